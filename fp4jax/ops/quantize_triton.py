"""Quantize one matrix for both of its GEMMs in one launch: the Triton kernel, equal to `ops.quantize` bit for bit.

A tile of x is read once. For each orientation, along its rows and along its columns, it is rotated, scaled, rounded and
packed, and written with the contraction axis last, so that a matmul reads contiguous bytes whichever operand it is: the
codes of columns come out transposed.

    moved per element: 2 bytes (bfloat16) in, 2 · (1/2 + 1/32) out = 3.06 bytes, which bounds the time from below

The tile function works on [F, K]: F free, K contraction. A rotation is a product with the matrix D·H, its sums in the order
of the matrix unit, so rotated values may differ from the reference in the last bits; all else is the same arithmetic.
"""

import functools
import logging
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import triton
import triton.language as tl
from jax import lax

from fp4jax import bits, formats, rotation, rounding, scales
from fp4jax.ops import qtensor, triton_call
from fp4jax.ops.kernels import Cast
from fp4jax.recipe import OperandSpec

NATIVE_TARGETS = ("gfx950", "sm_100")  # GPUs with an FP4 conversion instruction

_MAGIC = tl.constexpr(8388608.0)  # 2^23: adding and subtracting it rounds to an integer, ties to even
_TWO_M9 = tl.constexpr(2.0**-9)
_HEADROOM = tl.constexpr(scales.HEADROOM)
_EDEN_LARGEST = tl.constexpr(6 / scales.EDEN_SHRINK)
_EDEN_GROUP = tl.constexpr(formats.EDEN_GROUP)
_QUEST_FACTOR = tl.constexpr(scales.QUEST_CLIP / 6)


@triton.jit
def _bits(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def _float(b):
    return b.to(tl.float32, bitcast=True)


@triton.jit
def _flush(x):
    """Replace subnormals by a zero of the same sign."""
    b = _bits(x)
    return _float(tl.where((b & 0x7F800000) == 0, b & -2147483648, b))


@triton.jit
def _divide(x, divisor):
    return tl.div_rn(x, tl.where(x == 0.0, 1.0, divisor))


@triton.jit
def _mix(x):
    """The hash of `fp4jax.bits.mix`."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _random_words(key_ptr, rows, cols):
    """Return the uint32 words of `fp4jax.bits.random_bits`; key: (k0, k1, row offset, column offset)."""
    row_word = _mix((rows.to(tl.uint32) + tl.load(key_ptr + 2)) ^ tl.load(key_ptr))
    col_word = _mix((cols.to(tl.uint32) + tl.load(key_ptr + 3)) ^ tl.load(key_ptr + 1))
    return _mix(row_word ^ col_word)


@triton.jit
def _e2m1_code(x, words, STOCHASTIC: tl.constexpr):
    """Return the E2M1 codes (int32) of float32 x, saturating; to nearest, ties to even, or stochastically."""
    b = _bits(x)
    magnitude = tl.minimum(b & 0x7FFFFFFF, 0x40C00000)  # 6.0
    exponent = tl.maximum(magnitude & 0x7F800000, 0x3F800000)
    if STOCHASTIC:
        steps = _float(magnitude) * _float((255 << 23) - exponent)
        lower = steps.to(tl.int32)
        threshold = (words >> 8).to(tl.float32) + 1.0
        count = lower + (threshold <= (steps - lower.to(tl.float32)) * 16777216.0).to(tl.int32)
    else:  # the sum's last bit is a grid step
        count = _bits(_float(magnitude) + _float(exponent + (22 << 23))) & 7
    return count + ((exponent >> 22) - 254) | ((b >> 28) & 8)


@triton.jit
def _e2m1_value(code):
    """Return the float32 values of E2M1 codes."""
    magnitude = code & 7
    normal = _float((magnitude + 252) << 22)
    value = tl.where(magnitude < 2, magnitude.to(tl.float32) * 0.5, normal)
    return tl.where(code >= 8, -value, value)


@triton.jit
def _round_e4m3(x, words, STOCHASTIC: tl.constexpr):
    """Round float32 x ≥ 0 to the E4M3 grid, saturating at 448."""
    step = tl.maximum(_bits(x) >> 23, 121) - 3
    steps = x * _float((254 - step) << 23)
    if STOCHASTIC:
        lower = tl.floor(steps)
        threshold = (words >> 8).to(tl.float32) + 1.0
        steps = lower + (threshold <= (steps - lower) * 16777216.0).to(tl.float32)
    else:
        steps = (steps + _MAGIC) - _MAGIC
    return tl.minimum(steps * _float(step << 23), 448.0)


@triton.jit
def _e4m3_code(x):
    """Return the codes (int32) of E4M3 values ≥ 0; NaN gives 127."""
    code = tl.where(x < 0.015625, (x * 512.0).to(tl.int32), (_bits(x) >> 20) - 960)
    return tl.where(x != x, 127, code)


@triton.jit
def _pairwise(x, G: tl.constexpr, N: tl.constexpr, LOG: tl.constexpr):
    """Sum [G, N] over N = 2^LOG, neighbours first: the order of `rounding.pairwise_sum`; returns [G]."""
    for i in tl.static_range(LOG):
        even, odd = tl.split(tl.reshape(x, [G, N >> (i + 1), 2]))
        x = even + odd
    return tl.reshape(x, [G])


@triton.jit
def _spread(x, F: tl.constexpr, NB: tl.constexpr, A: tl.constexpr):
    """Repeat [F / A, NB] over the A rows of a square block."""
    return tl.reshape(tl.broadcast_to(x[:, None, :], [F // A, A, NB]), [F, NB])


@triton.jit
def _block_max(x, F: tl.constexpr, NB: tl.constexpr, B: tl.constexpr, A: tl.constexpr):
    """Return the largest of int32 x [F, NB·B] in every block, [F, NB]."""
    out = tl.max(tl.reshape(x, [F, NB, B]), axis=2)
    if A > 1:
        out = _spread(tl.max(tl.reshape(out, [F // A, A, NB]), axis=1), F, NB, A)
    return out


@triton.jit
def _block_sum(
    x, F: tl.constexpr, NB: tl.constexpr, B: tl.constexpr, A: tl.constexpr, LOG_B: tl.constexpr, COLUMNS: tl.constexpr
):
    """Return the sum of float32 x [F, NB·B] in every block, [F, NB]; square blocks sum over the rows of the matrix first."""
    if A == 1:
        out = tl.reshape(_pairwise(tl.reshape(x, [F * NB, B]), F * NB, B, LOG_B), [F, NB])
    else:
        if COLUMNS:  # the tile is transposed: K runs over the rows
            inner = tl.reshape(_pairwise(tl.reshape(x, [F * NB, B]), F * NB, B, LOG_B), [F // A, A, NB])
            inner = tl.reshape(tl.permute(inner, [0, 2, 1]), [F // A * NB, A])
        else:
            inner = tl.permute(tl.reshape(x, [F // A, A, NB * B]), [0, 2, 1])
            inner = _pairwise(tl.reshape(inner, [F // A * NB * B, A]), F // A * NB * B, A, LOG_B)
            inner = tl.reshape(inner, [F // A * NB, B])
        out = _spread(tl.reshape(_pairwise(inner, F // A * NB, A, LOG_B), [F // A, NB]), F, NB, A)
    return out


@triton.jit
def _per_element(x, F: tl.constexpr, NB: tl.constexpr, B: tl.constexpr):
    """Repeat [F, NB] over the B elements of a block: [F, NB·B]."""
    return tl.reshape(tl.broadcast_to(x[:, :, None], [F, NB, B]), [F, NB * B])


@triton.jit
def _mx_unit(amax, RULE: tl.constexpr):
    """Return int32 bits whose exponent is the scale's, for a block's largest magnitude (its bits) where that is finite."""
    if RULE == "even":
        carry: tl.constexpr = 0x200000
    elif RULE == "ceil":
        carry: tl.constexpr = 0x3FFFFF
    else:
        carry: tl.constexpr = 0
    return tl.maximum(amax + (carry - (2 << 23)), 1 << 23)


@triton.jit
def _mx_byte(amax, RULE: tl.constexpr):
    """Return the E8M0 byte (int32) of a block's largest magnitude (its bits), see `scales.mx_scale_byte`."""
    byte = tl.where(amax < 0x00800000, 127, _mx_unit(amax, RULE) >> 23)
    return tl.where(amax >= 0x7F800000, 255, byte)


@triton.jit
def _over_power(x, byte, F: tl.constexpr, NB: tl.constexpr, B: tl.constexpr):
    """Return x / 2^(byte - 127), byte per block."""
    return x * _per_element(_float((254 - tl.minimum(byte, 253)) << 23), F, NB, B)


@triton.jit
def _nan_max(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _gfx950_flush(x):
    """Replace subnormals by zeros: any float32 operation does, in a kernel compiled with allow_flush_denorm.

    The factor is a 1 that the compiler does not see, or it would drop the product, of which the GPU does two at a time.
    """
    return x * tl.inline_asm_elementwise("v_mov_b32 $0, $1", "=v,v", [1.0], tl.float32, is_pure=True, pack=1)


@triton.jit
def _native_mxfp4_tile(x, F: tl.constexpr, K: tl.constexpr, A: tl.constexpr, RULE: tl.constexpr, NATIVE: tl.constexpr):
    """Return (four packed codes per item [F, K/4] int16, E8M0 bytes [F, K/32]) by the target's own conversion, to nearest."""
    NB: tl.constexpr = K // 32
    amax = tl.reduce(tl.reshape(tl.abs(x), [F, NB, 4, 8]), 3, _nan_max)  # in a lane; the rest across lanes, as integers
    amax = tl.max(_bits(amax) & 0x7FFFFFFF, 2)
    if A > 1:
        amax = _spread(tl.max(tl.reshape(amax, [F // A, A, NB]), 1), F, NB, A)
    unit = _mx_unit(amax, RULE) & 0x7F800000
    keep = _of_items(tl.where(amax >= 0x7F800000, 0, -1).to(tl.int16), F, NB)  # a word's two items may be of two blocks
    even, odd = tl.split(tl.reshape(x, [F, K // 4, 2, 2]))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    if NATIVE == "gfx950":  # two words in turn: a byte of a word must not be written right after another of its bytes
        items = tl.inline_asm_elementwise(
            """
            v_cvt_scalef32_pk_fp4_f32 $0, $2, $6, $18
            v_cvt_scalef32_pk_fp4_f32 $1, $4, $8, $20
            v_cvt_scalef32_pk_fp4_f32 $0, $10, $14, $18 op_sel:[0,0,1,0]
            v_cvt_scalef32_pk_fp4_f32 $1, $12, $16, $20 op_sel:[0,0,1,0]
            v_cvt_scalef32_pk_fp4_f32 $0, $3, $7, $19 op_sel:[0,0,0,1]
            v_cvt_scalef32_pk_fp4_f32 $1, $5, $9, $21 op_sel:[0,0,0,1]
            v_cvt_scalef32_pk_fp4_f32 $0, $11, $15, $19 op_sel:[0,0,1,1]
            v_cvt_scalef32_pk_fp4_f32 $1, $13, $17, $21 op_sel:[0,0,1,1]
            v_and_b32 $0, $0, $22
            v_and_b32 $1, $1, $23
            """,
            "=&v,=&v,v,v,v,v,v,v,v,v,v,v,v,v,v,v,v,v,v,v,v,v,v,v",
            [x0, x1, x2, x3, _of_items(_float(unit), F, NB), keep],
            dtype=tl.int16,
            is_pure=True,
            pack=4,
        )
    else:
        items = tl.inline_asm_elementwise(
            """
            {
            .reg .b8 b0, b1, b2, b3;
            .reg .b32 w;
            .reg .f32 y0, y1, y2, y3, y4, y5, y6, y7;
            mul.f32 y0, $1, $9;
            mul.f32 y1, $3, $9;
            mul.f32 y2, $5, $9;
            mul.f32 y3, $7, $9;
            mul.f32 y4, $2, $10;
            mul.f32 y5, $4, $10;
            mul.f32 y6, $6, $10;
            mul.f32 y7, $8, $10;
            cvt.rn.satfinite.e2m1x2.f32 b0, y1, y0;
            cvt.rn.satfinite.e2m1x2.f32 b1, y3, y2;
            cvt.rn.satfinite.e2m1x2.f32 b2, y5, y4;
            cvt.rn.satfinite.e2m1x2.f32 b3, y7, y6;
            mov.b32 w, {b0, b1, b2, b3};
            and.b32 $0, w, $11;
            }
            """,
            "=r,f,f,f,f,f,f,f,f,f,f,r",
            [x0, x1, x2, x3, _of_items(_float((254 << 23) - unit), F, NB), keep],
            dtype=tl.int16,
            is_pure=True,
            pack=2,
        )
    return items, _mx_byte(amax, RULE)


@triton.jit
def _of_items(x, F: tl.constexpr, NB: tl.constexpr):
    """Repeat [F, NB] over the eight items of a block of 32, [F, NB·8], in the layout that splitting x by four gives."""
    x, _ = tl.split(tl.reshape(_per_element(x, F, NB, 32), [F, NB * 8, 2, 2]))
    x, _ = tl.split(x)
    return x


@triton.jit
def _mxfp4_tile(
    x,
    words,
    F: tl.constexpr,
    K: tl.constexpr,
    A: tl.constexpr,
    RULE: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Return (codes [F, K], E8M0 bytes [F, K/32]), int32, of float32 x [F, K]."""
    NB: tl.constexpr = K // 32
    amax = _block_max(_bits(x) & 0x7FFFFFFF, F, NB, 32, A)
    byte = _mx_byte(amax, RULE)
    if RULE == "mse":
        scaled = _over_power(x, byte, F, NB, 32)
        small = _e2m1_value(_e2m1_code(scaled, words, False)) - scaled
        large = 2 * _e2m1_value(_e2m1_code(scaled * 0.5, words, False)) - scaled
        small = _block_sum(small * small, F, NB, 32, A, 5, COLUMNS)
        large = _block_sum(large * large, F, NB, 32, A, 5, COLUMNS)
        byte = tl.where(byte == 255, 255, tl.minimum(byte + (large < small).to(tl.int32), 254))
    if RULE == "quest":
        unit = _over_power(x, byte, F, NB, 32)
        mean = _block_sum(unit, F, NB, 32, 1, 5, COLUMNS) * 0.03125
        deviation = unit - _per_element(mean, F, NB, 32)
        variance = _block_sum(deviation * deviation, F, NB, 32, 1, 5, COLUMNS) * 0.03125
        std = tl.sqrt_rn(variance) * _float(tl.minimum(byte, 254) << 23)
        quest = _bits(std * _QUEST_FACTOR + 1e-8) >> 23
        quest = tl.where(amax < 0x00800000, 127, tl.minimum(tl.maximum(quest, 1), 254))
        byte = tl.where(byte == 255, 255, quest)
    scaled = _over_power(x, byte, F, NB, 32)
    if RULE == "floor_3_4":
        scaled = scaled * 0.75
    code = _e2m1_code(scaled, words, STOCHASTIC)
    return tl.where(_per_element(byte, F, NB, 32) == 255, 0, code), byte


@triton.jit
def _e4m3_scaled(x, decode, F: tl.constexpr, NB: tl.constexpr):
    """Return x over its block's decode factor, a zero of x's sign where that is 0."""
    decode = _per_element(decode, F, NB, 16)
    sign = _float(_bits(x) & -2147483648)
    return _divide(tl.where(decode == 0.0, sign, x), tl.where(decode == 0.0, 1.0, decode))


@triton.jit
def _block_scale(amax, tensor, largest):
    return _flush(_divide(_flush(_divide(amax, largest)), tensor))


@triton.jit
def _eden_factor(scaled, code, scale, F: tl.constexpr, NB: tl.constexpr):
    """Return the factor of `scales.eden_scale` for every block [F, NB], the same within a group."""
    per_element = _per_element(scale, F, NB, 16)
    before, after = scaled * per_element, _e2m1_value(code) * per_element
    G: tl.constexpr = NB * 16 // _EDEN_GROUP
    inner = _pairwise(tl.reshape(before * after, [F * G, _EDEN_GROUP]), F * G, _EDEN_GROUP, 7)
    outer = _pairwise(tl.reshape(before * before, [F * G, _EDEN_GROUP]), F * G, _EDEN_GROUP, 7)
    factor = tl.where(inner == 0.0, 1.0, _divide(outer, tl.where(inner == 0.0, 1.0, inner)))
    return tl.reshape(tl.broadcast_to(factor[:, None], [F * G, NB // G]), [F, NB])


@triton.jit
def _nvfp4_tile(
    x,
    words,
    tensor,
    F: tl.constexpr,
    K: tl.constexpr,
    A: tl.constexpr,
    RULE: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Return (codes [F, K], E4M3 codes [F, K/16]), int32, of float32 x [F, K] under the tensor scale, a float32 scalar."""
    NB: tl.constexpr = K // 16
    amax = _float(_block_max(_bits(x) & 0x7FFFFFFF, F, NB, 16, A))
    broken = tensor != tensor
    if RULE == "eden":
        wanted = _block_scale(amax, tensor, _EDEN_LARGEST)
    else:
        wanted = _block_scale(amax, tensor, 6.0)
    if RULE == "headroom":
        scale = _round_e4m3(wanted * _HEADROOM, words, False)
        scale = tl.where(scale < wanted, scale + _TWO_M9, scale)
    else:
        scale = _round_e4m3(wanted, words, False)
    if RULE == "four_over_six":
        unit = _divide(x, tensor)
        smaller = _round_e4m3(_block_scale(amax, tensor, 4.0), words, False)
        code6 = _e2m1_code(_e4m3_scaled(x, _flush(scale * tensor), F, NB), words, False)
        code4 = _e2m1_code(_e4m3_scaled(x, _flush(smaller * tensor), F, NB), words, False)
        error6 = _e2m1_value(code6) * _per_element(scale, F, NB, 16) - unit
        error4 = _e2m1_value(code4) * _per_element(smaller, F, NB, 16) - unit
        error6 = _block_sum(error6 * error6, F, NB, 16, A, 4, COLUMNS)
        error4 = _block_sum(error4 * error4, F, NB, 16, A, 4, COLUMNS)
        scale = tl.where(error4 < error6, smaller, scale)
    scaled = _e4m3_scaled(x, _flush(scale * tensor), F, NB)
    code = _e2m1_code(scaled, words, STOCHASTIC)
    if RULE == "eden":
        first = tl.reshape(words, [F, NB, 16])
        first = tl.max(tl.where(tl.arange(0, 16)[None, None, :] == 0, first, 0), axis=2)
        scale = _round_e4m3(scale * _eden_factor(scaled, code, scale, F, NB), first, True)
    return tl.where(broken, 0, code), tl.where(broken, 127, _e4m3_code(scale))


@triton.jit
def _rotate(x, matrix_ptr, F: tl.constexpr, K: tl.constexpr, SIZE: tl.constexpr, NORM: tl.constexpr, COLUMNS: tl.constexpr):
    """Multiply every SIZE elements along K by the matrix [SIZE, SIZE] of ±1 (and 0) and then by NORM.

    Of 32 columns of a product, a lane of a matrix core holds four runs of four, a distance of 8 apart. They are computed in
    the order that makes these one run of 16, so that two lanes share an MX block, and the codes of a lane are contiguous.
    """
    if SIZE > 0:
        G: tl.constexpr = K // SIZE
        row, place = tl.arange(0, SIZE), tl.arange(0, SIZE)
        column = (place & (SIZE - 32)) | ((place & 4) << 2) | ((place & 24) >> 1) | (place & 3)
        matrix = tl.load(matrix_ptr + row[:, None] * SIZE + column[None, :])
        x = tl.reshape(x, [F, G, SIZE])
        if COLUMNS:  # neighbouring lanes then take neighbouring columns of the tile, as it was loaded
            x = tl.permute(x, [1, 0, 2])
        x = tl.dot(tl.reshape(x, [F * G, SIZE]), matrix, input_precision="ieee")
        x = tl.permute(tl.reshape(x, [F * G * (SIZE // 32), 4, 2, 4]), [0, 2, 1, 3])
        if COLUMNS:
            x = tl.permute(tl.reshape(x, [G, F, SIZE]), [1, 0, 2])
        x = tl.reshape(x, [F, K]) * NORM
    return x.to(tl.float32)


@triton.jit
def _write(
    x,
    key_ptr,
    matrix_ptr,
    tensor_ptr,
    data_ptr,
    scale_ptr,
    rows,
    cols,
    free0,
    k0,
    FREE: tl.constexpr,
    LENGTH: tl.constexpr,
    F: tl.constexpr,
    K: tl.constexpr,
    CAST: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Quantize tile x [F, K]; store codes [FREE, LENGTH / 2] and scale bytes [FREE, LENGTH / block] from (free0, k0) on."""
    FORMAT: tl.constexpr = CAST[0]
    ACROSS: tl.constexpr = CAST[1]
    RULE: tl.constexpr = CAST[2]
    STOCHASTIC: tl.constexpr = CAST[3]
    DRAWS: tl.constexpr = CAST[4]
    SIZE: tl.constexpr = CAST[5]
    NORM: tl.constexpr = CAST[6]
    NATIVE: tl.constexpr = CAST[7]
    BLOCK: tl.constexpr = 32 if FORMAT == "mxfp4" else 16
    x = _rotate(x, matrix_ptr, F, K, SIZE, NORM, COLUMNS)
    if NATIVE != "":
        if NATIVE == "gfx950":
            if SIZE == 0:  # a rotation's last multiplication has flushed
                x = _gfx950_flush(x)
        else:
            x = _flush(x)
        data, scale = _native_mxfp4_tile(x, F, K, ACROSS, RULE, NATIVE)
        data_ptr = data_ptr.to(tl.pointer_type(tl.int16))
    else:
        x = _flush(x)
        words = tl.zeros([F, K], tl.uint32)
        if DRAWS:
            words = _random_words(key_ptr, rows, cols)
        if FORMAT == "mxfp4":
            code, scale = _mxfp4_tile(x, words, F, K, ACROSS, RULE, STOCHASTIC, COLUMNS)
        else:
            code, scale = _nvfp4_tile(x, words, tl.load(tensor_ptr), F, K, ACROSS, RULE, STOCHASTIC, COLUMNS)
        low, high = tl.split(tl.reshape(code, [F, K // 2, 2]))
        data = (low | (high << 4)).to(tl.uint8)
    EVEN: tl.constexpr = FREE % F == 0 and LENGTH % K == 0  # no masks, and so wide stores
    PER: tl.constexpr = K // data.shape[1]  # elements per stored item
    row = tl.arange(0, F)[:, None]
    item, block = tl.arange(0, K // PER)[None, :], tl.arange(0, K // BLOCK)[None, :]
    data_ptr += free0.to(tl.int64) * (LENGTH // PER) + k0 // PER
    scale_ptr += free0.to(tl.int64) * (LENGTH // BLOCK) + k0 // BLOCK
    scale = scale.to(tl.uint8)
    if EVEN:
        tl.store(data_ptr + row * (LENGTH // PER) + item, data)
        tl.store(scale_ptr + row * (LENGTH // BLOCK) + block, scale)
    else:
        inside = free0 + row < FREE
        tl.store(data_ptr + row * (LENGTH // PER) + item, data, inside & (k0 + item * PER < LENGTH))
        tl.store(scale_ptr + row * (LENGTH // BLOCK) + block, scale, inside & (k0 + block * BLOCK < LENGTH))


@triton.jit
def _load_tile(x_ptr, r0, c0, R: tl.constexpr, C: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, LANE: tl.constexpr):
    """Return the tile [BR, BC] of x [R, C] at (r0, c0), zeros outside.

    It is loaded as [RUN, BR / RUN, BC], of which a lane holds the whole first axis and 16 bytes of the last, 16·8
    elements of bfloat16 on the native path: its part of a block is contiguous along either axis, and only maxima and results
    move between lanes.
    """
    RUN: tl.constexpr = LANE // 8
    r = tl.arange(0, RUN)[:, None, None] + tl.arange(0, BR // RUN)[None, :, None] * RUN
    c = tl.arange(0, BC)[None, None, :]
    x_ptr += r0.to(tl.int64) * C + c0
    if R % BR == 0 and C % BC == 0:
        x = tl.load(x_ptr + r * C + c)
    else:
        x = tl.load(x_ptr + r * C + c, (r0 + r < R) & (c0 + c < C), other=0.0)
    return tl.reshape(tl.permute(x, [1, 0, 2]), [BR, BC])


@triton.jit
def quantize_kernel(
    x_ptr,
    row_key_ptr,
    col_key_ptr,
    row_matrix_ptr,
    col_matrix_ptr,
    row_tensor_ptr,
    col_tensor_ptr,
    row_data_ptr,
    row_scale_ptr,
    col_data_ptr,
    col_scale_ptr,
    R: tl.constexpr,
    C: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    LANE: tl.constexpr,
    ROW: tl.constexpr,
    COL: tl.constexpr,
):
    """Quantize x [R, C] along C (ROW) and along R (COL), each None or the tuple that `_static` makes of a cast."""
    r0, c0 = tl.program_id(0) * BR, tl.program_id(1) * BC
    x = _load_tile(x_ptr, r0, c0, R, C, BR, BC, LANE)
    if ROW is not None:
        _write(
            x, row_key_ptr, row_matrix_ptr, row_tensor_ptr, row_data_ptr, row_scale_ptr,
            r0 + tl.arange(0, BR)[:, None], c0 + tl.arange(0, BC)[None, :], r0, c0, R, C, BR, BC, ROW, False,
        )  # fmt: skip
    if COL is not None:
        rows, cols = r0 + tl.arange(0, BR)[None, :], c0 + tl.arange(0, BC)[:, None]
        _write(
            tl.trans(x), col_key_ptr, col_matrix_ptr, col_tensor_ptr, col_data_ptr, col_scale_ptr,
            rows, cols, c0, r0, C, R, BC, BR, COL, True,
        )  # fmt: skip


@triton.jit
def amax_kernel(
    x_ptr,
    row_matrix_ptr,
    col_matrix_ptr,
    out_ptr,
    R: tl.constexpr,
    C: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    LANE: tl.constexpr,
    ROW: tl.constexpr,
    COL: tl.constexpr,
):
    """Store the largest magnitude, as float32 bits, of each tile of x [R, C], rotated along C and along R: int32 [tiles, 2]."""
    r0, c0 = tl.program_id(0) * BR, tl.program_id(1) * BC
    x = _load_tile(x_ptr, r0, c0, R, C, BR, BC, LANE)
    out_ptr += (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)) * 2
    if ROW is not None:
        rotated = _rotate(x, row_matrix_ptr, BR, BC, ROW[5], ROW[6], False)
        tl.store(out_ptr, tl.max(tl.max(_bits(rotated) & 0x7FFFFFFF, 1), 0))
    if COL is not None:
        rotated = _rotate(tl.trans(x), col_matrix_ptr, BC, BR, COL[5], COL[6], True)
        tl.store(out_ptr + 1, tl.max(tl.max(_bits(rotated) & 0x7FFFFFFF, 1), 0))


def launch_plan(
    shape: tuple[int, int],
    casts: tuple[Cast | None, Cast | None],
    arch: str,
    *,
    native: bool,
    tile: tuple[int, int] | None = None,
) -> tuple[dict[str, Any], tuple[int, int], dict[str, Any]]:
    """Return (compile-time arguments, grid, compiler options) of both kernels for x of `shape` and its casts on `arch`."""
    own = arch if native and arch in NATIVE_TARGETS else ""
    statics = [_static(cast, own) for cast in casts]
    light = own != "" and all(static is None or static[7] for static in statics)
    lane = 128 if light else 32  # elements per lane: the portable path needs more registers for each
    R, C = shape
    BR, BC = (
        _fit(size, wanted, casts) for size, wanted in zip(shape, tile or ((128, 256) if light else (64, 128)), strict=True)
    )
    constants = {"R": R, "C": C, "BR": BR, "BC": BC, "LANE": lane, "ROW": statics[0], "COL": statics[1]}
    options = {"num_warps": _warps(BR * BC // lane, arch), **({"allow_flush_denorm": True} if own == "gfx950" else {})}
    return constants, (triton.cdiv(R, BR), triton.cdiv(C, BC)), options


def _static(cast: Cast | None, native: str) -> tuple | None:
    """Return what the kernel is specialised for, in the order in which CAST[i] is read."""
    if cast is None:
        return None
    spec = cast.spec
    norm = float(np.float32(1 / math.sqrt(cast.size))) if cast.size else 1.0
    plain = spec.format == "mxfp4" and spec.rounding == "rne" and spec.scale_rule in ("floor", "even", "ceil")
    own = native if plain else ""
    return (spec.format, spec.across, spec.scale_rule, spec.rounding == "sr", spec.draws, _matrix_size(cast), norm, own)


def _matrix_size(cast: Cast) -> int:
    return max(cast.size, 32) if cast.size else 0  # one row of the product for every MX block at least


def _matrix(cast: Cast | None, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Return D·H, ±1, block-diagonal where H is smaller than 32; something small without a rotation."""
    if cast is None or not cast.size:
        return jnp.zeros((1,), dtype)
    h = jnp.asarray(rotation.hadamard_matrix(cast.size))
    h = h if cast.signs is None else cast.signs[:, None] * h
    return jnp.kron(jnp.eye(_matrix_size(cast) // cast.size, dtype=dtype), h.astype(dtype))


def _key_words(cast: Cast | None) -> jax.Array:
    """Return (k0, k1, row offset, column offset), uint32[4]."""
    if cast is None or cast.key is None:
        return jnp.zeros((4,), jnp.uint32)
    words, *offsets, _ = bits.as_key(cast.key)
    return jnp.concatenate([words, jnp.stack(offsets)])


def check_cast(cast: Cast, length: int, free: int) -> None:
    """Raise ValueError when the kernel cannot run a cast, or when its contraction `length` or `free` does not divide."""
    if cast.spec.format not in ("mxfp4", "nvfp4"):
        raise ValueError(f"the quantize kernel knows mxfp4 and nvfp4, not {cast.spec}")
    multiple = max(cast.spec.multiple, cast.size)
    if length % multiple:
        raise ValueError(f"contraction length {length} is not a multiple of {multiple} ({cast.spec})")
    if free % cast.spec.across:
        raise ValueError(f"length {free} across square blocks is not a multiple of {cast.spec.across} ({cast.spec})")


def quantize(
    x: jax.Array,
    row: Cast | None,
    col: Cast | None,
    *,
    tile: tuple[int, int] | None = None,
    native: bool | None = None,
    reduce_amax=lambda amax: amax,
) -> tuple[qtensor.QTensor | None, qtensor.QTensor | None]:
    """Quantize x [R, C] (float32, bfloat16 or float16) along C by `row` and along R by `col`, with one read of x.

    Returns (QTensor of x [R, C] with axis 1, QTensor of xᵀ [C, R] with axis 1), None for a cast not asked for. Scales stand
    for one row each, those of square blocks repeated. tile: rows and columns per program, a default if None. native: whether
    MXFP4 to nearest uses the GPU's own conversion; by default where the device has one and has passed `check_native`.
    reduce_amax: takes the float32[2] maxima of this shard to those of the whole tensor (nvfp4). Raises ValueError for a format
    or length that the kernel does not take.
    """
    R, C = x.shape
    casts, lengths = (row, col), (C, R)
    for cast, length, free in zip(casts, lengths, (R, C), strict=True):
        if cast is not None:
            check_cast(cast, length, free)
    target = triton_call.current_target()
    arch = "" if target is None else target.arch
    native = native_passes(arch) if native is None else native
    constants, grid, options = launch_plan((R, C), casts, arch, native=native, tile=tile)
    matrices = [_matrix(cast, x.dtype) for cast in casts]
    tensors = [jnp.zeros((1,), jnp.float32)] * 2
    if any(cast is not None and cast.spec.format == "nvfp4" for cast in casts):
        tiles = jax.ShapeDtypeStruct((grid[0] * grid[1], 2), jnp.int32)
        maxima = triton_call.call(amax_kernel, x, *matrices, out_type=tiles, grid=grid, options=options, **constants)
        maxima = reduce_amax(rounding.flush(rounding.from_bits(jnp.max(maxima, axis=0))))
        for i, cast in enumerate(casts):
            if cast is not None and cast.spec.format == "nvfp4":
                tensors[i] = scales.nvfp4_tensor_scale(maxima[i : i + 1], str(cast.spec.scale_rule))
    out_type = []
    for cast, free, length in zip(casts, (R, C), lengths, strict=True):
        shapes = [(1,), (1,)] if cast is None else [(free, length // 2), (free, length // cast.spec.block)]
        out_type += [jax.ShapeDtypeStruct(shape, jnp.uint8) for shape in shapes]
    keys = [_key_words(cast) for cast in casts]
    arrays = (x, *keys, *matrices, *tensors)
    out = triton_call.call(quantize_kernel, *arrays, out_type=tuple(out_type), grid=grid, options=options, **constants)
    results = []
    for cast, data, scale, tensor in zip(casts, out[::2], out[1::2], tensors, strict=True):
        if cast is None:
            results.append(None)
        elif cast.spec.format == "mxfp4":
            results.append(qtensor.QTensor(data, lax.bitcast_convert_type(scale, jnp.float8_e8m0fnu), None, cast.spec, 1))
        else:
            scale = lax.bitcast_convert_type(scale, jnp.float8_e4m3fn)
            results.append(qtensor.QTensor(data, scale, tensor.reshape(1, 1), cast.spec, 1))
    return results[0], results[1]


@functools.cache
def native_passes(arch: str) -> bool:
    """Return whether the GPU's own FP4 conversion gives the portable path's bits on this device; False without the device."""
    if arch not in NATIVE_TARGETS or triton_call.is_assumed():
        return False
    with jax.ensure_compile_time_eval():
        passed = check_native()
    logging.getLogger(__name__).log(
        logging.INFO if passed else logging.WARNING,
        "FP4 conversion of %s: its own instruction %s on 65 536 values",
        arch,
        "equals the portable one" if passed else "DIFFERS from the portable one and is not used",
    )
    return passed


def check_native() -> bool:
    """Compare the paths in both orientations: every bfloat16 value, in order and shuffled, for every rule; rotated; float32."""
    patterns = np.arange(65536, dtype=np.uint32)
    shuffled = (patterns * 40503) % 65536
    shuffled = np.where(shuffled & 0x7F80 == 0x7F80, 0, shuffled)  # no NaN or Inf, which would take their blocks along
    ordered, mixed = (
        lax.bitcast_convert_type(jnp.asarray(bits.astype(np.uint16).reshape(256, 256)), jnp.bfloat16)
        for bits in (patterns, shuffled)
    )
    wide = jnp.asarray(np.random.default_rng(0).standard_normal((256, 256)), jnp.float32).at[3, 40].set(jnp.nan)
    plain = [Cast(OperandSpec("mxfp4", scale_rule=rule)) for rule in ("floor", "even", "ceil")]
    cases = [(x, cast) for x in (ordered, mixed) for cast in plain]
    cases += [(x, Cast(OperandSpec("mxfp4"), size=size)) for x in (mixed, wide) for size in (0, 16)]
    for x, cast in cases:
        one, other = (jax.tree.leaves(quantize(x, cast, cast, tile=(128, 256), native=native)) for native in (True, False))
        if any(np.asarray(_as_bytes(a) != _as_bytes(b)).any() for a, b in zip(one, other, strict=True)):
            return False
    return True


def _as_bytes(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.uint8)


def _warps(lanes: int, arch: str) -> int:
    """Return the number of warps with that many lanes, within 512, beyond which each has too few registers."""
    return max(1, min(lanes, 512) // (64 if arch.startswith("gfx") else 32))


def _fit(size: int, wanted: int, casts: tuple[Cast | None, ...]) -> int:
    """Return the tile's length along an axis: no longer than needed, no shorter than a block, a rotation or a matrix unit."""
    least = max(
        [16] + [max(cast.spec.multiple, cast.spec.across or 1, _matrix_size(cast)) for cast in casts if cast is not None]
    )
    return max(least, min(wanted, triton.next_power_of_2(size)))
