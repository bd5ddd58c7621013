"""Write a directory of prepared data (`train.prepared`): tokenize files in parallel, append the results in order.

The files of each split are cut into units of at least UNIT_BYTES, a pure function of their names and sizes. Worker processes
tokenize units into parts/; this process appends finished parts to the split's files in the order of the units, and notes in
progress.json how far it is. Whatever stops it, the same command goes on after the last unit appended, and the result does not
depend on how often that was or on the number of workers.
"""

import concurrent.futures
import contextlib
import functools
import hashlib
import itertools
import json
import logging
import multiprocessing
import os
import pathlib
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from typing import Any, NamedTuple

import numpy as np
import rich.console
import rich.progress

from train import prepared, sources
from train import tokenizer as tokenizer_lib
from train.corpus import SEPARATOR
from train.errors import InputError, StorageError, write_whole, writing
from train.prepared import SPLITS
from train.tokenizer import ByteTokenizer, Tokenizer

log = logging.getLogger(__name__)
UNIT_BYTES = 8_000_000  # of files as they are on disk
BATCH = 1024  # documents tokenized at a time
SAMPLE_BYTES = 200_000_000  # of text, that BPE is trained on at most


class Plan(NamedTuple):
    """What is prepared, as progress.json keeps it. tokenizer: its name; marks: one of prepared.MARKS."""

    files: dict[str, list[tuple[str, int]]]  # of each split, path and size
    tokenizer: str
    marks: str
    text_key: str
    val_fraction: float  # of the training files' documents, where the validation split has no files of its own
    unit_bytes: int

    def units(self) -> list[tuple[str, list[str]]]:
        """Return (split, files) of every unit, the training split's first; no split is without a unit if it has files."""
        out: list[tuple[str, list[str]]] = []
        for split, files in self.files.items():
            group, size = [], 0
            for path, bytes_ in files:
                group.append(path)
                size += bytes_
                if size >= self.unit_bytes:
                    out.append((split, group))
                    group, size = [], 0
            if group:
                out.append((split, group))
        return out


class Stopped(Exception):
    """A signal came; what is done is kept."""


def make_plan(
    *, train: str, val: str, tokenizer: str, marks: str, text_key: str, val_fraction: float, unit_bytes: int = UNIT_BYTES
) -> Plan:
    """Return the plan for globs of files; raises InputError for whatever cannot be read or does not go together."""
    if marks not in prepared.MARKS:
        raise InputError(f"documents={marks!r} is not one of {', '.join(prepared.MARKS)}")
    paths = {"train": sources.match_files(train), "val": sources.match_files(val) if val else []}
    for path in paths["train"] + paths["val"]:
        sources.kind(path)
    real = {os.path.realpath(path) for path in paths["train"]}
    if twice := [path for path in paths["val"] if os.path.realpath(path) in real]:
        raise InputError(f"{twice[0]} is both for training and for validation")
    if not val and not 0 < val_fraction < 1:
        raise InputError(f"val_fraction={val_fraction} is not between 0 and 1, and there are no files for validation")
    if tokenizer_lib.trained_size(tokenizer) is None:
        loaded = tokenizer_lib.load(tokenizer)
        has_eos, has_bos = loaded.eos_id is not None, loaded.bos_id is not None
    else:
        has_eos, has_bos = tokenizer.endswith("+eos"), False
    if ("eos" in marks and not has_eos) or ("bos" in marks and not has_bos):
        raise InputError(f"documents={marks!r}: tokenizer {tokenizer!r} has no such token (EOS: {has_eos}, BOS: {has_bos})")
    files = {split: [(path, _size(path)) for path in found] for split, found in paths.items()}
    return Plan(files, tokenizer, marks, text_key, 0.0 if val else val_fraction, unit_bytes)


def _size(path: str) -> int:
    binary = pathlib.Path(path).with_suffix(".bin")
    return os.path.getsize(binary if path.endswith(".idx") and binary.is_file() else path)


def _is_held_out(unit: int, number: int, fraction: float) -> bool:
    """Return whether the number-th document of a unit, counted from 1, is for validation.

    Evenly spaced, from another place in each unit (multiples of the golden ratio): units of few documents give their share too.
    """
    phase = unit * 0.6180339887498949 % 1
    return int(number * fraction + phase) > int((number - 1) * fraction + phase)


def prepare(plan: Plan, output: pathlib.Path, *, workers: int, stop: Callable[[], bool] = lambda: False) -> dict[str, Any]:
    """Do what is left of a plan and return the manifest; raises InputError, StorageError or Stopped.

    The caller holds a lock on the directory. stop: asked a few times a second.
    """
    if (output / "manifest.json").exists():
        manifest = prepared.read_manifest(output)
        if manifest["plan"] != _plan_digest(plan):
            raise InputError(f"{output} holds other data, prepared already: choose another directory")
        prepared.open_directory(output)
        return manifest
    with writing(output):
        pieces = _begin(plan, output)
        tokenizer = _tokenizer(plan, output)
    units = plan.units()
    todo = range(len(pieces), len(units))
    arguments = [(output, unit, *units[unit], plan, tokenizer.special_names()) for unit in todo]
    with _pool(min(workers, len(todo))) as submit, _Bar(plan, units, len(pieces)) as bar:
        ahead = 2 * workers if workers > 1 else 1  # units begun before the one that is appended, so that parts/ stays small
        futures = [submit(_encode_unit, *each) for each in arguments[:ahead]]
        for unit in todo:
            while not futures[0].done() and not stop():
                concurrent.futures.wait(futures[:1], timeout=0.2)
            if stop():
                raise Stopped
            try:
                found = futures.pop(0).result()
            except BrokenProcessPool:
                raise StorageError(f"{output}: a worker process was killed, for memory perhaps: try fewer --workers") from None
            with writing(output):
                for split, piece in found.items():
                    _append(output, split, unit, before=_count(pieces, split))
                    piece["files"] = [(os.path.basename(path), _size(path)) for path in units[unit][1]]
                pieces.append(found)
                _write_json(output / "progress.json", _progress(plan, pieces))
                shutil.rmtree(_part(output, unit))
            bar.advance(unit, _count(pieces, "train") + _count(pieces, "val"))
            futures += [submit(_encode_unit, *each) for each in arguments[unit - todo[0] + ahead :][:1]]
    with writing(output):
        return _finish(plan, output, tokenizer, pieces)


# ---- In the worker processes ----


def _encode_unit(output, unit, split, paths, plan, special) -> dict[str, dict[str, Any]]:
    """Tokenize the files of a unit into its part; return the piece of each split."""
    part = _part(output, unit)
    tokenizer = _load(plan.tokenizer, (output / "tokenizer.json").read_text(), tuple(special.items()))
    with writing(output):
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
    names = SPLITS if plan.val_fraction and split == "train" else (split,)
    with contextlib.ExitStack() as stack:
        writers = {name: stack.enter_context(_Writer(part, name, output)) for name in names}
        number = 0
        for path in paths:
            for batch in _encoded(path, tokenizer, plan):
                held_out = [_is_held_out(unit, number + i, plan.val_fraction) for i in range(1, len(batch) + 1)]
                number += len(batch)
                for name, writer in writers.items():
                    writer.write(
                        [d for d, held in zip(batch, held_out, strict=True) if len(names) == 1 or held == (name == "val")]
                    )
        return {name: writer.piece() for name, writer in writers.items()}


@functools.lru_cache(maxsize=1)
def _load(name: str, serialized: str, special: tuple[tuple[str, str], ...]) -> Tokenizer:
    """Return the tokenizer, which keeps the words it has seen from one unit to the next."""
    return (
        tokenizer_lib.load(name) if name in ("bytes", "bytes+eos") else tokenizer_lib.JsonTokenizer(serialized, dict(special))
    )


def _encoded(path: str, tokenizer: Tokenizer, plan: Plan) -> Iterator[list[tuple[np.ndarray, int]]]:
    """Yield batches of (ids with their marks, bytes of text) of a file's documents; raises InputError for ids beyond them."""
    dtype = tokenizer_lib.id_dtype(tokenizer.vocab_size)
    before = [tokenizer.bos_id] if "bos" in plan.marks else []
    after = [tokenizer.eos_id] if "eos" in plan.marks else []
    before, after = np.array(before, dtype), np.array(after, dtype)
    if sources.kind(path) == ".idx":
        for number, ids in enumerate(sources.read_ids(path)):
            if not ids.size:
                continue
            if ids.min() < 0 or ids.max() >= tokenizer.vocab_size:
                worst = ids.max() if ids.max() >= tokenizer.vocab_size else ids.min()
                raise InputError(f"{path}, document {number}: id {worst} is not in [0, {tokenizer.vocab_size})")
            begun = before[len(before) * int(ids[0] in before) :]  # Megatron may have marked it already: --append-eod
            ended = after[len(after) * int(ids[-1] in after) :]
            yield [(np.concatenate([begun, ids.astype(dtype), ended]), 0)]
        return
    separator = SEPARATOR if plan.marks == "newlines" else ""
    for batch in itertools.batched(sources.read_text(path, text_key=plan.text_key), BATCH):
        texts = [text + separator for text in batch]
        encoded = tokenizer.encode_batch(texts)
        yield [
            (np.concatenate([before, ids, after]) if len(before) + len(after) else ids, len(text.encode()))
            for ids, text in zip(encoded, texts, strict=True)
        ]


class _Writer:
    """Writes the ids and ends of one split of a unit, and counts."""

    def __init__(self, part: pathlib.Path, split: str, output: pathlib.Path):
        self._output = output
        with writing(output):
            self._ids, self._ends = open(part / f"{split}.bin", "wb"), open(part / f"{split}.ends", "wb")  # noqa: SIM115
        self._hash, self._tokens, self._text_bytes, self._documents, self._largest = hashlib.sha256(), 0, 0, 0, -1

    def __enter__(self) -> "_Writer":
        return self

    def __exit__(self, *_) -> None:
        with writing(self._output):
            self._ids.close()
            self._ends.close()

    def write(self, documents: Sequence[tuple[np.ndarray, int]]) -> None:
        if not documents:
            return
        ids = np.concatenate([ids for ids, _ in documents])
        data = ids.astype(ids.dtype.newbyteorder("<"), copy=False).tobytes()
        ends = self._tokens + np.cumsum([len(ids) for ids, _ in documents], dtype="<i8")
        with writing(self._output):
            self._ids.write(data)
            self._ends.write(ends.tobytes())
        self._hash.update(data)
        self._tokens += len(ids)
        self._documents += len(documents)
        self._text_bytes += sum(size for _, size in documents)
        self._largest = max(self._largest, int(ids.max()))

    def piece(self) -> dict[str, Any]:
        with writing(self._output):
            for file in (self._ids, self._ends):
                file.flush()
                os.fsync(file.fileno())
        counts = {"documents": self._documents, "tokens": self._tokens, "text_bytes": self._text_bytes}
        return {**counts, "largest_id": self._largest, "sha256": self._hash.hexdigest()}


@contextlib.contextmanager
def _pool(workers: int) -> Iterator[Callable[..., concurrent.futures.Future]]:
    """Yield what runs a function in a worker process, or in this one where there is but one worker.

    Workers leave signals to this process, end with it, and are ended where the block fails.
    """
    if workers <= 1:
        yield _at_once
        return
    threads = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # in the workers: each has one core
    context = multiprocessing.get_context("spawn")
    pool = concurrent.futures.ProcessPoolExecutor(workers, context, _start_worker, (os.getpid(),))
    try:
        yield pool.submit
    except BaseException:
        for process in list(pool._processes.values()):
            process.kill()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
        os.environ.pop("TOKENIZERS_PARALLELISM")
        if threads is not None:
            os.environ["TOKENIZERS_PARALLELISM"] = threads


def _at_once(function: Callable[..., Any], *arguments: Any) -> concurrent.futures.Future:
    future = concurrent.futures.Future()
    future.set_result(function(*arguments))
    return future


def _start_worker(parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch():
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


# ---- In this process ----


def _begin(plan: Plan, output: pathlib.Path) -> list[dict[str, dict[str, Any]]]:
    """Return the pieces appended so far, with the files cut to them; raises InputError for a directory of something else."""
    output.mkdir(parents=True, exist_ok=True)
    try:
        progress = json.loads((output / "progress.json").read_text())
    except FileNotFoundError:
        if strays := sorted(path.name for path in output.iterdir() if path.name != "lock"):
            raise InputError(f"{output} is not empty: it holds {strays[0]}") from None
        progress = _progress(plan, [])
        _write_json(output / "progress.json", progress)
    except ValueError as error:
        raise InputError(f"{output / 'progress.json'} cannot be read: {error}") from None
    if progress["plan"] != _plan_digest(plan):
        if not _goes_on(plan, progress):
            raise InputError(f"{output} was begun with other files or options: choose another directory, or remove it")
        if not progress["pieces"]:
            (output / "tokenizer.json").unlink(missing_ok=True)
        _write_json(output / "progress.json", _progress(plan, progress["pieces"]))
    shutil.rmtree(output / "parts", ignore_errors=True)
    pieces, itemsize = progress["pieces"], np.dtype(_dtype(plan)).itemsize if progress["pieces"] else 1
    for split in SPLITS:
        tokens, documents = _count(pieces, split), _count(pieces, split, "documents")
        for name, size in ((f"{split}.bin", tokens * itemsize), (f"{split}.ends", documents * 8)):
            with open(output / name, "ab") as file:
                if file.tell() < size:
                    raise InputError(f"{output / name} is shorter than progress.json says: remove the directory")
                file.truncate(size)
    return pieces


def _progress(plan: Plan, pieces: list[dict[str, dict[str, Any]]]) -> dict[str, Any]:
    return {"plan": _plan_digest(plan), "options": _plan_digest(plan._replace(files={})), "pieces": pieces}


def _goes_on(plan: Plan, progress: dict[str, Any]) -> bool:
    """Return whether what was appended under another plan is what this one begins with: a file not reached yet was mended."""
    pieces, units = progress["pieces"], plan.units()
    if not pieces:
        return True
    if progress["options"] != _plan_digest(plan._replace(files={})) or len(pieces) > len(units):
        return False
    if tokenizer_lib.trained_size(plan.tokenizer) is not None:  # on all of the files
        return False
    return all(
        split in piece and [tuple(file) for file in piece[split]["files"]] == [(os.path.basename(p), _size(p)) for p in paths]
        for piece, (split, paths) in zip(pieces, units, strict=False)
    )


def _tokenizer(plan: Plan, output: pathlib.Path) -> Tokenizer:
    """Return the tokenizer of a plan, trained now or before; tokenizer.json holds it."""
    path, size = output / "tokenizer.json", tokenizer_lib.trained_size(plan.tokenizer)
    if size is None:
        tokenizer = tokenizer_lib.load(plan.tokenizer)
    elif path.exists():
        special = {"eos_token": tokenizer_lib.END} if plan.tokenizer.endswith("+eos") else {}
        return tokenizer_lib.JsonTokenizer(path.read_text(), special)
    else:
        log.info("training %s on the first %d MB of text at most", plan.tokenizer, SAMPLE_BYTES // 10**6)
        tokenizer = tokenizer_lib.train_bpe(_sample(plan), plan.tokenizer)
    write_whole(path, tokenizer.to_json())
    return tokenizer


def _sample(plan: Plan) -> Iterator[str]:
    """Yield training documents, those of the plan's own validation split left out, SAMPLE_BYTES of them at most."""
    size = 0
    for unit, (split, paths) in enumerate(plan.units()):
        texts = itertools.chain.from_iterable(sources.read_text(path, text_key=plan.text_key) for path in paths)
        for number, text in enumerate(texts if split == "train" else (), start=1):
            if not _is_held_out(unit, number, plan.val_fraction):
                size += len(text.encode())
                if size > SAMPLE_BYTES:
                    return
                yield text


def _append(output: pathlib.Path, split: str, unit: int, *, before: int) -> None:
    """Append a part's ids, and its ends counted from the beginning of the split; `before`: ids that are there."""
    part = _part(output, unit)
    with open(part / f"{split}.bin", "rb") as source, open(output / f"{split}.bin", "ab") as target:
        shutil.copyfileobj(source, target, 1 << 24)
        target.flush()
        os.fsync(target.fileno())
    with open(output / f"{split}.ends", "ab") as target:
        target.write((np.fromfile(part / f"{split}.ends", "<i8") + before).tobytes())
        target.flush()
        os.fsync(target.fileno())


def _finish(plan: Plan, output: pathlib.Path, tokenizer: Tokenizer, pieces: list[dict[str, Any]]) -> dict[str, Any]:
    splits = {}
    for split in SPLITS:
        of = [piece[split] for piece in pieces if split in piece]
        counts: dict[str, Any] = {name: _count(pieces, split, name) for name in ("documents", "tokens", "text_bytes")}
        with open(output / f"{split}.ends", "rb") as file:
            ends = hashlib.file_digest(file, "sha256").hexdigest()
        largest = max((piece["largest_id"] for piece in of), default=-1)
        splits[split] = {**counts, "largest_id": largest, "ends_sha256": ends, "pieces": of}
    if not splits["train"]["tokens"]:
        raise InputError(f"the {len(plan.files['train'])} files for training hold no text")
    if splits["val"]["tokens"] < 2:
        raise InputError(
            f"no document is held out for validation with val_fraction={plan.val_fraction}, or val's files are empty: remove "
            f"{output} and prepare with a larger --val_fraction, or with files for --val"
        )
    name = plan.tokenizer if isinstance(tokenizer, ByteTokenizer) or plan.tokenizer.startswith("bpe:") else None
    manifest = {
        "format": prepared.FORMAT,
        "plan": _plan_digest(plan),
        "tokenizer": {
            "name": name or os.path.basename(plan.tokenizer),
            "id": tokenizer.id,
            "vocab_size": tokenizer.vocab_size,
            "bos_id": tokenizer.bos_id,
            "eos_id": tokenizer.eos_id,
            "special": tokenizer.special_names(),
        },
        "documents": plan.marks,
        "dtype": np.dtype(_dtype(plan)).name,
        "splits": splits,
    }
    manifest["digest"] = prepared.digest(manifest)
    _write_json(output / "manifest.json", manifest)
    shutil.rmtree(output / "parts", ignore_errors=True)
    (output / "progress.json").unlink()
    return manifest


def _dtype(plan: Plan) -> type[np.unsignedinteger]:
    size = tokenizer_lib.trained_size(plan.tokenizer) or tokenizer_lib.load(plan.tokenizer).vocab_size
    return tokenizer_lib.id_dtype(size)


def _plan_digest(plan: Plan) -> str:
    """Return 16 hex digits over names and sizes of the files and all that changes the result; not over where they lie."""
    files = {split: [(os.path.basename(path), size) for path, size in found] for split, found in plan.files.items()}
    named = tokenizer_lib.trained_size(plan.tokenizer) or plan.tokenizer in ("bytes", "bytes+eos")
    tokenizer = plan.tokenizer if named else tokenizer_lib.load(plan.tokenizer).id
    content = json.dumps([files, tokenizer, *plan[2:]], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def _count(pieces: list[dict[str, Any]], split: str, what: str = "tokens") -> int:
    return sum(piece[split][what] for piece in pieces if split in piece)


def _part(output: pathlib.Path, unit: int) -> pathlib.Path:
    return output / "parts" / f"{unit:06d}"


def _write_json(path: pathlib.Path, value: Any) -> None:
    write_whole(path, json.dumps(value) + "\n")


class _Bar:
    """Progress by bytes of the files: a bar on a terminal, a log line every ten seconds otherwise."""

    def __init__(self, plan: Plan, units: list[tuple[str, list[str]]], done: int):
        sizes = {path: size for files in plan.files.values() for path, size in files}
        self._sizes = [sum(sizes[path] for path in paths) for _, paths in units]
        self._begun, self._logged, self._first = time.monotonic(), time.monotonic(), sum(self._sizes[:done])
        self._done, self._total = self._first, sum(self._sizes)
        self._bar = rich.progress.Progress(
            rich.progress.TextColumn("tokenizing"),
            rich.progress.DownloadColumn(),
            rich.progress.BarColumn(),
            rich.progress.TextColumn("{task.fields[text]}"),
            rich.progress.TimeRemainingColumn(),
            console=rich.console.Console(stderr=True),
            disable=not sys.stderr.isatty(),
        )
        self._task = self._bar.add_task("", total=self._total, completed=self._done, text="")

    def __enter__(self) -> "_Bar":
        self._bar.start()
        if self._done:
            log.info("%.1f of %.1f MB were done before", self._done / 1e6, self._total / 1e6)
        return self

    def __exit__(self, *_) -> None:
        self._bar.stop()

    def advance(self, unit: int, tokens: int) -> None:
        self._done += self._sizes[unit]
        self._bar.update(self._task, completed=self._done, text=f"{tokens:,} tokens")
        now = time.monotonic()
        if self._bar.disable and (now - self._logged > 10 or self._done == self._total):
            left = (now - self._begun) / max(self._done - self._first, 1) * (self._total - self._done)
            log.info("%.1f of %.1f MB, %s tokens, ETA %.0f s", self._done / 1e6, self._total / 1e6, f"{tokens:,}", left)
            self._logged = now
