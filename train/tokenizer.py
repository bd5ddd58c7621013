"""Tokenizers: bytes, byte-level BPE trained here, any tokenizer.json, and Llama 3's tiktoken file.

    bytes, bytes+eos       one id per UTF-8 byte; 256 is the end of a document
    bpe:N, bpe:N+eos       N ids, trained on the text; 0 is the end of a document
    PATH                   a tokenizer.json, or a tiktoken file with Llama 3's split and special tokens

Text is text: what looks like a special token in it ("</s>") is encoded like any other characters, and nothing is added.
"""

import base64
import binascii
import functools
import hashlib
import itertools
import json
import pathlib
import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from train.errors import InputError

END = "<|endoftext|>"
# Where no tokenizer_config.json beside a tokenizer.json names them: Llama 3, Llama 2, GPT-2.
BOS_NAMES = ("<|begin_of_text|>", "<s>", "<bos>")
EOS_NAMES = ("<|end_of_text|>", "</s>", END, "<eos>")
# Of Llama 3, from its reference code (llama/tokenizer.py): how text is split before merging, and the 256 special tokens.
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_RESERVED = [f"<|reserved_special_token_{i}|>" for i in range(251)]
LLAMA3_SPECIAL = [
    *(BOS_NAMES[0], EOS_NAMES[0], *_RESERVED[:4], "<|start_header_id|>", "<|end_header_id|>", _RESERVED[4], "<|eot_id|>"),
    *_RESERVED[5:],
]  # fmt: skip


class Tokenizer:
    """Maps text to ids in [0, vocab_size) and back.

    id: 16 hex digits over what it does. bos_id, eos_id: what can begin and end a document, None where it has none. bos: what a
    model is used to see in front of every text, None for nothing. eos: all ids at which a model's text ends.
    """

    vocab_size: int
    bos_id: int | None = None
    eos_id: int | None = None
    bos: int | None = None
    eos: frozenset[int] = frozenset()

    @property
    def id(self) -> str:
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of a text, of dtype `id_dtype(vocab_size)`."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of each text."""
        raise NotImplementedError

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids; invalid UTF-8 becomes U+FFFD, special tokens are left out."""
        raise NotImplementedError

    def to_json(self) -> str:
        """Return a tokenizer.json, which the `tokenizers` library and transformers read."""
        raise NotImplementedError

    def special_names(self) -> dict[str, str]:
        """Return "bos_token" and "eos_token" as a tokenizer_config.json names them."""
        return {}

    def prefix(self) -> int | None:
        """Return the id that `to_json` says is put in front of a text, None for nothing."""
        return None

    def front(self, choice: str = "auto") -> int | None:
        """Return what stands in front of a text: `bos` ("auto"), `bos` or else bos_id ("yes"), or nothing ("no")."""
        found = {"auto": self.bos, "yes": self.bos_id if self.bos is None else self.bos, "no": None}[choice]
        if choice == "yes" and found is None:
            raise InputError("--bos=yes: the tokenizer has no BOS")
        return found


class ByteTokenizer(Tokenizer):
    """One id per UTF-8 byte, and with `end` a 257th for the end of a document."""

    def __init__(self, *, end: bool = False):
        self.vocab_size = 257 if end else 256
        self.eos_id = 256 if end else None
        self.eos = frozenset({256} if end else ())

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), np.uint8).astype(np.uint16) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(int(i) for i in ids if int(i) < 256).decode(errors="replace")

    def to_json(self) -> str:
        """Return byte-level BPE without merges, whose letter for each byte has the byte as its id."""
        letters = {letter: byte for byte, letter in enumerate(_byte_letters())}
        tokenizer = tokenizers.Tokenizer(models.BPE(vocab=letters, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        if self.eos_id is not None:
            tokenizer.add_special_tokens([END])
        return tokenizer.to_str()

    def special_names(self) -> dict[str, str]:
        return {} if self.eos_id is None else {"eos_token": END}


class JsonTokenizer(Tokenizer):
    """What a tokenizer.json describes. special: the names of bos_token and eos_token; what they leave out is not there."""

    def __init__(self, serialized: str, special: dict[str, str] | None = None):
        self._serialized = serialized
        self._tokenizer = tokenizers.Tokenizer.from_str(serialized)
        self._tokenizer.encode_special_tokens = True  # as the text they are
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1  # there may be gaps
        self._special = special or {}
        self.bos_id, self.eos_id = (self._special_id(name) for name in ("bos_token", "eos_token"))
        self.eos = frozenset() if self.eos_id is None else frozenset({self.eos_id})

    def _special_id(self, name: str) -> int | None:
        token = self._special.get(name)
        if token is None:
            return None
        found = self._tokenizer.token_to_id(token)
        if found is None:
            raise InputError(f"{name}={token!r} is not in the tokenizer's vocabulary")
        return found

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, id_dtype(self.vocab_size)) for encoding in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        return self._tokenizer.decode([int(i) for i in ids])

    def to_json(self) -> str:
        return self._serialized

    def special_names(self) -> dict[str, str]:
        return dict(self._special)

    def prefix(self) -> int | None:
        special, plain = (self._tokenizer.encode("a", add_special_tokens=added).ids for added in (True, False))
        return special[0] if plain and special[1 : 1 + len(plain)] == plain else None


def to_files(tokenizer: Tokenizer) -> dict[str, str]:
    """Return {name: content} of the files that describe a tokenizer to transformers and to `read_files`, its `bos` included."""
    options = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    options |= {**tokenizer.special_names(), "add_bos_token": tokenizer.bos is not None}
    return {"tokenizer.json": tokenizer.to_json(), "tokenizer_config.json": json.dumps(options)}


def read_files(directory: pathlib.Path) -> JsonTokenizer:
    """Return the tokenizer that `to_files` described; raises InputError where it cannot be read."""
    path = directory / "tokenizer.json"
    try:
        options = json.loads((directory / "tokenizer_config.json").read_text())
        special = {name: options[name] for name in ("bos_token", "eos_token") if name in options}
        tokenizer = JsonTokenizer(path.read_text(encoding="utf-8"), special)
        tokenizer.bos = tokenizer.bos_id if options["add_bos_token"] else None
    except Exception as error:  # the library raises no narrower class
        raise InputError(f"{path} cannot be read: {str(error).splitlines()[0]}") from error
    return tokenizer


def id_dtype(vocab_size: int) -> type[np.unsignedinteger]:
    """Return the dtype in which ids are stored: uint16 if it holds them, else uint32."""
    return np.uint16 if vocab_size <= 2**16 else np.uint32


def trained_size(spec: str) -> int | None:
    """Return N of "bpe:N" and "bpe:N+eos", None for another tokenizer; raises InputError for N < 256 (257 with +eos)."""
    if not spec.startswith("bpe:"):
        return None
    size = spec.removeprefix("bpe:").removesuffix("+eos")
    if not (size.isascii() and size.isdigit() and 256 + spec.endswith("+eos") <= int(size) < 2**31):
        raise InputError(f"tokenizer={spec!r}: not bpe:N or bpe:N+eos with N >= 256, the letters of all bytes")
    return int(size)


def vocab_size(spec: str) -> int:
    """Return the number of ids of a tokenizer by name, without training one."""
    return trained_size(spec) or load(spec).vocab_size


def load(spec: str) -> Tokenizer:
    """Return a tokenizer that need not be trained; raises InputError for "bpe:N" and for what cannot be read."""
    if spec in ("bytes", "bytes+eos"):
        return ByteTokenizer(end=spec == "bytes+eos")
    if not pathlib.Path(spec).is_file():
        raise InputError(f"tokenizer={spec!r} is neither bytes, bytes+eos, bpe:N, bpe:N+eos nor a file, as DIR/tokenizer.json")
    return _load_file(spec, pathlib.Path(spec).stat().st_mtime_ns)


@functools.lru_cache(maxsize=4)
def _load_file(path: str, _changed: int) -> Tokenizer:
    try:
        content = pathlib.Path(path).read_bytes()
        if re.match(rb"[A-Za-z0-9+/]+=* \d+\r?\n", content):
            return from_tiktoken(content)
        serialized = pathlib.Path(path).read_text(encoding="utf-8")  # whatever its ends of lines: the id is the same
        vocabulary = tokenizers.Tokenizer.from_str(serialized).get_vocab(with_added_tokens=True)
        return JsonTokenizer(serialized, _find_special(pathlib.Path(path), vocabulary))
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    except Exception as error:  # the library raises no narrower class
        raise InputError(f"{path}: neither a tokenizer.json nor a tiktoken file: {str(error).splitlines()[0]}") from error


def _find_special(path: pathlib.Path, vocabulary: dict[str, int]) -> dict[str, str]:
    """Return the names of bos_token and eos_token: those of tokenizer_config.json beside it, or the usual ones it has."""
    beside = path.with_name("tokenizer_config.json")
    if beside.is_file():
        found: dict[str, Any] = json.loads(beside.read_text())
        given = {name: found.get(name) for name in ("bos_token", "eos_token")}
        texts = {name: token.get("content") if isinstance(token, dict) else token for name, token in given.items()}
        return {name: token for name, token in texts.items() if token}
    usual = {"bos_token": BOS_NAMES, "eos_token": EOS_NAMES}
    found = {name: next((token for token in names if token in vocabulary), None) for name, names in usual.items()}
    return {name: token for name, token in found.items() if token}


def train_bpe(texts: Iterable[str], spec: str) -> JsonTokenizer:
    """Return byte-level BPE trained on texts, by the name "bpe:N" or "bpe:N+eos"."""
    size, end = trained_size(spec), [END] if spec.endswith("+eos") else []
    assert size is not None
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, special_tokens=end, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != size:
        raise InputError(f"the training text yields {tokenizer.get_vocab_size()} BPE entries, fewer than vocab_size={size}")
    return JsonTokenizer(tokenizer.to_str(), {"eos_token": END} if end else {})


def from_tiktoken(content: bytes) -> JsonTokenizer:
    """Return Llama 3's tokenizer from the content of its tiktoken file, lines of a token in base64 and its rank.

    tiktoken merges the pair whose result has the lowest rank; as BPE, a token's merge is the pair that the tokens of lower
    rank leave of it. The special tokens follow the last rank.
    """
    ranks: dict[bytes, int] = {}
    try:
        for line in content.splitlines():
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
    except (ValueError, binascii.Error) as error:
        raise InputError(f"not a tiktoken file: {error}") from None
    if sorted(ranks.values()) != list(range(len(ranks))) or any(bytes([byte]) not in ranks for byte in range(256)):
        raise InputError("not a tiktoken file: its ranks have gaps, or a byte has none")
    letters = _byte_letters()
    spell = lambda token: "".join(letters[byte] for byte in token)  # noqa: E731
    pairs = [_last_pair(token, ranks) for token in sorted(ranks, key=ranks.__getitem__) if len(token) > 1]
    merges = [(spell(pair[0]), spell(pair[1])) for pair in pairs if pair]
    vocabulary = {spell(token): rank for token, rank in ranks.items()}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True))
    split = pre_tokenizers.Split(tokenizers.Regex(LLAMA3_SPLIT), "isolated")
    spelled = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, spelled])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(LLAMA3_SPECIAL)
    return JsonTokenizer(tokenizer.to_str(), {"bos_token": BOS_NAMES[0], "eos_token": EOS_NAMES[0]})


def _last_pair(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, ...] | None:
    """Return the two pieces that merging by the ranks below the token's own leaves of it; None where it is more than two."""
    pieces = [bytes([byte]) for byte in token]
    while len(pieces) > 2:
        found = [(ranks.get(a + b, len(ranks)), i) for i, (a, b) in enumerate(itertools.pairwise(pieces))]
        rank, i = min(found)
        if rank >= ranks[token]:
            return None
        pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]
    return tuple(pieces)


def _byte_letters() -> list[str]:
    """Return the letter by which GPT-2's byte-level BPE writes each byte: itself where it is visible, else 256, 257, …"""
    plain = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    moved = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(moved)) for byte in range(256)]
