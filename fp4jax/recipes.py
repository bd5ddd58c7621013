"""Named recipes: data with citations. `get(name)` returns the `Recipe`; `ENTRIES` holds its description and source.

The ladder is that of arXiv 2605.09825 (Llama 3.1 8B in MXFP4 on MI355X): GEMMs move from per-tensor FP8 to MXFP4 one class
at a time; those not in MXFP4 stay in FP8 (E4M3 forward, E5M2 gradients, current scaling). MXFP4 is E2M1 in blocks of 32
along the contraction axis, scale rule `even` (AMD's Transformer Engine, jax-aiter and Primus-Turbo), RNE unless said.
The exact placement of stochastic rounding in the study is not published; `_sr` puts it on every MXFP4 operand.
"""

import dataclasses
import difflib

from fp4jax.recipe import GemmSpec, OperandSpec, Recipe, Rotation

STUDY = "arXiv 2605.09825"


@dataclasses.dataclass(frozen=True)
class Entry:
    """A named recipe: what it does in one line, and where it comes from."""

    recipe: Recipe
    summary: str
    source: str


_E4M3, _E5M2 = OperandSpec("fp8_e4m3"), OperandSpec("fp8_e5m2")
_M, _M_SR = OperandSpec("mxfp4"), OperandSpec("mxfp4", rounding="sr")
_BF16 = OperandSpec("bf16")
_FP8 = Recipe(GemmSpec(_E4M3, _E4M3), GemmSpec(_E5M2, _E4M3), GemmSpec(_E4M3, _E5M2))
_RHT16, _RHT16_FIXED = Rotation(16, "redrawn"), Rotation(16, "fixed")


def _mxfp4(*gemms: str, operand: OperandSpec = _M, rotation: Rotation | None = None) -> Recipe:
    """The FP8 recipe with the named GEMMs in MXFP4."""
    spec = GemmSpec(operand, operand, rotation or Rotation())
    return dataclasses.replace(_FP8, **dict.fromkeys(gemms, spec))


_F, _FD, _ALL = ("fprop",), ("fprop", "dgrad"), ("fprop", "dgrad", "wgrad")
_SR_GRAD = Recipe(GemmSpec(_M, _M), GemmSpec(_M_SR, _M), GemmSpec(_M, _M_SR))
_H16_WGRAD = dataclasses.replace(_mxfp4(*_ALL), wgrad=GemmSpec(_M, _M, Rotation(16)))

ENTRIES = {
    "none": Entry(Recipe(), "the model's own compute dtype, untouched", "plain nn.Dense"),
    "bf16": Entry(Recipe(*[GemmSpec(_BF16, _BF16)] * 3), "operands rounded to bfloat16, FP32 accumulation", "mixed precision"),
    "fp8_current": Entry(_FP8, "per-tensor FP8, current scaling, E4M3 forward, E5M2 gradients", "Transformer Engine"),
    "mxfp4_fprop": Entry(_mxfp4(*_F), "MXFP4 fprop, the rest FP8", f"{STUDY}, rung 1"),
    "mxfp4_fprop_dgrad": Entry(_mxfp4(*_FD), "MXFP4 fprop and dgrad, wgrad FP8", f"{STUDY}, rung 2"),
    "mxfp4": Entry(_mxfp4(*_ALL), "MXFP4 in all three GEMMs, no stabilizer", f"{STUDY}, rung 3"),
    "mxfp4_fprop_sr": Entry(_mxfp4(*_F, operand=_M_SR), "rung 1 with stochastic rounding", STUDY),
    "mxfp4_fprop_dgrad_sr": Entry(_mxfp4(*_FD, operand=_M_SR), "rung 2 with stochastic rounding", STUDY),
    "mxfp4_sr": Entry(_mxfp4(*_ALL, operand=_M_SR), "rung 3 with stochastic rounding of all six operands", STUDY),
    "mxfp4_sr_grad": Entry(_SR_GRAD, "rung 3 with stochastic rounding of dy only", f"variant of {STUDY}"),
    "mxfp4_fprop_rht16": Entry(_mxfp4(*_F, rotation=_RHT16), "rung 1 with random-sign H16", STUDY),
    "mxfp4_fprop_dgrad_rht16": Entry(_mxfp4(*_FD, rotation=_RHT16), "rung 2 with random-sign H16", STUDY),
    "mxfp4_rht16": Entry(_mxfp4(*_ALL, rotation=_RHT16), "rung 3, random-sign H16, signs redrawn every step", STUDY),
    "mxfp4_rht16_fixed": Entry(
        _mxfp4(*_ALL, rotation=_RHT16_FIXED),
        "rung 3 with random-sign H16, one fixed sign vector",
        f"variant of {STUDY}",
    ),
    "mxfp4_h16": Entry(
        _mxfp4(*_ALL, rotation=Rotation(16)), "rung 3 with deterministic H16 on all six operands", f"{STUDY}, main row"
    ),
    "mxfp4_h32": Entry(_mxfp4(*_ALL, rotation=Rotation(32)), "rung 3 with deterministic H32 on all six operands", STUDY),
    "mxfp4_h16_wgrad": Entry(
        _H16_WGRAD, "rung 3 with deterministic H16 on the two wgrad operands only", "scope of Primus-Turbo, jax-aiter"
    ),
}


def names() -> list[str]:
    return list(ENTRIES)


def get(name: str) -> Recipe:
    """Return the recipe of that name; raises ValueError, with the nearest names, when there is none."""
    if name not in ENTRIES:
        near = difflib.get_close_matches(str(name), ENTRIES, n=3)
        raise ValueError(f"unknown recipe {name!r}: " + (f"did you mean {near}?" if near else f"choose from {names()}"))
    return ENTRIES[name].recipe
