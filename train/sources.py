"""Files of text or of token ids, read one document after the other, so that no file need fit in memory.

    .txt                          one document, which does fit
    .jsonl, .json, .ndjson        one JSON object per line, the text under `text_key` (C4's layout on the Hugging Face hub)
    any of these with .gz, .zst   compressed
    .parquet                      one row per document, the text in the column `text_key`
    .array_record, .arrayrecord   one record per document: UTF-8 text, a JSON object, or a tf.train.Example with `text_key`
    .idx                          Megatron's token files, NAME.idx beside NAME.bin: ids instead of text

Documents without text are left out. Every fault is an InputError that names the file, and the line, row or record where it can.
"""

import codecs
import contextlib
import glob
import gzip
import importlib
import itertools
import json
import os
import pathlib
import struct
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from train.errors import InputError

LINES = (".jsonl", ".json", ".ndjson")
RECORDS = (".array_record", ".arrayrecord")
SUFFIXES = (".txt", *LINES, ".parquet", *RECORDS, ".idx")
CHUNK = 1 << 20  # bytes read at a time
MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
MEGATRON_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # megatron/core/datasets/indexed_dataset.py, DType


def match_files(patterns: str) -> list[str]:
    """Return the files that match one of the globs (`**` recurses), which commas separate, each sorted by path, none twice.

    Raises InputError where a glob matches nothing.
    """
    paths: dict[str, None] = {}
    for pattern in patterns.split(","):
        found = sorted(path for path in glob.glob(pattern, recursive=True) if os.path.isfile(path))
        if not found:
            raise InputError(f"no file matches {pattern!r}")
        paths |= dict.fromkeys(found)
    return list(paths)


def kind(path: str) -> str:
    """Return the one of SUFFIXES that says how a file is read; raises InputError for another."""
    plain = pathlib.Path(path.removesuffix(".gz").removesuffix(".zst"))
    if plain.suffix not in SUFFIXES or (str(plain) != str(pathlib.Path(path)) and plain.suffix not in (".txt", *LINES)):
        raise InputError(f"{path}: not one of {', '.join(SUFFIXES)}, the first four also with .gz or .zst")
    return plain.suffix


def read_files(paths: Sequence[str], *, text_key: str) -> list[str]:
    """Return all documents of files of text; raises InputError if there are none."""
    documents = [document for path in paths for document in read_text(path, text_key=text_key)]
    if not documents:
        raise InputError(f"the {len(paths)} files from {paths[0]} on hold no text")
    return documents


def read_text(path: str, *, text_key: str) -> Iterator[str]:
    """Yield the documents of a file of text that are not empty."""
    suffix = kind(path)
    if suffix == ".idx":
        raise InputError(f"{path}: token ids, not text: python -m train.prepare reads them")
    if suffix == ".txt":
        documents = iter([_decode(b"".join(_chunks(path)).removeprefix(codecs.BOM_UTF8), path)])
    elif suffix in LINES:
        lines = (line if n > 1 else line.removeprefix(codecs.BOM_UTF8) for n, line in enumerate(_lines(path), start=1))
        documents = (_from_json(line, f"{path}:{n}", text_key) for n, line in enumerate(lines, start=1) if line.strip())
    elif suffix == ".parquet":
        documents = _read_parquet(path, text_key)
    else:
        documents = (_from_record(record, f"{path}, record {n}", text_key) for n, record in enumerate(_records(path)))
    return (document for document in documents if document)


def read_ids(path: str) -> Iterator[np.ndarray]:
    """Yield the documents of a Megatron index, an array of ids each, those without ids too."""
    try:
        head = pathlib.Path(path).read_bytes()
        magic, version, dtype, sequences, bounds = struct.unpack_from("<9sQBQQ", head)
        if magic != MEGATRON_MAGIC or version != 1 or dtype not in MEGATRON_DTYPES:
            raise InputError(f"{path}: not an index of Megatron's token files, version 1, of whole numbers")
        at = struct.calcsize("<9sQBQQ")
        lengths = np.frombuffer(head, "<i4", sequences, at)
        offsets = np.frombuffer(head, "<i8", sequences, at + 4 * sequences)
        first = np.frombuffer(head, "<i8", bounds, at + 12 * sequences)  # of each document its first sequence, and the end
        binary = pathlib.Path(path).with_suffix(".bin")
        ids = np.memmap(binary, MEGATRON_DTYPES[dtype], "r") if binary.stat().st_size else np.zeros(0, np.uint8)
    except (OSError, OverflowError, ValueError, struct.error) as error:
        raise InputError(f"{path}: cannot be read: {error}") from error
    starts = offsets // ids.itemsize
    beyond = (starts > len(ids)) | (lengths > len(ids) - np.minimum(starts, len(ids)))
    if (lengths < 0).any() or (offsets < 0).any() or (offsets % ids.itemsize).any() or beyond.any():
        raise InputError(f"{path}: points beyond the {len(ids)} ids of {binary.name}")
    if not len(first) or first[0] != 0 or first[-1] != sequences or (np.diff(first) < 0).any():
        raise InputError(f"{path}: its documents do not cover its {sequences} sequences")
    for a, b in itertools.pairwise(first):
        pieces = [ids[starts[i] : starts[i] + lengths[i]] for i in range(a, b)]
        yield np.concatenate(pieces) if pieces else ids[:0]


def _chunks(path: str) -> Iterator[bytes]:
    """Yield the decompressed content in pieces."""
    try:
        if path.endswith(".gz") and not os.path.getsize(path):
            raise EOFError("it is empty, without even a header")
        with gzip.open(path) if path.endswith(".gz") else open(path, "rb") as file:
            pieces = iter(lambda: bytes(file.read(CHUNK)), b"")
            yield from (_unzstd(pieces) if path.endswith(".zst") else pieces)
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path}: cannot be read: {error}") from error


def _unzstd(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Decompress frame after frame; the library's own reader ends without a word where a file was cut."""
    import zstandard

    frame = zstandard.ZstdDecompressor().decompressobj()
    for piece in pieces:
        while piece:
            if frame.eof:
                frame = zstandard.ZstdDecompressor().decompressobj()
            try:
                yield frame.decompress(piece)
            except zstandard.ZstdError as error:
                raise OSError(str(error)) from error
            piece = frame.unused_data if frame.eof else b""
    if not frame.eof:
        raise EOFError("it ends in the middle of a compressed frame")


def _lines(path: str) -> Iterator[bytes]:
    """Yield the lines, split at \\n only: JSON strings may hold U+2028 and other separators that str.splitlines splits at."""
    rest = b""
    for chunk in _chunks(path):
        *lines, rest = (rest + chunk).split(b"\n")
        yield from lines
    yield rest


def _decode(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise InputError(f"{where}:{line}: not UTF-8: {error.reason} at byte {error.start}") from error


def _from_json(line: bytes, where: str, text_key: str) -> str:
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise InputError(f"{where}: not UTF-8: {error.reason} at byte {error.start} of the line") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: not JSON: {error}") from error
    return _text_of(record, where, text_key)


def _text_of(record: Any, where: str, text_key: str) -> str:
    document = record.get(text_key) if isinstance(record, dict) else None
    if not isinstance(document, str):
        raise InputError(f"{where}: expected a JSON object with a string under {text_key!r}")
    try:
        document.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{where}: {text_key!r} holds a lone surrogate, which no UTF-8 encodes") from error
    return document


def _read_parquet(path: str, text_key: str) -> Iterator[str]:
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path, page_checksum_verification=True)  # where the file has checksums
        if file.schema_arrow.names.count(text_key) != 1:
            raise InputError(f"{path}: not one column {text_key!r} among {', '.join(file.schema_arrow.names)}")
        held = file.schema_arrow.field(text_key).type
        plain = held.value_type if pyarrow.types.is_dictionary(held) else held  # a pandas category is a dictionary
        if plain not in (pyarrow.string(), pyarrow.large_string(), pyarrow.string_view()):
            raise InputError(f"{path}: column {text_key!r} holds {held}, not strings")
        for batch in file.iter_batches(columns=[text_key], batch_size=1024):
            yield from (text or "" for text in batch.column(0).to_pylist())
    except (OSError, pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read: {str(error).splitlines()[0]}") from error


def _records(path: str) -> Iterator[bytes]:
    array_record: Any = importlib.import_module("array_record.python.array_record_module")  # compiled, without types
    try:
        with contextlib.closing(array_record.ArrayRecordReader(path)) as reader:  # closing one that is damaged raises
            for _ in range(reader.num_records() if reader.ok() else 0):
                yield reader.read()
    except (OSError, IndexError, RuntimeError, ValueError) as error:
        raise InputError(f"{path}: cannot be read: {(str(error) or 'no ArrayRecord file').splitlines()[0]}") from error


def _from_record(record: bytes, where: str, text_key: str) -> str:
    if features := _example(record):
        text = features.get(text_key.encode())
        if text is None:
            names = ", ".join(name.decode(errors="replace") for name, value in features.items() if value is not None)
            raise InputError(f"{where}: no feature {text_key!r} of bytes, only {names}")
        return _decode(text, where)
    try:
        found = json.loads(record)
    except (ValueError, RecursionError):
        found = None
    return _text_of(found, where, text_key) if isinstance(found, dict) else _decode(record, where)


def _example(record: bytes) -> dict[bytes, bytes | None]:
    """Return the first value of each bytes feature of a serialized tf.train.Example, None for features of another type.

    {} where the record is no Example.

    Example { 1: Features { 1: map entry { 1: key, 2: Feature { 1: BytesList { 1: value } } } } }  (tensorflow/core/example)
    """
    try:
        entries = [dict(_fields(entry)) for _, features in _fields(record) for _, entry in _fields(features)]
        lists = {entry[1]: dict(_fields(entry[2])).get(1) for entry in entries}
        return {
            key: None if values is None else next((value for number, value in _fields(values) if number == 1), b"")
            for key, values in lists.items()
        }
    except (KeyError, IndexError, ValueError):
        return {}


def _fields(message: bytes) -> list[tuple[int, bytes]]:
    """Return (number, content) of the fields of a protocol buffer, which must all be length-delimited."""
    out, at = [], 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte, at = message[at], at + 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7

    while at < len(message):
        tag, length = varint(), varint()
        if tag & 7 != 2 or at + length > len(message):
            raise ValueError("not a message of messages")
        out.append((tag >> 3, message[at : at + length]))
        at += length
    return out
