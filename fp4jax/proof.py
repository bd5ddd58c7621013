"""Proof of which numerics a program holds: every dot in a jaxpr, by what its operands went through on the way there.

An operand counts as "grid" when its values come out of a rounding (`round` or `floor`) and have since only been scaled by
broadcast factors or powers of two, moved, or combined with their like; as "bf16" when they come out of `reduce_precision` to
bfloat16; otherwise as "plain". Nothing is taken from names or from the recipe, so the count is evidence and not an echo. It
cannot see how fine the grid is.
"""

from collections import Counter
from typing import Any

import jax
from jax.extend import core

_DOTS = ("dot_general", "ragged_dot", "ragged_dot_general", "conv_general_dilated")
_ROUNDINGS = ("round", "floor")
# Moves and sign changes keep what their operand is.
# fmt: off
_KEEPS = frozenset((
    "abs", "bitcast_convert_type", "convert_element_type", "copy", "copy_p", "dynamic_slice", "name", "neg", "reshape",
    "sharding_constraint", "slice", "squeeze", "transpose",
))
# What is on the grid when every operand is, constants and broadcast values apart.
_COMBINES = frozenset((
    "and", "clamp", "concatenate", "max", "min", "mul", "or", "pad", "select_n", "shift_left", "shift_right_arithmetic",
    "shift_right_logical", "stack", "xor",
))
# fmt: on
_FACTORS = ("const", "spread", "power", "bool", "step")  # may be combined with a rounded operand


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
        return "const" if isinstance(atom, core.Literal) else kind.get(atom, "const")  # a constvar has no entry

    for eqn in jaxpr.eqns:
        operands = [of(atom) for atom in eqn.invars]
        results = zip(eqn.outvars, _results(eqn, operands, counts), strict=True)
        kind.update({var: "bool" if _dtype(var) == "bool" else what for var, what in results})
    return [of(atom) for atom in jaxpr.outvars]


def _results(eqn: core.JaxprEqn, operands: list[str], counts: Counter[str]) -> list[str]:
    name, number = eqn.primitive.name, len(eqn.outvars)
    if name in _DOTS:
        counts[f"{_word(operands[0])} × {_word(operands[1])}"] += 1
        return ["plain"] * number
    inner = _inner(eqn)
    if inner:
        return _through(eqn, inner, operands, counts)
    if name in _ROUNDINGS:
        return ["grid"]
    if name == "reduce_precision":
        return ["bf16" if eqn.params["mantissa_bits"] == 7 and operands[0] != "grid" else operands[0]]
    if name == "optimization_barrier":
        return operands
    if name == "convert_element_type" and operands[0] == "bool":
        return ["step"]
    if name == "shift_left" and isinstance(eqn.invars[1], core.Literal) and int(eqn.invars[1].val) == 23:
        return ["power"]  # an exponent field: the bits of a power of two
    if name == "broadcast_in_dim":
        return [operands[0] if operands[0] in ("grid", "bf16", "power", "const") else "spread"]
    if name == "gather":  # of repeated scales
        return ["spread" if _size(eqn.outvars[0]) > _size(eqn.invars[0]) else "plain"]
    if name in ("add", "sub") and _dtype(eqn.outvars[0]).startswith(("int", "uint")) and "const" in operands:
        return [operands[0] if operands[1] == "const" else operands[1]]  # codes, shifted
    if name in ("add", "add_any"):  # stochastic rounding adds the outcome of a comparison to the floor
        return ["grid" if sorted(operands) == ["grid", "step"] else "plain"]
    if name in _KEEPS:
        return [operands[0]] * number
    if name in _COMBINES:
        if name not in ("concatenate", "pad", "stack"):  # elementwise: an operand with axes of length 1 is broadcast
            small = [_size(atom) < _size(eqn.outvars[0]) for atom in eqn.invars]
            operands = ["spread" if s and k in ("plain", "grid") else k for k, s in zip(operands, small, strict=True)]
        rest = [k for k in operands if k not in _FACTORS]
        if not rest:
            return [next((k for k in ("power", "spread", "const") if k in operands), "plain")]
        return [rest[0] if len(set(rest)) == 1 else "plain"] * number
    return ["plain"] * number


def _through(eqn: core.JaxprEqn, inner: list[core.Jaxpr], operands: list[str], counts: Counter[str]) -> list[str]:
    """Return what the results of an equation with inner jaxprs went through."""
    name, number = eqn.primitive.name, len(eqn.outvars)
    if name in ("scan", "while"):  # what comes in may change from one iteration to the next: it counts as plain
        results = [_walk(jaxpr, ["plain"] * len(jaxpr.invars), counts) for jaxpr in inner]
        return results[0] if name == "scan" else ["plain"] * number
    if name == "cond":
        operands = operands[1:]
    same = all(len(jaxpr.invars) == len(operands) for jaxpr in inner)
    results = [_walk(j, operands if same else ["plain"] * len(j.invars), counts) for j in inner]
    if any(len(kinds) != number for kinds in results):
        return ["plain"] * number
    return [kinds[0] if len(set(kinds)) == 1 else "plain" for kinds in zip(*results, strict=True)]


def _dtype(var: Any) -> str:
    return str(getattr(var.aval, "dtype", ""))


def _size(atom: Any) -> int:
    return atom.aval.size


def _word(kind: str) -> str:
    return kind if kind in ("grid", "bf16") else "plain"


def _inner(eqn: core.JaxprEqn) -> list[core.Jaxpr]:
    """Return the jaxprs an equation runs, those of its derivative rules excepted."""
    found = []
    for value in eqn.params.values():  # derivative rules are functions there, not jaxprs
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, core.ClosedJaxpr):
                found.append(item.jaxpr)
            elif isinstance(item, core.Jaxpr):
                found.append(item)
    return found
