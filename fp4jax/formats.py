"""Number formats: what the 4- and 8-bit patterns mean and which scales go with them. Data only.

An element format is a sign, an exponent and a mantissa field: value = (-1)^s · 2^e · (1 + m/2^mantissa_bits) for normal
numbers, and multiples of 2^(min_exponent - mantissa_bits) below 2^min_exponent. A `Format` couples an element format with
the scale that multiplies it. Sources: OCP Microscaling Formats (MX) v1.0, sections 5.3 and 6; OCP 8-bit Floating Point v1.0.
"""

import dataclasses


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

    element: None for an operand that is not quantized. blocks: allowed block sizes along the contraction axis, the default
    first; 0 means one scale for the whole tensor. scale_rules and roundings: likewise, the default first.
    """

    name: str
    element: ElementFormat | None
    blocks: tuple[int, ...]
    scale_rules: tuple[str, ...]
    roundings: tuple[str, ...]


FORMATS = {
    f.name: f
    for f in (
        Format("none", None, (0,), ("none",), ("none",)),  # the operand itself, in the model's own compute dtype
        Format("bf16", None, (0,), ("none",), ("rne",)),  # rounded to bfloat16
        Format("fp8_e4m3", E4M3, (0,), ("amax",), ("rne", "sr")),  # FP32 scale = amax/448 per tensor
        Format("fp8_e5m2", E5M2, (0,), ("amax",), ("rne", "sr")),  # FP32 scale = amax/57344 per tensor
        Format("mxfp4", E2M1, (32,), ("even", "floor", "ceil"), ("rne", "sr")),  # OCP MX: E8M0 scale per 32 elements
    )
}
