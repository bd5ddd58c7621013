"""Which weights of a run an export packs in FP4, and the codes they get: those of fprop's weight operand.

A linear layer of a block is packed unless the run kept it in high precision: exempt, in the first or last blocks, or under a
rule that gives fprop's weight another format. Its cast is that of the run's recipe where fprop's weight has the format that is
asked for, with stochastic rounding replaced by RNE, otherwise the format's default (a model that was not trained in it).
Like fprop it starts from the weight in model.dtype. Embedding, norms and lm_head are never packed.

A rotated fprop multiplies H·w, which needs rotated activations, and no loader rotates them: refused, unless the user wants the
same cast of w itself. A scale rule with a gain, by which a loader would have to divide, is refused. What fprop does to x, a
split included, is not exported: loaders multiply x in high precision.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from fp4jax.ops import quantize
from fp4jax.recipe import OperandSpec, Rotation, round_to_nearest
from models import huggingface, packed
from train.config import Settings
from train.errors import InputError

# Layers that vLLM multiplies as one, with one tensor scale: by the last part of their module.
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class Choice(NamedTuple):
    """What is packed: {module: its cast}; what is not: {module: why}; origin: whose casts these are, for the manifest."""

    casts: Mapping[str, OperandSpec]
    kept: Mapping[str, str]
    origin: str
    rotation: str


def choose(settings: Settings, format: str, *, unrotated: bool = False) -> Choice:
    """Return what to pack of a model trained in these settings; unrotated: cast w itself where fprop casts H·w.

    Raises InputError where a loader could not undo the cast, where nothing can be packed, and for an `unrotated` of no use.
    """
    numerics, shapes = settings.numerics.map(round_to_nearest), huggingface.expected(settings.model)
    casts, kept, origins, rotations = {}, {}, set(), set()
    for module, (path, layer) in huggingface.linear_modules(settings.model).items():
        recipe, reason = numerics.recipe_for(path, layer)
        spec, (rows, columns) = recipe.fprop.rhs, shapes[f"{module}.weight"]
        if reason and spec.format != format:
            kept[module] = reason
            continue
        if spec.format == format:
            _check(settings.recipe_name, spec, recipe.fprop.rotation, unrotated)
            origin, rotation = f"recipe {settings.recipe_name}", recipe.fprop.rotation
        else:
            spec, origin, rotation = OperandSpec(format), "the format's default", Rotation()
        across = spec.across or 1
        if columns % spec.multiple or rows % across:
            kept[module] = f"[{rows}, {columns}] does not divide into blocks of {across} x {spec.multiple}"
            continue
        casts[module] = spec
        origins.add(origin)
        rotations |= {str(rotation)} if rotation.size else set()
    if not casts:
        raise InputError(f"--dtype={format}: no layer can be packed: {next(iter(kept.values()))}")
    if unrotated and not rotations:
        raise InputError(f"--unrotated does not apply: recipe {settings.recipe_name} rotates no weight that is packed")
    rotation = f"none: {', '.join(sorted(rotations))} of fprop was left out (--unrotated)" if rotations else "none"
    return Choice(casts, kept, ", ".join(sorted(origins)), rotation)


def _check(recipe: str, spec: OperandSpec, rotation: Rotation, unrotated: bool) -> None:
    if rotation.size and not unrotated:
        raise InputError(
            f"recipe {recipe} multiplies weights rotated by {rotation} in fprop, and no loader rotates the activations: "
            "--unrotated packs the weights themselves, or --dtype=bfloat16"
        )
    if spec.gain != 1:
        raise InputError(
            f"recipe {recipe} has scale rule {spec.scale_rule} in fprop, whose codes stand for {spec.gain} of the weight, "
            "and no loader divides by it"
        )


def packing(settings: Settings, format: str, choice: Choice, *, shared: bool) -> packed.Packing:
    """Return what `huggingface.save` packs. shared: one tensor scale for the layers that vLLM fuses (NVFP4)."""

    def cast(module: str, weight: Callable[[str], np.ndarray]) -> packed.Codes:
        return pack(weight(module), choice.casts[module], settings.model.dtype, [weight(name) for name in others(module)])

    def others(module: str) -> list[str]:
        parent, _, leaf = module.rpartition(".")
        group = next((names for names in FUSED if leaf in names), ()) if shared else ()
        return [name for name in (f"{parent}.{other}" for other in group) if name != module and name in choice.casts]

    return packed.Packing(format, frozenset(choice.casts), cast)


def pack(weight: np.ndarray, spec: OperandSpec, dtype: str, others: list[np.ndarray]) -> packed.Codes:
    """Return the codes of a weight [out, in], cast from `dtype` along `in`, under a tensor scale common to it and `others`.

    The scales of square blocks are repeated for each of their rows.
    """
    rows, whole = len(weight), np.concatenate([weight, *others])
    cpu = jax.local_devices(backend="cpu")[0]
    q = quantize.quantize(jax.device_put(whole, cpu).astype(dtype), spec, 1)
    scale = np.repeat(np.asarray(q.scale_bytes), spec.across or 1, axis=0)
    tensor_scale = None if q.tensor_scale is None else float(np.asarray(q.tensor_scale).item())
    return packed.Codes(np.asarray(q.data)[:rows], scale[:rows], tensor_scale)


def describe(settings: Settings, choice: Choice) -> dict[str, Any]:
    """Return what the manifest says of the packed weights."""
    by_cast: dict[str, list[str]] = {}
    for module, spec in choice.casts.items():
        by_cast.setdefault(str(spec), []).append(module)
    return {
        "packed": [{**dataclasses.asdict(choice.casts[m[0]]), "modules": m} for m in by_cast.values()],
        "cast_from": settings.model.dtype,
        "cast_by": choice.origin,
        "rotation": choice.rotation,
        "activations": "not quantized by loaders; in the recipe: " + str(settings.numerics.recipe.fprop.lhs),
        "kept": dict(choice.kept),
    }
