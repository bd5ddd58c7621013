"""Scale rules: from the values of a block, or of the whole tensor, to the scale that divides them. Plain jnp.

Blocks come as a view whose `within` axes run inside a block; results keep these axes with length 1. Powers of two (E8M0) are
returned as bytes, E4M3 block scales as float32 values on the E4M3 grid, per-tensor and FP32 block scales as float32.
"""

import math

import jax
import jax.numpy as jnp

from fp4jax import formats, rounding
from fp4jax.rounding import divide, max_magnitude, pairwise_sum, power_of_two, round_to_grid, to_bits

NAN_BYTE = 255
QUEST_CLIP = 2.92247856  # MSE-optimal clipping point of a Gaussian for E2M1, in standard deviations (2505.14669)
HEADROOM = 17 / 16  # rounding to E4M3 takes at most a seventeenth off a normal scale (2601.22813)
EDEN_SHRINK = 17 / 16 * 0.93  # RNE may clip a little, EDEN's factor makes up for it (2601.22813)


def fp32_scale(amax: jax.Array, largest: float) -> jax.Array:
    """Return the FP32 scale amax / largest (float32, same shape as amax).

    amax zero or subnormal → 1. A quotient below 2^-126 becomes 2^-126. amax Inf or NaN → NaN.
    """
    scale = jnp.maximum(divide(amax, largest), jnp.float32(2.0**-126))
    scale = jnp.where(to_bits(amax) < 0x00800000, 1.0, scale)
    return jnp.where(to_bits(amax) >= 0x7F800000, jnp.nan, scale)


def mx_scale_byte(amax: jax.Array, rule: str, element: formats.ElementFormat = formats.E2M1) -> jax.Array:
    """Return the E8M0 byte (int32) of blocks with maximum magnitude `amax` (float32, ≥ 0); scale = 2^(byte - 127).

    With amax = m·2^k, 1 ≤ m < 2, and the largest element M·2^e (E2M1: 1.5·2², E4M3: 1.75·2⁸, E5M2: 1.75·2¹⁵):
        floor  2^(k-e)                              E2M1: amax/scale in [4, 8)    may clip     OCP MX v1.0, section 6.3
        even   one more where m rounds up to 2      E2M1: amax/scale in [3.5, 7)  may clip     AMD Transformer Engine, Quark
               in the element's mantissa bits       (m ≥ 1.75 for E2M1)
        ceil   one more where m > M                 E2M1: amax/scale in (3, 6]    never clips  2506.08027
    Clamped to 1…254. amax zero or subnormal → 127 (scale 1). amax Inf or NaN → 255.
    """
    fraction, exponent = math.frexp(element.max)
    # Adding just enough to the bits carries into the exponent field exactly when the mantissa is at the rule's threshold.
    carry = {
        "floor": 0,
        "even": 1 << (22 - element.mantissa_bits),
        "ceil": int((2 - 2 * fraction) * 2**23) - 1,
    }[rule]
    bits = to_bits(amax)
    byte = jnp.clip(((bits + carry) >> 23) - (exponent - 1), 1, 254)
    byte = jnp.where(bits < 0x00800000, formats.E8M0_BIAS, byte)
    return jnp.where(bits >= 0x7F800000, NAN_BYTE, byte)


def e8m0_byte(x: jax.Array, within: tuple[int, ...], rule: str, element: formats.ElementFormat) -> jax.Array:
    """Return the E8M0 byte of every block of `x` by any rule that has such scales.

    floor_3_4: that of `floor`; the elements are then multiplied by 3/4, which keeps them below 6 (2502.20586).
    mse: the better of the scale of `floor` and twice it, by the squared error of rounding to nearest; ties to the smaller.
    quest: the largest power of two ≤ std · (2.92247856/6) + 1e-8, std around the block's mean (2505.14669).
    """
    amax = max_magnitude(x, within)
    if rule not in ("floor_3_4", "mse", "quest"):
        return mx_scale_byte(amax, rule, element)
    floor = mx_scale_byte(amax, "floor", element)
    if rule == "floor_3_4":
        return floor
    if rule == "mse":
        scaled = divide_by_power(x, floor)  # errors in units of the smaller scale: their squares neither over- nor underflow
        small = round_to_grid(scaled, element) - scaled
        large = 2 * round_to_grid(scaled * 0.5, element) - scaled
        better = _sum(large * large, within) < _sum(small * small, within)
        return jnp.where(floor == NAN_BYTE, NAN_BYTE, jnp.minimum(floor + better, 254))
    (axis,) = within
    count = x.shape[axis]  # a power of two: dividing by it is exact
    unit = divide_by_power(x, floor)
    mean = _sum(unit, within) * (1 / count)
    deviation = unit - mean
    std = jnp.sqrt(_sum(deviation * deviation, within) * (1 / count)) * power_of_two(jnp.minimum(floor, 254))
    byte = to_bits(rounding.no_contraction(std * jnp.float32(QUEST_CLIP / 6)) + jnp.float32(1e-8)) >> 23
    byte = jnp.where(to_bits(amax) < 0x00800000, formats.E8M0_BIAS, jnp.clip(byte, 1, 254))
    return jnp.where(floor == NAN_BYTE, NAN_BYTE, byte)


def divide_by_power(x: jax.Array, byte: jax.Array) -> jax.Array:
    """Return x / 2^(byte - 127), exact but for underflow; where byte is 255, x is anything."""
    return x * power_of_two(254 - jnp.minimum(byte, 254 - 1))


def _sum(x: jax.Array, within: tuple[int, ...]) -> jax.Array:
    for axis in within:
        x = pairwise_sum(x, axis)
    return x


def _nvfp4_largest(rule: str) -> float:
    """Return the magnitude, in units of the block scale, that a block's maximum is scaled to."""
    return 6 / EDEN_SHRINK if rule == "eden" else 6.0


def nvfp4_tensor_scale(amax: jax.Array, rule: str) -> jax.Array:
    """Return the float32 tensor scale s of `nvfp4_scales` from the tensor's largest magnitude (float32, any shape)."""
    bound = {"two_level": 448, "headroom": 448 / HEADROOM, "four_over_six": 256, "single_level": 448, "eden": 255.99}[rule]
    scale = fp32_scale(amax, _nvfp4_largest(rule) * bound)
    return jnp.where(jnp.isnan(scale), scale, 1.0) if rule == "single_level" else scale


def nvfp4_scales(x: jax.Array, within: tuple[int, ...], rule: str) -> tuple[jax.Array, jax.Array]:
    """Return (block scale on the E4M3 grid, tensor scale s), both float32; value = element · (block scale · s).

    In FP32, each operation rounded to nearest: s = amax / (6·B), block scale = E4M3(amax_block / 6 / s), saturating.
        two_level      B = 448; a block scale rounded down clips its maximum by up to 1/17          2509.25149
        headroom       scales enlarged by 17/16, and B = 448·16/17: nothing clips                   2601.22813
                       (a subnormal block scale below amax_block / 6 / s goes to the next code)
        four_over_six  B = 256; the better of E4M3(amax_block/6/s) and E4M3(amax_block/4/s),        2512.02010
                       by squared error of rounding to nearest, ties to 6
        single_level   s = 1: blocks above 448·6 clip, blocks far below 2^-9·6 vanish               2505.19115
        eden           B = 255.99 and 6 / ((17/16)·0.93) in place of 6                              2601.22813
    A zero block has scale 0, a zero tensor s = 1. Inf or NaN anywhere make s, and so everything, NaN.
    """
    largest = _nvfp4_largest(rule)
    block = max_magnitude(x, within)
    tensor = nvfp4_tensor_scale(max_magnitude(x), rule)

    def block_scale(target: float) -> jax.Array:
        return rounding.flush(divide(rounding.flush(divide(block, target)), tensor))

    def e4m3(scale: jax.Array) -> jax.Array:
        return jnp.where(jnp.isnan(tensor), jnp.nan, round_to_grid(scale, formats.E4M3))

    wanted = block_scale(largest)
    if rule == "headroom":
        scale = e4m3(wanted * HEADROOM)
        return jnp.where(scale < wanted, scale + 2.0**-9, scale), tensor
    scale = e4m3(wanted)
    if rule != "four_over_six":
        return scale, tensor
    smaller, unit = e4m3(block_scale(4.0)), divide(x, tensor)
    error6, error4 = (e4m3_elements(x, s, tensor) * s - unit for s in (scale, smaller))
    return jnp.where(_sum(error4 * error4, within) < _sum(error6 * error6, within), smaller, scale), tensor


def e4m3_elements(x: jax.Array, scale: jax.Array, tensor: jax.Array) -> jax.Array:
    """Return x / (scale · tensor) rounded to the nearest E2M1 value; a zero of x's sign where the scale is 0."""
    return round_to_grid(e4m3_scaled(x, scale, tensor), formats.E2M1)


def e4m3_scaled(x: jax.Array, scale: jax.Array, tensor: jax.Array) -> jax.Array:
    """Return x / (scale · tensor) before rounding; a zero of x's sign where the scale is 0."""
    decode = e4m3_decode(scale, tensor)
    return divide(jnp.where(decode == 0, jnp.copysign(0.0, x), x), jnp.where(decode == 0, 1.0, decode))


def e4m3_decode(scale: jax.Array, tensor: jax.Array) -> jax.Array:
    """Return scale · tensor, what an element is multiplied by; subnormal products are 0."""
    return rounding.flush(scale * tensor)


def eden_scale(scaled: jax.Array, elements: jax.Array, scale: jax.Array, axis: int, random: jax.Array) -> jax.Array:
    """Return the E4M3 block scales, each multiplied by its group's EDEN factor and rounded stochastically.

    factor = ‖x‖² / ⟨x, q⟩ over the 128 elements of a group, x = scaled · scale before and q = elements · scale after rounding,
    1 where q is zero: the projection of q on x then is x, and over random rotations q is unbiased (2601.22813, MS-EDEN).
    Arrays in the block view (…, blocks, 16, …) with `axis` the axis of blocks; random: uint32, one word per block.
    """
    before, after = scaled * scale, elements * scale
    per_group = formats.EDEN_GROUP // scaled.shape[axis + 1]

    def total(product: jax.Array) -> jax.Array:
        per_block = pairwise_sum(product, axis + 1)
        shape = per_block.shape
        groups = per_block.reshape(*shape[:axis], shape[axis] // per_group, per_group, *shape[axis + 1 :])
        summed = jnp.broadcast_to(pairwise_sum(groups, axis + 1), groups.shape)
        return summed.reshape(shape)

    inner = total(before * after)
    factor = jnp.where(inner == 0, 1.0, divide(total(before * before), jnp.where(inner == 0, 1.0, inner)))
    return round_to_grid(scale * factor, formats.E4M3, random)
