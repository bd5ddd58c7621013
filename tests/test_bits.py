"""Random bits: the published hash, balance, correlations, no repeats, keys that differ in one bit, folding, row offsets."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp4jax import bits

SHAPE = (512, 1024)
KEYS = {
    "PRNGKey(0)": lambda: bits.as_key(jax.random.PRNGKey(0)),
    "PRNGKey(1)": lambda: bits.as_key(jax.random.PRNGKey(1)),
    "step 0": lambda: bits.step_key(2, 0),
    "step 1": lambda: bits.step_key(2, 1),
    "seed 3": lambda: bits.step_key(3, 0),
    "operand 0": lambda: bits.fold_in(bits.step_key(0, 0), 0),
    "operand 1": lambda: bits.fold_in(bits.step_key(0, 0), 1),
    "layer 1": lambda: bits.fold_in(bits.step_key(0, 0), 7, 1),
    "layer 2": lambda: bits.fold_in(bits.step_key(0, 0), 7, 2),
}


def words(key, shape=SHAPE):
    return np.asarray(bits.random_bits(key, shape))


def centred(w):
    return w.astype(np.float64) / 2.0**31 - 1.0


def correlation(a, b):
    """Return the correlation in units of its standard deviation for independent uniform draws."""
    a, b = centred(a), centred(b)
    return (a * b).mean() * 3 * np.sqrt(a.size)


def numpy_mix(x):
    x = np.asarray(x, np.uint32)
    x = (x ^ (x >> 16)) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * np.uint32(0x846CA68B)
    return x ^ (x >> 16)


def test_words_follow_the_formula_in_the_docstring():
    key = bits.Key(jnp.array([0x12345678, 0x9ABCDEF0], jnp.uint32), 2**32 - 5)
    rows = (np.arange(8, dtype=np.uint64) + 2**32 - 5).astype(np.uint32)  # wraps
    row, col = numpy_mix(rows ^ np.uint32(0x12345678)), numpy_mix(np.arange(64, dtype=np.uint32) ^ np.uint32(0x9ABCDEF0))
    expected = numpy_mix(row[:, None] ^ col[None])
    np.testing.assert_array_equal(words(key, (8, 64)), expected)
    np.testing.assert_array_equal(words(key, (2, 4, 64)).reshape(8, 64), expected)
    np.testing.assert_array_equal(words(key, (64,)), expected[0])
    np.testing.assert_array_equal(np.asarray(jax.jit(bits.random_bits, static_argnums=1)(bits.as_key(key), (8, 64))), expected)


def test_words_at_far_rows_need_no_flat_index():
    key = bits.step_key(0, 0)
    far = words(key._replace(row_offset=jnp.uint32(3_000_000_000)), (4, 64))
    assert not np.isin(far, words(key, (64, 64))).any()
    np.testing.assert_array_equal(far[2:], words(key._replace(row_offset=3_000_000_002), (2, 64)))


@pytest.mark.parametrize("name", KEYS)
def test_mean_and_balance_of_every_bit(name):
    w = words(KEYS[name]())
    assert abs(centred(w).mean()) < 5 / np.sqrt(3 * w.size)
    for bit in range(32):
        assert abs((w >> bit & 1).mean() - 0.5) < 5 * 0.5 / np.sqrt(w.size)
    counts = np.bincount(w.ravel() >> 24, minlength=256)
    expected = w.size / 256
    assert abs(((counts - expected) ** 2 / expected).sum() - 255) < 5 * np.sqrt(2 * 255)


@pytest.mark.parametrize("name", KEYS)
def test_no_correlation_along_rows_columns_and_diagonals(name):
    w = words(KEYS[name]())
    for lag in (1, 2, 3, 4, 8, 16, 32, 64, 128, 256):
        pairs = [
            (w[lag:], w[:-lag]),
            (w[:, lag:], w[:, :-lag]),
            (w[lag:, lag:], w[:-lag, :-lag]),
            (w[lag:, :-lag], w[:-lag, lag:]),
        ]
        for a, b in pairs:
            assert abs(correlation(a, b)) < 5
            assert abs(correlation(a << np.uint32(8), b << np.uint32(8))) < 5
    square = w[:, :512]
    off = ~np.eye(512, dtype=bool)
    assert abs(correlation(square[off], square.T[off])) < 5 * np.sqrt(2)  # each pair counts twice
    row_means = centred(w).mean(1) * np.sqrt(3 * w.shape[1])
    assert abs((row_means**2).mean() - 1) < 5 * np.sqrt(2 / len(row_means))


@pytest.mark.parametrize("name", KEYS)
def test_no_word_repeats_in_a_row_or_a_column(name):
    w = words(KEYS[name]())
    for lines in (w, w.T):
        assert (np.diff(np.sort(lines, axis=1), axis=1) > 0).all()


def test_keys_are_uncorrelated_and_differ_everywhere():
    drawn = {name: words(make()) for name, make in KEYS.items()}
    for (_, a), (_, b) in itertools.combinations(drawn.items(), 2):
        assert abs(correlation(a, b)) < 5
        assert abs(correlation(a[1:], b[:-1])) < 5
        assert abs(correlation(a[:, 1:], b[:, :-1])) < 5
        assert (a == b).mean() < 1e-5
        for bit in (8, 16, 24, 31):
            assert abs((((a ^ b) >> bit) & 1).mean() - 0.5) < 5 * 0.5 / np.sqrt(a.size)


def test_folding_depends_on_every_word_and_on_their_order():
    key = bits.as_key(jax.random.key(0))
    chains = [(), *itertools.product(range(6)), *itertools.product(range(6), repeat=2), *itertools.product(range(4), repeat=3)]
    seen = {tuple(np.asarray(bits.fold_in(key, *chain).words).tolist()) for chain in chains}
    assert len(seen) == len(chains)
    one_by_one = bits.fold_in(bits.fold_in(key, 3), 5)
    np.testing.assert_array_equal(np.asarray(one_by_one.words), np.asarray(bits.fold_in(key, 3, 5).words))
    assert bits.fold_in(key._replace(row_offset=9), 3).row_offset == 9


@pytest.mark.parametrize("word", [0, 5, 2**31 - 1, 2**31, 3_979_514_741, 2**32 - 1])
def test_folding_takes_any_32_bit_word(word):
    key = bits.step_key(0, 0)
    expected = np.asarray(bits.fold_in(key, jnp.uint32(word)).words)
    np.testing.assert_array_equal(np.asarray(bits.fold_in(key, word).words), expected)
    if word < 2**31:
        np.testing.assert_array_equal(np.asarray(jax.jit(bits.fold_in)(key, jnp.int32(word)).words), expected)


@pytest.mark.parametrize("path", ["attn/q", "attn/k", "attn/v", "attn/o", "mlp/gate", "mlp/up", "mlp/down", "lm_head"])
def test_every_path_of_the_model_can_be_folded(path):
    assert 0 <= bits.path_word(path) < 2**32
    assert bits.fold_in(bits.step_key(0, 0), bits.path_word(path), 3).words.shape == (2,)


def test_step_key_depends_on_all_64_bits_of_the_seed_and_on_the_step():
    seeds = [0, 1, 2**31, 2**32 - 1, 2**32, 2**32 + 1, 2**63, 2**64 - 1]
    seen = {tuple(np.asarray(bits.step_key(s, t).words).tolist()) for s in seeds for t in (0, 1, 2, 2**31 - 1)}
    assert len(seen) == 32
    traced = jax.jit(lambda t: bits.step_key(7, t).words)(jnp.int32(11))
    np.testing.assert_array_equal(np.asarray(traced), np.asarray(bits.step_key(7, 11).words))


def test_typed_raw_and_plain_keys_agree_and_others_raise():
    expected = np.asarray(bits.as_key(jax.random.key(3)).words)
    for key in (jax.random.PRNGKey(3), np.array([0, 3], np.uint32), jnp.array([0, 3], jnp.uint32)):
        np.testing.assert_array_equal(np.asarray(bits.as_key(key).words), expected)
    same = bits.step_key(0, 0)
    np.testing.assert_array_equal(np.asarray(bits.as_key(same).words), np.asarray(same.words))
    for bad in (3, jnp.zeros(2), jnp.zeros(3, jnp.uint32), jax.random.split(jax.random.key(0), 2)):
        with pytest.raises(ValueError, match="a key is"):
            bits.as_key(bad)


def test_signs_are_balanced_and_ignore_the_row_offset():
    key = bits.step_key(0, 0)
    many = np.asarray(jax.vmap(lambda i: bits.random_signs(bits.fold_in(key, i), 16))(jnp.arange(4096)))
    assert set(np.unique(many).tolist()) == {-1.0, 1.0}
    assert (np.abs(many.mean(0)) < 5 / np.sqrt(len(many))).all()
    products = many.T @ many / len(many)
    assert (np.abs(products - np.eye(16)) < 5 / np.sqrt(len(many))).all()
    moved = bits.random_signs(key._replace(row_offset=123), 16)
    np.testing.assert_array_equal(np.asarray(moved), np.asarray(bits.random_signs(key, 16)))
