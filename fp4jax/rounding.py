"""Exact arithmetic of the casts: float32 bit patterns, rounding to an element grid, sums in a fixed order. Plain jnp.

Everything works on exponent bits: `floor(log2(x))` and `exp2(k)` are not exact on every backend, bit patterns are. XLA on
CPU flushes subnormals and GPUs do not; so that both agree, a float32 with exponent field 0 counts as a zero of its sign.
"""

import jax
import jax.numpy as jnp
from jax import lax

from fp4jax import formats


def to_bits(x: jax.Array) -> jax.Array:
    """Return the bit patterns of a float32 array as int32."""
    return lax.bitcast_convert_type(x, jnp.int32)


def from_bits(b: jax.Array) -> jax.Array:
    """Return the float32 array with the bit patterns `b` (int32)."""
    return lax.bitcast_convert_type(b, jnp.float32)


def power_of_two(exponent_field: jax.Array) -> jax.Array:
    """Return 2^(exponent_field - 127) as float32 for 1 ≤ exponent_field ≤ 254."""
    return from_bits(exponent_field << 23)


def flush(x: jax.Array) -> jax.Array:
    """Return float32 `x` with subnormals replaced by a zero of the same sign."""
    b = to_bits(x)
    return from_bits(jnp.where(b & 0x7F800000 == 0, b & jnp.int32(-(2**31)), b))


def max_magnitude(x: jax.Array, axis: int | tuple[int, ...] | None = None) -> jax.Array:
    """Return max |x| of float32 `x` over some axes or all, dimensions kept; Inf and NaN give Inf or NaN.

    Taken on the bit patterns, whose order is that of the magnitudes with NaN on top: XLA's float maximum on CPU loses NaN.
    """
    return from_bits(jnp.max(to_bits(x) & 0x7FFFFFFF, axis=axis, keepdims=True))


def to_bfloat16(x: jax.Array) -> jax.Array:
    """Return float32 `x` rounded to bfloat16, kept in float32; XLA may drop a pair of casts, not this."""
    return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)


def divide(x: jax.Array, divisor: jax.Array | float) -> jax.Array:
    """Return the IEEE quotient of float32 `x` and a constant or an array that broadcasts to it; 0 where x is 0.

    XLA turns a division by a constant (under jit) or by a broadcast (always) into a product with the reciprocal, and two
    divisions in a row into one by the product: an ulp away. The barriers prevent both.
    """
    if isinstance(divisor, float):
        return lax.optimization_barrier(x / lax.optimization_barrier(jnp.full_like(x, divisor)))
    return x / jnp.where(x == 0, 1.0, divisor)


def no_contraction(x: jax.Array) -> jax.Array:
    """Return x, computed by itself: a product is not fused into the addition that follows."""
    return lax.optimization_barrier(x)


def pairwise_sum(x: jax.Array, axis: int) -> jax.Array:
    """Return the sum over an axis whose length is a power of two, dimension kept, neighbours first: the same bits always.

    A reduction leaves the order of summation to XLA, which changes it between eager and jit; the barrier keeps a product that
    was computed before from being contracted into the first addition.
    """
    x = no_contraction(x)
    while x.shape[axis] > 1:
        even = lax.slice_in_dim(x, 0, None, stride=2, axis=axis)
        x = even + lax.slice_in_dim(x, 1, None, stride=2, axis=axis)
    return x


def round_to_grid(x: jax.Array, element: formats.ElementFormat, random: jax.Array | None = None) -> jax.Array:
    """Round float32 `x` to the values of `element`, saturating at ±element.max; keeps the sign of zero.

    random=None rounds to nearest, ties to even. Otherwise `random` holds uint32 words and the magnitude is rounded up with
    probability ⌊f·2^24⌋ / 2^24, f being its distance from the lower neighbour in grid steps: unbiased to 2^-24 of a step
    wherever nothing saturates, and a value on the grid never moves. Only the upper 24 bits of a word are used.
    """
    magnitude = jnp.abs(x)
    exponent = jnp.maximum(to_bits(magnitude) >> 23, 127 + element.min_exponent)
    step_field = exponent - element.mantissa_bits  # the grid step 2^(exponent - mantissa_bits) around |x|
    steps = magnitude * power_of_two(254 - step_field)  # exact, 0 ≤ steps < 2^(mantissa_bits + 1)
    if random is None:
        rounded = jnp.round(steps)
    else:
        lower = jnp.floor(steps)
        threshold = (random >> 8).astype(jnp.float32) + 1.0  # 1 … 2^24, exact
        rounded = lower + (threshold <= (steps - lower) * 2.0**24).astype(jnp.float32)
    return jnp.copysign(jnp.minimum(rounded * power_of_two(step_field), element.max), x)


def encode(x: jax.Array, element: formats.ElementFormat) -> jax.Array:
    """Return the codes (uint8) of float32 values on the grid of `element`: sign, exponent field, mantissa."""
    magnitude = jnp.abs(x)
    shift = 23 - element.mantissa_bits
    smallest_normal = 2.0**element.min_exponent
    normal = (to_bits(magnitude) >> shift) - ((126 + element.min_exponent) << element.mantissa_bits)
    subnormal = (magnitude * (2.0**element.mantissa_bits / smallest_normal)).astype(jnp.int32)
    code = jnp.where(magnitude < smallest_normal, subnormal, normal)
    sign = (to_bits(x) < 0).astype(jnp.int32) << (element.bits - 1)
    return (code | sign).astype(jnp.uint8)


def decode(codes: jax.Array, element: formats.ElementFormat) -> jax.Array:
    """Return the float32 values of `codes` (uint8), inverse of `encode`. FP8 NaN and Inf codes are not interpreted."""
    code = codes.astype(jnp.int32)
    magnitude_code = code & ((1 << (element.bits - 1)) - 1)
    shift = 23 - element.mantissa_bits
    smallest_normal = 2.0**element.min_exponent
    normal = from_bits((magnitude_code + ((126 + element.min_exponent) << element.mantissa_bits)) << shift)
    subnormal = magnitude_code.astype(jnp.float32) * (smallest_normal / 2.0**element.mantissa_bits)
    magnitude = jnp.where(magnitude_code < 1 << element.mantissa_bits, subnormal, normal)
    return jnp.where(code >> (element.bits - 1) == 1, -magnitude, magnitude)
