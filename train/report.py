"""What a person sees on stderr when a run starts: the run in a few lines, and the census of its numerics."""

import pathlib
from typing import Any

import jax
import rich.console
import rich.table

from fp4jax.ops import triton_call
from models import llama
from train import data
from train.config import Settings


def print_start(
    settings: Settings, workdir: pathlib.Path, dataset: data.Dataset, mesh: jax.sharding.Mesh, census: list[dict[str, Any]]
) -> None:
    """Print model, data, mesh, recipe and census to stderr."""
    console = rich.console.Console(stderr=True, highlight=False, markup=False)
    if not console.is_terminal:
        console.width = 200  # a log file: no wrapping
    recipe = settings.numerics.recipe
    emulated = f" ({why})" if (why := _emulated(census)) else ""
    idle = f", {spare} of {len(jax.devices())} devices idle" if (spare := len(jax.devices()) - mesh.size) else ""
    axes = " × ".join(f"{name} {size}" for name, size in mesh.shape.items())
    console.print(f"model    {llama.num_params(settings.model):,} parameters, {settings.model.dtype}")
    console.print(f"data     {settings.data.source}, {sum(map(len, dataset.train)):,} + {sum(map(len, dataset.val)):,} tokens")
    console.print(f"mesh     {axes} on {jax.devices()[0].device_kind}{idle}")
    console.print(f"recipe   {settings.recipe_name} [{recipe.digest()}]{emulated}")
    for start, name, recipe, _ in settings.schedule:
        console.print(f"         from step {start}: {name} [{recipe.digest()}]")
    console.print(f"workdir  {workdir}")
    console.print(census_table(census))


def _emulated(census: list[dict[str, Any]]) -> str:
    """Return how low precision is only emulated, "" where matrix units multiply it or nothing is quantized."""
    impls, target = {row["impl"] for row in census}, triton_call.current_target()
    if "reference" in impls:
        return "emulated: dequantized operands, FP32 products"
    if "xla" in impls and target is None:
        return "emulated: XLA multiplies dequantized operands on a CPU"
    if "triton" in impls and target is not None and not target.has_fp4:
        return f"emulated: {target.arch} has no FP4 matrix unit"
    return ""


def census_table(census: list[dict[str, Any]]) -> rich.table.Table:
    """Return the census as a table: modules whose GEMMs all read alike share their lines, an exempt module takes one."""
    columns = ("gemm", "lhs", "rhs", "rotation", "impl", "exempt")
    by_module: dict[str, list[tuple[str, ...]]] = {}
    for row in census:
        impl = f"{row['impl']} ({row['why']})" if row["why"] else row["impl"]
        by_module.setdefault(row["module"], []).append(tuple(str({**row, "impl": impl}[k]) for k in columns))
    modules_of: dict[tuple[tuple[str, ...], ...], list[str]] = {}
    for module, rows in by_module.items():
        modules_of.setdefault(tuple(rows), []).append(module)
    table = rich.table.Table("module", *columns, box=None, pad_edge=False)
    for rows, modules in modules_of.items():
        if len({row[1:] for row in rows}) == 1:
            rows = (("all", *rows[0][1:]),)
        table.add_row("\n".join(modules), *("\n".join(cells) for cells in zip(*rows, strict=True)))
    return table
