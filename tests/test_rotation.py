"""Hadamard rotation: explicit matrices, the same bits along any axis, eager, jitted, or sharded; signs; errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from fp4jax import Rotation, bits, hadamard
from fp4jax.rotation import hadamard_matrix, rotation_signs

SIZES = (2, 4, 8, 16, 32, 64)
by_size = pytest.mark.parametrize("size", SIZES)
TE_SIGNS = [1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1]


def patterns(x):
    return np.asarray(x, np.float32).view(np.int32)


def explicit(size):
    """Return the entries (-1)^popcount(i & j) / √size of the Sylvester matrix in natural order, float64."""
    return np.array([[(-1.0) ** (i & j).bit_count() for j in range(size)] for i in range(size)]) / np.sqrt(size)


def wide(shape, seed=0):
    rng = np.random.default_rng(seed)
    return (rng.normal(size=shape) * 2.0 ** rng.integers(-6, 6, shape)).astype(np.float32)


@by_size
def test_matrix_is_symmetric_orthogonal_and_in_natural_order(size):
    h = explicit(size)
    np.testing.assert_array_equal(hadamard_matrix(size), np.sign(h))
    np.testing.assert_array_equal(h, h.T)
    np.testing.assert_allclose(h @ h, np.eye(size), atol=1e-12)


@by_size
@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_equals_an_explicit_matrix_product(axis, signed, size):
    x = wide(tuple(128 if a == axis % 3 else 4 for a in range(3)))
    signs = np.where(np.random.default_rng(size).random(size) < 0.5, -1.0, 1.0) if signed else None
    diagonal = np.ones(size) if signs is None else signs
    blocks = np.moveaxis(x.astype(np.float64), axis, -1).reshape(-1, size)
    expected = np.moveaxis((blocks * diagonal @ explicit(size)).reshape(np.moveaxis(x, axis, -1).shape), -1, axis)
    bound = np.moveaxis((np.abs(blocks) @ np.abs(explicit(size))).reshape(np.moveaxis(x, axis, -1).shape), -1, axis)
    got = jax.jit(hadamard, static_argnums=(1, 2))(x, size, axis, None if signs is None else jnp.asarray(signs))
    assert got.dtype == jnp.float32
    assert (np.abs(got - expected) <= (np.log2(size) + 2) * 2.0**-24 * bound).all()


@by_size
def test_the_same_bits_eagerly_jitted_and_along_any_axis(size):
    x = wide((4, 256))
    signs = np.float32(np.where(np.random.default_rng(1).random(size) < 0.5, -1, 1))
    for diagonal in (None, signs):
        expected = patterns(oracle.hadamard(x, size, 1, diagonal))
        for axis in (0, 1, 2):
            moved = jnp.moveaxis(jnp.asarray(x)[None], 2, axis)
            for f in (hadamard, jax.jit(hadamard, static_argnums=(1, 2)))[size > 16 :]:  # eager takes seconds where large
                got = np.moveaxis(np.asarray(f(moved, size, axis, diagonal)), axis, 2)[0]
                np.testing.assert_array_equal(patterns(got), expected)


@by_size
def test_the_same_sign_of_zero_along_any_axis(size):
    x = np.random.default_rng(2).choice(np.float32([0.0, -0.0, 1.0, -1.0]), (512, size), p=[0.2, 0.6, 0.1, 0.1])
    rotate = jax.jit(hadamard, static_argnums=(1, 2))
    expected = patterns(rotate(x, size, 1))
    for f in (hadamard, rotate)[size > 16 :]:
        np.testing.assert_array_equal(patterns(f(x, size, 1)), expected)
        np.testing.assert_array_equal(patterns(f(x.T, size, 0)).T, expected)


@by_size
def test_is_its_own_inverse_and_signs_undo_themselves(size):
    x = wide((8, 256), 3)
    integers = np.round(x * 4).astype(np.float32)
    rotate = jax.jit(hadamard, static_argnums=(1, 2))
    once = rotate(x, size, 1)
    twice = np.asarray(rotate(once, size, 1))
    bound = np.abs(x).reshape(8, -1, size).sum(-1, keepdims=True).repeat(size, -1).reshape(8, 256)
    assert (np.abs(twice - x) <= 2.0**-22 * bound).all()
    assert not np.allclose(once, x)
    if np.sqrt(size).is_integer():  # sums of integers over a power of two are exact
        np.testing.assert_array_equal(rotate(rotate(integers, size, 1), size, 1), integers)
    signs = bits.random_signs(bits.step_key(0, size), size)
    back = np.asarray(rotate(rotate(x, size, 1, signs), size, 1)) * np.tile(signs, 256 // size)
    assert (np.abs(back - x) <= 2.0**-22 * bound).all()


def test_cancels_in_a_product_only_when_both_operands_share_it():
    rng = np.random.default_rng(4)
    x, w = rng.integers(-8, 9, (32, 64)).astype(np.float32), rng.integers(-8, 9, (64, 32)).astype(np.float32)
    signs = [bits.random_signs(bits.step_key(s, 0), 16) for s in (0, 1)]
    product = lambda a, b: np.asarray(hadamard(x, 16, 1, a)) @ np.asarray(hadamard(w, 16, 0, b))  # noqa: E731
    for s in (None, *signs):
        np.testing.assert_array_equal(product(s, s), x @ w)
    for a, b in ((signs[0], signs[1]), (signs[0], None)):
        assert np.abs(product(a, b) - x @ w).max() > 10


def test_result_is_float32_and_not_rounded_to_the_input_dtype():
    x = jnp.asarray(wide((4, 64)), jnp.bfloat16)
    got = hadamard(x, 32, 1)
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(patterns(got), patterns(oracle.hadamard(np.asarray(x.astype(jnp.float32)), 32, 1)))
    assert (got != got.astype(jnp.bfloat16).astype(jnp.float32)).any()


@pytest.mark.parametrize("partition", [("d", None), (None, "d")], ids=str)
def test_sharding_changes_no_bit(partition):
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    x = wide((256, 256), 5)
    sharded = jax.device_put(x, NamedSharding(mesh, PartitionSpec(*partition)))
    for size, axis in ((16, 0), (16, 1), (32, 0), (32, 1), (64, 1)):
        got = jax.jit(functools.partial(hadamard, size=size, axis=axis))(sharded)
        np.testing.assert_array_equal(patterns(got), patterns(oracle.hadamard(x, size, axis)))


def test_errors_name_the_value():
    for size in (0, 3, 12, -2):
        with pytest.raises(ValueError, match=f"size={size} is not a power of two"):
            hadamard(jnp.ones((4, 48)), size, 1)
    with pytest.raises(ValueError, match="size=32 does not divide axis 1 of length 48"):
        hadamard(jnp.ones((4, 48)), 32, -1)


def test_signs_of_a_rotation():
    assert rotation_signs(Rotation(16), None) is None
    np.testing.assert_array_equal(rotation_signs(Rotation(16, "fixed"), None), TE_SIGNS)
    key = bits.step_key(0, 0)
    for size in (16, 32, 64):
        fixed = np.asarray(rotation_signs(Rotation(size, "fixed"), None))
        assert fixed.shape == (size,)
        assert set(np.unique(fixed).tolist()) == {-1.0, 1.0}
        np.testing.assert_array_equal(rotation_signs(Rotation(size, "fixed"), key), fixed)  # a key changes nothing
        drawn = [np.asarray(rotation_signs(Rotation(size, "redrawn"), bits.step_key(0, t))) for t in range(20)]
        assert len({tuple(d.tolist()) for d in drawn}) == 20
        np.testing.assert_array_equal(rotation_signs(Rotation(size, "redrawn"), key), drawn[0])
        places = [bits.fold_in(bits.step_key(0, t), layer) for layer in range(20) for t in (0, 1)]
        placed = [tuple(np.asarray(rotation_signs(Rotation(size, "per_layer"), place)).tolist()) for place in places]
        assert placed[::2] == placed[1::2]  # the same at every step
        assert len(set(placed)) == 20
    with pytest.raises(ValueError, match=r"H16r.*key="):
        rotation_signs(Rotation(16, "redrawn"), None)
    with pytest.raises(ValueError, match=r"H16p.*key="):
        rotation_signs(Rotation(16, "per_layer"), None)
    with pytest.raises(ValueError, match=r"H16p.*step_key"):
        rotation_signs(Rotation(16, "per_layer"), bits.as_key(jax.random.key(0)))
