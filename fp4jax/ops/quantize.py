"""Quantize one operand: the reference in plain jnp, and its fake-quantized twin that the reference GEMM multiplies.

Per block: scale from the maximum magnitude by the scale rule, elements x / scale rounded to the grid of the element format,
value = element · scale. Both functions share `_scaled_elements`, so `fake_quantize(x) == quantize(x).dequantize()` bit for
bit. Blocks are reduced along the contraction axis in place, without a transpose.

Edge semantics: a float32 with exponent field 0 is a zero of its sign; -0 keeps its sign; NaN or Inf anywhere in a block
gives the scale NaN (byte 255) and codes 0, so the whole block decodes to NaN; a zero block has scale 1 (byte 127).
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from fp4jax import bits, rounding
from fp4jax.ops import qtensor
from fp4jax.recipe import OperandSpec

_VMAP_WORD = bits.path_word("vmap")


def quantize(x: jax.Array, spec: OperandSpec, axis: int, *, key=None) -> qtensor.QTensor:
    """Quantize `x` along `axis` (the contraction axis of the GEMM that will consume it).

    x: float32, bfloat16 or float16, any rank ≥ 1; x.shape[axis] must be a multiple of spec.block. spec: an OperandSpec of a
    quantized format ("mxfp4", "fp8_e4m3", "fp8_e5m2"). key: needed for rounding "sr": a jax.random key, any uint32[2]
    array or a `bits.Key`; the draw of an element depends on the key and on its row (all axes but the last, row-major) and
    column only. Under vmap over x alone, the batch index enters the key. Raises ValueError for a format without codes, a
    length that does not divide, a key that is missing or of no use, and for integer or double-precision input.
    """
    x = jnp.asarray(x)
    if spec.element is None:
        raise ValueError(f"format {spec.format!r} has no codes: quantize needs a quantized format")
    check_operand(x, spec, axis, key)
    if key is not None and spec.rounding != "sr":
        raise ValueError(f"key= does not apply to rounding {spec.rounding!r}")
    return _quantize(x, spec, axis % x.ndim, None if key is None else bits.as_key(key))


def check_operand(x: jax.Array, spec: OperandSpec, axis: int, key) -> None:
    """Raise ValueError when `x` cannot be cast by `spec` along `axis`."""
    if x.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise ValueError(f"cannot quantize {x.dtype}: only float32, bfloat16 and float16")
    if x.size == 0:
        raise ValueError(f"cannot quantize an empty array of shape {x.shape}")
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f"{axis=} is out of range for shape {x.shape}")
    if spec.block and x.shape[axis] % spec.block:
        raise ValueError(f"axis {axis} of shape {x.shape} is not a multiple of block={spec.block} ({spec})")
    if spec.rounding == "sr" and key is None:
        raise ValueError(f"{spec} rounds stochastically: pass key=")


@functools.partial(jax.jit, static_argnames=("spec", "axis"))
def _quantize(x: jax.Array, spec: OperandSpec, axis: int, key: bits.Key | None) -> qtensor.QTensor:
    elements, scale = _scaled_elements(x, spec, axis, key)
    element = spec.element
    assert element is not None
    is_nan = jnp.isnan(qtensor.decode_e8m0(scale) if spec.block else scale)
    codes = jnp.where(is_nan, jnp.uint8(0), rounding.encode(elements, element)).reshape(x.shape)
    if not spec.block:
        return qtensor.QTensor(codes, scale, spec, axis)
    scale = qtensor.encode_e8m0(jnp.squeeze(scale, axis + 1))
    return qtensor.QTensor(qtensor.pack(codes, axis), scale, spec, axis)


def fake_quantize(x: jax.Array, spec: OperandSpec, axis: int, key: bits.Key | None = None) -> jax.Array:
    """Return quantize(x, spec, axis, key).dequantize() in float32, without going through codes.

    Also takes the unquantized formats: "none" returns float32(x), "bf16" rounds to bfloat16.
    """
    x32 = x.astype(jnp.float32)
    if spec.format == "none":
        return x32
    if spec.format == "bf16":
        return lax.reduce_precision(x32, exponent_bits=8, mantissa_bits=7)
    axis = axis % x.ndim
    elements, scale = _scaled_elements(x32, spec, axis, key)
    scale = qtensor.decode_e8m0(scale) if spec.block else scale
    return rounding.flush(elements * scale).reshape(x.shape)


def _scaled_elements(x: jax.Array, spec: OperandSpec, axis: int, key: bits.Key | None) -> tuple[jax.Array, jax.Array]:
    """Return (elements on the grid, scale): in the block view (…, n, block, …) with the E8M0 byte as int32, or per tensor.

    `axis` is the block-count axis of the view, axis + 1 runs within a block; scale has length 1 there.
    """
    element = spec.element
    assert element is not None
    x = rounding.flush(x.astype(jnp.float32))
    random = None if spec.rounding == "rne" else random_bits(x, key)
    if spec.block:
        view = (*x.shape[:axis], x.shape[axis] // spec.block, spec.block, *x.shape[axis + 1 :])
        x = x.reshape(view)
        random = None if random is None else random.reshape(view)
        scale = rounding.mx_scale_byte(rounding.max_magnitude(x, axis + 1), spec.scale_rule or "")
        scaled = x * rounding.power_of_two(254 - jnp.minimum(scale, 254 - 1))
    else:
        scale = rounding.per_tensor_scale(rounding.max_magnitude(x), element)
        scaled = x / jnp.where(x == 0, 1.0, scale)  # XLA turns a division by a broadcast into a product with its reciprocal
    return rounding.round_to_grid(scaled, element, random), scale


def random_bits(x: jax.Array, key: bits.Key | None) -> jax.Array:
    """Return the uint32 words for every element of `x`; where vmap batches x but not the key, the batch index enters it."""
    assert key is not None

    def draw(x, words, row_offset):
        return bits.random_bits(bits.Key(words, row_offset), x.shape)

    return _distinct_under_vmap(draw)(x, key.words, jnp.asarray(key.row_offset, jnp.uint32))


def _distinct_under_vmap(draw):
    """Return `draw(x, words, row_offset)` with a batching rule: where only x is batched, the batch index enters `words`."""
    custom = jax.custom_batching.custom_vmap(draw)

    @custom.def_vmap
    def rule(axis_size, in_batched, x, words, row_offset):
        if in_batched == [True, False, False]:
            words = jax.vmap(lambda i: bits.fold_in(bits.Key(words), _VMAP_WORD, i).words)(jnp.arange(axis_size))
            in_batched = [True, True, False]
        batched = jax.vmap(draw, in_axes=tuple(0 if b else None for b in in_batched), axis_size=axis_size)
        return _distinct_under_vmap(batched)(x, words, row_offset), True

    return custom
