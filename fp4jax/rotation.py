"""Block Hadamard rotation: natural-order Sylvester matrices H, normalised by 1/√n, so H = Hᵀ = H⁻¹.

The rotation of both operands of a GEMM along the contraction cancels inside the product: (x·H)·(H·w) = x·w, and with a ±1
diagonal D, (x·D·H)·(H·D·w) = x·w.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fp4jax import bits
from fp4jax.recipe import Rotation

# The fixed 16-sign vector of Transformer Engine's random Hadamard transform.
_TE_SIGNS = np.array([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1], np.float32)


def hadamard_matrix(size: int) -> np.ndarray:
    """Return the natural-order Sylvester matrix with entries ±1, float32[size, size]; size is a power of two."""
    _check_size(size)
    h = np.ones((1, 1), np.float32)
    while len(h) < size:
        h = np.block([[h, h], [h, -h]])
    return h


def _check_size(size: int) -> None:
    if size < 1 or size & (size - 1):
        raise ValueError(f"Hadamard {size=} is not a power of two")


def hadamard(x: jax.Array, size: int, axis: int, signs: jax.Array | None = None) -> jax.Array:
    """Rotate blocks of `size` along `axis` by the normalised Hadamard matrix: block → H·D·block / √size, in float32.

    x: any shape with x.shape[axis] a multiple of size, any float dtype; returns float32 of the same shape, not rounded to
    x's dtype. signs: the diagonal of D, ±1, shape [size]; None means D = 1. Signed elements are summed pairwise,
    neighbours first, then multiplied once by float32(1/√size): the same bits along any axis, eagerly, jitted or sharded.
    Raises ValueError when `size` is not a power of two or does not divide the axis.
    """
    axis = axis % x.ndim
    length = x.shape[axis]
    _check_size(size)
    if length % size:
        raise ValueError(f"Hadamard {size=} does not divide axis {axis} of length {length}")
    x = x.astype(jnp.float32)
    if signs is not None:
        x = multiply_signs(x, signs, axis)
    stride, shape = 1, x.shape
    while stride < size:
        # Along the last axis a block lies within a cache line, and one pass does; elsewhere many strided reads would not pay.
        radix = size if axis == len(shape) - 1 else min(4, size // stride)
        blocks = x.reshape(*shape[:axis], length // (radix * stride), radix, stride, *shape[axis + 1 :])
        x = _transform(blocks, axis + 1)
        stride *= radix
        if stride == size:
            x = x * np.float32(1 / math.sqrt(size))
        # Kept in memory: fused into its readers, block maximum and rounding, every sum would be taken anew for each.
        x = lax.optimization_barrier(x.reshape(shape))
    return x


def multiply_signs(x: jax.Array, signs: jax.Array, axis: int) -> jax.Array:
    """Return x with every block of len(signs) elements along `axis` multiplied by `signs`."""
    tiled = jnp.tile(signs.astype(jnp.float32), x.shape[axis] // len(signs))
    return x * tiled.reshape(*(1,) * axis, -1, *(1,) * (x.ndim - 1 - axis))


def split_first(x: jax.Array, size: int, axis: int) -> tuple[jax.Array, jax.Array]:
    """Return (rotated `x` with the first coefficient of every block set to zero, these coefficients, `size` times fewer)."""
    first = lax.slice_in_dim(x, 0, None, stride=size, axis=axis)
    index = lax.broadcasted_iota(jnp.int32, x.shape, axis)
    return jnp.where(index % size == 0, 0.0, x), first


def _transform(x: jax.Array, axis: int) -> jax.Array:
    """Return the unnormalised Hadamard transform along an axis whose length is a power of two, as pairwise sums.

    Output i adds or subtracts at stage k as bit k of i says. Written out, because a reduction or a small dot leaves the order
    of summation to XLA, which changes it with the shape and between eager and jit (measured in LOG.md).
    """
    size = x.shape[axis]
    terms = [lax.slice_in_dim(x, j, j + 1, axis=axis) for j in range(size)]
    for stage in range(size.bit_length() - 1):
        signs = np.float32(1 - 2 * (np.arange(size) >> stage & 1))
        signs = signs.reshape(*(1,) * axis, size, *(1,) * (x.ndim - 1 - axis))
        terms = [a + signs * b for a, b in zip(terms[::2], terms[1::2], strict=True)]
    return terms[0]


def rotation_signs(rotation: Rotation, key: bits.Key | None) -> jax.Array | None:
    """Return the ±1 diagonal of a rotation, float32[size], or None for a deterministic one.

    "fixed": Transformer Engine's vector for size 16, otherwise a constant drawn once and for all. "redrawn": drawn from
    `key`, "per_layer": from its place; raises ValueError without one.
    """
    if rotation.signs == "deterministic":
        return None
    if rotation.signs == "fixed":
        return jnp.asarray(_TE_SIGNS) if rotation.size == 16 else bits.random_signs(bits.step_key(0, 0), rotation.size)
    if key is None:
        raise ValueError(f"rotation {rotation} draws its signs: pass key=")
    if rotation.signs == "per_layer":
        if key.place is None:
            raise ValueError(f"rotation {rotation} draws its signs per layer: pass a key that comes from bits.step_key")
        key = key._replace(words=key.place)
    return bits.random_signs(key, rotation.size)
