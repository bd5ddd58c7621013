"""Command line:  python -m fp4jax list | describe NAME | diff NAME NAME   [--json]

list       every named recipe with its source
describe   what every operand of every GEMM of a recipe goes through
diff       the leaves in which two recipes differ
"""

import argparse
import dataclasses
import json
import sys
from typing import Any

from fp4jax import formats, recipes
from fp4jax.recipe import GEMMS, OPERANDS, Recipe, leaves

_CONTRACTION = {"fprop": "K (input features)", "dgrad": "N (output features)", "wgrad": "M (tokens)"}
_MEANING = {  # what the words in a description mean; amax = m·2^k, 1 ≤ m < 2, is the largest magnitude under one scale
    "none": "format: the operand itself, in the model's compute dtype",
    "bf16": "format: rounded to bfloat16",
    "fp8_e4m3": "format: E4M3 (max 448), one FP32 scale per tensor or block",
    "fp8_e5m2": "format: E5M2 (max 57344), one FP32 scale per tensor or block",
    "mxfp8_e4m3": "format: E4M3 (max 448), one E8M0 scale 2^e per block of 32",
    "mxfp8_e5m2": "format: E5M2 (max 57344), one E8M0 scale 2^e per block of 32",
    "mxfp4": "format: E2M1 (0, .5, 1, 1.5, 2, 3, 4, 6 and negatives), one E8M0 scale 2^e per block of 32",
    "nvfp4": "format: E2M1, one E4M3 scale per block of 16, one FP32 scale s above them",
    "floor": "scale 2^(k-2): amax/scale in [4, 8), clips above 6 (E8M0 with FP8 elements: the like)",
    "even": "scale 2^(k-2), from m = 1.75 on 2^(k-1): amax/scale in [3.5, 7), clips above 6 (with FP8: the like)",
    "ceil": "the smallest power of two that does not clip: for E2M1 amax/scale in (3, 6]",
    "floor_3_4": "scale of floor, elements × 3/4, the product divided by that: never clips",
    "mse": "the better of floor's scale and twice it, by squared error",
    "quest": "power of two ≤ std · 2.92247856/6: clips; the gradient of a clipped element is zero",
    "amax": "scale amax/448 (E4M3) or amax/57344 (E5M2): never clips",
    "delayed": "scale from the newest maximum of an earlier step: clips what has grown since",
    "two_level": "s = amax_tensor/(6·448), block scale E4M3(amax/6/s): clips where that was rounded down",
    "headroom": "two_level × 17/16: never clips",
    "four_over_six": "s = amax_tensor/(6·256), block scale for amax → 6 or amax → 4, by squared error",
    "single_level": "block scale E4M3(amax/6), s = 1: clips where rounded down; blocks far below 0.01 vanish",
    "eden": "nearest values; each group of 128 is rescaled by ‖x‖²/⟨x,q⟩: unbiased over random rotations",
    "rne": "rounding to nearest, ties to even",
}
_SPLITS = {
    "mean": "split: the mean over tokens is taken off x and dy and multiplied in FP32",
    "first": "split: the first coefficient of every rotated block is multiplied in BF16",
}
_SIGNS = {
    "deterministic": "Hadamard rotation of both operands along the contraction, no signs",
    "fixed": "Hadamard rotation with one random ±1 diagonal for the whole model",
    "per_layer": "Hadamard rotation with a random ±1 diagonal for each GEMM of each layer, the same at every step",
    "redrawn": "Hadamard rotation with a random ±1 diagonal, redrawn every step",
}


def describe(recipe: Recipe) -> list[dict[str, Any]]:
    """Return one row per operand: gemm, operand, contraction, the leaves of its spec, rotation, split, pad."""
    return [
        {
            "gemm": gemm,
            "operand": operand,
            "contraction": _CONTRACTION[gemm],
            **dataclasses.asdict(spec),
            "rotation": str(getattr(recipe, gemm).rotation),
            "split": getattr(recipe, gemm).split,
            "pad": getattr(recipe, gemm).pad,
        }
        for gemm in GEMMS
        for operand, spec in zip(OPERANDS[gemm], (getattr(recipe, gemm).lhs, getattr(recipe, gemm).rhs), strict=True)
    ]


def _legend(recipe: Recipe) -> list[str]:
    """Return a line for every word that occurs in the description of `recipe`."""
    specs = [spec for g in GEMMS for spec in (getattr(recipe, g).lhs, getattr(recipe, g).rhs)]
    words = {w for s in specs for w in (s.format, s.scale_rule, s.rounding) if w != "none" or recipe.is_plain}
    lines = {word: text for word, text in _MEANING.items() if word in words}
    rules = sorted({str(s.scale_rule) for s in specs if s.rounding == "sr"})
    if rules:
        verdicts = (f"{'un' if rule in formats.NEVER_CLIPS else ''}biased with {rule}" for rule in rules)
        lines["sr"] = "stochastic rounding, 24 random bits: " + ", ".join(verdicts)
    if any(s.source == "fprop" for s in specs):
        lines["fprop"] = "source: the operand as fprop has rotated and quantized it; otherwise the high-precision one"
    splits = {getattr(recipe, g).split for g in GEMMS}
    lines |= {word: text for word, text in _SPLITS.items() if word in splits}
    lines |= {str(r): _SIGNS[str(r.signs)] for r in (getattr(recipe, g).rotation for g in GEMMS) if r.size}
    return [f"{word:{max(map(len, lines))}} {text}" for word, text in lines.items()]


def diff(first: Recipe, second: Recipe) -> list[dict[str, Any]]:
    """Return the leaves in which two recipes differ: leaf, first, second."""
    pairs = zip(leaves(first), leaves(second), strict=True)
    return [{"leaf": path, "first": a, "second": b} for (path, a), (_, b) in pairs if a != b]


def _print_table(rows: list[dict[str, Any]]) -> None:
    if not rows:
        print("no difference")
        return
    texts = [list(rows[0]), *[[str(v) for v in row.values()] for row in rows]]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    for row in texts:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def main(argv: list[str]) -> int:
    """Run the command; prints tables to stdout, or JSON; returns the exit code, 2 for an unknown recipe."""
    parser = argparse.ArgumentParser(
        prog="python -m fp4jax", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for command, arguments in (("list", ()), ("describe", ("name",)), ("diff", ("first", "second"))):
        sub = commands.add_parser(command)
        for argument in arguments:
            sub.add_argument(argument)
        sub.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args(argv)
    try:
        if args.command == "list":
            rows = [{"name": n, "summary": e.summary, "source": e.source} for n, e in recipes.ENTRIES.items()]
        elif args.command == "describe":
            rows = describe(recipes.get(args.name))
        else:
            rows = diff(recipes.get(args.first), recipes.get(args.second))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps(rows, indent=1, ensure_ascii=False))
        return 0
    if args.command == "describe":
        entry = recipes.ENTRIES[args.name]
        print(f"{args.name}: {entry.summary}\nsource: {entry.source}")
        if entry.keep_last:
            print(f"kept in BF16: the last {entry.keep_last:.0%} of a model's blocks, unless quant.keep_last says otherwise")
        if entry.deviations:
            print(f"deviations: {entry.deviations}")
        print(f"digest: {entry.recipe.digest()}\n")
    _print_table(rows)
    if args.command == "describe":
        print("\n" + "\n".join(_legend(recipes.get(args.name))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
