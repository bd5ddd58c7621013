"""What the literature leaves open, at laptop size: one grid per question, five paired seeds.

    python -m train.ablate --config=configs/hypotheses.py:a --workdir=runs/ablation_tiny --report=results/hypothesis_a

Model, data and cells are those of ablation_tiny, so all grids can share one workdir and every cell runs once. Hardware: 2 CPU
cores, about 2 minutes per cell; `a` has 76 cells. Contrasts (row − other, paired within seeds) are what a question asks for.

    a  scale rule × rotation                           f  1x32 against 32x32 weight scales
    b  does SR hurt because it clips, or in itself     g  MXFP4 + H16 against NVFP4 and Quartet
    c  SR on which operands, with and without H16      h  FP8 for the last 10 % of the steps
    d  random signs: redrawn, per layer, fixed, none   i  the mean or first coefficient kept in high precision
    e  rotation size 16, 32, 64
"""

from collections.abc import Callable
from typing import Any

from ml_collections import ConfigDict

from configs import ablation_tiny
from configs.ablation_tiny import GEMMS, OPERANDS, with_rule

Row = Any  # what ablate.rows takes
FP8 = "fp8_current"


def label(row: Row) -> str:
    return row if isinstance(row, str) else row[0]


def variant(recipe: Row, name: str, **changes: Any) -> tuple[str, str]:
    """Return (label, recipe) of a row with leaves changed, __ standing for the dot."""
    base = recipe if isinstance(recipe, str) else recipe[1]
    text = ",".join(f"{leaf.replace('__', '.')}={value}" for leaf, value in changes.items())
    return f"{label(recipe)}_{name}", base + ("," if ":" in base else ":") + text


def everywhere(recipe: Row, name: str, leaf: str, value: Any) -> tuple[str, str]:
    """Return a row with one leaf of all six operands, or of all three GEMMs ("rotation__size"), changed."""
    places = (
        GEMMS if leaf.startswith(("rotation", "split")) else [f"{gemm}__{operand}" for gemm in GEMMS for operand in OPERANDS]
    )
    return variant(recipe, name, **{f"{place}__{leaf}": value for place in places})


def scale_rules() -> tuple[list[Row], list[tuple[Row, Row]]]:
    rotations, rules = ("mxfp4", "mxfp4_h16", "mxfp4_h16_wgrad"), ("floor", "even", "ceil", "mse")
    of: dict[tuple[str, str], Row] = {
        (rotation, rule): rotation if rule == "even" else with_rule(rotation, rule) for rule in rules for rotation in rotations
    }
    contrasts = [(of[rotation, rule], of["mxfp4", rule]) for rule in rules for rotation in rotations[1:]]
    contrasts += [(of[rotation, rule], of[rotation, "floor"]) for rotation in rotations for rule in rules[1:]]
    return list(of.values()), contrasts


def stochastic() -> tuple[list[Row], list[tuple[Row, Row]]]:
    pairs: list[tuple[Row, Row]] = []
    for rule in ("even", "floor", "ceil", "floor_3_4"):
        pairs.append(("mxfp4_sr", "mxfp4") if rule == "even" else (with_rule("mxfp4_sr", rule), with_rule("mxfp4", rule)))
    return [row for pair in pairs for row in pair], pairs


def stochastic_scope() -> tuple[list[Row], list[tuple[Row, Row]]]:
    rows: list[Row] = []
    contrasts: list[tuple[Row, Row]] = []
    for base in ("mxfp4", "mxfp4_h16"):
        everything = "mxfp4_sr" if base == "mxfp4" else everywhere(base, "sr", "rounding", "sr")
        gradients = variant(base, "sr_grad", dgrad__lhs__rounding="sr", wgrad__rhs__rounding="sr")
        wgrad = variant(base, "sr_wgrad", wgrad__rhs__rounding="sr")
        rows += [base, everything, gradients, wgrad]
        contrasts += [(row, base) for row in (everything, gradients, wgrad)]
    return rows, contrasts


def signs() -> tuple[list[Row], list[tuple[Row, Row]]]:
    redrawn: Row = "mxfp4_rht16"
    backward = variant(redrawn, "backward", fprop__rotation__signs="deterministic")
    per_layer = everywhere(redrawn, "per_layer", "rotation__signs", "per_layer")
    rows: list[Row] = ["mxfp4", "mxfp4_h16", "mxfp4_rht16_fixed", per_layer, redrawn, backward]
    others: list[Row] = [backward, per_layer, "mxfp4_rht16_fixed"]
    return rows, [(row, "mxfp4_h16") for row in rows[2:]] + [(redrawn, row) for row in others]


def sizes() -> tuple[list[Row], list[tuple[Row, Row]]]:
    size, pad = ({f"{gemm}__{leaf}": value for gemm in GEMMS} for leaf, value in (("rotation__size", 64), ("pad", True)))
    largest = variant("mxfp4_h16", "64", **size, **pad)  # d_ff = 352 is five and a half times 64
    rows: list[Row] = ["mxfp4", "mxfp4_h16", "mxfp4_h32", largest]
    return rows, [("mxfp4_h32", "mxfp4_h16"), (largest, "mxfp4_h16")]


def square_weights() -> tuple[list[Row], list[tuple[Row, Row]]]:
    square = variant("mxfp4", "square", fprop__rhs__across=32, dgrad__rhs__across=32)
    rotated = variant("mxfp4_h16_wgrad", "square", fprop__rhs__across=32, dgrad__rhs__across=32)
    return ["mxfp4", square, "mxfp4_h16_wgrad", rotated], [(square, "mxfp4"), (rotated, "mxfp4_h16_wgrad")]


def camps() -> tuple[list[Row], list[tuple[Row, Row]]]:
    rows: list[Row] = ["mxfp4_h16", "nvidia_nvfp4", "nvidia_nvfp4_four_over_six", "quartet", "quartet2"]
    return rows, [(row, "mxfp4_h16") for row in rows[1:]]


def healing() -> tuple[list[Row], list[tuple[Row, Row]]]:
    healed: list[Row] = [(f"{row}_healed", row, ((0.9, FP8),)) for row in ("mxfp4", "mxfp4_h16")]
    return ["mxfp4", "mxfp4_h16", *healed], [(healed[0], "mxfp4"), (healed[1], "mxfp4_h16")]


def kept_parts() -> tuple[list[Row], list[tuple[Row, Row]]]:
    first = variant("mxfp4_h16_wgrad", "first", wgrad__split="first")
    rows: list[Row] = ["mxfp4", "mxfp4_mean_split", "mxfp4_h16_wgrad", first]
    return rows, [("mxfp4_mean_split", "mxfp4"), (first, "mxfp4_h16_wgrad")]


QUESTIONS: dict[str, Callable[[], tuple[list[Row], list[tuple[Row, Row]]]]] = {
    "a": scale_rules,
    "b": stochastic,
    "c": stochastic_scope,
    "d": signs,
    "e": sizes,
    "f": square_weights,
    "g": camps,
    "h": healing,
    "i": kept_parts,
}


def get_config(argument: str = "a") -> ConfigDict:
    if argument not in QUESTIONS:
        raise ValueError(f"unknown argument {argument!r}: choose from {', '.join(QUESTIONS)}")
    config: Any = ablation_tiny.get_config().unlock()
    rows, contrasts = QUESTIONS[argument]()
    config.ablate.rows = (FP8, *dict.fromkeys(rows))
    config.ablate.seeds = (0, 1, 2, 3, 4)
    config.ablate.perturbed = (FP8,)
    config.ablate.contrasts = tuple((label(row), label(other)) for row, other in contrasts)
    return config.lock()
