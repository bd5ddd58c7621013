"""Tokenizers by name and from files; Llama 3's tiktoken file against merging by rank, written out here."""

import base64
import itertools
import json
import re

import numpy as np
import pytest
import tokenizers

from train import tokenizer
from train.errors import InputError

TEXT = "Hello   world's  naïve café\r\n\n 12345 日本語🙂 </s><|end_of_text|>\tIt'S  \n x"


def tiktoken_file(merges):
    """Return a tiktoken file of all bytes, in an order of their own, and then the merged tokens."""
    tokens = [bytes([(i * 7) % 256]) for i in range(256)] + merges
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens))


MERGES = [b"lo", b"He", b"wo", b"el", b"wor", b"Hel", b" w", b"llo", b" wor", b"123", b"12", b"\r\n", b"  ", b"'s", b"ll"]


# Llama 3's expression in Python's dialect: [^\\W_] is a letter or number, [^\\W\\d_] a letter.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|(?:(?![^\W_])[^\r\n])?[^\W\d_]+|\d{1,3}| ?(?:(?![^\W_])\S)+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def by_rank(text, ranks):
    """Return ids: split by that expression, then merge the adjacent pair of lowest rank until there is none."""
    out = []
    for piece in re.findall(SPLIT, text):
        piece = piece.encode()
        parts = [piece] if piece in ranks else [bytes([byte]) for byte in piece]
        while True:
            pairs = [(ranks[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in ranks]
            if not pairs:
                break
            _, i = min(pairs)
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        out += [ranks[part] for part in parts]
    return out


def test_a_tiktoken_file_merges_by_rank(tmp_path):
    content = tiktoken_file(MERGES)
    (tmp_path / "tokenizer.model").write_bytes(content)
    ours = tokenizer.load(str(tmp_path / "tokenizer.model"))
    ranks = {base64.b64decode(line.split()[0]): int(line.split()[1]) for line in content.splitlines()}
    for text in (TEXT, "Hello", "Hellllo", "world wor wo w", "12 123 1234", "", " ", "\n\n", "Hello" * 50):
        assert ours.encode(text).tolist() == by_rank(text, ranks), text
        assert ours.decode(ours.encode(text)) == text
    base = len(ranks)
    assert (ours.vocab_size, ours.bos_id, ours.eos_id) == (base + 256, base, base + 1)
    names = tokenizers.Tokenizer.from_str(ours.to_json())
    assert [names.id_to_token(base + i) for i in (6, 9, 255)] == [
        "<|start_header_id|>",
        "<|eot_id|>",
        "<|reserved_special_token_250|>",
    ]


def test_text_that_looks_like_a_special_token_is_text(tmp_path):
    for made in (tokenizer.train_bpe([TEXT * 3], "bpe:280+eos"), tokenizer.from_tiktoken(tiktoken_file(MERGES))):
        ids = made.encode("a<|endoftext|><|end_of_text|>b")
        assert made.eos_id not in ids
        assert made.decode(ids) == "a<|endoftext|><|end_of_text|>b"


@pytest.mark.parametrize("spec", ["bytes", "bytes+eos"])
def test_bytes(spec):
    made = tokenizer.load(spec)
    assert made.encode(TEXT).tolist() == list(TEXT.encode())
    assert made.decode(made.encode(TEXT)) == TEXT
    assert (made.vocab_size, made.eos_id) == ((256, None) if spec == "bytes" else (257, 256))
    again = tokenizer.JsonTokenizer(made.to_json(), made.special_names())
    assert again.encode(TEXT).tolist() == made.encode(TEXT).tolist()
    assert (again.vocab_size, again.eos_id, again.id) == (made.vocab_size, made.eos_id, made.id)


def write_json(path, *, special=(), config=None):
    made = tokenizers.Tokenizer.from_str(tokenizer.train_bpe([TEXT * 3], "bpe:270").to_json())
    made.add_special_tokens(list(special))
    made.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 270)])
    made.enable_truncation(4)
    made.enable_padding()
    (path / "tokenizer.json").write_text(made.to_str())
    if config is not None:
        (path / "tokenizer_config.json").write_text(json.dumps(config))
    return tokenizer.load(str(path / "tokenizer.json"))


def test_any_tokenizer_json_encodes_text_alone(tmp_path):
    made = write_json(tmp_path, special=["<s>", "</s>", "<pad>"])
    assert (made.vocab_size, made.bos_id, made.eos_id) == (273, 270, 271)
    ids = made.encode(TEXT)
    assert made.decode(ids) == TEXT
    assert ids.max() < 270
    assert [len(a) for a in made.encode_batch(["a", "Hello world" * 9])] != [4, 4]  # not cut, not padded


def test_its_config_says_what_begins_and_ends_a_document(tmp_path):
    config = {"bos_token": None, "eos_token": {"content": "<pad>", "special": True}}
    made = write_json(tmp_path, special=["<s>", "</s>", "<pad>"], config=config)
    assert (made.bos_id, made.eos_id) == (None, 272)
    with pytest.raises(InputError, match=r"eos_token='<gone>' is not in the tokenizer's vocabulary"):
        write_json(tmp_path, special=["<s>"], config={"eos_token": "<gone>"})


def test_ids_with_gaps_count_up_to_the_largest():
    vocabulary = {chr(letter): letter for letter in range(65, 70)} | {"z": 999}
    model = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    assert tokenizer.JsonTokenizer(model.to_str()).vocab_size == 1000


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{}", "neither a tokenizer.json nor a tiktoken file"),
        (b"\xff\xfe", "neither"),
        (b"", "neither"),
        (b"QQ== 0\nQg== 2\n", "its ranks have gaps, or a byte has none"),
        (b"QQ== 0\nQg==\n", "not a tiktoken file"),
    ],
)
def test_a_file_that_is_none_is_refused(tmp_path, content, message):
    (tmp_path / "t").write_bytes(content)
    with pytest.raises(InputError, match=message) as error:
        tokenizer.load(str(tmp_path / "t"))
    assert str(tmp_path / "t") in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("spec", ["words", "bpe:x", "bpe:255", "bpe:256+eos", "bytes+bos", "bpe:300+eos+eos"])
def test_a_name_that_is_none_is_refused(spec):
    with pytest.raises(InputError, match="tokenizer="):
        tokenizer.vocab_size(spec)


def test_sizes_and_dtypes():
    assert [tokenizer.vocab_size(spec) for spec in ("bytes", "bytes+eos", "bpe:256", "bpe:300+eos")] == [256, 257, 256, 300]
    assert tokenizer.id_dtype(2**16) == np.uint16
    assert tokenizer.id_dtype(2**16 + 1) == np.uint32
