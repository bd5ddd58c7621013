"""Counter-based random bits: a pure function of a key and of an element's global row and column.

    word(row, col) = mix(mix(row ^ k0) ^ mix(col ^ k1))

`mix` is a bijection of 32-bit words, so no word repeats within a row or a column; row and column are separate 32-bit words
(one flat index would overflow on an 8B model). The same integer operations can be written in a Triton kernel. Nothing
here depends on a mesh, on rematerialisation, on scan or on how a batch was split: whoever casts a piece of a tensor gives
the piece's global row offset.

mix: C. Wellons' `lowbias32` (public domain, "Prospecting for Hash Functions", 2018), bias 0.17.
"""

import zlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


class Key(NamedTuple):
    """What a cast draws from.

    words: uint32[2] (or a stack of them). row_offset, col_offset: the global indices of the tensor's first row and column,
    uint32, where only a piece of it is cast; a row_offset per row is its global index less its local one. place: as `words`,
    but the same at every step, for what is drawn once per layer; None where the key is not of `step_key`.
    """

    words: jax.Array
    row_offset: jax.Array | int = 0
    col_offset: jax.Array | int = 0
    place: jax.Array | None = None


@jax.jit  # traced once per shape: its operators take a tenth of the time that a model takes to trace
def mix(x: jax.Array) -> jax.Array:
    """Return a bijective avalanche hash of uint32 words."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def as_key(key) -> Key:
    """Return `key` as a `Key`; takes a Key, a jax.random key (typed or raw), or any uint32[2] array."""
    if isinstance(key, Key):
        return key._replace(row_offset=_uint32(key.row_offset), col_offset=_uint32(key.col_offset))
    key = jnp.asarray(key)
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.key_data(key)
    if key.shape != (2,) or key.dtype != jnp.uint32:
        raise ValueError(f"a key is a jax.random key or a uint32[2] array, got {key.dtype}{list(key.shape)}")
    return fold_in(Key(key, jnp.uint32(0)), path_word("jax.random"))  # raw keys such as PRNGKey(0) and (1) differ in one bit


def _uint32(word: jax.Array | int) -> jax.Array | np.uint32:
    """Return a word as uint32: Python ints, int32 and uint32 modulo 2^32."""
    return np.uint32(word & 0xFFFFFFFF) if isinstance(word, int) else jnp.asarray(word).astype(jnp.uint32)


def fold_in(key: Key, *words: jax.Array | int) -> Key:
    """Return a new key that depends on every word (Python ints, int32 or uint32 scalars, in order)."""
    folded = tuple(_uint32(word) for word in words)
    place = None if key.place is None else _fold_in(key.place, folded)
    return key._replace(words=_fold_in(key.words, folded), place=place)


@jax.jit
def _fold_in(key_words: jax.Array, words: tuple[jax.Array | np.uint32, ...]) -> jax.Array:
    k0, k1 = key_words[..., 0], key_words[..., 1]
    for w in words:
        k0 = mix(k0 ^ mix(k1 + w + jnp.uint32(0x9E3779B9)))  # a Feistel round per half: no two keys collide
        k1 = mix(k1 ^ mix(k0 + w + jnp.uint32(0x85EBCA6B)))
    return _computed_once(jnp.stack([k0, k1], axis=-1))


def _computed_once(words: jax.Array) -> jax.Array:
    """Return `words`, kept out of fusions: XLA would compute the whole chain of hashes anew for every element that uses it."""
    return lax.optimization_barrier(words)


def seed_words(seed: int) -> np.ndarray:
    """Return a seed, 0 ≤ seed < 2^64, as uint32[2], the lower word first."""
    return np.array([seed & 0xFFFFFFFF, seed >> 32], np.uint32)


def step_key(seed: int | jax.Array, step: jax.Array | int) -> Key:
    """Return the key of one optimizer step; seed: 0 ≤ seed < 2^64, or its `seed_words`."""
    words = jnp.asarray(seed_words(seed) if isinstance(seed, int) else seed)
    return Key(_fold_in(words, (_uint32(step),)), jnp.uint32(0), place=words)


def path_word(path: str) -> int:
    """Return the 32-bit word that stands for a module path."""
    return zlib.crc32(path.encode())


_VMAP_WORD = path_word("vmap")


def distinct_words(words: jax.Array, size: int) -> jax.Array:
    """Return the words of `size` batch elements, uint32[size, 2], from those of a key that is common to them."""
    return jax.vmap(lambda i: fold_in(Key(words), _VMAP_WORD, i).words)(jnp.arange(size))


def random_bits(key: Key, shape: tuple[int, ...]) -> jax.Array:
    """Return uint32 words of `shape`; the last axis is the column, all axes before it are the row (row-major)."""
    rows = jnp.arange(int(np.prod(shape[:-1])), dtype=jnp.uint32) + _uint32(key.row_offset)
    cols = jnp.arange(shape[-1], dtype=jnp.uint32) + _uint32(key.col_offset)
    row_words = _computed_once(mix(rows ^ key.words[0])).reshape(*shape[:-1], 1)
    col_words = _computed_once(mix(cols ^ key.words[1])).reshape(*(1,) * (len(shape) - 1), -1)
    return mix(row_words ^ col_words)


def random_signs(key: Key, size: int) -> jax.Array:
    """Return a ±1 vector, float32[size]."""
    top = random_bits(key._replace(row_offset=0, col_offset=0), (1, size))[0] >> 31
    return _computed_once(1.0 - 2.0 * top.astype(jnp.float32))
