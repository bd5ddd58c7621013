"""Data: documents and splits, tokenizers and their cache, training order and resume, validation coverage, errors."""

import gzip
import itertools
import json

import grain
import numpy as np
import orbax.checkpoint as ocp
import pytest

from train import corpus, data, sources
from train import tokenizer as tokenizer_lib
from train.errors import InputError

UNICODE = "naïve café — 日本語 🙂\r\n\ttabs  and\u2028separators\x00 <|endoftext|>\n"


def make_dataset(train_size=101, val_size=50, *, vocab_size=2**16):
    """Return a dataset whose training ids are all distinct, so that every position can be recognised."""
    return data.Dataset(
        train=(np.random.default_rng(0).permutation(train_size).astype(np.uint16),),
        val=(np.arange(1, val_size + 1, dtype=np.uint16),),
        largest_id=max(train_size - 1, val_size),
        vocab_size=vocab_size,
        fingerprint="made for a test",
        tokenizer=tokenizer_lib.ByteTokenizer(),
    )


def take(iterator, count):
    return [batch["tokens"] for batch in itertools.islice(iterator, count)]


def naive_windows(tokens, seq_len):
    """Return the windows by walking over the tokens, as lists."""
    windows, start = [], 0
    while start + seq_len + 1 <= len(tokens):
        windows.append([int(t) for t in tokens[start : start + seq_len + 1]])
        start += seq_len
    return windows


@pytest.fixture
def word_files(tmp_path):
    """Return a config over 60 one-line documents of distinct numbers."""
    lines = [json.dumps({"text": " ".join(f"w{i}x{j}" for j in range(30))}) for i in range(60)]
    (tmp_path / "docs.jsonl").write_text("\n".join(lines) + "\n")

    def config(**overrides):
        settings = {"source": "files", "files": str(tmp_path / "docs.jsonl"), "seq_len": 16}
        return data.DataConfig(**settings | {"cache_dir": str(tmp_path / "cache")} | overrides)

    return config


# ---- Sources and splits ----


def test_bible_is_complete_and_readable():
    documents = corpus.read_bible()
    assert len(documents) == 1189
    assert documents[0].startswith("Genesis 1\nIn the beginning God created the heaven and the earth.\nAnd the earth")
    assert documents[-1].startswith("Revelation 22\n")
    assert sum(document.count("\n") for document in documents) == 31_102  # one line per verse after the heading
    assert "[]" not in "".join(documents)


def test_python_corpus_is_deterministic_and_capped(monkeypatch):
    documents = corpus.read_python()
    assert documents == corpus.read_python()
    assert sum(len(d.encode()) for d in documents) > 15_000_000
    monkeypatch.setattr(corpus, "PYTHON_MAX_BYTES", 100_000)
    capped = corpus.read_python()
    assert sum(len(d.encode()) for d in capped) <= 100_000
    assert capped == documents[: len(capped)]


@pytest.mark.parametrize("source", ["bible", "python"])
def test_embedded_corpora_load_as_bytes(source):
    dataset = data.load(data.DataConfig(source=source))
    assert dataset.train[0].dtype == np.uint16
    assert dataset.vocab_size == 256
    size = len(dataset.train[0]) + len(dataset.val[0])
    assert 0.02 < len(dataset.val[0]) / size < 0.08
    assert dataset.fingerprint == data.load(data.DataConfig(source=source)).fingerprint


def test_split_holds_out_every_twentieth_document():
    documents = [f"document {i}" for i in range(100)]
    train, val = corpus.split_documents(documents, val_fraction=0.05)
    assert val == documents[19::20]
    assert sorted(train + val) == sorted(documents)
    assert not set(train) & set(val)
    assert (train, val) == corpus.split_documents(documents, val_fraction=0.05)


@pytest.mark.parametrize("count", [1, 3, 39])
def test_split_of_few_documents_cuts_the_text_once_after_a_line(count):
    documents = [f"document {i}\n" * 40 for i in range(count)]
    (train,), (val,) = corpus.split_documents(documents, val_fraction=0.05)
    assert train + val == corpus.SEPARATOR.join(documents)
    assert train.endswith("\n")
    assert len(val) / len(train + val) == pytest.approx(0.05, abs=15 / len(train + val))


def test_files_by_glob_in_sorted_order(tmp_path):
    (tmp_path / "b.txt").write_text(UNICODE, newline="")
    (tmp_path / "a.jsonl").write_text(json.dumps({"body": UNICODE}, ensure_ascii=False) + '\n\n{"body": ""}\n')
    with gzip.open(tmp_path / "d.txt.gz", "wt") as file:
        file.write("gz text")
    (tmp_path / "sub").mkdir()
    with gzip.open(tmp_path / "sub" / "c.jsonl.gz", "wt") as file:
        file.write('{"body": "one"}\n{"body": "two"}')
    paths = sources.match_files(str(tmp_path / "**"))
    assert paths == sorted(paths)
    assert sources.read_files(paths, text_key="body") == [UNICODE, UNICODE, "gz text", "one", "two"]


def test_val_files_replace_the_split(tmp_path):
    (tmp_path / "t.txt").write_text("train " * 20)
    (tmp_path / "v.txt").write_text("val")
    config = data.DataConfig(source="files", files=str(tmp_path / "t.txt"), val_files=str(tmp_path / "v.txt"), seq_len=8)
    dataset = data.load(config)
    assert dataset.tokenizer.decode(dataset.train[0]) == "train " * 20
    assert dataset.tokenizer.decode(dataset.val[0]) == "val"


# ---- Tokenizers and cache ----


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:300"])
def test_ids_decode_to_the_joined_text(word_files, tokenizer):
    config = word_files(tokenizer=tokenizer)
    dataset = data.load(config)
    train, val = corpus.split_documents(
        sources.read_files(sources.match_files(config.files), text_key="text"), val_fraction=0.05
    )
    assert dataset.tokenizer.decode(dataset.train[0]) == corpus.SEPARATOR.join(train)
    assert dataset.tokenizer.decode(dataset.val[0]) == corpus.SEPARATOR.join(val)
    assert dataset.vocab_size == config.vocab_size
    assert dataset.train[0].max() < config.vocab_size
    assert dataset.tokenizer.decode(dataset.tokenizer.encode(UNICODE)) == UNICODE
    data.check_ids(dataset, vocab_size=config.vocab_size)


def test_bpe_never_sees_the_validation_split(tmp_path):
    train, val = ["abcabc " * 50] * 3, ["zqzqzq " * 50] * 3
    tokenizer, _, val_ids = corpus.tokenize(train, val, tokenizer="bpe:258", cache_dir=tmp_path)
    assert len(tokenizer.encode("abc")) < 3
    assert len(tokenizer.encode("zqzqzq")) == 6
    assert len(val_ids) == sum(map(len, val)) + 4  # two separators


def test_bpe_cache_tells_two_splits_of_one_corpus_apart(tmp_path):
    documents = [f"document {i}" for i in range(4)]
    for cut in (1, 2, 3):
        settings = {"tokenizer": "bpe:257", "cache_dir": tmp_path}
        tokenizer, train_ids, val_ids = corpus.tokenize(documents[:cut], documents[cut:], **settings)
        assert tokenizer.decode(train_ids) == corpus.SEPARATOR.join(documents[:cut])
        assert tokenizer.decode(val_ids) == corpus.SEPARATOR.join(documents[cut:])


def test_bpe_cache_is_used_and_bound_to_corpus_and_settings(word_files, tmp_path, monkeypatch):
    first = data.load(word_files(tokenizer="bpe:300"))
    (path,) = (tmp_path / "cache").iterdir()
    with monkeypatch.context() as patch:
        patch.setattr(tokenizer_lib, "train_bpe", None)  # would fail if it were called
        again = data.load(word_files(tokenizer="bpe:300"))
    np.testing.assert_array_equal(first.train[0], again.train[0])
    np.testing.assert_array_equal(first.val[0], again.val[0])
    assert first.fingerprint == again.fingerprint
    data.load(word_files(tokenizer="bpe:301"))
    data.load(word_files(tokenizer="bpe:300", val_fraction=0.1))
    files = sorted((tmp_path / "cache").iterdir())
    assert len(files) == 3  # and no scratch directory stays behind
    other = next(file for file in files if file != path)
    path.write_bytes(other.read_bytes())  # intact, but of other data
    assert data.load(word_files(tokenizer="bpe:300")).fingerprint == first.fingerprint


@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda b: b"", lambda b: b[:900] + bytes([b[900] ^ 1]) + b[901:]])
def test_corrupt_cache_is_built_again(word_files, tmp_path, damage):
    first = data.load(word_files(tokenizer="bpe:300"))
    (path,) = (tmp_path / "cache").iterdir()
    intact = path.read_bytes()
    path.write_bytes(damage(intact))
    again = data.load(word_files(tokenizer="bpe:300"))
    np.testing.assert_array_equal(first.train[0], again.train[0])
    assert first.fingerprint == again.fingerprint
    assert path.read_bytes() == intact


def test_cache_directory_from_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("FP4JAX_CACHE", str(tmp_path))
    assert data.DataConfig().cache_path == tmp_path
    assert data.DataConfig(cache_dir="/x").cache_path.as_posix() == "/x"
    monkeypatch.delenv("FP4JAX_CACHE")
    assert data.DataConfig().cache_path.parts[-2:] == (".cache", "fp4jax")


def test_id_dtype_holds_the_vocabulary():
    assert tokenizer_lib.id_dtype(2**16) == np.uint16
    assert tokenizer_lib.id_dtype(2**16 + 1) == np.uint32


def test_fingerprint_follows_data_and_settings(word_files, tmp_path):
    reference = data.load(word_files()).fingerprint
    (tmp_path / "copy.jsonl").write_bytes((tmp_path / "docs.jsonl").read_bytes())
    same = [word_files(files=str(tmp_path / "copy.jsonl")), word_files(cache_dir=""), word_files(max_val_sequences=3)]
    assert {data.load(config).fingerprint for config in same} == {reference}
    (tmp_path / "edited.jsonl").write_text((tmp_path / "docs.jsonl").read_text().replace("w7x7", "w7x8"))
    other = [
        word_files(seq_len=8),
        word_files(val_fraction=0.1),
        word_files(tokenizer="bpe:256"),
        word_files(files=str(tmp_path / "edited.jsonl")),
    ]
    assert len({reference} | {data.load(config).fingerprint for config in other}) == 5


def test_fingerprint_is_the_same_on_every_machine(tmp_path):
    (tmp_path / "t.txt").write_text("0123456789\n" * 20)
    config = data.DataConfig(source="files", files=str(tmp_path / "*.txt"), seq_len=8)
    assert data.load(config).fingerprint == "3bdb96940e5cb918"


# ---- Training ----


@pytest.mark.parametrize(("train_size", "seq_len"), [(101, 10), (100, 10), (109, 10), (11, 10), (20, 1)])
def test_an_epoch_holds_each_window_exactly_once(train_size, seq_len):
    dataset = make_dataset(train_size)
    windows = naive_windows(dataset.train[0], seq_len)
    examples = data.train_examples(dataset, seq_len=seq_len, seed=3)
    for epoch in range(3):
        seen = [examples[epoch * len(windows) + i] for i in range(len(windows))]
        assert all(example.dtype == np.int32 for example in seen)
        assert sorted(example.tolist() for example in seen) == sorted(windows)


def test_epochs_and_seeds_have_different_orders():
    dataset, count = make_dataset(1001), 100

    def epoch(seed, number):
        examples = data.train_examples(dataset, seq_len=10, seed=seed)
        return tuple(int(examples[number * count + i][0]) for i in range(count))

    assert epoch(0, 0) == epoch(0, 0)
    assert len({epoch(seed, number) for seed in range(4) for number in range(4)}) == 16


@pytest.mark.parametrize("batch_size", [4, 16])  # both batches and epochs of 25 windows end in each other's middle
def test_batch_is_a_pure_function_of_its_number(batch_size):
    dataset = make_dataset(251)
    examples = data.train_examples(dataset, seq_len=10, seed=1)
    batches = take(data.train_iterator(dataset, seq_len=10, batch_size=batch_size, seed=1), 20)
    for k, tokens in enumerate(batches):
        assert tokens.dtype == np.int32
        np.testing.assert_array_equal(tokens, [examples[k * batch_size + row] for row in range(batch_size)])


def test_resume_continues_identically_across_epochs():
    dataset = make_dataset(251)  # 25 windows

    def make():
        return data.train_iterator(dataset, seq_len=10, batch_size=4, seed=1)

    reference = take(make(), 40)
    iterator, resumed = make(), []
    for steps in (0, 1, 5, 1, 12, 21):  # epochs end within batches 6, 12, 18, ...
        state = json.loads(json.dumps(iterator.get_state()))
        next(iterator)  # a batch taken after the state was saved is taken again
        iterator = make()
        iterator.set_state(state)
        resumed += take(iterator, steps)
    np.testing.assert_array_equal(resumed, reference)
    iterator.set_state(state)
    np.testing.assert_array_equal(take(iterator, 3), reference[19:22])


def test_state_survives_an_orbax_checkpoint(tmp_path):
    dataset = make_dataset(251)
    iterator, other = (data.train_iterator(dataset, seq_len=10, batch_size=4, seed=1) for _ in range(2))
    take(iterator, 9)
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(9, args=ocp.args.Composite(data=grain.checkpoint.CheckpointSave(iterator)))
        manager.wait_until_finished()
        manager.restore(9, args=ocp.args.Composite(data=grain.checkpoint.CheckpointRestore(other)))
    np.testing.assert_array_equal(take(iterator, 5), take(other, 5))


@pytest.mark.parametrize("process_count", [2, 4])
def test_processes_share_one_global_batch(process_count):
    dataset = make_dataset(251)
    settings = {"seq_len": 10, "batch_size": 8, "seed": 1}
    reference = take(data.train_iterator(dataset, **settings), 12)
    iterators = [
        data.train_iterator(dataset, **settings, process_index=p, process_count=process_count) for p in range(process_count)
    ]
    parts = [take(iterator, 5) for iterator in iterators]
    for iterator, part in zip(iterators, parts, strict=True):
        other = data.train_iterator(dataset, **settings)  # resume under another process count: the state is global
        other.set_state(iterator.get_state())
        np.testing.assert_array_equal(take(other, 1)[0], reference[5])
        part += take(iterator, 7)
    np.testing.assert_array_equal([np.concatenate(rows) for rows in zip(*parts, strict=True)], reference)


# ---- Validation ----


@pytest.mark.parametrize("batch_size", [1, 2, 3, 5, 64])
@pytest.mark.parametrize("val_size", [2, 9, 10, 11, 12, 50, 51])
def test_validation_predicts_every_token_once_in_order(val_size, batch_size):
    dataset = make_dataset(val_size=val_size)
    predicted = []
    for batch in data.val_batches(dataset, seq_len=10, batch_size=batch_size):
        tokens, mask = batch["tokens"], batch["mask"]
        assert (tokens.shape, tokens.dtype) == ((batch_size, 11), np.int32)
        assert (mask.shape, mask.dtype) == ((batch_size, 10), np.float32)
        for row, row_mask in zip(tokens, mask, strict=True):
            predicted += [(int(row[t]), int(row[t + 1])) for t in range(10) if row_mask[t] == 1]
        assert set(np.unique(mask)) <= {0.0, 1.0}
        assert (np.diff(mask.reshape(-1)) <= 0).all()  # padding comes last
        assert (tokens[:, 1:][mask == 0] == 0).all()
    expected = dataset.val[0].tolist()
    assert predicted == list(itertools.pairwise(expected))


@pytest.mark.parametrize(("max_sequences", "first_tokens"), [(1, [1]), (2, [1, 51]), (4, [1, 21, 51, 71]), (99, None)])
def test_max_sequences_takes_evenly_spaced_windows(max_sequences, first_tokens):
    dataset = make_dataset(val_size=101)  # ids 1 ... 101 in ten windows
    batches = data.val_batches(dataset, seq_len=10, batch_size=3, max_sequences=max_sequences)
    rows = [int(row[0]) for batch in batches for row in batch["tokens"] if row[0]]
    assert rows == (first_tokens or list(range(1, 101, 10)))


# ---- Errors ----


def assert_one_line(error, *parts):
    message = str(error.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"source": "wikipedia"}, "wikipedia"),
        ({"source": "files"}, "files"),
        ({"files": "*.txt"}, "*.txt"),
        ({"val_files": "*.txt"}, "do not apply"),
        ({"text_key": "body"}, "do not apply"),
        ({"tokenizer": "words"}, "words"),
        ({"tokenizer": "bpe:"}, "bpe:"),
        ({"tokenizer": "bpe:255"}, "bpe:255"),
        ({"tokenizer": "bpe:1e3"}, "bpe:1e3"),
        ({"seq_len": 0}, "seq_len=0"),
        ({"seq_len": 8.0}, "seq_len=8.0"),
        ({"seq_len": True}, "seq_len=True"),
        ({"seq_len": None}, "seq_len=None"),
        ({"cache_dir": 3}, "cache_dir=3"),
        ({"max_val_sequences": -1}, "-1"),
        ({"val_fraction": 0}, "val_fraction=0"),
        ({"val_fraction": 1.0}, "val_fraction=1.0"),
        ({"val_fraction": float("nan")}, "nan"),
        ({"val_fraction": "0.1"}, "'0.1'"),
    ],
)
def test_settings_are_validated(settings, part):
    with pytest.raises(InputError) as error:
        data.DataConfig(**settings)
    assert_one_line(error, part)


@pytest.mark.parametrize(
    ("name", "content", "part"),
    [
        ("a.txt", b"good\nbad \xff", "a.txt:2: not UTF-8"),
        ("a.jsonl", b'{"text": "x"}\n{"text": \n', "a.jsonl:2: not JSON"),
        ("a.jsonl", b"[" * 100_000, "a.jsonl:1: not JSON"),
        ("a.jsonl", b"9" * 5000, "a.jsonl:1: not JSON"),
        ("a.jsonl", b'{"text": "x"}\n\n{"body": "x"}\n', "a.jsonl:3: expected"),
        ("a.jsonl", b'{"text": 3}', "a.jsonl:1: expected"),
        ("a.jsonl", b'["text"]', "a.jsonl:1: expected"),
        ("a.jsonl", b'{"text": "\\ud800"}', "a.jsonl:1: 'text' holds a lone surrogate"),
        ("a.txt.gz", b"not gzip", "a.txt.gz: cannot be read"),
        ("a.txt.gz", gzip.compress(b"some text" * 99, mtime=0)[:-9], "a.txt.gz: cannot be read"),
        ("a.txt.gz", gzip.compress(b"", mtime=0)[:10] + b"\xff" * 20, "a.txt.gz: cannot be read"),
        ("a.csv", b"x", "a.csv: not one of .txt"),
        ("a.gz", b"x", "a.gz: not one of .txt"),
        ("a.txt", b"", "hold no text"),
        ("a.jsonl", b'{"text": ""}\n', "hold no text"),
        ("a.txt", b"0123456", "too few for data.seq_len=8"),
        ("a.txt", b"01234567890123456", "validation tokens are too few"),
    ],
)
def test_unusable_files(tmp_path, name, content, part):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError) as error:
        data.load(data.DataConfig(source="files", files=str(tmp_path / "a*"), seq_len=8))
    assert_one_line(error, part)


def test_file_that_cannot_be_opened(tmp_path):
    (tmp_path / "a.txt").mkdir()
    with pytest.raises(InputError, match="cannot be read"):
        sources.read_files([str(tmp_path / "a.txt")], text_key="text")


def test_pattern_without_a_match(tmp_path):
    (tmp_path / "directory.txt").mkdir()
    with pytest.raises(InputError, match="no file matches"):
        sources.match_files(str(tmp_path / "*.txt"))


def test_validation_file_must_not_be_trained_on(word_files):
    with pytest.raises(InputError, match="matches both"):
        data.load(word_files(val_files=word_files().files))


def test_missing_dependency():
    with pytest.raises(InputError, match="'no-such-distribution' is installed"):
        corpus._installed_files("no-such-distribution", suffix=".py")


def test_corpus_too_small_for_the_bpe_vocabulary(word_files):
    with pytest.raises(InputError) as error:
        data.load(word_files(tokenizer="bpe:100000"))
    assert_one_line(error, "vocab_size=100000")


def test_cache_that_cannot_be_used(word_files, tmp_path):
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(InputError) as error:
        data.load(word_files(tokenizer="bpe:256", cache_dir=str(tmp_path / "file")))
    assert_one_line(error, "cache", str(tmp_path / "file"))


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"seq_len": 101}, "seq_len=101"),
        ({"seq_len": 0}, "seq_len=0"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": 6, "process_count": 4}, "batch_size=6"),
        ({"process_index": 2, "process_count": 2}, "process_index=2"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": 1.5}, "seed=1.5"),
    ],
)
def test_iterator_arguments(settings, part):
    with pytest.raises(InputError) as error:
        data.train_iterator(make_dataset(101), **{"seq_len": 10, "batch_size": 4, "seed": 0} | settings)
    assert_one_line(error, part)


@pytest.mark.parametrize("settings", [{"seq_len": 0}, {"batch_size": 0}, {"max_sequences": -1}])
def test_validation_arguments(settings):
    with pytest.raises(InputError) as error:
        data.val_batches(make_dataset(), **{"seq_len": 10, "batch_size": 4} | settings)
    assert_one_line(error, f"{next(iter(settings))}={next(iter(settings.values()))}")


def test_ids_beyond_the_model():
    dataset = make_dataset(101, val_size=200, vocab_size=200)
    data.check_ids(dataset, vocab_size=201)
    with pytest.raises(InputError) as error:
        data.check_ids(dataset, vocab_size=200)
    assert_one_line(error, "id 200", "vocab_size=200")
    with pytest.raises(InputError) as error:
        data.check_ids(make_dataset(101, vocab_size=102), vocab_size=101)
    assert_one_line(error, "102 ids", "vocab_size=101")
