"""Training and validation data: settings, the loaded dataset, and batches of token windows.

Shape key: B sequences, T positions, N tokens of a split. A window is T + 1 tokens, window w starts at token w·T, so
neighbours share one token and every token after the first is predicted exactly once:

    training    (N - 1) // T windows; the last (N - 1) % T tokens are not used
    validation  ceil((N - 1) / T) windows; the last one is padded and masked

Training example n is a pure function of (tokens, T, seed, n): epoch e = n // windows, and a permutation of the windows
drawn from (seed, e). Batch k holds the examples [k·B, (k + 1)·B), and may span two epochs. Document boundaries are
not respected: a window may span several documents.
"""

import dataclasses
import hashlib
import os
import pathlib
from collections.abc import Iterator

import grain
import numpy as np
import numpy.typing as npt

from train import corpus
from train.errors import InputError, check_types

SOURCES = ("bible", "python", "files")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Settings of the data; raises InputError for a value that is out of range or does not apply.

    Attributes:
      source: "bible" (King James text, 4.1 MB), "python" (sources of pinned dependencies, 20 MB) or "files".
      files: for "files", a glob of .txt, .jsonl, .txt.gz and .jsonl.gz files, read in sorted order.
      val_files: for "files", a glob of validation files, in place of the split by val_fraction.
      text_key: for "files", the key of a .jsonl object's text.
      tokenizer: "bytes" or "bpe:N", byte-level BPE with N entries trained on the training split.
      seq_len: positions T per sequence.
      val_fraction: share of the corpus held out for validation (see `corpus.split_documents`).
      cache_dir: directory of BPE results; "" means $FP4JAX_CACHE, or ~/.cache/fp4jax.
      max_val_sequences: validate on at most this many windows, evenly spaced; 0 means all.
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

    def __post_init__(self):
        check_types("data", self)
        if self.source not in SOURCES:
            raise InputError(f"data.source={self.source!r} is not one of {', '.join(SOURCES)}")
        if (self.source == "files") != bool(self.files):
            raise InputError(f"data.files={self.files!r} with data.source={self.source!r}: 'files', and only it, needs files")
        if self.source != "files" and (self.val_files or self.text_key != "text"):
            raise InputError(f"data.val_files and data.text_key do not apply to data.source={self.source!r}")
        if self.seq_len < 1:
            raise InputError(f"data.seq_len={self.seq_len} is below 1")
        if self.max_val_sequences < 0:
            raise InputError(f"data.max_val_sequences={self.max_val_sequences} is negative")
        if not 0 < self.val_fraction < 1:
            raise InputError(f"data.val_fraction={self.val_fraction} is not between 0 and 1")
        corpus.vocab_size(self.tokenizer)

    @property
    def vocab_size(self) -> int:
        """The number of token ids, known without loading anything."""
        return corpus.vocab_size(self.tokenizer)

    @property
    def cache_path(self) -> pathlib.Path:
        """The directory that cache_dir stands for."""
        return pathlib.Path(self.cache_dir or os.environ.get("FP4JAX_CACHE") or "~/.cache/fp4jax").expanduser()


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Dataset:
    """Two disjoint splits as arrays [N] of uint16 or uint32 ids below vocab_size.

    `fingerprint` identifies both arrays, the tokenizer's name and seq_len; it does not depend on the machine. A
    checkpoint stores it, because an iterator's position means nothing on other data.
    """

    train_tokens: np.ndarray
    val_tokens: np.ndarray
    vocab_size: int
    fingerprint: str
    tokenizer: corpus.Tokenizer


def load(config: DataConfig) -> Dataset:
    """Read, split and tokenize the corpus; raise InputError if it cannot be read or is too short for one window."""
    train, val = _read_splits(config)
    tokenizer, train_tokens, val_tokens = corpus.tokenize(train, val, tokenizer=config.tokenizer, cache_dir=config.cache_path)
    if len(train_tokens) <= config.seq_len:
        raise InputError(f"{len(train_tokens)} training tokens are too few for data.seq_len={config.seq_len} + 1")
    if len(val_tokens) < 2:
        raise InputError(f"{len(val_tokens)} validation tokens are too few: data.val_fraction={config.val_fraction}")
    return Dataset(
        train_tokens=train_tokens,
        val_tokens=val_tokens,
        vocab_size=tokenizer.vocab_size,
        fingerprint=_fingerprint(config, train_tokens, val_tokens),
        tokenizer=tokenizer,
    )


def _read_splits(config: DataConfig) -> tuple[list[str], list[str]]:
    if config.source == "files":
        paths = corpus.match_files(config.files)
        documents = corpus.read_files(paths, text_key=config.text_key)
        if config.val_files:
            val_paths = corpus.match_files(config.val_files)
            for path in {os.path.realpath(path) for path in paths} & {os.path.realpath(path) for path in val_paths}:
                raise InputError(f"{path} matches both data.files={config.files!r} and data.val_files={config.val_files!r}")
            return documents, corpus.read_files(val_paths, text_key=config.text_key)
    else:
        documents = corpus.read_bible() if config.source == "bible" else corpus.read_python()
    return corpus.split_documents(documents, val_fraction=config.val_fraction)


def _fingerprint(config: DataConfig, train_tokens: np.ndarray, val_tokens: np.ndarray) -> str:
    digest = hashlib.sha256(f"{config.tokenizer} {config.seq_len} {len(train_tokens)} {len(val_tokens)} ".encode())
    for tokens in (train_tokens, val_tokens):
        digest.update(tokens.astype(tokens.dtype.newbyteorder("<"), copy=False))
    return digest.hexdigest()[:16]


def check_ids(dataset: Dataset, *, vocab_size: int) -> None:
    """Raise InputError unless every id of both splits is below the model's vocab_size."""
    largest = int(max(dataset.train_tokens.max(), dataset.val_tokens.max()))
    if largest >= vocab_size:
        raise InputError(f"the data holds token id {largest}, but the model's {vocab_size=}")


# ---- Training ----


def train_examples(dataset: Dataset, *, seq_len: int, seed: int) -> grain.MapDataset:
    """Return the endless sequence of training examples: item n is an int32 array [T + 1]."""
    order = _window_order(dataset, seq_len=seq_len, seed=seed)
    return order.map(lambda window: _gather(dataset.train_tokens, window, seq_len=seq_len))


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
        return {"tokens": _gather(dataset.train_tokens, windows, seq_len=seq_len)}

    order = _window_order(dataset, seq_len=seq_len, seed=seed)
    blocks = order.batch(batch_size // process_count, batch_fn=gather_rows)[process_index::process_count]
    return iter(blocks.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)))


def _window_order(dataset: Dataset, *, seq_len: int, seed: int) -> grain.MapDataset:
    """Return window numbers, one permutation per epoch; batches gather by them at once, which is twice as fast."""
    if not isinstance(seed, int) or seed < 0:
        raise InputError(f"{seed=} is not a non-negative integer")
    if not 1 <= seq_len < len(dataset.train_tokens):
        raise InputError(f"{seq_len=} is below 1, or its windows exceed {len(dataset.train_tokens)} training tokens")
    windows = (len(dataset.train_tokens) - 1) // seq_len
    # Hashed, because grain draws epoch e from seed + e: seeds 0 and 1 would share all but one epoch.
    grain_seed = int.from_bytes(hashlib.sha256(str(seed).encode()).digest()[:4], "little")
    return grain.MapDataset.range(windows).shuffle(seed=grain_seed).repeat()


def _gather(tokens_N: np.ndarray, windows: npt.ArrayLike, *, seq_len: int) -> np.ndarray:
    """Return int32 [..., T + 1], the tokens of each window number."""
    return tokens_N[np.asarray(windows)[..., None] * seq_len + np.arange(seq_len + 1)].astype(np.int32)


# ---- Validation ----


def val_batches(dataset: Dataset, *, seq_len: int, batch_size: int, max_sequences: int = 0) -> Iterator[dict[str, np.ndarray]]:
    """Return an iterator of {"tokens": int32 [B, T + 1], "mask": float32 [B, T]} over the validation split, in order.

    mask[b, t] is 1 where tokens[b, t + 1] is a token to predict and 0 where it is padding: summed over all batches it
    is N - 1. A positive max_sequences takes that many windows at most, evenly spaced over the split.
    """
    if seq_len < 1 or batch_size < 1 or max_sequences < 0:
        raise InputError(f"{seq_len=} and {batch_size=} must be positive, {max_sequences=} must not be negative")
    windows = -(-(len(dataset.val_tokens) - 1) // seq_len)
    chosen = min(max_sequences or windows, windows)
    window_numbers = np.arange(chosen) * windows // chosen
    padded = np.pad(dataset.val_tokens, (0, windows * seq_len + 1 - len(dataset.val_tokens)))
    chunks = (window_numbers[first : first + batch_size] for first in range(0, chosen, batch_size))

    def make_batch(rows):
        targets_BT = rows[:, None] * seq_len + np.arange(1, seq_len + 1)
        missing = ((0, batch_size - len(rows)), (0, 0))
        return {
            "tokens": np.pad(_gather(padded, rows, seq_len=seq_len), missing),
            "mask": np.pad((targets_BT < len(dataset.val_tokens)).astype(np.float32), missing),
        }

    return map(make_batch, chunks)
