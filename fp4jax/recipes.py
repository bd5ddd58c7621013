"""Named recipes: data with citations. `get(name)` returns the `Recipe`; `ENTRIES` holds its description and source.

The ladder is that of arXiv 2605.09825 (Llama 3.1 8B in MXFP4 on MI355X): GEMMs move from per-tensor FP8 to MXFP4 one class
at a time; those not in MXFP4 stay in FP8 (E4M3 forward, E5M2 gradients, current scaling). MXFP4 is E2M1 in blocks of 32
along the contraction axis, scale rule `even` (AMD's Transformer Engine, jax-aiter and Primus-Turbo), RNE unless said.
The exact placement of stochastic rounding in the study is not published; `_sr` puts it on every MXFP4 operand.

The others follow their papers or code; `deviations` says what was left open there and chosen here, or is not done.
Everywhere embeddings, norms, attention and the head stay in high precision (`quant.exempt`), also where a paper is silent.
"""

import dataclasses
import difflib

from fp4jax.recipe import GEMMS, GemmSpec, OperandSpec, Recipe, Rotation, override

STUDY = "arXiv 2605.09825"


@dataclasses.dataclass(frozen=True)
class Entry:
    """A named recipe: what it does in one line, where it comes from, and where this differs from it.

    keep_last: the share of the last blocks (rounded up to whole ones) that stay in BF16, in models that have blocks.
    """

    recipe: Recipe
    summary: str
    source: str
    deviations: str = ""
    keep_last: float = 0.0


_E4M3, _E5M2 = OperandSpec("fp8_e4m3"), OperandSpec("fp8_e5m2")
_M, _M_SR = OperandSpec("mxfp4"), OperandSpec("mxfp4", rounding="sr")
_BF16 = OperandSpec("bf16")
_FP8 = Recipe(GemmSpec(_E4M3, _E4M3), GemmSpec(_E5M2, _E4M3), GemmSpec(_E4M3, _E5M2))
_M_SQUARE, _M_FLOOR = OperandSpec("mxfp4", across=32), OperandSpec("mxfp4", scale_rule="floor")
_M_CEIL, _M_CEIL_SR = (OperandSpec("mxfp4", scale_rule="ceil", rounding=r) for r in ("rne", "sr"))
_M_3_4, _QUEST = OperandSpec("mxfp4", scale_rule="floor_3_4", rounding="sr"), OperandSpec("mxfp4", scale_rule="quest")
_MX8 = OperandSpec("mxfp8_e4m3")
_B, _B_SQUARE = OperandSpec("fp8_e4m3", block=128), OperandSpec("fp8_e4m3", block=128, across=128)
_N, _N_SR, _N_SQUARE = OperandSpec("nvfp4"), OperandSpec("nvfp4", rounding="sr"), OperandSpec("nvfp4", across=16)
_N_46_SQUARE = OperandSpec("nvfp4", scale_rule="four_over_six", across=16)
_N1, _N1_SR = (OperandSpec("nvfp4", scale_rule="single_level", rounding=r) for r in ("rne", "sr"))
_N_46, _EDEN = OperandSpec("nvfp4", scale_rule="four_over_six"), OperandSpec("nvfp4", scale_rule="eden")
_TSENG = GemmSpec(_M_3_4, _M_3_4, Rotation(64, "redrawn"), pad=True)
_RHT16, _RHT16_FIXED = Rotation(16, "redrawn"), Rotation(16, "fixed")


def _mxfp4(*gemms: str, operand: OperandSpec = _M, rotation: Rotation | None = None) -> Recipe:
    """The FP8 recipe with the named GEMMs in MXFP4."""
    spec = GemmSpec(operand, operand, rotation or Rotation())
    return dataclasses.replace(_FP8, **dict.fromkeys(gemms, spec))


def _replace_rule(spec: GemmSpec, rule: str) -> GemmSpec:
    lhs, rhs = (dataclasses.replace(s, scale_rule=rule) for s in (spec.lhs, spec.rhs))
    return dataclasses.replace(spec, lhs=lhs, rhs=rhs)


def _eden(reused: str) -> GemmSpec:
    """A backward GEMM of Quartet II; reused: the operand that fprop has quantized."""
    spec = GemmSpec(_EDEN, _EDEN, Rotation(128, "redrawn"), pad=True)
    return dataclasses.replace(spec, **{reused: dataclasses.replace(_EDEN, source="fprop")})


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
    "fp8_delayed": Entry(
        Recipe(*[_replace_rule(getattr(_FP8, g), "delayed") for g in GEMMS]),
        "per-tensor FP8 whose scale is made from the newest of the last maxima, E4M3 forward, E5M2 gradients",
        "Transformer Engine, MLPerf v6.0",
        "before the first step is done the current maximum is used (Transformer Engine: scale 1)",
    ),
    "fp8_block": Entry(
        Recipe(*[GemmSpec(_B, w, pad=True) for w in (_B_SQUARE, _B_SQUARE, _B)]),
        "E4M3 with FP32 scales, 1x128 for activations and gradients, 128x128 for weights",
        "DeepSeek-V3, arXiv 2412.19437",
        "accumulates in FP32 throughout; no power-of-two scales; a length that 128 does not divide is padded with zeros",
    ),
    "mxfp8": Entry(
        Recipe(*[GemmSpec(_MX8, _MX8)] * 3),
        "E4M3 in blocks of 32 with E8M0 scales rounded up, all six operands",
        "arXiv 2506.08027",
    ),
    "mx_baseline": Entry(
        Recipe(*[GemmSpec(_M_FLOOR, _M_FLOOR)] * 3), "MXFP4 by the letter of the specification", "OCP MX v1.0, section 6.3"
    ),
    "amd_jax_aiter": Entry(
        Recipe(GemmSpec(_M, _M), GemmSpec(_M, _M), GemmSpec(_M, _M_SR, Rotation(16))),
        "MXFP4, wgrad with H16 on both operands and stochastic rounding of dy",
        "ROCm/jax-aiter",
    ),
    "amd_primus_turbo": Entry(
        Recipe(GemmSpec(_M, _M_SQUARE), GemmSpec(_M, _M_SQUARE), GemmSpec(_M, _M, Rotation(16))),
        "MXFP4 with 32x32 weight scales, H16 on both wgrad operands",
        "AMD-AGI/Primus-Turbo",
    ),
    "lumen_mxfp4": Entry(
        Recipe(GemmSpec(_M, _M_SQUARE), GemmSpec(_M_SR, _M_SQUARE), GemmSpec(_M, _M_SR, Rotation(16))),
        "MXFP4 with 32x32 weight scales, stochastic rounding of dy, H16 on both wgrad operands; last 15 % of blocks BF16",
        "Lumen",
        "its scale rule is not stated; `even` is inferred",
        keep_last=0.15,
    ),
    "tseng_mxfp4": Entry(
        Recipe(GemmSpec(_BF16, _BF16), _TSENG, _TSENG),
        "BF16 forward; backward MXFP4 with random-sign H64, inputs × 3/4, stochastic rounding, product × 16/9",
        "arXiv 2502.20586",
        "a contraction that 64 does not divide is padded with zeros",
    ),
    "nvidia_nvfp4": Entry(
        Recipe(GemmSpec(_N, _N_SQUARE), GemmSpec(_N_SR, _N_SQUARE), GemmSpec(_N, _N_SR, Rotation(16, "fixed"))),
        "NVFP4 with 16x16 weight scales, stochastic rounding of dy, fixed-sign H16 on wgrad; last 15 % of blocks BF16",
        "arXiv 2509.25149",
        "the paper keeps chosen linears (about 15 %), for its 8 B model the last 8 of 52 blocks: here the last 15 % of blocks",
        keep_last=0.15,
    ),
    "nvidia_nvfp4_four_over_six": Entry(
        Recipe(GemmSpec(_N_46, _N_46_SQUARE), GemmSpec(_N_SR, _N_46_SQUARE), GemmSpec(_N_46, _N_SR, Rotation(16, "fixed"))),
        "nvidia_nvfp4 whose blocks take the better of max → 6 and max → 4 wherever rounding is to nearest",
        "arXiv 2512.02010 on 2509.25149",
        "as nvidia_nvfp4; operands with stochastic rounding keep NVIDIA's scales",
        keep_last=0.15,
    ),
    "quartet": Entry(
        Recipe(
            GemmSpec(_QUEST, _QUEST, Rotation(32)),
            GemmSpec(_M_3_4, dataclasses.replace(_M_3_4, source="fprop"), Rotation(32, "redrawn")),
            GemmSpec(dataclasses.replace(_M_3_4, source="fprop"), _M_3_4, Rotation(32, "redrawn")),
        ),
        "QuEST forward under H32 with its clip mask on the gradient; backward stochastic × 3/4 on fprop's quantized operands",
        "arXiv 2505.14669",
    ),
    "quartet2": Entry(
        Recipe(GemmSpec(_N_46, _N_46), _eden("rhs"), _eden("lhs")),
        "NVFP4 four-over-six forward; backward EDEN under random-sign H128 on fprop's quantized operands",
        "arXiv 2601.22813",
        "EDEN's factor is taken from x and q with their block scales (the published code leaves the scales out); signs are "
        "drawn anew per layer and GEMM; a contraction that 128 does not divide is padded with zeros",
    ),
    "tetrajet": Entry(
        Recipe(
            GemmSpec(_M_CEIL, _M_CEIL),
            GemmSpec(_M_CEIL_SR, dataclasses.replace(_M_CEIL_SR, source="fprop")),
            GemmSpec(dataclasses.replace(_M_CEIL_SR, source="fprop"), _M_CEIL_SR),
        ),
        "MXFP4 with scales rounded up; backward stochastic, on fprop's quantized operands",
        "arXiv 2502.20853",
        "without its two methods against oscillating weights (Q-EMA, Q-Ramping)",
    ),
    "mxfp4_mean_split": Entry(
        Recipe(*[GemmSpec(_M, _M, split="mean")] * 3),
        "rung 3, the mean over tokens of x and dy taken out and multiplied in FP32",
        "arXiv 2603.10444",
        "applied to MXFP4 with scale rule even and to all three GEMMs; means over the tokens of a microbatch",
    ),
    "fp4_all_the_way": Entry(
        Recipe(GemmSpec(_N1, _N1), GemmSpec(_N1_SR, _N1), GemmSpec(_N1_SR, _N1_SR)),
        "NVFP4-like without a tensor scale; stochastic rounding of dy, and of both wgrad operands",
        "arXiv 2505.19115",
        "does not by itself leave the FP4 backward when gradient-to-noise falls below √3: give quant.schedule",
    ),
}


def names() -> list[str]:
    return list(ENTRIES)


def get(name: str) -> Recipe:
    """Return the recipe of that name; raises ValueError, with the nearest names, when there is none."""
    if name not in ENTRIES:
        near = difflib.get_close_matches(str(name), ENTRIES, n=3)
        hint = f"did you mean {', '.join(map(repr, near))}?" if near else "python -m fp4jax list shows all"
        raise ValueError(f"unknown recipe {name!r}: {hint}")
    return ENTRIES[name].recipe


def parse(text: str, base: Recipe | None = None) -> Recipe:
    """Return the recipe that `text` names: "NAME", "NAME:CHANGE,…" or, on top of `base`, ":CHANGE,…".

    CHANGE: a leaf and its value ("wgrad.lhs.rounding=sr"), or a GEMM and the recipe it is taken from ("fprop=bf16").
    Raises ValueError for an unknown name, leaf or value.
    """
    if not isinstance(text, str):
        return get(text)
    name, _, rest = text.partition(":")
    recipe = get(name) if name or base is None else base
    changes: dict[str, str | int | bool] = {}
    for change in filter(None, rest.split(",")):
        leaf, equals, value = (part.strip() for part in change.partition("="))
        if not equals:
            raise ValueError(f"{change!r} in recipe {text!r} is not leaf=value")
        if leaf in GEMMS:
            recipe = dataclasses.replace(recipe, **{leaf: getattr(get(value), leaf)})
        else:
            as_number = int(value) if value.isdecimal() else value
            changes[leaf] = {"true": True, "false": False}.get(value.lower(), as_number)
    return override(recipe, changes)
