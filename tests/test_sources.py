"""Every kind of file gives the same documents, and a damaged one is refused by name."""

import gzip
import importlib
import json
import re
import struct

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from train import sources
from train.errors import InputError

DOCUMENTS = ["one\ntwo", "naïve 日本 \u2028 </s> <|endoftext|>", "three" * 1000, "x"]
array_record = importlib.import_module("array_record.python.array_record_module")


def json_lines(documents):
    return "".join(json.dumps({"text": d, "url": "a\nb", "n": 3}, ensure_ascii=False) + "\n" for d in documents).encode()


def write_parquet(path, documents, column="text"):
    pyarrow.parquet.write_table(pyarrow.table({column: documents, "n": list(range(len(documents)))}), path, row_group_size=2)


def write_records(path, records):
    writer = array_record.ArrayRecordWriter(str(path), "group_size:1")
    for record in records:
        writer.write(record)
    writer.close()


def field(number, content):
    """Return a length-delimited field of a protocol buffer, its length in two bytes or more."""
    length, out = len(content), b""
    while length >= 0x80:
        out, length = out + bytes([length & 0x7F | 0x80]), length >> 7
    return bytes([number << 3 | 2]) + out + bytes([length]) + content


def example(text):
    """Return a tf.train.Example with a text, a list of numbers and a list of floats."""
    features = {b"id": field(3, field(1, b"\x05\x06")), b"text": field(1, field(1, text.encode())), b"f": field(2, b"")}
    return field(1, b"".join(field(1, field(1, key) + field(2, value)) for key, value in features.items()))


NUMBERS = field(1, field(1, field(1, b"text") + field(2, field(3, field(1, b"\x05")))))  # an Example whose text is numbers
WRITERS = {
    "a.jsonl": lambda p, d: p.write_bytes(json_lines(d)),
    "a.json.gz": lambda p, d: p.write_bytes(gzip.compress(json_lines(d[:2])) + gzip.compress(json_lines(d[2:]))),
    "a.ndjson": lambda p, d: p.write_bytes(b"\n" + json_lines(d).rstrip(b"\n")),
    "a.jsonl.zst": lambda p, d: p.write_bytes(
        zstandard.ZstdCompressor().compress(json_lines(d[:1])) + zstandard.ZstdCompressor().compress(json_lines(d[1:]))
    ),
    "a.parquet": lambda p, d: write_parquet(p, [*d, "", None]),
    "b.parquet": lambda p, d: write_parquet(p, pyarrow.array([*d, "", None]).dictionary_encode()),
    "c.parquet": lambda p, d: write_parquet(p, pyarrow.array([*d, "", None]).cast(pyarrow.string_view())),
    "a.array_record": lambda p, d: write_records(p, [x.encode() for x in d]),
    "b.array_record": lambda p, d: write_records(p, [json.dumps({"text": x}).encode() for x in d]),
    "c.arrayrecord": lambda p, d: write_records(p, [example(x) for x in d]),
}


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("chunk", [1, 7, sources.CHUNK])
def test_every_kind_of_file_gives_the_same_documents(tmp_path, monkeypatch, name, chunk):
    monkeypatch.setattr(sources, "CHUNK", chunk)
    WRITERS[name](tmp_path / name, DOCUMENTS)
    assert list(sources.read_text(str(tmp_path / name), text_key="text")) == DOCUMENTS


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.txt.zst"])
def test_a_text_file_is_one_document(tmp_path, name):
    compress = {".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}.get((tmp_path / name).suffix, bytes)
    (tmp_path / name).write_bytes(compress("\r\n a\n\nß".encode()))
    assert sources.read_files([str(tmp_path / name)], text_key="text") == ["\r\n a\n\nß"]


@pytest.mark.parametrize("chunk", [1, sources.CHUNK])
def test_a_byte_order_mark_is_no_text(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(sources, "CHUNK", chunk)
    for name, content in (("a.txt", "\ufeffa\ufeff"), ("a.jsonl", '\ufeff{"text": "a\ufeff"}\n{"text": "b"}')):
        (tmp_path / name).write_text(content, encoding="utf-8")
        assert next(sources.read_text(str(tmp_path / name), text_key="text")) == "a\ufeff"


def test_records_of_every_length_and_text_with_braces(tmp_path):
    """An Example begins with a newline and its length, which 123 makes a brace."""
    texts = ["x" * n for n in range(1, 300)]
    write_records(tmp_path / "a.array_record", [example(text) for text in texts])
    assert list(sources.read_text(str(tmp_path / "a.array_record"), text_key="text")) == texts
    texts = ["{{Infobox}}", "{\\bf Theorem}", "[1]", "{"]
    write_records(tmp_path / "b.array_record", [text.encode() for text in texts])
    assert list(sources.read_text(str(tmp_path / "b.array_record"), text_key="text")) == texts
    several = field(1, field(1, field(1, b"text") + field(2, field(1, field(1, b"first") + field(1, b"second")))))
    write_records(tmp_path / "c.array_record", [several])
    assert list(sources.read_text(str(tmp_path / "c.array_record"), text_key="text")) == ["first"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.parquet", b"PAR1 not", "a.parquet: cannot be read"),
        ("a.parquet", {"body": ["x"]}, "a.parquet: not one column 'text' among body, n"),
        ("a.jsonl.gz", b"", "a.jsonl.gz: cannot be read: it is empty"),
        ("a.parquet", {"text": [3]}, "a.parquet: column 'text' holds int64, not strings"),
        ("a.array_record", b"no records here", "a.array_record: cannot be read"),
        ("a.array_record", [b'{"body": "x"}'], "a.array_record, record 0: expected a JSON object"),
        ("a.array_record", [b"fine", b"\xff\xfe"], "a.array_record, record 1:1: not UTF-8"),
        ("a.array_record", [field(1, field(1, field(1, b"body") + field(2, field(1, field(1, b"x")))))], "only body"),
        ("a.array_record", [NUMBERS], "no feature 'text'"),
        ("a.jsonl.zst", b"no zstandard", "a.jsonl.zst: cannot be read"),
        ("a.parquet.gz", b"", "a.parquet.gz: not one of"),
        ("a.idx", b"", "a.idx: token ids, not text"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, name, content, message):
    path = tmp_path / name
    if isinstance(content, dict):
        ((column, values),) = content.items()
        write_parquet(path, values, column)
    elif isinstance(content, list):
        write_records(path, content)
    else:
        path.write_bytes(content)
    with pytest.raises(InputError, match=re.escape(message)) as error:
        list(sources.read_text(str(path), text_key="text"))
    assert "\n" not in str(error.value)


def test_a_column_that_is_there_twice_is_refused_and_checksums_are_compared(tmp_path):
    twice = pyarrow.Table.from_arrays([pyarrow.array(["a"])] * 2, names=["text", "text"])
    pyarrow.parquet.write_table(twice, tmp_path / "a.parquet")
    with pytest.raises(InputError, match="not one column 'text' among text, text"):
        list(sources.read_text(str(tmp_path / "a.parquet"), text_key="text"))
    table = pyarrow.table({"text": ["a", "hello world", "z"]})  # statistics hold the first and the last
    how = {"write_page_checksum": True, "compression": "none", "use_dictionary": False}
    pyarrow.parquet.write_table(table, tmp_path / "b.parquet", **how)
    content = (tmp_path / "b.parquet").read_bytes()
    (tmp_path / "b.parquet").write_bytes(content.replace(b"hello", b"iello", 1))
    with pytest.raises(InputError, match=r"b\.parquet: cannot be read"):
        list(sources.read_text(str(tmp_path / "b.parquet"), text_key="text"))


def test_globs_are_joined_in_order_and_no_file_comes_twice(tmp_path):
    for name in ("b1.txt", "b2.txt", "a.txt"):
        (tmp_path / name).write_text(name)
    found = sources.match_files(f"{tmp_path}/b*.txt,{tmp_path}/*.txt")
    assert [path.rpartition("/")[2] for path in found] == ["b1.txt", "b2.txt", "a.txt"]
    with pytest.raises(InputError, match=r"no file matches '.*c\*\.txt'"):
        sources.match_files(f"{tmp_path}/a.txt,{tmp_path}/c*.txt")


def write_megatron(path, documents, dtype="<u2", code=8):
    """Write NAME.idx and NAME.bin as Megatron does; a document is a list of sequences."""
    sequences = [np.array(sequence, dtype) for document in documents for sequence in document]
    sizes = np.array([len(sequence) for sequence in sequences], "<i4")
    offsets = np.cumsum([0, *(sequence.nbytes for sequence in sequences)])[:-1].astype("<i8")
    bounds = np.cumsum([0, *(len(document) for document in documents)]).astype("<i8")
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(sequences), len(bounds))
    path.write_bytes(head + sizes.tobytes() + offsets.tobytes() + bounds.tobytes())
    path.with_suffix(".bin").write_bytes(b"".join(sequence.tobytes() for sequence in sequences))


@pytest.mark.parametrize(("dtype", "code"), [("<u2", 8), ("<i4", 4), ("<i8", 5)])
def test_megatron_files_give_their_documents(tmp_path, dtype, code):
    documents = [[[1, 2, 3]], [[4], [5, 6]], [[]], [[7]]]
    write_megatron(tmp_path / "a.idx", documents, dtype, code)
    found = [ids.tolist() for ids in sources.read_ids(str(tmp_path / "a.idx"))]
    assert found == [[1, 2, 3], [4, 5, 6], [], [7]]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda idx, bin_: idx.write_bytes(idx.read_bytes()[:-8]), "cannot be read|do not cover"),
        (lambda idx, bin_: idx.write_bytes(b"MMIDIDX\x00\x01" + idx.read_bytes()[9:]), "not an index"),
        (lambda idx, bin_: idx.write_bytes(idx.read_bytes()[:17] + b"\x07" + idx.read_bytes()[18:]), "whole numbers"),
        (lambda idx, bin_: bin_.write_bytes(bin_.read_bytes()[:-2]), "points beyond the 5 ids of a.bin"),
        (lambda idx, bin_: bin_.unlink(), "cannot be read"),
        (lambda idx, bin_: idx.write_bytes(idx.read_bytes()[:25] + b"\x80" + idx.read_bytes()[26:]), "cannot be read"),
        (lambda idx, bin_: idx.write_bytes(idx.read_bytes()[:50] + b"\x05" + idx.read_bytes()[51:]), "points beyond"),
        (lambda idx, bin_: idx.write_bytes(idx.read_bytes()[:57] + b"\x7f" + idx.read_bytes()[58:]), "points beyond"),
    ],
)
def test_damaged_megatron_files_are_refused(tmp_path, damage, message):
    write_megatron(tmp_path / "a.idx", [[[1, 2, 3]], [[4, 5, 6]]])
    damage(tmp_path / "a.idx", tmp_path / "a.bin")
    with pytest.raises(InputError, match=rf"a\.idx: .*({message})"):
        list(sources.read_ids(str(tmp_path / "a.idx")))
