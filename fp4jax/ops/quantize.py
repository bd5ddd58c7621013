"""Quantize one operand: the reference in plain jnp, and its fake-quantized twin that the reference GEMM multiplies.

Per block: scale by the scale rule (`fp4jax.scales`), elements x / scale rounded to the grid of the element format,
value = element · scale. Both functions share `cast_blocks`, so `fake_quantize(x) == quantize(x).dequantize()` bit for
bit. Blocks are reduced along the contraction axis in place, without a transpose.

Edge semantics: a float32 with exponent field 0 is a zero of its sign; -0 keeps its sign; NaN or Inf anywhere under a scale
makes that scale NaN (E8M0 byte 255, E4M3 code 127) and its codes 0, so all of it decodes to NaN; under NVFP4's tensor scale
that is the whole tensor. A zero block has scale 1 (E8M0 byte 127, FP32 1.0), and E4M3 scale 0 under NVFP4. Near the largest
float32 a value that is rounded up can become Inf.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fp4jax import bits, rounding, scales
from fp4jax.ops import qtensor
from fp4jax.recipe import OperandSpec


def quantize(x: jax.Array, spec: OperandSpec, axis: int, *, key=None, amax: jax.Array | None = None) -> qtensor.QTensor:
    """Quantize `x` along `axis` (the contraction axis of the GEMM that will consume it).

    x: float32, bfloat16 or float16, any rank ≥ 1; x.shape[axis] must be a multiple of spec.multiple. Square blocks
    (spec.across > 1) lie in the last two axes. spec: an OperandSpec of a quantized format. amax: as in `fake_quantize`.
    key: needed for rounding "sr" and "eden": a jax.random key, any uint32[2] array or a `bits.Key`; the draw of an element
    depends on the key and on its row (all axes but the last, row-major) and column only. Under vmap over x alone, the batch
    index enters the key. Raises ValueError for a format without codes, a length that does not divide, a key that is missing
    or of no use, and for integer or double-precision input.
    """
    x = jnp.asarray(x)
    if spec.element is None:
        raise ValueError(f"format {spec.format!r} has no codes: quantize needs a quantized format")
    check_operand(x, spec, axis, key)
    if key is not None and not spec.draws:
        raise ValueError(f"key= does not apply to rounding {spec.rounding!r}")
    return _quantize(x, spec, axis % x.ndim, None if key is None else bits.as_key(key), amax)


def check_operand(x: jax.Array, spec: OperandSpec, axis: int, key) -> None:
    """Raise ValueError when `x` cannot be cast by `spec` along `axis`."""
    if x.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise ValueError(f"cannot quantize {x.dtype}: only float32, bfloat16 and float16")
    if x.size == 0:
        raise ValueError(f"cannot quantize an empty array of shape {x.shape}")
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f"{axis=} is out of range for shape {x.shape}")
    if x.shape[axis] % spec.multiple:
        raise ValueError(f"axis {axis} of shape {x.shape} is not a multiple of {spec.multiple} ({spec})")
    if spec.across and spec.across > 1:
        if axis % x.ndim < x.ndim - 2 or x.ndim < 2:
            raise ValueError(f"{axis=} of shape {x.shape}: square blocks ({spec}) lie in the last two axes")
        if x.shape[other := across_axis(x.ndim, axis % x.ndim)] % spec.across:
            raise ValueError(f"axis {other} of shape {x.shape} is not a multiple of across={spec.across} ({spec})")
    if spec.draws and key is None:
        raise ValueError(f"{spec} rounds stochastically: pass key=")


@functools.partial(jax.jit, static_argnames=("spec", "axis"))
def _quantize(x: jax.Array, spec: OperandSpec, axis: int, key: bits.Key | None, amax: jax.Array | None) -> qtensor.QTensor:
    cast = cast_blocks(x, spec, axis, key, amax)
    element = spec.element
    assert element is not None
    codes = jnp.where(jnp.isnan(cast.decode), jnp.uint8(0), rounding.encode(cast.elements, element)).reshape(x.shape)
    scale = jnp.squeeze(cast.scale, block_view(x.shape, spec, axis)[1]) if spec.block else cast.scale
    if spec.scale == "e8m0":
        scale = qtensor.encode_e8m0(scale)
    elif spec.scale == "e4m3":
        scale = qtensor.encode_e4m3(scale)
    data = qtensor.pack(codes, axis) if element.bits == 4 else codes
    tensor_scale = None if cast.tensor_scale is None else cast.tensor_scale.reshape((1,) * x.ndim)
    return qtensor.QTensor(data, scale, tensor_scale, spec, axis)


def fake_quantize(
    x: jax.Array, spec: OperandSpec, axis: int, key: bits.Key | None = None, amax: jax.Array | None = None
) -> jax.Array:
    """Return quantize(x, spec, axis, key).dequantize() in float32, without going through codes.

    Also takes the unquantized formats: "none" returns float32(x), "bf16" rounds to bfloat16. amax: the magnitude that a
    "delayed" scale is made from, float32 scalar; 0 or None stand for that of `x`.
    """
    x32 = x.astype(jnp.float32)
    if spec.format == "none":
        return x32
    if spec.format == "bf16":
        return rounding.to_bfloat16(x32)
    cast = cast_blocks(x32, spec, axis % x.ndim, key, amax)
    return rounding.flush(cast.elements * cast.decode).reshape(x.shape)


def inside_clip(x: jax.Array, spec: OperandSpec, axis: int) -> jax.Array:
    """Return where |x| / scale < element.max, bool: the elements whose gradient a clipping rule ("quest") lets pass."""
    element = spec.element
    assert element is not None
    x = rounding.flush(x.astype(jnp.float32))
    view, _ = block_view(x.shape, spec, axis)
    scale = cast_blocks(x, spec, axis, None).decode
    return (jnp.abs(x.reshape(view)) < element.max * scale).reshape(x.shape)


class BlockCast(NamedTuple):
    """One cast, in the block view. scale: as stored (E8M0 byte as int32, E4M3 value, FP32); value = elements · decode."""

    elements: jax.Array
    scale: jax.Array
    tensor_scale: jax.Array | None
    decode: jax.Array


def block_view(shape: tuple[int, ...], spec: OperandSpec, axis: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape that gives every block axes of its own, and these axes; per tensor, the shape itself and all axes."""
    if not spec.block:
        return shape, tuple(range(len(shape)))
    sizes = {axis: spec.block}
    if spec.across and spec.across > 1:
        sizes[across_axis(len(shape), axis)] = spec.across
    view, within = [], []
    for i, length in enumerate(shape):
        view += [length // sizes[i], sizes[i]] if i in sizes else [length]
        within += [len(view) - 1] if i in sizes else []
    return tuple(view), tuple(within)


def across_axis(ndim: int, axis: int) -> int:
    """Return the axis that a square block also runs along: the other one of the last two."""
    return ndim - 1 if axis == ndim - 2 else ndim - 2


def cast_blocks(x: jax.Array, spec: OperandSpec, axis: int, key: bits.Key | None, amax: jax.Array | None = None) -> BlockCast:
    """Return the cast of `x` along axis ≥ 0, before it is written as codes and scales."""
    element, rule = spec.element, str(spec.scale_rule)
    assert element is not None
    view, within = block_view(x.shape, spec, axis)
    x = rounding.flush(x.astype(jnp.float32))
    words = random_bits(x, key).reshape(view) if spec.draws else None
    x = x.reshape(view)
    random = words if spec.rounding == "sr" else None
    if spec.scale == "float32":
        measured = rounding.max_magnitude(x, within)
        if rule == "delayed" and amax is not None:
            measured = jnp.where(amax > 0, amax, measured)
        scale = scales.fp32_scale(measured, element.max)
        return BlockCast(rounding.round_to_grid(rounding.divide(x, scale), element, random), scale, None, scale)
    if spec.scale == "e8m0":
        byte = scales.e8m0_byte(x, within, rule, element)
        scaled = scales.divide_by_power(x, byte)
        if spec.gain != 1:
            scaled = scaled * spec.gain
        return BlockCast(rounding.round_to_grid(scaled, element, random), byte, None, qtensor.decode_e8m0(byte))
    scale, tensor = scales.nvfp4_scales(x, within, rule)
    scaled = scales.e4m3_scaled(x, scale, tensor)
    elements = rounding.round_to_grid(scaled, element, random)
    if words is not None and spec.rounding == "eden":
        one_per_block = lax.slice_in_dim(words, 0, 1, axis=axis + 1)
        scale = scales.eden_scale(scaled, elements, scale, axis, one_per_block)
    return BlockCast(elements, scale, tensor, scales.e4m3_decode(scale, tensor))


def random_bits(x: jax.Array, key: bits.Key | None) -> jax.Array:
    """Return the uint32 words for every element of `x`; where vmap batches x but not the key, the batch index enters it."""
    assert key is not None

    def draw(x, words, offsets):
        return bits.random_bits(bits.Key(words, *offsets), x.shape)

    offsets = tuple(jnp.asarray(offset, jnp.uint32) for offset in (key.row_offset, key.col_offset))
    return _distinct_under_vmap(draw)(x, key.words, offsets)


def _distinct_under_vmap(draw):
    """Return `draw(x, words, offsets)` with a batching rule: where only x is batched, the batch index enters `words`."""
    custom = jax.custom_batching.custom_vmap(draw)

    @custom.def_vmap
    def rule(axis_size, in_batched, x, words, offsets):
        if in_batched == [True, False, (False, False)]:
            words = bits.distinct_words(words, axis_size)
            in_batched = [True, True, (False, False)]
        in_axes = jax.tree.map(lambda batched: 0 if batched else None, tuple(in_batched))
        batched = jax.vmap(draw, in_axes=in_axes, axis_size=axis_size)
        return _distinct_under_vmap(batched)(x, words, offsets), True

    return custom
