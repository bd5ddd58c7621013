"""Training and validation data: settings, the loaded dataset, and batches of token windows.

Shape key: B sequences, T positions, N tokens of one part's split. A window is T + 1 tokens, window w starts at token w·T, so
neighbours share one token and every token after the first is predicted exactly once:

    training    (N - 1) // T windows; the last (N - 1) % T tokens are not used
    validation  ceil((N - 1) / T) windows; the last one is padded and masked

Training example n is a pure function of (tokens, T, seed, n): epoch e = n // windows, and a permutation of the windows
drawn from (seed, e). Of a mixture, grain's fixed pattern of the weights says which part example n is of, and that part's own
count goes on. Batch k holds the examples [k·B, (k + 1)·B), and may span two epochs. A window may span several documents:
whether they see each other is the model's business (`LlamaConfig.document_end`).
"""

import dataclasses
import hashlib
import math
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import grain
import numpy as np

from train import corpus, prepared, sources
from train import tokenizer as tokenizer_lib
from train.errors import InputError, check_types
from train.tokenizer import Tokenizer

SOURCES = ("bible", "python", "files", "prepared")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Settings of the data; raises InputError for a value that is out of range or does not apply.

    Attributes:
      source: "bible" (King James text, 4.1 MB), "python" (sources of pinned dependencies, 20 MB), "files", held in memory, or
        "prepared", directories that `python -m train.prepare` wrote.
      files: for "files", globs of what `train.sources` reads, separated by commas, in sorted order. For "prepared",
        directories separated by commas, each with its weight where they are several: "prepared/c4=0.7,prepared/code=0.3".
      val_files: for "files", globs of validation files, in place of the split by val_fraction.
      text_key: for "files", the key or column of a record's text.
      tokenizer: as `train.tokenizer` names them; "bpe:N" is trained on the training split. For "prepared" "", or the one that
        it was prepared with: another is refused.
      seq_len: positions T per sequence.
      val_fraction: share of the corpus held out for validation (see `corpus.split_documents`).
      cache_dir: directory of tokenized text; "" means $FP4JAX_CACHE, or ~/.cache/fp4jax.
      max_val_sequences: validate on at most this many windows; 0 means all.
      val_choice: the "first" so many, or "even"ly spaced.
      verify: of "prepared", read all of it once when a run begins and compare it with its hashes.
    """

    source: str = "bible"
    files: str = ""
    val_files: str = ""
    text_key: str = "text"
    tokenizer: str = "bytes"
    seq_len: int = 128
    val_fraction: float = 0.05
    cache_dir: str = ""
    max_val_sequences: int = 0
    val_choice: str = "even"
    verify: bool = True

    def __post_init__(self):
        check_types("data", self)
        if self.source not in SOURCES:
            raise InputError(f"data.source={self.source!r} is not one of {', '.join(SOURCES)}")
        if (self.source in ("files", "prepared")) != bool(self.files):
            raise InputError(
                f"data.files={self.files!r} with data.source={self.source!r}: 'files' and 'prepared' alone need files"
            )
        if self.source != "files" and (self.val_files or self.text_key != "text"):
            raise InputError(f"data.val_files and data.text_key do not apply to data.source={self.source!r}")
        if self.val_choice not in ("even", "first"):
            raise InputError(f"data.val_choice={self.val_choice!r} is neither 'even' nor 'first'")
        if self.seq_len < 1:
            raise InputError(f"data.seq_len={self.seq_len} is below 1")
        if self.max_val_sequences < 0:
            raise InputError(f"data.max_val_sequences={self.max_val_sequences} is negative")
        if not 0 < self.val_fraction < 1:
            raise InputError(f"data.val_fraction={self.val_fraction} is not between 0 and 1")
        if self.source == "prepared":
            self.directories()
        else:
            tokenizer_lib.vocab_size(self.tokenizer)

    @property
    def vocab_size(self) -> int:
        """The number of token ids, known from the name, the tokenizer's file or the manifest."""
        if self.source == "prepared":
            return self.manifests()[0]["tokenizer"]["vocab_size"]  # they have one tokenizer
        return tokenizer_lib.vocab_size(self.tokenizer)

    def directories(self) -> list[tuple[pathlib.Path, float]]:
        """Return (directory, share of the examples) of each part of prepared data; the shares add up to 1."""
        if pathlib.Path(self.files).is_dir():  # whatever its name holds
            return [(pathlib.Path(self.files), 1.0)]
        parts = [part.rpartition("=") if "=" in part else (part, "", "1") for part in self.files.split(",")]
        try:
            weights = [float(weight) for _, _, weight in parts]
        except ValueError as error:
            raise InputError(f"data.files={self.files!r}: {error}") from None
        if len(parts) > 1 and not all("=" in part for part in self.files.split(",")):
            raise InputError(f"data.files={self.files!r}: of several directories each needs its weight: DIR=0.7,OTHER=0.3")
        if not all(path for path, _, _ in parts) or not all(math.isfinite(weight) and weight > 0 for weight in weights):
            raise InputError(f"data.files={self.files!r}: a directory without a name, or a weight that is not positive")
        if not math.isfinite(sum(weights)) or min(weights) < 1e-9 * sum(weights):
            raise InputError(f"data.files={self.files!r}: a share of the examples is below 1e-9")
        return [(pathlib.Path(path), weight / sum(weights)) for (path, _, _), weight in zip(parts, weights, strict=True)]

    def manifests(self) -> list[dict[str, Any]]:
        """Return the manifest of each part of prepared data; raises InputError where one has another tokenizer."""
        paths = [path for path, _ in self.directories()]
        manifests = [prepared.read_manifest(path) for path in paths]
        for path, manifest in zip(paths, manifests, strict=True):
            prepared.check_tokenizer(self.tokenizer, path, manifest)
            if (found := manifest["tokenizer"]["id"]) != (first := manifests[0]["tokenizer"]["id"]):
                raise InputError(f"{path} was prepared with another tokenizer than {paths[0]}: id {found}, not {first}")
        return manifests

    @property
    def cache_path(self) -> pathlib.Path:
        """The directory that cache_dir stands for."""
        return pathlib.Path(self.cache_dir or os.environ.get("FP4JAX_CACHE") or "~/.cache/fp4jax").expanduser()


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Dataset:
    """Two disjoint splits, of each part an array [N] of uint16 or uint32 ids below vocab_size.

    weights: the share of the training examples that each part has. largest_id: of both splits. document_end: the id that ends
    every document, None where none does. `fingerprint` identifies the arrays, the tokenizer and seq_len; it does not depend on
    the machine. A checkpoint stores it, because an iterator's position means nothing on other data.
    """

    train: tuple[np.ndarray, ...]
    val: tuple[np.ndarray, ...]
    vocab_size: int
    fingerprint: str
    tokenizer: Tokenizer
    largest_id: int
    weights: tuple[float, ...] = (1.0,)
    document_end: int | None = None


def load(config: DataConfig, *, splits: Sequence[str] = prepared.SPLITS, part: int = 0, parts: int = 1) -> Dataset:
    """Read, split and tokenize the corpus, or map prepared data; raise InputError if that cannot be, or it is too short.

    splits, part, parts: of prepared data, what is compared with its hashes, and the share of it that this process does.
    """
    dataset = _load_prepared(config, splits, part, parts) if config.source == "prepared" else _load_text(config)
    for tokens in dataset.train:
        if len(tokens) <= config.seq_len:
            raise InputError(f"{len(tokens)} training tokens are too few for data.seq_len={config.seq_len} + 1")
    if sum(len(tokens) for tokens in dataset.val) < 2:
        raise InputError(f"{sum(map(len, dataset.val))} validation tokens are too few: data.val_fraction={config.val_fraction}")
    return dataset


def _load_text(config: DataConfig) -> Dataset:
    train, val = _read_splits(config)
    tokenizer, train_tokens, val_tokens = corpus.tokenize(train, val, tokenizer=config.tokenizer, cache_dir=config.cache_path)
    return Dataset(
        train=(train_tokens,),
        val=(val_tokens,),
        vocab_size=tokenizer.vocab_size,
        fingerprint=_fingerprint(config, train_tokens, val_tokens),
        tokenizer=tokenizer,
        largest_id=max((int(tokens.max()) for tokens in (train_tokens, val_tokens) if len(tokens)), default=-1),
    )


def _load_prepared(config: DataConfig, splits: Sequence[str], part: int, parts: int) -> Dataset:
    manifests, parts_of = config.manifests(), config.directories()
    found = [prepared.open_directory(path) for path, _ in parts_of]
    for each in found if config.verify else ():
        prepared.verify(each, splits=splits, part=part, parts=parts)
    weights = tuple(weight for _, weight in parts_of)
    identity = [config.seq_len, *((manifest["digest"], weight) for manifest, weight in zip(manifests, weights, strict=True))]
    return Dataset(
        train=tuple(each.ids["train"] for each in found),
        val=tuple(each.ids["val"] for each in found),
        vocab_size=manifests[0]["tokenizer"]["vocab_size"],  # they have one tokenizer
        fingerprint=hashlib.sha256(repr(identity).encode()).hexdigest()[:16],
        tokenizer=found[0].tokenizer(),
        largest_id=max(split["largest_id"] for manifest in manifests for split in manifest["splits"].values()),
        weights=weights,
        document_end=manifests[0]["tokenizer"]["eos_id"] if all("eos" in each["documents"] for each in manifests) else None,
    )


def _read_splits(config: DataConfig) -> tuple[list[str], list[str]]:
    if config.source == "files":
        paths = sources.match_files(config.files)
        documents = sources.read_files(paths, text_key=config.text_key)
        if config.val_files:
            val_paths = sources.match_files(config.val_files)
            for path in {os.path.realpath(path) for path in paths} & {os.path.realpath(path) for path in val_paths}:
                raise InputError(f"{path} matches both data.files={config.files!r} and data.val_files={config.val_files!r}")
            return documents, sources.read_files(val_paths, text_key=config.text_key)
    else:
        documents = corpus.read_bible() if config.source == "bible" else corpus.read_python()
    return corpus.split_documents(documents, val_fraction=config.val_fraction)


def _fingerprint(config: DataConfig, train_tokens: np.ndarray, val_tokens: np.ndarray) -> str:
    digest = hashlib.sha256(f"{config.tokenizer} {config.seq_len} {len(train_tokens)} {len(val_tokens)} ".encode())
    for tokens in (train_tokens, val_tokens):
        digest.update(tokens.astype(tokens.dtype.newbyteorder("<"), copy=False))
    return digest.hexdigest()[:16]


def check_ids(dataset: Dataset, *, vocab_size: int, document_end: int = -1) -> None:
    """Raise InputError unless all ids, the tokenizer's too, are below the model's vocab_size, and documents end as it says."""
    if dataset.vocab_size > vocab_size:
        raise InputError(f"the data's tokenizer has {dataset.vocab_size} ids, but the model's {vocab_size=}")
    if dataset.largest_id >= vocab_size:
        raise InputError(f"the data holds token id {dataset.largest_id}, but the model's {vocab_size=}")
    if document_end >= 0 and document_end != dataset.document_end:
        raise InputError(f"model.{document_end=}, but what ends the data's documents is {dataset.document_end}")


# ---- Training ----


def train_examples(dataset: Dataset, *, seq_len: int, seed: int) -> grain.MapDataset:
    """Return the endless sequence of training examples: item n is an int32 array [T + 1]."""
    order = _window_order(dataset, seq_len=seq_len, seed=seed)
    return order.map(lambda window: _gather(dataset.train, window, seq_len=seq_len))


def train_iterator(
    dataset: Dataset, *, seq_len: int, batch_size: int, seed: int, process_index: int = 0, process_count: int = 1
) -> grain.DatasetIterator:
    """Return an endless iterator over {"tokens": int32 [B / process_count, T + 1]}.

    Process p gets the p-th of process_count contiguous blocks of rows of each global batch of B = batch_size. The
    state (get_state, set_state, grain.checkpoint) is the number of batches taken, so a run may resume with another
    process_count, but only with the same dataset, seq_len, batch_size and seed, which the state does not record.
    Batches are gathered when they are asked for: no thread, worker process or prefetched batch has a state to lose.
    """
    if batch_size < 1 or batch_size % process_count:
        raise InputError(f"{batch_size=} is not a positive multiple of {process_count=}")
    if not 0 <= process_index < process_count:
        raise InputError(f"{process_index=} is not in [0, {process_count=})")

    def gather_rows(windows):
        return {"tokens": np.stack([_gather(dataset.train, window, seq_len=seq_len) for window in windows])}

    order = _window_order(dataset, seq_len=seq_len, seed=seed)
    blocks = order.batch(batch_size // process_count, batch_fn=gather_rows)[process_index::process_count]
    return iter(blocks.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)))


def _window_order(dataset: Dataset, *, seq_len: int, seed: int) -> grain.MapDataset:
    """Return (part, window), of each part one permutation of its windows per epoch; batches gather by them."""
    if not isinstance(seed, int) or seed < 0:
        raise InputError(f"{seed=} is not a non-negative integer")
    shortest = min(len(tokens) for tokens in dataset.train)
    if not 1 <= seq_len < shortest:
        raise InputError(f"{seq_len=} is below 1, or its windows exceed {shortest} training tokens")
    orders = []
    for part, tokens in enumerate(dataset.train):
        # Hashed, because grain draws epoch e from seed + e: seeds 0 and 1 would share all but one epoch.
        name = f"{seed}/{part}" if part else str(seed)
        grain_seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")
        windows = grain.MapDataset.range((len(tokens) - 1) // seq_len)
        orders.append(windows.shuffle(seed=grain_seed).repeat().map(lambda window, part=part: (part, window)))
    return orders[0] if len(orders) == 1 else grain.MapDataset.mix(orders, dataset.weights)


def _gather(tokens: tuple[np.ndarray, ...], window: tuple[int, int], *, seq_len: int) -> np.ndarray:
    """Return int32 [T + 1], the tokens of (part, window); what lies beyond the part's end is 0."""
    part, number = window
    row = tokens[part][number * seq_len : (number + 1) * seq_len + 1].astype(np.int32)
    return row if len(row) == seq_len + 1 else np.pad(row, (0, seq_len + 1 - len(row)))


# ---- Validation ----


def val_batches(
    dataset: Dataset, *, seq_len: int, batch_size: int, max_sequences: int = 0, choice: str = "even"
) -> Iterator[dict[str, np.ndarray]]:
    """Return an iterator of {"tokens": int32 [B, T + 1], "mask": float32 [B, T]} over the validation split, in order.

    mask[b, t] is 1 where tokens[b, t + 1] is a token to predict and 0 where it is padding: summed over all batches it
    is N - 1, over all parts. A positive max_sequences takes that many windows at most, evenly spaced over the split, or the
    "first" of them.
    """
    if seq_len < 1 or batch_size < 1 or max_sequences < 0:
        raise InputError(f"{seq_len=} and {batch_size=} must be positive, {max_sequences=} must not be negative")
    windows = [
        (part, window) for part, tokens in enumerate(dataset.val) for window in range(-(-max(len(tokens) - 1, 0) // seq_len))
    ]
    chosen = min(max_sequences or len(windows), len(windows))
    numbers = range(chosen) if choice == "first" else np.arange(chosen) * len(windows) // max(chosen, 1)
    rows = [windows[number] for number in numbers]

    def make_batch(first: int) -> dict[str, np.ndarray]:
        tokens, mask = np.zeros((batch_size, seq_len + 1), np.int32), np.zeros((batch_size, seq_len), np.float32)
        for b, (part, window) in enumerate(rows[first : first + batch_size]):
            tokens[b] = _gather(dataset.val, (part, window), seq_len=seq_len)
            mask[b, : len(dataset.val[part]) - 1 - window * seq_len] = 1
        return {"tokens": tokens, "mask": mask}

    return map(make_batch, range(0, chosen, batch_size))
