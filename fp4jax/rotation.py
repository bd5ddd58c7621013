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
        per_element = jnp.tile(signs.astype(jnp.float32), length // size)
        x = x * per_element.reshape(*(1,) * axis, length, *(1,) * (x.ndim - 1 - axis))
    sums = _butterfly(x, size) if axis == x.ndim - 1 else _signed_sums(x, size, axis)
    return sums * np.float32(1 / math.sqrt(size))


# Two ways to take the same pairwise sums, each the fastest on its axis on a CPU (2–10 × over a small dot, LOG.md). A reduction
# or a dot would leave the order of summation to XLA, which changes it with the shape and between eager and jit (measured).


def _butterfly(x: jax.Array, size: int) -> jax.Array:
    """Return the unnormalised transform along the last axis, by stages of 4 (and one of 2) over neighbours."""
    shape, stride = x.shape, 1
    while stride < size:
        radix = 4 if size // stride >= 4 else 2
        groups = x.reshape(*shape[:-1], shape[-1] // (radix * stride), radix, stride)
        a, b, *rest = (groups[..., i, :] for i in range(radix))
        out = [a + b, a - b]
        if rest:
            c, d = rest
            out = [(a + b) + (c + d), (a - b) + (c - d), (a + b) - (c + d), (a - b) - (c - d)]
        x = jnp.stack(out, axis=-2).reshape(shape)
        stride *= radix
    return x


def _signed_sums(x: jax.Array, size: int, axis: int) -> jax.Array:
    """Return the same along an axis that is not the last: output i adds or subtracts at stage k as bit k of i says."""
    blocks = x.reshape(*x.shape[:axis], x.shape[axis] // size, size, *x.shape[axis + 1 :])
    column = (*(1,) * (axis + 1), size, *(1,) * (x.ndim - 1 - axis))
    terms = [lax.slice_in_dim(blocks, j, j + 1, axis=axis + 1) for j in range(size)]
    for stage in range(size.bit_length() - 1):
        signs = jnp.asarray(np.float32(1 - 2 * (np.arange(size) >> stage & 1)).reshape(column))
        terms = [a + signs * b for a, b in zip(terms[::2], terms[1::2], strict=True)]
    return terms[0].reshape(x.shape)


def rotation_signs(rotation: Rotation, key: bits.Key | None) -> jax.Array | None:
    """Return the ±1 diagonal of a rotation, float32[size], or None for a deterministic one.

    "fixed": Transformer Engine's vector for size 16, otherwise a constant drawn once and for all. "redrawn": drawn from
    `key`; raises ValueError without one.
    """
    if rotation.signs == "deterministic":
        return None
    if rotation.signs == "fixed":
        return jnp.asarray(_TE_SIGNS) if rotation.size == 16 else bits.random_signs(bits.step_key(0, 0), rotation.size)
    if key is None:
        raise ValueError(f"rotation {rotation} draws its signs: pass key=")
    return bits.random_signs(key, rotation.size)
