"""Independent oracle of the casts, written from the format definitions and not from fp4jax.

Two levels. Scalars in exact rationals (`fractions.Fraction`) say what is right. Arrays in float64 are fast and still exact:
a float32 divided or multiplied by a power of two, and a midpoint of a grid times a power of two, are float64 numbers, so
every comparison below is exact; only the last step rounds (to float32, by numpy). `test_quantize` checks one level against
the other. Random words come as an argument: the oracle rounds with them, it does not draw them.
"""

import bisect
import functools
from fractions import Fraction

import numpy as np

TINY = 2.0**-126  # the smallest normal float32; anything below counts as a zero of its sign
NAN_BYTE = 255
# (exponent bits, mantissa bits, bias, largest finite value)
ELEMENTS = {"e2m1": (2, 1, 1, 6), "e4m3": (4, 3, 7, 448), "e5m2": (5, 2, 15, 57344)}
ELEMENT_OF = {f"{p}fp8_{e}": e for p in ("", "mx") for e in ("e4m3", "e5m2")} | {"mxfp4": "e2m1", "nvfp4": "e2m1"}


# ------------------------------------------------------------------------------------------------- exact rationals


@functools.cache
def grid(element: str) -> tuple[Fraction, ...]:
    """Return every finite magnitude of the format; the index is the code without its sign."""
    exponent_bits, mantissa_bits, bias, largest = ELEMENTS[element]
    values = []
    for exponent in range(2**exponent_bits):
        for mantissa in range(2**mantissa_bits):
            fraction = Fraction(mantissa, 2**mantissa_bits)
            lead = 1 if exponent else 0
            values.append((lead + fraction) * Fraction(2) ** (max(exponent, 1) - bias))
    return tuple(v for v in values if v <= largest)


def scale_exponent_exact(amax: Fraction, rule: str) -> int:
    """Return e of the scale 2^e, from the definition of each rule; amax > 0."""
    k = 0
    while Fraction(2) ** k > amax:
        k -= 1
    while Fraction(2) ** (k + 1) <= amax:
        k += 1
    if rule == "floor":
        return k - 2
    if rule == "even":
        return k - 2 if amax / Fraction(2) ** k < Fraction(7, 4) else k - 1
    e = k - 4  # ceil: the smallest power of two with amax ≤ 6·scale
    while amax > 6 * Fraction(2) ** e:
        e += 1
    return e


def rne_exact(magnitude: Fraction, element: str) -> int:
    """Return the code of the nearest grid magnitude, the even code where two are equally near, saturating."""
    values = grid(element)
    if magnitude >= values[-1]:
        return len(values) - 1
    lower = bisect.bisect_right(values, magnitude) - 1
    below, above = magnitude - values[lower], values[lower + 1] - magnitude
    if below == above:
        return lower + lower % 2
    return lower if below < above else lower + 1


# ------------------------------------------------------------------------------------------------- arrays, exact in float64


@functools.cache
def grid_array(element: str) -> np.ndarray:
    return np.array([float(v) for v in grid(element)])


def flush(x: np.ndarray) -> np.ndarray:
    """Return x with everything below the smallest normal float32 replaced by a zero of its sign."""
    return np.where(np.abs(x) < TINY, np.copysign(0.0, x), x).astype(x.dtype)


def to_float32(x: np.ndarray) -> np.ndarray:
    """Round exact float64 values to float32, subnormals to zero, too large ones to Inf."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return flush(np.asarray(x).astype(np.float32))


def rne(magnitude: np.ndarray, element: str) -> np.ndarray:
    """Return the codes (int) of magnitudes ≥ 0: how many midpoints lie below, a tie counting when it leads to an even code."""
    values = grid_array(element)
    midpoints = (values[:-1] + values[1:]) / 2
    below = np.searchsorted(midpoints, magnitude, side="left")  # midpoints < magnitude
    tie = np.isin(magnitude, midpoints)
    return below + (tie & (below % 2 == 1))


def stochastic(magnitude: np.ndarray, element: str, words: np.ndarray) -> np.ndarray:
    """Return the codes of a stochastic rounding: up when the top 24 bits of the word are < ⌊f·2^24⌋, f the share of the gap."""
    values = grid_array(element)
    lower = np.clip(np.searchsorted(values, magnitude, side="right") - 1, 0, len(values) - 1)
    upper = np.minimum(lower + 1, len(values) - 1)
    gap = np.where(upper > lower, values[upper] - values[lower], 1.0)
    share = np.floor((magnitude - values[lower]) / gap * 2.0**24)  # gap is a power of two
    return np.where((words >> 8) < share, upper, lower)


def scale_exponent(amax: np.ndarray, rule: str) -> np.ndarray:
    fraction, exponent = np.frexp(amax.astype(np.float64))  # amax = fraction·2^exponent, ½ ≤ fraction < 1
    m, k = 2 * fraction, exponent - 1
    larger = {"floor": np.zeros(m.shape, bool), "even": m >= 1.75, "ceil": m > 1.5}[rule]
    return np.where(larger, k - 1, k - 2)


def scale_byte(amax: np.ndarray, rule: str) -> np.ndarray:
    byte = np.clip(scale_exponent(np.where(np.isfinite(amax), amax, 1), rule) + 127, 1, 254)
    byte = np.where(amax < TINY, 127, byte)
    return np.where(np.isfinite(amax), byte, NAN_BYTE)


def encode(signed: np.ndarray, element: str, words: np.ndarray | None = None) -> np.ndarray:
    code = rne(np.abs(signed), element) if words is None else stochastic(np.abs(signed), element, words)
    sign_bit = 8 if element == "e2m1" else 128
    return (code + sign_bit * np.signbit(signed)).astype(np.uint8)


def decode(codes: np.ndarray, element: str) -> np.ndarray:
    sign_bit = 8 if element == "e2m1" else 128
    magnitude = grid_array(element)[codes & (sign_bit - 1)]
    return np.where(codes & sign_bit, -magnitude, magnitude)


def mx_quantize(x, axis: int, rule: str = "even", words=None):
    """Return (codes, scale bytes, values) of MXFP4 in blocks of 32 along `axis`: uint8, uint8, float32."""
    x = np.moveaxis(np.asarray(x, np.float32), axis, -1)
    words = None if words is None else np.moveaxis(np.asarray(words), axis, -1).reshape(*x.shape[:-1], -1, 32)
    blocks = flush(x).reshape(*x.shape[:-1], -1, 32)
    bad = ~np.isfinite(blocks).all(-1)
    blocks = np.where(bad[..., None], np.float32(0), blocks).astype(np.float64)
    byte = np.where(bad, NAN_BYTE, scale_byte(np.abs(blocks).max(-1), rule)).astype(np.uint8)
    scale = np.ldexp(1.0, byte.astype(int) - 127)[..., None]
    codes = np.where(bad[..., None], 0, encode(blocks / scale, "e2m1", words)).astype(np.uint8)
    values = to_float32(np.where(bad[..., None], np.nan, decode(codes, "e2m1") * scale))
    back = lambda a: np.moveaxis(a.reshape(*x.shape[:-1], -1), -1, axis)  # noqa: E731
    return back(codes), back(byte), back(values)


def fp8_scale(amax: np.float32, element: str) -> np.float32:
    """Return the float32 nearest to amax / largest (numpy divides correctly rounded); 1 for a zero tensor; at least 2^-126."""
    if not np.isfinite(amax):
        return np.float32(np.nan)
    with np.errstate(under="ignore"):
        scale = np.float32(amax) / np.float32(ELEMENTS[element][3])
    return np.float32(1) if amax < TINY else np.maximum(scale, np.float32(TINY))


def fp8_quantize(x, element: str, words=None):
    """Return (codes, scale, values) of FP8 with one scale for the whole tensor: float32(x / scale), then rounded."""
    x = flush(np.asarray(x, np.float32))
    scale = fp8_scale(np.abs(x).max(), element)
    if np.isnan(scale):
        return np.zeros(x.shape, np.uint8), scale, np.full(x.shape, np.nan, np.float32)
    with np.errstate(under="ignore"):
        quotient = flush(x / scale)
    codes = encode(quotient.astype(np.float64), element, words)
    return codes, scale, to_float32(decode(codes, element) * np.float64(scale))


def fake_quantize(x, spec, axis: int, words=None) -> np.ndarray:
    """Return the float32 values that an operand of `spec` has in the GEMM."""
    x = np.asarray(x, np.float32)
    if spec.format == "none":
        return x
    if spec.format == "bf16":
        return bfloat16_rne(x)
    if spec.block:
        return block_quantize(x, spec, axis, words)["values"]
    return fp8_quantize(x, ELEMENT_OF[spec.format], words)[2]


# ------------------------------------------------------------------------------------------------- any block format

# NVFP4: what amax_block is divided by, and the largest block scale, as the papers give them (see fp4jax.scales)
NVFP4 = {
    "two_level": (6, 448),
    "headroom": (6, 448 / (17 / 16)),
    "four_over_six": (6, 256),
    "single_level": (6, 448),
    "eden": (6 / (17 / 16 * 0.93), 255.99),
}


def tiles(x, spec, axis: int):
    """Return x as [blocks, elements of a block], blocks row-major with the contraction axis last."""
    x = np.moveaxis(np.asarray(x), axis, -1)
    rows, columns = int(np.prod(x.shape[:-1])) // spec.across, x.shape[-1] // spec.block
    return x.reshape(rows, spec.across, columns, spec.block).swapaxes(1, 2).reshape(rows * columns, -1)


def untile(blocks, shape, spec, axis: int):
    """Undo `tiles`."""
    moved = tuple(np.moveaxis(np.empty(shape, bool), axis, -1).shape)
    rows, columns = int(np.prod(moved[:-1])) // spec.across, moved[-1] // spec.block
    x = blocks.reshape(rows, columns, spec.across, spec.block).swapaxes(1, 2).reshape(moved)
    return np.moveaxis(x, -1, axis)


def block_quantize(x, spec, axis: int, words=None) -> dict:
    """Return {"codes", "values", "scales", "tensor", "close"}; scales per block in float32.

    Where a rule compares two errors or takes a root, "close" marks the blocks whose decision lies within rounding.
    """
    element = ELEMENT_OF.get(spec.format, "e2m1")
    blocks = flush(tiles(np.asarray(x, np.float32), spec, axis))
    words = None if words is None else tiles(words, spec, axis)
    amax = np.abs(blocks).max(-1)
    close, tensor = np.zeros(len(blocks), bool), np.float32(1)
    with np.errstate(all="ignore"):
        if spec.scale == "float32":
            scales = np.array([fp8_scale(a, element) for a in amax], np.float32)
            scaled = flush(blocks / scales[:, None])
        elif spec.scale == "e8m0":
            scales, close = e8m0_scales(blocks, amax, spec.scale_rule, element)
            scaled = (blocks * np.float32(0.75) if spec.scale_rule == "floor_3_4" else blocks) / scales[:, None].astype(float)
        else:
            scales, tensor, close = nvfp4_scales(blocks, amax, spec.scale_rule)
            product = scales[:, None] * tensor
            scaled = flush((blocks / np.where(product == 0, np.float32(1), product)).astype(np.float32))
            scaled = np.where(scales[:, None] == 0, np.copysign(np.float32(0), blocks), scaled)
        decode_scale = (scales * tensor)[:, None]
        bad = ~np.isfinite(decode_scale) | np.zeros(blocks.shape, bool)
        scaled = np.where(bad, 0, scaled).astype(np.float64)
        codes = np.where(bad, 0, encode(scaled, element, words if spec.rounding == "sr" else None)).astype(np.uint8)
        if spec.rounding == "eden":
            scales, close = eden_scales(scaled, decode(codes, element), scales, words[:, 0])
            decode_scale = (scales * tensor)[:, None]
        values = to_float32(np.where(bad, np.nan, decode(codes, element) * decode_scale.astype(np.float64)))
    back = lambda a: untile(np.broadcast_to(a, blocks.shape), np.shape(x), spec, axis)  # noqa: E731
    return {"codes": back(codes), "values": back(values), "scales": scales, "tensor": tensor, "close": back(close[:, None])}


def e8m0_scales(blocks, amax, rule: str, element: str):
    """Return (scales as float32, NaN where a block is not finite; blocks whose decision is close)."""
    largest, mantissa_bits = ELEMENTS[element][3], ELEMENTS[element][1]
    finite = np.isfinite(amax)
    fraction, exponent = np.frexp(np.where(finite & (amax >= TINY), amax, 1).astype(np.float64))
    m, k = 2 * fraction, exponent - 1
    top = int(np.floor(np.log2(largest)))
    larger = {"even": m >= 2 - 0.5 ** (mantissa_bits + 1), "ceil": m > largest / 2.0**top}.get(rule, np.zeros(m.shape, bool))
    close = np.zeros(m.shape, bool)
    e = k - top + larger
    x = np.where(finite[:, None], blocks, 0).astype(np.float64)
    if rule == "mse":
        small, large = (
            ((decode(encode(x / s, element), element) * s - x) ** 2).sum(-1)
            for s in (2.0 ** e[:, None], 2.0 ** (e[:, None] + 1))
        )
        e, close = np.where(large < small, e + 1, e), nearly_equal(large, small)
    if rule == "quest":
        wanted = x.std(-1) * (2.92247856 / 6) + 1e-8
        e = np.floor(np.log2(wanted)).astype(int)
        close = np.abs(np.log2(wanted) - np.round(np.log2(wanted))) < 1e-4
    scale = np.ldexp(1.0, np.clip(np.where(amax < TINY, 0, e), -126, 127)).astype(np.float32)
    return np.where(finite, scale, np.float32(np.nan)), close


def eden_scales(scaled, elements, scales, words):
    """Return (E4M3 scales times ‖x‖²/⟨x,q⟩ of their group of 128, rounded stochastically; blocks close to the other one)."""
    before, after = (a.reshape(-1, 8, 16) * scales.reshape(-1, 8, 1).astype(np.float64) for a in (scaled, elements))
    inner = (before * after).sum((1, 2))
    factor = np.where(inner == 0, 1, (before**2).sum((1, 2)) / np.where(inner == 0, 1, inner))
    wanted = (scales.reshape(-1, 8) * factor[:, None]).reshape(-1)
    down, up = (
        decode(stochastic(wanted, "e4m3", w), "e4m3") for w in (np.full(wanted.shape, 2**32 - 1), np.zeros(wanted.shape, int))
    )
    share = (wanted - down) / np.where(up > down, up - down, 1)
    rounded = decode(stochastic(wanted, "e4m3", words), "e4m3").astype(np.float32)
    close = (np.abs(share - (words >> 8) / 2.0**24) < 1e-4) | (share < 1e-4) | (share > 1 - 1e-4)
    return rounded, close & (wanted > 0)


def nearly_equal(a, b):
    """Return where a float32 evaluation could order a and b otherwise; an exact tie is one in float32 as well."""
    return (np.abs(a - b) < 1e-5 * np.maximum(a, b)) & (a != b)


def e4m3(x: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(x), decode(rne(np.where(np.isfinite(x), x, 0).astype(np.float64), "e4m3"), "e4m3"), x).astype(
        np.float32
    )


def nvfp4_scales(blocks, amax, rule: str):
    """Return (block scales, tensor scale, blocks whose decision is close), every step rounded to float32."""
    target, bound = NVFP4[rule]
    f = np.float32
    top = f(amax.max())
    if not np.isfinite(top):
        return np.full(amax.shape, f(np.nan)), f(np.nan), np.zeros(amax.shape, bool)
    tensor = f(1) if top < TINY or rule == "single_level" else np.maximum(top / f(target * bound), f(TINY))
    wanted = flush(flush(amax / f(target)) / tensor)
    close = np.zeros(amax.shape, bool)
    if rule == "headroom":
        scale = e4m3(wanted * f(17 / 16))
        return np.where(scale < wanted, scale + f(2.0**-9), scale), tensor, close
    scale = e4m3(wanted)
    if rule == "four_over_six":
        smaller = e4m3(flush(flush(amax / f(4)) / tensor))
        unit = blocks.astype(np.float64) / float(tensor)
        error6, error4 = (
            ((decode(encode(unit / np.where(s == 0, 1, s)[:, None], "e2m1"), "e2m1") * s[:, None] - unit) ** 2).sum(-1)
            for s in (scale.astype(float), smaller.astype(float))
        )
        scale = np.where(error4 < error6, smaller, scale)
        close = nearly_equal(error4, error6)
    return scale, tensor, close


def bfloat16_rne(x: np.ndarray) -> np.ndarray:
    """Round finite float32 to bfloat16, ties to even, on the bit patterns."""
    b = x.view(np.uint32).astype(np.uint64)
    return (((b + 0x7FFF + ((b >> 16) & 1)) >> 16) << 16).astype(np.uint32).view(np.float32)


def hadamard(x, size: int, axis: int, signs=None) -> np.ndarray:
    """Rotate in float32 in a fixed order of summation: neighbours in pairs, pairs of those, …; then times 1/√size."""
    matrix = np.ones((1, 1), np.float32)
    while len(matrix) < size:
        matrix = np.kron(np.array([[1, 1], [1, -1]], np.float32), matrix)
    x = np.moveaxis(np.asarray(x, np.float32), axis, -1)
    blocks = x.reshape(*x.shape[:-1], -1, 1, size)
    diagonal = np.ones(size, np.float32) if signs is None else np.asarray(signs, np.float32)
    terms = blocks * diagonal * matrix  # [..., block, row, term]
    while terms.shape[-1] > 1:
        terms = terms[..., ::2] + terms[..., 1::2]
    return np.moveaxis((terms[..., 0] * np.float32(size**-0.5)).reshape(x.shape), -1, axis)
