"""Sliding-window perplexity: from token streams to padded batches, and from a model's losses to one figure. No jax here.

A stream of N tokens is read by windows: window j begins at token j · stride, reads at most `window` tokens and predicts those
after them. Each token but the stream's first is predicted once, in the first window that reaches it, so that it sees

    t tokens before it                                   t ≤ window
    window − stride + 1 + (t − window − 1) mod stride    after that

which is at least window − stride + 1. stride = window is the cheapest choice, and what validation during training does.
Shape key: B rows, T positions.
"""

import itertools
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from train import corpus
from train.cli import perplexity
from train.errors import InputError
from train.tokenizer import Tokenizer

log = logging.getLogger(__name__)
Figures = Callable[[np.ndarray, int], tuple[np.ndarray, ...]]  # (tokens_BT1, number of the first row) → arrays [B, T]


class Protocol(NamedTuple):
    """A published evaluation: the first so many sequences of a stream, in order, and the loss to reach, nats per token."""

    sequences: int
    window: int
    target: float


# MLPerf Training, Llama 3.1 8B: documents follow each other without any token between them (its preprocessing appends none).
PROTOCOLS = {"mlperf": Protocol(sequences=1024, window=8192, target=3.3)}


class Piece(NamedTuple):
    """What one row of a batch reads and predicts: tokens [n + 1], of which those from index `scored` on are predicted."""

    tokens: np.ndarray
    scored: int


class Text(NamedTuple):
    """Documents as token streams. tokens: of the text alone, without BOS; bytes: in UTF-8, 0 where nobody knows."""

    streams: list[np.ndarray]
    tokens: int
    bytes: int


def encode(
    documents: Sequence[str],
    tokenizer: Tokenizer,
    *,
    separate: bool = False,
    bos: int | None = None,
    separator: str = corpus.SEPARATOR,
) -> Text:
    """Return one stream per document, or a single one with `separator` after all but the last; each stream begins with `bos`.

    Every document is tokenized by itself, with its separator: no token spans two.
    """
    ends = [""] * len(documents) if separate else [separator] * (len(documents) - 1) + [""]
    texts = [document + end for document, end in zip(documents, ends, strict=True)]
    ids = [np.asarray(tokenizer.encode(text), np.int32) for text in texts]
    start = np.array([] if bos is None else [bos], np.int32)
    groups = [[tokens] for tokens in ids] if separate else [ids]
    streams = [np.concatenate([start, *group]) for group in groups]
    return Text(streams, sum(map(len, ids)), sum(len(text.encode()) for text in texts))


def spans(length: int, *, window: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Yield (begin, scored, end) of every window: it reads the tokens begin … end − 1 and predicts scored … end."""
    if not 1 <= stride <= window:
        raise InputError(f"{stride=} is not between 1 and {window=}")
    scored = 1
    for begin in range(0, length, stride):
        if scored >= length:
            return
        end = min(begin + window, length - 1)
        yield begin, scored, end
        scored = end + 1


def cut(streams: Sequence[np.ndarray], *, window: int, stride: int) -> list[Piece]:
    """Return the windows of all streams in order."""
    return [
        Piece(tokens[begin : end + 1], scored - begin)
        for tokens in streams
        for begin, scored, end in spans(len(tokens), window=window, stride=stride)
    ]


def batches(
    pieces: Sequence[Piece], *, batch_size: int, equal: bool = False, document_end: int = -1
) -> Iterator[tuple[list[int], dict[str, np.ndarray]]]:
    """Yield (numbers of the pieces, {"tokens": int32 [B, T + 1], "mask": float32 [B, T]}), the longest first.

    The mask is 1 where the token after a position is to be predicted; the rows that a last batch lacks are zeros. Pieces are
    filled up with zeros at their end, to lengths of which there are few. equal: not even that, each length has batches of its
    own, for numerics in which a position sees those after it, such as one scale for a whole sequence. document_end: the
    token after it is not predicted (-1: every one is), as in a model that keeps the documents of a row apart.
    """
    longest = max((len(piece.tokens) for piece in pieces), default=0) - 1

    def length_of(number: int) -> int:
        length = size = len(pieces[number].tokens) - 1
        if not equal:
            size = longest
            while max(length, 1) <= size // 4:
                size //= 4
        return size

    order = sorted(range(len(pieces)), key=length_of, reverse=True)
    for length, group in itertools.groupby(order, key=length_of):
        for numbers in itertools.batched(group, batch_size):
            tokens_BT1 = np.zeros((batch_size, length + 1), np.int32)
            mask_BT = np.zeros((batch_size, length), np.float32)
            for row, (tokens, scored) in enumerate(pieces[number] for number in numbers):
                tokens_BT1[row, : len(tokens)] = tokens
                mask_BT[row, scored - 1 : len(tokens) - 1] = tokens[scored - 1 : -1] != document_end
            yield list(numbers), {"tokens": tokens_BT1, "mask": mask_BT}


def score(
    figures: Figures, pieces: Sequence[Piece], *, batch_size: int, equal: bool = False, document_end: int = -1
) -> np.ndarray:
    """Return float64 [number of figures, number of pieces]: each figure summed over the predicted tokens of each piece.

    The sums are exact before they are rounded, so they depend on nothing but the figures.
    """
    sums, row, said = {}, 0, time.monotonic()
    for numbers, batch in batches(pieces, batch_size=batch_size, equal=equal, document_end=document_end):
        values = [np.asarray(each, np.float64) for each in figures(batch["tokens"], row)]
        for i, number in enumerate(numbers):
            predicted = batch["mask"][i] > 0
            sums[number] = [math.fsum(each[i][predicted]) for each in values]
        row += len(numbers)
        if time.monotonic() - said > 30:
            said = time.monotonic()
            log.info("%d of %d windows", row, len(pieces))
    return np.array([sums[number] for number in range(len(pieces))]).T


def count(pieces: Sequence[Piece], *, document_end: int = -1) -> int:
    """Return how many tokens are predicted."""
    return sum(int(np.sum(piece.tokens[piece.scored - 1 : -1] != document_end)) for piece in pieces)


def summary(nats: float, tokens: int, bytes_per_token: float | None) -> dict[str, Any]:
    """Return what is reported of a loss summed over `tokens` tokens, in nats.

    bits per byte = nats per token / ln 2 / (bytes of the text per token of it); None where the text is not known.
    """
    mean = nats / tokens
    bits = mean / math.log(2) / bytes_per_token if bytes_per_token else None
    return {"tokens": tokens, "nats_per_token": mean, "perplexity": perplexity(mean), "bits_per_byte": bits}


def first_sequences(stream: np.ndarray, protocol: Protocol) -> np.ndarray:
    """Return the tokens of the protocol's sequences, or of as many whole ones as there are; raises InputError for none."""
    whole = min((len(stream) - 1) // protocol.window, protocol.sequences)
    if whole < 1:
        raise InputError(f"{len(stream)} tokens are too few for one sequence of {protocol.window} and the token after it")
    return stream[: whole * protocol.window + 1]
