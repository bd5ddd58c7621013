"""What quantization does to a model's tensors, weights and gradients at one point of training. Nothing here changes a state.

make_measure      the sums of `fp4jax.stats` for every linear layer, of the very step that comes next
make_codes        the weights' codes; what share of them flips from one step to the next
Comparison        gradients of dw under a recipe, or under one of its GEMMs alone, against exact ones over many batches
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fp4jax import bits, stats
from fp4jax.numerics import OUTSIDE_BLOCKS
from fp4jax.recipe import GEMMS, GemmSpec, Recipe, current_scaling
from models import llama
from train import sharding, step
from train.config import Settings

GROUPS = 8  # of batches, for the jackknife
ARMS = ("all", *GEMMS)  # a recipe, or only this GEMM of it and the other two exact
Figure = tuple[float, float]  # value and standard error


def make_measure(settings: Settings, mesh: Mesh) -> Callable[[step.TrainState, jax.Array], dict[str, stats.Sums]]:
    """Return the jitted (state, tokens_BT1) → {path: sums}: what the casts and GEMMs of the next step will do."""
    gradient, zeros = step.make_gradient(settings, mesh), settings.numerics.init_sums(llama.LINEAR_PATHS)

    def measure(state: step.TrainState, tokens_BT1: jax.Array):
        key = bits.step_key(state.seed, state.step)
        _, (_, _, sums) = gradient(state.params, state.history, zeros, tokens_BT1, key)
        return sums

    shardings = (step.state_shardings(settings, mesh), sharding.batch_sharding(mesh))
    return jax.jit(measure, in_shardings=shardings, out_shardings=NamedSharding(mesh, PartitionSpec()))


def make_codes(settings: Settings) -> Callable[..., dict[str, jax.Array]]:
    """Return the jitted (params, seed, step) → {path: codes that fprop multiplies}, uint8 of the kernels' shapes."""

    @jax.jit
    def codes_of(params, seed, at):
        key, out = bits.step_key(seed, at), {}
        for path, kernels in llama.linear_kernels(params, settings.model).items():
            codes = settings.numerics.weight_codes(path, kernels, key)
            if codes is not None:
                out[path] = codes
        return out

    return codes_of


@jax.jit
def flip_shares(before: dict[str, jax.Array], after: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Return {path: share of the weights whose code differs}, float32 [n_layers], or a scalar outside blocks."""
    return {path: jnp.mean(before[path] != after[path], axis=(-2, -1)) for path in before}


def by_module(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return {"layers/3/attn/q": …} of {"attn/q": array over blocks}; paths outside blocks keep their name."""
    out = {}
    for path, of_path in values.items():
        if path in OUTSIDE_BLOCKS:
            out[path] = of_path
        else:
            out |= {f"layers/{i}/{path}": value for i, value in enumerate(of_path)}
    return out


def rows(at: int, sums: Mapping[str, stats.Sums], flips: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
    """Return the rows of `stats.figures` with their step, and the share of codes that flip, in fprop's rows under w."""
    flipped = by_module(jax.tree.map(np.asarray, dict(flips or {})))
    out = []
    for row in stats.figures(sums):
        if row["gemm"] == "fprop" and row["module"] in flipped and "w" in row:
            row["w"]["flipped"] = float(flipped[row["module"]])
        out.append({"step": at, **row})
    return out


def averages(figures: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return {"wgrad/relative_error": …, "wgrad/dy/zeroed": …}, the means over all modules of the numbers in rows."""
    collected: dict[str, list[float]] = {}
    for row in figures:
        for name, value in row.items():
            if isinstance(value, dict):
                for inner, number in value.items():
                    if isinstance(number, float):
                        collected.setdefault(f"{row['gemm']}/{name}/{inner}", []).append(number)
            elif isinstance(value, float):
                collected.setdefault(f"{row['gemm']}/{name}", []).append(value)
    return {name: float(np.mean(values)) for name, values in collected.items()}


def arm(recipe: Recipe, name: str) -> Recipe:
    """Return the recipe of an arm; a GEMM that casts what fprop quantized then casts the operand itself."""
    if name == "all":
        return recipe
    spec: GemmSpec = getattr(recipe, name)
    lhs, rhs = (dataclasses.replace(s, source=None) if s.source == "fprop" else s for s in (spec.lhs, spec.rhs))
    return Recipe(**{name: dataclasses.replace(spec, lhs=lhs, rhs=rhs)})


def make_weight_gradient(settings: Settings, mesh: Mesh, change: Callable[[Recipe], Recipe], *, measured: bool = False):
    """Return the jitted (params, tokens_BT1, seed, step) → ({path: dw}, {path: sums}) with every recipe changed.

    Delayed scaling is replaced by current scaling. Without `measured` the sums are {}.
    """
    numerics = settings.numerics.map(lambda recipe: change(current_scaling(recipe)))
    settings = dataclasses.replace(settings, numerics=numerics)
    gradient, zeros = step.make_gradient(settings, mesh), numerics.init_sums(llama.LINEAR_PATHS) if measured else {}

    @jax.jit
    def weight_gradient(params, tokens_BT1, seed, at):
        _, (grads, _, sums) = gradient(params, {}, zeros, tokens_BT1, bits.step_key(seed, at))
        kernels = llama.linear_kernels(grads, settings.model)
        return {path: dw.astype(jnp.float32) for path, dw in kernels.items() if path not in OUTSIDE_BLOCKS}, sums

    return weight_gradient


@jax.jit
def _add(total, exact, error, index):
    """Add one batch's exact dw and its error to group `index` of the sums, and their squares to its dots."""

    def inner(a, b):
        return jnp.sum(a * b, axis=(-2, -1))

    out = {}
    for path, (of_error, of_exact, of_dots) in total.items():
        e, g = error[path], exact[path]
        dots = jnp.stack([inner(e, e), inner(e, g), inner(g, g)])
        out[path] = tuple(old.at[index].add(new) for old, new in ((of_error, e), (of_exact, g), (of_dots, dots)))
    return out


@jax.jit
def _grams(total):
    """Return {path: the inner products of the groups' sums}, float32 [3, n_layers, GROUPS, GROUPS]: ee, eg, gg."""
    return {
        path: jnp.stack([jnp.einsum("alkn,blkn->lab", x, y, precision="highest") for x, y in ((e, e), (e, g), (g, g))])
        for path, (e, g, _) in total.items()
    }


class Comparison:
    """Quantized against exact gradients of the weights in blocks, over batches that are added one by one.

    Keeps 2 · GROUPS copies of these weights.
    """

    def __init__(self, batches: int):
        self._batches, self._counts, self._total = batches, np.zeros(GROUPS), None

    def add(self, exact: dict[str, jax.Array], quantized: dict[str, jax.Array]) -> None:
        if self._total is None:
            self._total = {
                path: (*(jnp.zeros((GROUPS, *dw.shape), jnp.float32),) * 2, jnp.zeros((GROUPS, 3, len(dw)), jnp.float32))
                for path, dw in exact.items()
            }
        index = int(self._counts.sum()) * GROUPS // self._batches
        self._counts[index] += 1
        error = jax.tree.map(jnp.subtract, quantized, exact)
        self._total = _add(self._total, exact, error, index)

    def figures(self) -> tuple[dict[str, Figure], dict[str, dict[str, Figure]]]:
        """Return (figures of all weights as one vector, {module: its figures}); see `gradient_figures`."""
        assert self._total is not None
        grams = {path: np.asarray(gram, np.float64) for path, gram in _grams(self._total).items()}
        dots = {path: np.asarray(of_dots, np.float64) for path, (_, _, of_dots) in self._total.items()}
        modules, gram_sum, dot_sum = {}, np.zeros((3, GROUPS, GROUPS)), np.zeros((GROUPS, 3))
        for path in grams:
            for layer in range(grams[path].shape[1]):
                gram, dot = grams[path][:, layer], dots[path][:, :, layer]
                modules[f"layers/{layer}/{path}"] = with_errors(gram, dot, self._counts)
                gram_sum, dot_sum = gram_sum + gram, dot_sum + dot
        return with_errors(gram_sum, dot_sum, self._counts), modules


def with_errors(grams: np.ndarray, dots: np.ndarray, counts: np.ndarray) -> dict[str, Figure]:
    """Return `gradient_figures` of all groups, each with its jackknife standard error over the groups of batches.

    grams: [3, G, G], inner products (e·e, e·g, g·g) of the groups' summed errors e and exact gradients g. dots: [G, 3], sums
    over each group's batches of the inner products of one batch's e and g. counts: [G], batches per group.
    """
    filled = np.flatnonzero(counts)

    def of(groups: np.ndarray) -> dict[str, float]:
        return gradient_figures(grams[:, groups][:, :, groups].sum((1, 2)), dots[groups].sum(0), int(counts[groups].sum()))

    figures = of(filled)
    without = [of(filled[filled != left_out]) for left_out in filled] if len(filled) > 2 else []
    errors = {}
    for name in figures:
        values = np.array([one[name] for one in without])
        known = len(values) and np.isfinite(values).all()
        errors[name] = float(np.sqrt((len(values) - 1) * np.mean((values - values.mean()) ** 2))) if known else math.nan
    return {name: (figures[name], errors[name]) for name in figures}


def gradient_figures(total: np.ndarray, diagonal: np.ndarray, n: int) -> dict[str, float]:
    """Return what n batches say about quantized gradients q = g + e.

    total: inner products (e·e, e·g, g·g) of the sums over all batches; diagonal: sums of the batches' own. With ⟨·⟩ the mean
    over single batches, and ⟨·⟩' the mean over pairs of different ones, which sampling noise does not reach:
        gain ⟨q·g⟩/⟨g·g⟩, cosine, relative_error √(⟨e·e⟩/⟨g·g⟩)
        systematic2 ⟨e·e⟩'/⟨g·g⟩', and gain_removed2, the same after the best common gain ⟨q·g⟩'/⟨g·g⟩' is taken out
        noise_ratio Var(e)/Var(g), the quantization's noise over the gradient's own
        gradient_to_noise √(⟨g·g⟩'/Var(e)), to be held against √3 (2505.19115)
    NaN where a mean over pairs is not above zero: too few batches for so noisy a gradient.
    """
    ee, eg, gg = diagonal / n
    pairs = (total - diagonal) / (n * (n - 1)) if n > 1 else np.full(3, math.nan)
    signal = float(pairs[2]) if pairs[2] > 0 else math.nan
    noise = float(ee - pairs[0])
    return {
        "gain": float(1 + eg / gg),
        "cosine": float((gg + eg) / math.sqrt(gg * (gg + 2 * eg + ee))),
        "relative_error": math.sqrt(ee / gg),
        "systematic2": float(pairs[0]) / signal,
        "gain_removed2": float(pairs[0]) / signal - (float(pairs[1]) / signal) ** 2,
        "noise_ratio": noise / float(gg - pairs[2]),
        "gradient_to_noise": math.sqrt(signal / noise) if noise > 0 else math.inf,
    }
