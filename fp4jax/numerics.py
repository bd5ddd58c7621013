"""Numerics of a whole model: which recipe each linear layer follows, and a census of what really runs.

`Numerics.dot(path, layer, key)` is the one hook a model needs: a `lax.dot_general`-like callable for the linear layer at
`path` of block `layer`. Its random bits depend on (seed, step) through the key, on the layer, the path, the GEMM, the
operand and the element, and on nothing else.
"""

import dataclasses
import fnmatch
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fp4jax import bits, dot, recipes, stats
from fp4jax.ops import kernels, matmul
from fp4jax.recipe import GEMMS, GemmSpec, Recipe

_NO_LAYER = 0xFFFFFFFF
KEPT = recipes.get("bf16")
HISTORY = 4  # maxima kept by delayed scaling, the newest used (MLPerf's Llama 3.1 8B run with Transformer Engine)
OUTSIDE_BLOCKS = ("lm_head",)


class Context(NamedTuple):
    """What the casts of one step share: the step's key (None when nothing is drawn), and what their dots measure.

    history: {path: float32 [n_layers, 3, 2, H], or [3, 2, H] outside blocks} of delayed scaling; its cotangent holds the new
    maxima. sums: {path: `stats.zeros`} of the layers that are to be measured; its cotangent holds the figures.
    """

    key: bits.Key | None
    history: Mapping[str, jax.Array]
    sums: Mapping[str, stats.Sums] = {}


@dataclasses.dataclass(frozen=True)
class Numerics:
    """A recipe applied to a model.

    For every linear layer the first that applies: an `exempt` pattern, a rule, keep_first/keep_last, the recipe.
    exempt: patterns (fnmatch) of layers that stay in the model's compute dtype because the user says so. rules: (pattern,
    recipe) pairs. A pattern is matched against the path ("attn/q", "lm_head") and, in blocks, "layers/3/attn/q".
    keep_first, keep_last: so many blocks have BF16 operands. n_layers: blocks of the model, needed by rules on single
    blocks where blocks are scanned, and by keep_last. strict: True makes every other exemption an error; False leaves a GEMM
    plain when its contraction length does not divide by the recipe's blocks, and the census says so. observe: called with
    one census row per GEMM of every traced dot. residuals, partition (of a path): see `dot.quantized_dot_general`.
    """

    recipe: Recipe
    exempt: tuple[str, ...] = ("lm_head",)
    impl: str = "auto"
    strict: bool = True
    observe: Callable[[dict[str, Any]], None] | None = None
    rules: tuple[tuple[str, Recipe], ...] = ()
    keep_first: int = 0
    keep_last: int = 0
    n_layers: int = 0
    residuals: str = "operands"
    partition: Callable[[str], kernels.Partition] | None = None

    def __post_init__(self):
        matmul.check_impl(self.impl)
        if self.residuals not in dot.RESIDUALS:
            raise ValueError(f"unknown residuals={self.residuals!r}: choose from {list(dot.RESIDUALS)}")
        if self.keep_first < 0 or self.keep_last < 0 or self.keep_first + self.keep_last > max(self.n_layers, 0):
            raise ValueError(f"keep_first={self.keep_first} and keep_last={self.keep_last} do not fit {self.n_layers} blocks")

    def recipe_for(self, path: str, layer: int | None) -> tuple[Recipe, str]:
        """Return the recipe of one linear layer, and why it is another than the base recipe ("" when it is not)."""
        kind, index = self._first_match(path, layer)
        if kind == "exempt":
            return Recipe(), f"exempt={self.exempt[index]!r} in the config"
        if kind == "rule":
            return self.rules[index][1], f"rule {self.rules[index][0]!r}"
        if layer is not None and 0 <= layer < self.keep_first:
            return KEPT, f"keep_first={self.keep_first}"
        if layer is not None and self.n_layers - self.keep_last <= layer < self.n_layers:
            return KEPT, f"keep_last={self.keep_last}"
        return self.recipe, ""

    def _first_match(self, path: str, layer: int | None) -> tuple[str, int]:
        """Return ("exempt" or "rule", index of the pattern), or ("", 0)."""
        names = (path,) if layer is None else (path, f"layers/{layer}/{path}")
        for kind, index, pattern in self._patterns():
            if any(fnmatch.fnmatchcase(name, pattern) for name in names):
                return kind, index
        return "", 0

    def _patterns(self) -> list[tuple[str, int, str]]:
        """Return (kind, index, pattern) of every exemption and rule, in the order in which they are tried."""
        exempt = [("exempt", index, pattern) for index, pattern in enumerate(self.exempt)]
        return exempt + [("rule", index, pattern) for index, (pattern, _) in enumerate(self.rules)]

    def recipes_of(self, path: str, layer: Any) -> list[tuple[Recipe, str, tuple[int, ...]]]:
        """Return the different (recipe, reason, block indices) of a path; layer: None, an index, or traced for all blocks."""
        if layer is None or isinstance(layer, int):
            return [(*self.recipe_for(path, layer), () if layer is None else (layer,))]
        groups: dict[tuple[Recipe, str], list[int]] = {}
        for i in range(self.n_layers):
            groups.setdefault(self.recipe_for(path, i), []).append(i)
        if not groups:  # scanned blocks of unknown number: rules on single blocks cannot be followed
            if any(pattern.startswith("layers/") for _, _, pattern in self._patterns()):
                raise ValueError("patterns on single blocks need Numerics(n_layers=…) where blocks are scanned")
            return [(*self.recipe_for(path, -1), ())]
        return [(*choice, tuple(layers)) for choice, layers in groups.items()]

    def check_patterns(self, paths: Iterable[str]) -> None:
        """Raise ValueError for a pattern that is the first match of no layer; paths: those of blocks, and others."""
        blocks = {path: (None,) if path in OUTSIDE_BLOCKS else range(self.n_layers) for path in paths}
        used = {self._first_match(path, layer) for path, layers in blocks.items() for layer in layers}
        for kind, index, pattern in self._patterns():
            if (kind, index) not in used:
                what = "exempt pattern" if kind == "exempt" else "rule"
                raise ValueError(f"{what} {pattern!r} matches no layer that an earlier pattern does not")

    def map(self, change: Callable[[Recipe], Recipe]) -> "Numerics":
        """Return these numerics with every recipe replaced by change(recipe)."""
        rules = tuple((pattern, change(recipe)) for pattern, recipe in self.rules)
        return dataclasses.replace(self, recipe=change(self.recipe), rules=rules)

    def init_history(self, paths: Iterable[str]) -> dict[str, jax.Array]:
        """Return the zero history of every path that has delayed scaling in some block; empty when none has."""
        out = {}
        for path in paths:
            outside = path in OUTSIDE_BLOCKS
            if any(recipe.needs_history for recipe, _, _ in self.recipes_of(path, None if outside else ...)):
                out[path] = jnp.zeros((*(() if outside else (self.n_layers,)), 3, 2, HISTORY), jnp.float32)
        return out

    def init_sums(self, paths: Iterable[str]) -> dict[str, stats.Sums]:
        """Return the zero sums of every path that is quantized in some block: what `Context.sums` takes."""
        out = {}
        for path in paths:
            outside = path in OUTSIDE_BLOCKS
            if any(not recipe.is_plain for recipe, _, _ in self.recipes_of(path, None if outside else ...)):
                out[path] = stats.zeros(() if outside else (self.n_layers,))
        return out

    def weight_codes(self, path: str, kernels_LKN: jax.Array, key: Any) -> jax.Array | None:
        """Return the codes (uint8) that fprop multiplies for the weights of a path, None where some block has none.

        kernels_LKN: those of all blocks, or one [K, N] outside blocks. key: this step's.
        """
        if kernels_LKN.ndim == 2:
            recipe, _ = self.recipe_for(path, None)
            return dot.weight_codes(recipe, kernels_LKN, _layer_key(key, path, None))
        out: list[Any] = [None] * len(kernels_LKN)
        for recipe, _, layers in self.recipes_of(path, ...):
            index = np.array(layers, np.uint32)
            of_layer = functools.partial(self._codes_of, recipe, path, key)
            codes = None if recipe.fprop.rhs.element is None else jax.vmap(of_layer)(kernels_LKN[index], index)
            for i, layer in enumerate(layers):
                out[layer] = None if codes is None else codes[i]
        return None if any(codes is None for codes in out) else jnp.stack(out)

    @staticmethod
    def _codes_of(recipe: Recipe, path: str, key, kernel_KN, layer):
        return dot.weight_codes(recipe, kernel_KN, _layer_key(key, path, layer) if recipe.needs_key else None)

    def dot(
        self, path: str, layer: jax.Array | int | None = None, key: Any = None, shared: dict[Any, Any] | None = None
    ) -> Callable[..., jax.Array]:
        """Return the dot_general of one linear layer.

        layer: block index or None. key: this step's key, Context, or None. shared: a dict given to the layers of one block
        that read the same input, so that they keep one packed copy of it.
        """
        context = key if isinstance(key, Context) else Context(None if key is None else bits.as_key(key), {})
        history, sums = (
            jax.tree.map(lambda leaf: leaf if layer is None else leaf[layer], of.get(path))
            for of in (context.history, context.sums)
        )
        choices = self.recipes_of(path, layer)
        draws = any(recipe.needs_key for recipe, *_ in choices)
        layer_key = _layer_key(context.key, path, layer) if draws else None

        def one(choice, lhs, rhs, dimension_numbers, precision, preferred_element_type):
            recipe, reason, layers = choice
            recipe, reasons = self._fit(recipe, reason, lhs, rhs, dimension_numbers)
            lengths = dot.contraction_lengths(lhs, rhs, dimension_numbers)
            self._report(_module(path, layer, layers, len(choices)), recipe, reasons, lengths)
            return dot.quantized_dot_general(
                lhs,
                rhs,
                dimension_numbers,
                precision,
                preferred_element_type,
                recipe=recipe,
                key=layer_key if recipe.needs_key else None,
                history=history if recipe.needs_history else None,
                impl=self.impl,
                residuals=self.residuals if sums is None else "operands",
                sums=sums,
                partition=None if self.partition is None else self.partition(path),
                shared=shared if len(choices) == 1 else None,  # a branch of a switch may not see another's arrays
            )

        def dot_general(lhs, rhs, dimension_numbers, precision=None, preferred_element_type=None):
            rest = (dimension_numbers, precision, preferred_element_type)
            if len(choices) == 1:
                return one(choices[0], lhs, rhs, *rest)
            which = np.zeros(self.n_layers, np.int32)
            for index, (_, _, layers) in enumerate(choices):
                which[list(layers)] = index
            branches = [functools.partial(lambda choice, a, b: one(choice, a, b, *rest), choice) for choice in choices]
            return lax.switch(jnp.asarray(which)[layer], branches, lhs, rhs)

        return dot_general

    def _fit(self, recipe: Recipe, reason: str, lhs, rhs, dimension_numbers) -> tuple[Recipe, dict[str, str]]:
        """Return the recipe for these shapes and, when not strict, why a GEMM had to be left plain."""
        reasons: dict[str, str] = dict.fromkeys(GEMMS, reason)
        if self.strict:
            return recipe, reasons
        lengths = dot.contraction_lengths(lhs, rhs, dimension_numbers)
        misfits = {gemm: dot.misfit(recipe, gemm, lengths) for gemm in GEMMS}
        changes = {gemm: GemmSpec() for gemm, why in misfits.items() if why}
        reasons |= {gemm: why for gemm, why in misfits.items() if why}
        if "fprop" in changes:  # the others cannot cast what fprop no longer quantizes
            for gemm, side in (("dgrad", "rhs"), ("wgrad", "lhs")):
                spec: GemmSpec = changes.get(gemm) or getattr(recipe, gemm)
                if getattr(spec, side).source == "fprop":
                    changes[gemm] = dataclasses.replace(
                        spec, **{side: dataclasses.replace(getattr(spec, side), source="input")}
                    )
                    reasons[gemm] = f"casts the input: fprop's {misfits['fprop']}"
        return dataclasses.replace(recipe, **changes), reasons

    def _report(self, module: str, recipe: Recipe, reasons: dict[str, str], lengths: dict[str, int]) -> None:
        if self.observe is None:
            return
        for gemm in GEMMS:
            spec: GemmSpec = getattr(recipe, gemm)
            impl, why = matmul.choose(self.impl, spec, ragged=dot.ragged(recipe, gemm, lengths))
            self.observe(
                {
                    "module": module,
                    "gemm": gemm,
                    "lhs": str(spec.lhs),
                    "rhs": str(spec.rhs),
                    "rotation": str(spec.rotation),
                    "impl": impl,
                    "why": why,
                    "exempt": reasons[gemm],
                }
            )


def _layer_key(key: bits.Key | None, path: str, layer: Any) -> bits.Key | None:
    return None if key is None else bits.fold_in(key, bits.path_word(path), _NO_LAYER if layer is None else layer)


def _module(path: str, layer: Any, layers: tuple[int, ...], choices: int) -> str:
    """Return the census name of a path: layers/3/…, layers/*/… for scanned blocks, layers/0-2,7/… for some of them."""
    if layer is None:
        return path
    if isinstance(layer, int) or choices == 1:
        return f"layers/{layer if isinstance(layer, int) else '*'}/{path}"
    starts = [i for i in layers if i - 1 not in layers]
    ends = [i for i in layers if i + 1 not in layers]
    return f"layers/{','.join(str(a) if a == b else f'{a}-{b}' for a, b in zip(starts, ends, strict=True))}/{path}"


def census(numerics: Numerics, trace: Callable[[Numerics], Any]) -> list[dict[str, Any]]:
    """Return one row per (module, GEMM) that runs in `trace(numerics)`, which is only traced, never executed.

    A row has the keys module, gemm, lhs, rhs, rotation, impl, why (where it is not the one named),
    exempt; scanned blocks share the module name "layers/*/…".
    """
    rows: dict[tuple[str, ...], dict[str, Any]] = {}  # a module may run several times, and not always alike
    observed = dataclasses.replace(numerics, observe=lambda row: rows.setdefault(tuple(row.values()), row))
    jax.eval_shape(lambda: trace(observed))
    return list(rows.values())
