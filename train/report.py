"""What a person sees on stderr when a run starts: the run in a few lines, and the census of its numerics."""

import pathlib
from typing import Any

import jax
import rich.console
import rich.table

from models import llama
from train import data
from train.config import Settings


def print_start(
    settings: Settings, workdir: pathlib.Path, dataset: data.Dataset, mesh: jax.sharding.Mesh, census: list[dict[str, Any]]
) -> None:
    """Print model, data, mesh, recipe and census to stderr."""
    console = rich.console.Console(stderr=True, highlight=False, soft_wrap=True)
    recipe = settings.numerics.recipe
    emulated = "" if recipe.is_plain else " (emulated: dequantized operands, FP32 products)"
    axes = " × ".join(f"{name} {size}" for name, size in mesh.shape.items())
    console.print(f"model    {llama.num_params(settings.model):,} parameters, {settings.model.dtype}")
    console.print(f"data     {settings.data.source}, {len(dataset.train_tokens):,} + {len(dataset.val_tokens):,} tokens")
    console.print(f"mesh     {axes} on {jax.devices()[0].device_kind}")
    console.print(f"recipe   {settings.recipe_name} [{recipe.digest()}]{emulated}", markup=False)
    console.print(f"workdir  {workdir}")
    console.print(census_table(census))


def census_table(census: list[dict[str, Any]]) -> rich.table.Table:
    """Return the census as a table; GEMMs of one module that only repeat an exemption are joined."""
    table = rich.table.Table("module", "gemm", "lhs", "rhs", "rotation", "impl", "exempt", box=None, pad_edge=False)
    shown = set()
    for row in census:
        if row["exempt"]:
            if (row["module"], row["exempt"]) in shown:
                continue
            shown.add((row["module"], row["exempt"]))
            row = {**row, "gemm": "all"}
        table.add_row(*(str(row[k]) for k in ("module", "gemm", "lhs", "rhs", "rotation", "impl", "exempt")))
    return table
