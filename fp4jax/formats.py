"""Number formats: what the 4- and 8-bit patterns mean and which scales go with them. Data only.

An element format is a sign, an exponent and a mantissa field: value = (-1)^s · 2^e · (1 + m/2^mantissa_bits) for normal
numbers, and multiples of 2^(min_exponent - mantissa_bits) below 2^min_exponent. A `Format` couples an element format with
the scale that multiplies it. Sources: OCP Microscaling Formats (MX) v1.0, sections 5.3 and 6; OCP 8-bit Floating Point v1.0;
NVFP4: arXiv 2509.25149, appendix.
"""

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class ElementFormat:
    """One floating-point element format; `max` is the largest finite magnitude, `bits` the width of a code."""

    name: str
    bits: int
    mantissa_bits: int
    min_exponent: int
    max: float


E2M1 = ElementFormat("e2m1", bits=4, mantissa_bits=1, min_exponent=0, max=6.0)
E4M3 = ElementFormat("e4m3", bits=8, mantissa_bits=3, min_exponent=-6, max=448.0)
E5M2 = ElementFormat("e5m2", bits=8, mantissa_bits=2, min_exponent=-14, max=57344.0)

E8M0_BIAS = 127  # an E8M0 byte b decodes to 2^(b - 127); bytes 1…254 are used, 255 is NaN


@dataclasses.dataclass(frozen=True)
class Format:
    """How one operand of a GEMM is represented.

    element: None for an operand that is not quantized. scale: how a scale is stored, "none", "float32", "e8m0", or "e4m3"
    with one float32 scale of the tensor above it. blocks: allowed block sizes along the contraction axis, the default first;
    0 means one scale for the whole tensor. rules: every scale rule with the roundings it goes with, the defaults first.
    """

    name: str
    element: ElementFormat | None
    scale: str
    blocks: tuple[int, ...]
    rules: Mapping[str, tuple[str, ...]]


_BOTH, _NEAREST = ("rne", "sr"), ("rne",)
_FP8 = {"amax": _BOTH, "delayed": _BOTH}
_MX = {"ceil": _BOTH, "floor": _BOTH, "even": _BOTH}
_MXFP4 = {"even": _BOTH, "floor": _BOTH, "ceil": _BOTH, "floor_3_4": _BOTH, "mse": _NEAREST, "quest": _NEAREST}
_NVFP4 = {"two_level": _BOTH, "headroom": _BOTH, "four_over_six": _NEAREST, "single_level": _BOTH, "eden": ("eden",)}

FORMATS = {
    f.name: f
    for f in (
        Format("none", None, "none", (0,), {"none": ("none",)}),  # the operand itself, in the model's own compute dtype
        Format("bf16", None, "none", (0,), {"none": _NEAREST}),  # rounded to bfloat16
        Format("fp8_e4m3", E4M3, "float32", (0, 128), _FP8),  # scale = amax/448
        Format("fp8_e5m2", E5M2, "float32", (0, 128), _FP8),  # scale = amax/57344
        Format("mxfp8_e4m3", E4M3, "e8m0", (32,), _MX),
        Format("mxfp8_e5m2", E5M2, "e8m0", (32,), _MX),
        Format("mxfp4", E2M1, "e8m0", (32,), _MXFP4),
        Format("nvfp4", E2M1, "e4m3", (16,), _NVFP4),
    )
}

# Rules whose decoded values are a known multiple of the operand; a GEMM divides its product by it.
GAIN = {"floor_3_4": 0.75}
# Rules that keep every magnitude of a block within the element format's range, so that stochastic rounding is unbiased.
NEVER_CLIPS = ("amax", "ceil", "floor_3_4", "headroom")
ONE_DIMENSIONAL_RULES = ("quest", "eden")  # defined for blocks along the contraction axis only
EDEN_GROUP = 128  # elements that share one EDEN factor, and the size of the rotation it needs (2601.22813)
