"""Numerics of a whole model: which recipe each linear layer follows, and a census of what really runs.

`Numerics.dot(path, layer, key)` is the one hook a model needs: a `lax.dot_general`-like callable for the linear layer at
`path` of block `layer`. Its random bits depend on (seed, step) through the key, on the layer, the path, the GEMM, the
operand and the element, and on nothing else.
"""

import dataclasses
import fnmatch
from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from fp4jax import bits, dot
from fp4jax.recipe import GEMMS, GemmSpec, Recipe

_NO_LAYER = 0xFFFFFFFF


@dataclasses.dataclass(frozen=True)
class Numerics:
    """A recipe applied to a model.

    exempt: path patterns (fnmatch, for instance "lm_head") that stay in the model's compute dtype because the user says so.
    strict: True makes every other exemption an error; False leaves a GEMM plain when its contraction length does not divide
    by the recipe's blocks, and the census says so. observe: called with one census row per GEMM of every traced dot.
    """

    recipe: Recipe
    exempt: tuple[str, ...] = ("lm_head",)
    impl: str = "auto"
    strict: bool = True
    observe: Callable[[dict[str, Any]], None] | None = None

    def __post_init__(self):
        dot.resolve_impl(self.impl)

    def dot(self, path: str, layer: jax.Array | int | None = None, key: Any = None) -> Callable[..., jax.Array]:
        """Return the dot_general of one linear layer; layer: block index or None; key: this step's key or None."""
        layer_word = _NO_LAYER if layer is None else layer
        layer_key = None if key is None else bits.fold_in(bits.as_key(key), bits.path_word(path), layer_word)
        module = path if layer is None else f"layers/{layer if isinstance(layer, int) else '*'}/{path}"
        exempt = next((f"exempt={p!r} in the config" for p in self.exempt if fnmatch.fnmatch(path, p)), "")

        def dot_general(lhs, rhs, dimension_numbers, precision=None, preferred_element_type=None):
            recipe, reasons = (Recipe(), dict.fromkeys(GEMMS, exempt)) if exempt else self._fit(lhs, rhs, dimension_numbers)
            self._report(module, recipe, reasons)
            if recipe.is_plain:
                return lax.dot_general(lhs, rhs, dimension_numbers, precision, preferred_element_type)
            return dot.quantized_dot_general(
                lhs,
                rhs,
                dimension_numbers,
                precision,
                preferred_element_type,
                recipe=recipe,
                key=layer_key if recipe.needs_key else None,
                impl=self.impl,
            )

        return dot_general

    def _fit(self, lhs, rhs, dimension_numbers) -> tuple[Recipe, dict[str, str]]:
        """Return the recipe for these shapes and, when not strict, why a GEMM had to be left plain."""
        reasons = dict.fromkeys(GEMMS, "")
        if self.strict:
            return self.recipe, reasons
        changes = {}
        for gemm, length in dot.contraction_lengths(lhs, rhs, dimension_numbers).items():
            spec: GemmSpec = getattr(self.recipe, gemm)
            if length % spec.multiple and not spec.pad:
                changes[gemm] = GemmSpec()
                reasons[gemm] = f"contraction length {length} is not a multiple of {spec.multiple}"
        return dataclasses.replace(self.recipe, **changes), reasons

    def _report(self, module: str, recipe: Recipe, reasons: dict[str, str]) -> None:
        if self.observe is None:
            return
        impl = dot.resolve_impl(self.impl)
        for gemm in GEMMS:
            spec: GemmSpec = getattr(recipe, gemm)
            self.observe(
                {
                    "module": module,
                    "gemm": gemm,
                    "lhs": str(spec.lhs),
                    "rhs": str(spec.rhs),
                    "rotation": str(spec.rotation),
                    "impl": "lax" if spec.is_plain else impl,
                    "exempt": reasons[gemm],
                }
            )


def census(numerics: Numerics, trace: Callable[[Numerics], Any]) -> list[dict[str, Any]]:
    """Return one row per (module, GEMM) that runs in `trace(numerics)`, which is only traced, never executed.

    A row has the keys module, gemm, lhs, rhs, rotation, impl, exempt; scanned blocks share the module name "layers/*/…".
    """
    rows: dict[tuple[str, ...], dict[str, Any]] = {}  # a module may run several times, and not always alike
    observed = dataclasses.replace(numerics, observe=lambda row: rows.setdefault(tuple(row.values()), row))
    jax.eval_shape(lambda: trace(observed))
    return list(rows.values())
