"""Proof of which numerics a program holds: every dot in a jaxpr, by what its operands went through on the way there.

An operand counts as "grid" when its values come out of a rounding (`round` or `floor`) and have since only been scaled,
moved, or combined bitwise; as "bf16" when they come out of `reduce_precision` to bfloat16; otherwise as "plain". Nothing is
taken from names or from the recipe, so the count is evidence and not an echo.
"""

from collections import Counter
from typing import Any

import jax
from jax.extend import core

_ROUNDINGS = ("round", "floor")
# What may follow a rounding on the way to the dot: scaling by the block's scale, clipping, flushing, signs, and moves.
# fmt: off
_KEEPS = frozenset((
    "abs", "and", "bitcast_convert_type", "broadcast_in_dim", "concatenate", "convert_element_type", "copy_p", "dynamic_slice",
    "max", "min", "mul", "name", "neg", "not", "or", "pad", "reshape", "select_n", "sharding_constraint", "sign", "slice",
    "squeeze", "transpose", "xor",
))
# fmt: on
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")


def count_dots(program: Any, *args: Any) -> Counter[str]:
    """Return {"lhs × rhs": number of dot_general sites} of a function called with `args`, or of a ClosedJaxpr.

    Sites, not executions: the body of a scan counts once, every branch of a switch counts.
    """
    closed = program if isinstance(program, core.ClosedJaxpr) else jax.make_jaxpr(program)(*args)
    counts: Counter[str] = Counter()
    _walk(closed.jaxpr, ["plain"] * len(closed.jaxpr.invars), counts)
    return counts


def _walk(jaxpr: core.Jaxpr, inputs: list[str], counts: Counter[str]) -> list[str]:
    """Follow one jaxpr, adding its dots to `counts`; return what its results went through."""
    kind: dict[Any, str] = dict(zip(jaxpr.invars, inputs, strict=True))

    def of(atom: Any) -> str:
        return "plain" if isinstance(atom, core.Literal) else kind.get(atom, "plain")

    for eqn in jaxpr.eqns:
        operands = [of(atom) for atom in eqn.invars]
        outs = _results(eqn, operands, counts)
        kind.update(zip(eqn.outvars, outs, strict=True))
    return [of(atom) for atom in jaxpr.outvars]


def _results(eqn: core.JaxprEqn, operands: list[str], counts: Counter[str]) -> list[str]:
    name, number = eqn.primitive.name, len(eqn.outvars)
    if name == "dot_general":
        counts[f"{_word(operands[0])} × {_word(operands[1])}"] += 1
        return ["plain"]
    if name in _ROUNDINGS:
        return ["grid"]
    if name == "reduce_precision":
        return ["bf16" if eqn.params["mantissa_bits"] == 7 and operands[0] != "grid" else operands[0]]
    if name in ("optimization_barrier", "copy"):
        return operands
    inner = _inner(eqn)
    if inner:
        results = [_walk(jaxpr, _inputs(eqn, jaxpr, operands), counts) for jaxpr in inner]
        merged = [next((k for k in kinds if k != "plain"), "plain") for kinds in zip(*results, strict=True)]
        return merged[:number] if len(merged) >= number else ["plain"] * number
    if name in _COMPARISONS:
        return ["bool"]
    if name == "convert_element_type" and operands[0] == "bool":
        return ["step"]
    if name in ("add", "add_any"):  # stochastic rounding adds the outcome of a comparison to the floor
        return ["grid" if sorted(operands) == ["grid", "step"] else "plain"]
    if name in _KEEPS:
        return [next((k for k in operands if k in ("grid", "bf16")), "plain")] * number
    return ["plain"] * number


def _word(kind: str) -> str:
    return kind if kind in ("grid", "bf16") else "plain"


def _inner(eqn: core.JaxprEqn) -> list[core.Jaxpr]:
    """Return the jaxprs an equation runs, those of its derivative rules excepted."""
    found = []
    for key, value in eqn.params.items():
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, core.ClosedJaxpr) and key not in ("fwd_jaxpr_thunk", "bwd", "jvp_jaxpr_fun"):
                found.append(item.jaxpr)
            elif isinstance(item, core.Jaxpr):
                found.append(item)
    return found


def _inputs(eqn: core.JaxprEqn, jaxpr: core.Jaxpr, operands: list[str]) -> list[str]:
    """Return what the inputs of an inner jaxpr went through; a cond's first operand is its index."""
    if eqn.primitive.name == "cond":
        operands = operands[1:]
    if len(jaxpr.invars) != len(operands):
        return ["plain"] * len(jaxpr.invars)
    return operands
