"""Prepared data: token ids on disk, as `python -m train.prepare` writes them and training maps them into memory.

    manifest.json          counts, hashes, the tokenizer and how documents are marked; written last
    tokenizer.json         the tokenizer
    train.bin, val.bin     the ids of all documents one after the other, little-endian uint16 or uint32
    train.ends, val.ends   where each document ends, int64, in ids from the beginning

A document is [BOS] its ids [EOS], as "documents" in the manifest says: "eos", "bos", "bos+eos"; "newlines", where
corpus.SEPARATOR follows it as text; "none", where nothing does. `digest` identifies all of it, and does not depend on the
machine.
"""

import concurrent.futures
import hashlib
import json
import mmap
import os
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from train import tokenizer as tokenizer_lib
from train.errors import InputError
from train.tokenizer import JsonTokenizer

FORMAT = 1
SPLITS = ("train", "val")
MARKS = ("eos", "bos", "bos+eos", "newlines", "none")


class Prepared(NamedTuple):
    """One directory. ids and ends: of each split, memory-mapped, [N] and [documents]."""

    path: pathlib.Path
    manifest: dict[str, Any]
    ids: dict[str, np.ndarray]
    ends: dict[str, np.ndarray]

    def tokenizer(self) -> JsonTokenizer:
        """Return the tokenizer, whose `bos` is what every document here begins with."""
        tokenizer = read_tokenizer(self.path, self.manifest)
        tokenizer.bos = tokenizer.bos_id if "bos" in self.manifest["documents"] else None
        return tokenizer


def digest(manifest: dict[str, Any]) -> str:
    """Return 32 hex digits over a manifest without its own digest."""
    content = json.dumps({k: v for k, v in manifest.items() if k != "digest"}, sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:32]


def read_manifest(path: pathlib.Path) -> dict[str, Any]:
    """Return the manifest of a directory; raises InputError where there is none, or it is damaged or of another version."""
    file = path / "manifest.json"
    try:
        manifest = json.loads(file.read_text())
    except FileNotFoundError:
        more = ": its preparation has not ended, the same command continues it" if (path / "progress.json").exists() else ""
        raise InputError(f"{path} has no manifest.json, as python -m train.prepare writes one{more}") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{file} cannot be read: {error}") from None
    if not isinstance(manifest, dict) or manifest.get("digest") != digest(manifest):
        raise InputError(f"{file} is damaged: it does not match its digest")
    if manifest["format"] != FORMAT:
        raise InputError(f"{file} has format {manifest['format']}, this program reads format {FORMAT}")
    return manifest


def read_tokenizer(path: pathlib.Path, manifest: dict[str, Any]) -> JsonTokenizer:
    """Return the tokenizer of a directory; raises InputError where it is not the manifest's."""
    file = path / "tokenizer.json"
    try:
        tokenizer = JsonTokenizer(file.read_text(), manifest["tokenizer"]["special"])
    except Exception as error:  # the library raises no narrower class
        raise InputError(f"{file} cannot be read: {error}") from None
    if tokenizer.id != manifest["tokenizer"]["id"]:
        raise InputError(f"{file} is not the tokenizer of the manifest: {tokenizer.id} ≠ {manifest['tokenizer']['id']}")
    return tokenizer


def open_directory(path: pathlib.Path) -> Prepared:
    """Map a directory's files; raises InputError where one is missing or has not the size that the manifest says."""
    manifest = read_manifest(path)
    ids, ends = {}, {}
    for split in SPLITS:
        of = manifest["splits"][split]
        ids[split] = _map(path / f"{split}.bin", np.dtype(manifest["dtype"]).newbyteorder("<"), of["tokens"])
        ends[split] = _map(path / f"{split}.ends", np.dtype("<i8"), of["documents"])
    return Prepared(path, manifest, ids, ends)


def _map(path: pathlib.Path, dtype: np.dtype, length: int) -> np.ndarray:
    try:
        size = path.stat().st_size
        if size != length * dtype.itemsize:
            raise InputError(f"{path} is damaged: it has {size} bytes, the manifest says {length * dtype.itemsize}")
        if not length:
            return np.zeros(0, dtype)
        array = np.memmap(path, dtype, "r")
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error}") from None
    array._mmap.madvise(mmap.MADV_RANDOM)  # pyright: ignore  # windows are read one by one: nothing beyond them is wanted
    return array


def verify(data: Prepared, *, splits: Sequence[str] = SPLITS, part: int = 0, parts: int = 1) -> None:
    """Compare the `part`-th of `parts` shares of the splits' files with their hashes; raises InputError with the file.

    Ids are hashed in pieces, one per unit of the preparation, so that processes and threads share the reading.
    """
    checks = []
    for split in splits:
        of, first = data.manifest["splits"][split], 0
        checks.append((f"{split}.ends", "documents", data.ends[split], 0, of["ends_sha256"]))
        for piece in of["pieces"]:
            ids = data.ids[split][first : first + piece["tokens"]]
            checks.append((f"{split}.bin", "ids", ids, first, piece["sha256"]))
            first += piece["tokens"]

    def check(file: str, what: str, array: np.ndarray, first: int, expected: str) -> None:
        if hashlib.sha256(array).hexdigest() != expected:
            raise InputError(f"{data.path / file} is damaged: {what} {first} to {first + len(array)} do not match their hash")

    with concurrent.futures.ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        for done in [pool.submit(check, *each) for each in checks[part::parts]]:
            done.result()


def check_tokenizer(spec: str, data: pathlib.Path, manifest: dict[str, Any]) -> None:
    """Raise InputError unless the tokenizer that a config names is that of a manifest; "" is whatever the manifest says."""
    made, is_file = manifest["tokenizer"], pathlib.Path(spec).is_file()  # "" is a directory
    given = tokenizer_lib.load(spec).id if is_file else None
    if given != made["id"] if is_file else spec not in ("", made["name"]):
        which = f"{spec}, id {given}" if is_file else spec
        how = f"{data} was prepared with another tokenizer: {made['name']}, id {made['id']}, not {which}"
        raise InputError(f"{how}; an empty --config.data.tokenizer= takes the data's")
