"""The typed recipe: what every operand of the three GEMMs of a linear layer goes through. Frozen data, no jax.

    fprop  y_MN  = x_MK · w_KN      lhs = x,  rhs = w,   contraction K (input features)
    dgrad  dx_MK = dy_MN · w_KNᵀ    lhs = dy, rhs = w,   contraction N (output features)
    wgrad  dw_KN = x_MKᵀ · dy_MN    lhs = x,  rhs = dy,  contraction M (tokens)

Blocks, scales and rotation run along the contraction axis. The rotation belongs to the GEMM, so both operands always share
it together with its signs: an unpaired rotation cannot be written. A field left at None takes its format's default.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from fp4jax import formats

GEMMS: tuple[str, ...] = ("fprop", "dgrad", "wgrad")
OPERANDS = {"fprop": ("x", "w"), "dgrad": ("dy", "w"), "wgrad": ("x", "dy")}
SIGNS = ("deterministic", "fixed", "per_layer", "redrawn")


def _choose(owner: str, field: str, value: Any, allowed: tuple) -> Any:
    """Return `value`, or the first allowed one where it is None; raise ValueError when it is not allowed."""
    if value is None:
        return allowed[0]
    if isinstance(value, str):
        value = value.lower()
    if value not in allowed or type(value) is not type(allowed[0]):
        raise ValueError(f"{field}={value!r} does not apply to {owner}: choose from {list(allowed)}")
    return value


def _check_types(spec: Any) -> None:
    """Raise ValueError unless every field has the type of its default."""
    for field in dataclasses.fields(spec):
        if type(getattr(spec, field.name)) is not type(field.default):
            raise ValueError(f"{field.name}={getattr(spec, field.name)!r} is not of type {type(field.default).__name__}")


@dataclasses.dataclass(frozen=True)
class OperandSpec:
    """One operand: element and scale format, elements per scale, scale rule, rounding, and what is cast.

    format: a key of `formats.FORMATS`. block: elements along the contraction axis that share one scale, 0 = whole tensor.
    scale_rule: a rule of the format (see `fp4jax.scales`). rounding: "rne" (round to nearest, ties to even), "sr"
    (stochastic) or "eden". across: elements across the contraction axis that share one scale: 1, or `block` for square
    blocks such as 32x32. source: "input" casts the high-precision operand; "fprop" (w of dgrad, x of wgrad) casts the
    operand that fprop has quantized, rotated as it was there. Raises ValueError for any value that does not apply.
    """

    format: str = "none"
    block: int | None = None
    scale_rule: str | None = None
    rounding: str | None = None
    across: int | None = None
    source: str | None = None

    def __post_init__(self):
        if self.format not in formats.FORMATS:
            raise ValueError(f"unknown format={self.format!r}: choose from {list(formats.FORMATS)}")
        fmt = formats.FORMATS[self.format]
        self._choose("block", f"format {self.format!r}", fmt.blocks)
        self._choose("scale_rule", f"format {self.format!r}", tuple(fmt.rules))
        self._choose("rounding", f"{self.format!r} with scale_rule={self.scale_rule!r}", fmt.rules[str(self.scale_rule)])
        square = self.block and self.scale_rule not in formats.ONE_DIMENSIONAL_RULES
        self._choose("across", f"{self.format!r} with this block and rule", (1, self.block) if square else (1,))
        self._choose("source", f"format {self.format!r}", ("input", "fprop") if fmt.element else ("input",))
        if self.scale_rule == "delayed" and self.block:
            raise ValueError(f"scale_rule='delayed' does not apply to block={self.block}: it has one scale per tensor")

    def _choose(self, field: str, owner: str, allowed: tuple) -> None:
        object.__setattr__(self, field, _choose(owner, field, getattr(self, field), allowed))

    @property
    def element(self) -> formats.ElementFormat | None:
        return formats.FORMATS[self.format].element

    @property
    def scale(self) -> str:
        """How the scales are stored: "none", "float32", "e8m0" or "e4m3"."""
        return formats.FORMATS[self.format].scale

    @property
    def multiple(self) -> int:
        """The length of the contraction axis must be a multiple of this."""
        return formats.EDEN_GROUP if self.rounding == "eden" else self.block or 1

    @property
    def draws(self) -> bool:
        """Whether the cast needs random bits."""
        return self.rounding in ("sr", "eden")

    @property
    def gain(self) -> float:
        """The decoded values are this multiple of the operand."""
        return formats.GAIN.get(str(self.scale_rule), 1.0)

    def __str__(self) -> str:
        if self.element is None:
            return self.format
        block = f"{self.across}x{self.block}" if self.block else "tensor"
        source = "" if self.source == "input" else "(of fprop's)"
        return f"{self.format}.{block}.{self.scale_rule}.{self.rounding}{source}"


@dataclasses.dataclass(frozen=True)
class Rotation:
    """Block Hadamard rotation of both operands along the contraction axis; size 0 means none.

    size: a power of two. signs: "deterministic" (H), "fixed" (H·D with one ±1 diagonal D for the whole model), "per_layer" (a
    D of its own for every GEMM of every layer, the same at every step) or "redrawn" (D drawn anew at every optimizer step).
    """

    size: int = 0
    signs: str | None = None

    def __post_init__(self):
        if type(self.size) is not int or self.size < 0 or self.size == 1 or self.size & (self.size - 1):
            raise ValueError(f"rotation size={self.size!r} must be 0 (none) or a power of two from 2 on")
        allowed = SIGNS if self.size else ("none",)
        object.__setattr__(self, "signs", _choose(f"rotation size {self.size}", "signs", self.signs, allowed))

    @property
    def draws(self) -> bool:
        """Whether the signs differ between layers: they need a key."""
        return self.signs in ("per_layer", "redrawn")

    def __str__(self) -> str:
        return f"H{self.size}{self.signs[0]}" if self.size else "-"  # pyright: ignore[reportOptionalSubscript]


SPLITS = ("none", "mean", "first")


@dataclasses.dataclass(frozen=True)
class GemmSpec:
    """One GEMM: its two operands, their common rotation, padding, and a part that stays in high precision.

    pad: a ragged contraction, or other side of a square block, is filled up with zeros instead of refused. split: "mean"
    subtracts from the token operands (x, dy) their mean over tokens and multiplies that rank-one part in high precision
    (2603.10444); "first" multiplies the first coefficient of every rotated block, which gathers its mean, in BF16.
    """

    lhs: OperandSpec = OperandSpec()
    rhs: OperandSpec = OperandSpec()
    rotation: Rotation = Rotation()
    pad: bool = False
    split: str = "none"

    def __post_init__(self):
        _check_types(self)
        quantized = [s for s in (self.lhs, self.rhs) if s.element is not None]
        if self.rotation.size and not quantized:
            raise ValueError(f"rotation {self.rotation} does not apply to a GEMM without a quantized operand")
        if self.pad and self.multiple == 1:
            raise ValueError("pad=True does not apply to a GEMM without blocks and without a rotation")
        if any(s.rounding == "eden" for s in quantized) and self.rotation.size != formats.EDEN_GROUP:
            raise ValueError(f"rounding 'eden' needs a rotation of size {formats.EDEN_GROUP}, not {self.rotation}")
        if self.split not in SPLITS:
            raise ValueError(f"split={self.split!r}: choose from {list(SPLITS)}")
        if self.split != "none" and not quantized:
            raise ValueError(f"split={self.split!r} does not apply to a GEMM without a quantized operand")
        if self.split == "first" and not self.rotation.size:
            raise ValueError("split='first' does not apply to a GEMM without a rotation")
        if self.split != "none" and "quest" in (self.lhs.scale_rule, self.rhs.scale_rule):
            raise ValueError(f"split={self.split!r} does not apply to scale_rule='quest': its clip mask is of whole operands")
        if self.split != "none" and "fprop" in (self.lhs.source, self.rhs.source):
            raise ValueError(f"split={self.split!r} does not apply to an operand that fprop has quantized")

    @property
    def multiple(self) -> int:
        """The contraction length must be a multiple of this: both operands' blocks and the rotation (powers of two)."""
        return max(self.lhs.multiple, self.rhs.multiple, self.rotation.size or 1)

    @property
    def draws(self) -> bool:
        """Whether a cast of either operand needs random bits."""
        return self.lhs.draws or self.rhs.draws

    @property
    def is_plain(self) -> bool:
        """Whether both operands are left untouched, in the model's own compute dtype."""
        return self.lhs.format == self.rhs.format == "none"

    def __str__(self) -> str:
        split = "" if self.split == "none" else f" split {self.split}"
        return f"{self.lhs} × {self.rhs} {self.rotation}{split}" + (" pad" if self.pad else "")


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The numerics of a linear layer: one `GemmSpec` for each of its three GEMMs."""

    fprop: GemmSpec = GemmSpec()
    dgrad: GemmSpec = GemmSpec()
    wgrad: GemmSpec = GemmSpec()

    def __post_init__(self):
        _check_types(self)
        if self.fprop.lhs.source == "fprop" or self.fprop.rhs.source == "fprop":
            raise ValueError("source='fprop' does not apply to fprop itself")
        if self.dgrad.lhs.source == "fprop" or self.wgrad.rhs.source == "fprop":
            raise ValueError("source='fprop' does not apply to dy, which fprop never sees")
        for again, first in ((self.dgrad.rhs, self.fprop.rhs), (self.wgrad.lhs, self.fprop.lhs)):
            if again.source == "fprop" and self.fprop.split != "none":
                raise ValueError(f"source='fprop' does not apply where fprop splits its operands (split={self.fprop.split!r})")
            if again.source == "fprop" and (first.element is None or first.gain != 1):
                raise ValueError(f"source='fprop' needs an operand that fprop quantizes without a gain, not {first}")

    @property
    def is_plain(self) -> bool:
        return all(getattr(self, g).is_plain for g in GEMMS)

    @property
    def needs_key(self) -> bool:
        """Whether any cast draws random bits (stochastic rounding, redrawn or per-layer signs)."""
        specs = [getattr(self, g) for g in GEMMS]
        return any(s.draws or s.rotation.draws for s in specs)

    @property
    def needs_history(self) -> bool:
        """Whether any cast takes its scale from the maxima of earlier steps."""
        return any("delayed" in (g.lhs.scale_rule, g.rhs.scale_rule) for g in (self.fprop, self.dgrad, self.wgrad))

    def digest(self) -> str:
        """Return 12 hex digits that identify the content of the recipe."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()[:12]

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        return "\n".join(f"{g}: {getattr(self, g)}" for g in GEMMS)


def leaves(recipe: Recipe) -> Iterator[tuple[str, Any]]:
    """Yield every leaf as (dotted path, value), for instance ("fprop.lhs.rounding", "rne")."""

    def walk(prefix: str, node: Mapping[str, Any]):
        for name, value in node.items():
            path = f"{prefix}.{name}" if prefix else name
            if isinstance(value, Mapping):
                yield from walk(path, value)
            else:
                yield path, value

    return walk("", recipe.to_dict())


_RESET = {"format": ("block", "scale_rule", "rounding", "across", "source"), "size": ("signs",)}


def override(recipe: Recipe, changes: Mapping[str, Any]) -> Recipe:
    """Return the recipe with leaves replaced, `changes` mapping dotted paths to values.

    A change of `format` resets the operand's other fields to the new format's defaults, a change of rotation `size`
    resets the signs, unless they are changed too. Raises ValueError for an unknown path or a value that does not apply.
    """
    tree = recipe.to_dict()
    for path, value in changes.items():
        *parents, leaf = path.split(".")
        node = tree
        for name in parents:
            node = node[name] if isinstance(node, dict) and name in node else None
        if not isinstance(node, dict) or leaf not in node or isinstance(node[leaf], dict):
            raise ValueError(f"unknown recipe leaf {path!r}: choose from {[p for p, _ in leaves(recipe)]}")
        for other in _RESET.get(leaf, ()):
            if node[leaf] != value and ".".join([*parents, other]) not in changes:
                node[other] = None
        node[leaf] = value
    return from_dict(tree)


def from_dict(tree: Mapping[str, Any]) -> Recipe:
    """Return the recipe that `to_dict` wrote; unknown or missing keys raise ValueError."""

    def build(cls: type, node: Any) -> Any:
        fields = {f.name: f.default for f in dataclasses.fields(cls)}
        if not isinstance(node, Mapping) or set(node) != set(fields):
            raise ValueError(f"{cls.__name__} needs exactly the keys {sorted(fields)}, got {node!r}")
        nested = {k: type(d) for k, d in fields.items() if dataclasses.is_dataclass(d)}
        return cls(**{k: build(nested[k], v) if k in nested else v for k, v in node.items()})

    return build(Recipe, tree)


def round_to_nearest(recipe: Recipe) -> Recipe:
    """Return the recipe with every random rounding replaced by RNE, as evaluation uses it."""
    changes: dict[str, Any] = {path: "rne" for path, value in leaves(recipe) if value in ("sr", "eden")}
    changes |= {path: "two_level" for path, value in leaves(recipe) if value == "eden" and path.endswith("scale_rule")}
    return override(recipe, changes)


def current_scaling(recipe: Recipe) -> Recipe:
    """Return the recipe with delayed scaling replaced by that of the tensor itself: outside training there is no history."""
    return override(recipe, {path: "amax" for path, value in leaves(recipe) if value == "delayed"})
