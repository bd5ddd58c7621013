"""Damaged data: every bit and every length of a compressed shard, and a shard that changes between stop and resume."""

import gzip
import json

import pytest
import zstandard
from helpers import settings, snapshot, write_corpus

from train import corpus, data, loop, sources
from train.errors import InputError

DOCUMENTS = ["one two three\n" * 3, "four five\n" * 4, "six\n" * 9]


def shard(directory, name):
    lines = "".join(json.dumps({"text": document}) + "\n" for document in DOCUMENTS)
    text = lines if ".jsonl" in name else corpus.SEPARATOR.join(DOCUMENTS)
    path = directory / name
    compress = {".gz": lambda b: gzip.compress(b, mtime=0), ".zst": zstandard.ZstdCompressor(write_checksum=True).compress}
    path.write_bytes(compress.get(path.suffix, bytes)(text.encode()))
    return path


def read(path):
    """Return the documents, or the error's message, which must name the file on one line."""
    try:
        return sources.read_files([str(path)], text_key="text")
    except InputError as error:
        message = str(error)
    assert str(path) in message
    assert "\n" not in message
    return message


@pytest.mark.parametrize("name", ["a.txt.gz", "a.jsonl.gz", "a.jsonl.zst"])
def test_a_compressed_shard_is_whole_or_refused(tmp_path, name):
    path = shard(tmp_path, name)
    whole, documents = path.read_bytes(), read(path)
    assert isinstance(documents, list)
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert "cannot be read" in read(path) or length == 0, length  # gzip takes an empty file for an empty text
    for bit in range(8 * len(whole)):
        path.write_bytes(bytes(b ^ (1 << bit % 8) if i == bit // 8 else b for i, b in enumerate(whole)))
        found = read(path)
        assert found == documents or isinstance(found, str), bit  # the header's time and system may say anything


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("a.jsonl", lambda b: b[:-9], "a.jsonl:3: not JSON"),
        ("a.jsonl", lambda b: b.replace(b'"}\n{"', b'"}{"', 1), "a.jsonl:1: not JSON"),
        ("a.jsonl", lambda b: b.replace(b"four", b"f\xffur", 1), "a.jsonl:2: not UTF-8"),
        ("a.txt", lambda b: b.replace(b"two", b"t\x80o", 1), "a.txt:1: not UTF-8"),
        ("a.txt", lambda b: b[:0], "hold no text"),
    ],
)
def test_a_damaged_shard_is_named_with_its_line(tmp_path, name, damage, message):
    path = shard(tmp_path, name)
    path.write_bytes(damage(path.read_bytes()))
    assert message in read(path)


CHANGES = {
    "bit": lambda b: b[:20_000] + bytes([b[20_000] ^ 1]) + b[20_001:],
    "cut": lambda b: b[: len(b) // 2],
    "one byte longer": lambda b: b + b"x",
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_shard_that_changed_since_the_run_stopped_is_refused(tmp_path, change):
    path = write_corpus(tmp_path)
    s, workdir = settings(path, quant__recipe="none"), tmp_path / "run"
    loop.prepare(s, workdir)
    before, whole = snapshot(workdir), path.read_bytes()
    path.write_bytes(change(whole))
    with pytest.raises(InputError) as error:
        loop.prepare(s, workdir)
    assert str(error.value).startswith(f"{workdir} was trained on other data: ")
    assert "\n" not in str(error.value)
    assert snapshot(workdir) == before
    path.write_bytes(whole)
    assert data.load(s.data).fingerprint in (workdir / "config.json").read_text()
    loop.prepare(s, workdir)
