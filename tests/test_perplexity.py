"""Windows and sums against brute force: a model whose loss depends on the context it is given, and models with known losses."""

import math

import numpy as np
import pytest

from train import perplexity
from train.errors import InputError
from train.tokenizer import ByteTokenizer

RNG = np.random.default_rng(0)
VOCAB = 11
DOCUMENTS = [RNG.integers(0, VOCAB, n) for n in (40, 1, 2, 17, 0, 33, 9)]
WINDOWS = [(1, 1), (4, 4), (8, 3), (8, 1), (7, 7), (16, 5), (64, 64)]


def context_loss(before, token):
    """A loss that tells by its value how much a token saw, and what: no two contexts give the same."""
    return 1 + len(before) / 100 + math.sin(float(np.dot(np.arange(1, len(before) + 1), np.asarray(before) + 1)) + token)


def context_model(tokens_BT1, row):
    del row
    nll = np.zeros((len(tokens_BT1), tokens_BT1.shape[1] - 1))
    for b, tokens in enumerate(tokens_BT1):
        for t in range(1, len(tokens)):
            nll[b, t - 1] = context_loss(tokens[:t], tokens[t])
    return (nll,)


def context_length(t, window, stride):
    """The number of tokens that token t sees, from the definition: the first window that holds it begins at a multiple."""
    begin = 0
    while t > begin + window:
        begin += stride
    return t - begin


@pytest.mark.parametrize(("window", "stride"), WINDOWS)
@pytest.mark.parametrize("batch_size", [1, 3, 64])
@pytest.mark.parametrize("equal", [False, True])
def test_each_token_is_predicted_once_with_its_context(window, stride, batch_size, equal):
    expected, lengths = [], []
    for tokens in DOCUMENTS:
        seen = [context_length(t, window, stride) for t in range(1, len(tokens))]
        expected += [context_loss(tokens[t - n : t], tokens[t]) for t, n in enumerate(seen, start=1)]
        lengths += [(n, t) for t, n in enumerate(seen, start=1)]
    assert all(n >= min(window - stride + 1, t) and n <= window for n, t in lengths)
    pieces = perplexity.cut(DOCUMENTS, window=window, stride=stride)
    assert perplexity.count(pieces) == len(expected) == sum(max(len(d) - 1, 0) for d in DOCUMENTS)
    (sums,) = perplexity.score(context_model, pieces, batch_size=batch_size, equal=equal)
    assert math.fsum(sums) == pytest.approx(math.fsum(expected), rel=1e-14)


def test_the_formula_of_the_docstring_is_the_context():
    for window, stride in WINDOWS:
        for t in range(1, 200):
            after = window - stride + 1 + (t - window - 1) % stride
            assert context_length(t, window, stride) == (t if t <= window else after)


def test_the_batch_does_not_change_one_bit_and_padding_is_never_counted():
    """Padded positions and rows get a NaN: one that is counted shows."""

    def poisoned(tokens_BT1, row):
        (nll,) = context_model(tokens_BT1, row)
        valid = np.arange(nll.shape[1]) < (np.cumsum(tokens_BT1[:, ::-1] != 0, 1)[:, ::-1] > 0)[:, 1:].sum(1)[:, None]
        return (np.where(valid, nll, np.nan),)

    documents = [tokens + 1 for tokens in DOCUMENTS]  # so that 0 is padding alone
    pieces = perplexity.cut(documents, window=8, stride=3)
    results = [perplexity.score(poisoned, pieces, batch_size=b, equal=e) for b in (1, 2, 5, 100) for e in (False, True)]
    for other in results[1:]:
        np.testing.assert_array_equal(other, results[0])
    assert np.isfinite(results[0]).all()


def test_the_rows_are_numbered_whatever_the_batch():
    def numbered(tokens_BT1, row):
        return (np.broadcast_to(row + np.arange(len(tokens_BT1))[:, None], (len(tokens_BT1), tokens_BT1.shape[1] - 1)),)

    pieces = perplexity.cut(DOCUMENTS, window=8, stride=8)
    one, *others = (perplexity.score(numbered, pieces, batch_size=b) for b in (1, 3, 4, 5, 7))
    for other in others:
        np.testing.assert_array_equal(other, one)


def test_lengths_are_few_unless_they_must_be_equal():
    pieces = perplexity.cut([np.ones(n, np.int32) for n in range(2, 66)], window=64, stride=64)
    few = {batch["tokens"].shape for _, batch in perplexity.batches(pieces, batch_size=4)}
    assert few == {(4, 65), (4, 17), (4, 5), (4, 2)}
    for numbers, batch in perplexity.batches(pieces, batch_size=4, equal=True):
        assert batch["mask"][: len(numbers)].all()
        assert not batch["mask"][len(numbers) :].any()


def test_unigram_perplexity_in_closed_form():
    p = RNG.dirichlet(np.ones(VOCAB))
    stream = RNG.integers(0, VOCAB, 1000)
    entropy = -sum(np.log(p[x]) for x in stream[1:]) / 999
    for window, stride, batch_size in ((16, 16, 4), (100, 7, 3)):
        pieces = perplexity.cut([stream], window=window, stride=stride)
        (sums,) = perplexity.score(lambda tokens, row: (-np.log(p)[tokens[:, 1:]],), pieces, batch_size=batch_size)
        found = perplexity.summary(math.fsum(sums), perplexity.count(pieces), 2.0)
        assert found["tokens"] == 999
        assert found["nats_per_token"] == pytest.approx(entropy, rel=1e-14)
        assert found["perplexity"] == pytest.approx(np.exp(entropy), rel=1e-12)
        assert found["bits_per_byte"] == pytest.approx(entropy / np.log(2) / 2, rel=1e-14)
    assert perplexity.summary(2.0, 1, None)["bits_per_byte"] is None


@pytest.mark.parametrize(("window", "stride"), [(4, 5), (4, 0), (0, 0)])
def test_a_stride_beyond_the_window_would_skip_tokens(window, stride):
    with pytest.raises(InputError, match=f"stride={stride} is not between 1 and window={window}"):
        list(perplexity.spans(10, window=window, stride=stride))


# ---- Text ----


def test_documents_joined_and_separate():
    tokenizer = ByteTokenizer()
    documents = ["ab", "ü", "c"]
    joined = perplexity.encode(documents, tokenizer, bos=7)
    assert [bytes(s.tolist()) for s in joined.streams] == ["\x07ab\n\nü\n\nc".encode()]
    assert (joined.tokens, joined.bytes) == (9, 9)
    separate = perplexity.encode(documents, tokenizer, separate=True, bos=7)
    assert [bytes(s.tolist()) for s in separate.streams] == [b"\x07ab", "\x07ü".encode(), b"\x07c"]
    assert (separate.tokens, separate.bytes) == (5, 5)
    plain = perplexity.encode(documents, tokenizer, separator="")
    assert [bytes(s.tolist()) for s in plain.streams] == ["abüc".encode()]


def test_a_protocol_takes_the_first_whole_sequences():
    protocol = perplexity.Protocol(sequences=3, window=4, target=1.0)
    for length, taken in ((5, 5), (8, 5), (12, 9), (13, 13), (100, 13)):
        np.testing.assert_array_equal(perplexity.first_sequences(np.arange(length), protocol), np.arange(taken))
    with pytest.raises(InputError, match="4 tokens are too few for one sequence of 4"):
        perplexity.first_sequences(np.arange(4), protocol)
    assert perplexity.PROTOCOLS["mlperf"] == (1024, 8192, 3.3)
