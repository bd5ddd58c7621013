"""Block Hadamard rotation: natural-order Sylvester matrices H, normalised by 1/√n, so H = Hᵀ = H⁻¹.

The rotation of both operands of a GEMM along the contraction cancels inside the product: (x·H)·(H·w) = x·w, and with a ±1
diagonal D, (x·D·H)·(H·D·w) = x·w.
"""

import functools
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
    if size < 1 or size & (size - 1):
        raise ValueError(f"Hadamard {size=} is not a power of two")
    h = np.ones((1, 1), np.float32)
    while len(h) < size:
        h = np.block([[h, h], [h, -h]])
    return h


def hadamard(x: jax.Array, size: int, axis: int, signs: jax.Array | None = None) -> jax.Array:
    """Rotate blocks of `size` along `axis` by the normalised Hadamard matrix: block → H·D·block / √size, in float32.

    x: any shape with x.shape[axis] a multiple of size, any float dtype; returns float32 of the same shape, not rounded to
    x's dtype. signs: the diagonal of D, ±1, shape [size]; None means D = 1. The sum over a block is taken with entries ±1
    in the order of the elements, then multiplied once by float32(1/√size). Raises ValueError when `size` is not a power of
    two or does not divide the axis.
    """
    axis = axis % x.ndim
    length = x.shape[axis]
    matrix = hadamard_matrix(size)
    if length % size:
        raise ValueError(f"Hadamard {size=} does not divide axis {axis} of length {length}")
    if signs is not None:
        matrix = matrix * signs[None, :]
    blocks = x.astype(jnp.float32).reshape(*x.shape[:axis], length // size, 1, size, *x.shape[axis + 1 :])
    # The barrier gives every tensor a matrix of its own: shared by two casts, XLA on CPU would materialise its broadcast
    # to the full size × size outer product. Measured in LOG.md, with the alternatives (small dot, butterfly).
    blocks, matrix = lax.optimization_barrier((blocks, jnp.asarray(matrix)))
    matrix = matrix.reshape(*(1,) * (axis + 1), size, size, *(1,) * (x.ndim - 1 - axis))
    if axis == x.ndim - 1:
        rotated = jnp.sum(blocks * matrix, axis=axis + 2)
    else:
        terms = [
            lax.index_in_dim(blocks, j, axis + 2, keepdims=False) * lax.index_in_dim(matrix, j, axis + 2, keepdims=False)
            for j in range(size)
        ]
        rotated = functools.reduce(jnp.add, terms)
    return (rotated * np.float32(1 / math.sqrt(size))).reshape(x.shape)


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
