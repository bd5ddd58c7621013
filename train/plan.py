"""Plan a run without a device:  python -m train.plan --config=FILE[:ARGUMENT] --device=mi355x --devices=8 [--recipe=NAME ...]

Says what a train step would hold on each device, compute, move and send, and the shortest time it could take under several
recipes and assumed efficiencies of the matrix units, each line with its formula. Nothing is allocated and no device is needed:
any mesh can be planned anywhere. Rates are those of data sheets (train/devices.py), nothing is fitted to a measurement. A
config that does not fit the device's memory is refused with exit code 2. The last line of stdout is a JSON object.
"""

import dataclasses
import math
import sys
from typing import Any

import rich.console
import rich.table
from absl import flags
from ml_collections import config_flags

from train import cli, devices
from train.errors import InputError

CONFIG = config_flags.DEFINE_config_file("config", None, "Config file, with an optional :argument.", lock_config=True)
DEVICE = flags.DEFINE_string("device", None, "The GPU: a name in train/devices.py.")
COUNT = flags.DEFINE_integer("devices", 1, "How many of them; the config's mesh must use all.")
MEMORY = flags.DEFINE_float("memory_gib", None, "Memory of one device in GiB; default its data sheet's.")
RECIPE = flags.DEFINE_multi_string("recipe", [], "Recipes to compare, one flag each; the config's own and fp8_current always.")

BASELINE = "fp8_current"
COMPARED = ("mxfp4", "mxfp4_h16", "bf16")
EFFICIENCIES = (1.0, 0.7, 0.5, 0.3)
STUDY = {"mxfp4_h16": 1.20}  # throughput over FP8's, arXiv 2605.09825


def main() -> int:
    if CONFIG.value is None or DEVICE.value is None:
        raise InputError("--config=FILE[:ARGUMENT] and --device=NAME are needed, for instance --device=mi355x --devices=8")
    if COUNT.value < 1 or (MEMORY.value is not None and not 0 < MEMORY.value < math.inf):
        raise InputError(f"--devices={COUNT.value} and --memory_gib={MEMORY.value} must be positive and finite")
    device = devices.get(DEVICE.value)
    if MEMORY.value is not None:
        device = dataclasses.replace(device, memory=MEMORY.value * 2**30)
    from fp4jax.ops import triton_call  # after the flags were read: importing jax takes seconds
    from train import config, memory, sharding

    settings = config.resolve(CONFIG.value)
    mesh = sharding.abstract_mesh(settings.mesh, COUNT.value)
    choices = {name: config.in_recipe(settings, name) for name in (BASELINE, *(RECIPE.value or COMPARED))}
    own = settings.recipe_name
    if own in choices and choices[own].numerics != settings.numerics:  # by its rules, or the blocks that it keeps
        own += ", this config"
    choices = {own: settings, **choices}
    lengths = {"microbatch": settings.train.microbatch, "seq_len": settings.data.seq_len}

    def check(name: str, choice: Any) -> None:
        try:
            with triton_call.assume_target(device.arch):
                sharding.check(mesh, settings.model, choice.numerics, **lengths, reduce=settings.train.grad_reduce_dtype)
        except InputError as error:
            raise InputError(f"{name}: {error}") from None

    for phase in settings.phases():
        check(phase.recipe_name, phase)
    for name, choice in list(choices.items()):
        try:
            check(name, choice)
        except InputError as error:
            if RECIPE.value or name not in COMPARED:
                raise
            print(f"not compared: {error}", file=sys.stderr)
            del choices[name]
    for phase in settings.phases():
        memory.check_fits(phase, mesh, device.memory)
    cli.print_result(_report(settings, mesh, device, choices))
    return cli.DONE


def _report(settings: Any, mesh: Any, device: Any, choices: dict[str, Any]) -> dict[str, Any]:
    """Print the plan to stderr and return its figures as JSON data."""
    from train import estimate, memory

    console = rich.console.Console(stderr=True, highlight=False, markup=False)
    if not console.is_terminal:
        console.width = 160
    axes = " × ".join(f"{name} {size}" for name, size in mesh.shape.items())
    console.print(f"{COUNT.value} × {device.name}, mesh {axes}; data-sheet numbers, nothing measured")
    console.print(" · ".join(f"{kind} {rate / 1e15:.2f} PFLOP/s" for kind, rate in device.rates.items()), end="; ")
    console.print(
        f"memory {device.memory / 1e9:.0f} GB at {device.bandwidth / 1e12:.2f} TB/s, links {device.links / 1e9:.0f} GB/s"
    )
    if "fp4" not in device.rates:
        console.print(f"{device.name} has no FP4 unit: FP4 is emulated, its codes are decoded and multiplied at the BF16 rate")
    if settings.optimizer.name == "muon":
        console.print("Muon's Newton–Schulz products, and the gathers for them, are not counted")
    if settings.model.dtype == "float32":
        console.print(
            "products that are not quantized are float32; they are counted at the BF16 rate, which is too high for them"
        )
    arguments, held = memory.state_lines(settings, mesh), memory.temporaries(settings, mesh)
    lines = [*arguments, *held.moments[held.fullest]]
    console.print(_table(f"memory of one device, {next(iter(choices))}, remat {settings.model.remat}", lines, memory.gib))
    needed = memory.total(lines)
    console.print(f"arguments {memory.total(arguments):,} B, results {memory.output_bytes(settings, mesh):,} B in their place")
    moments = ", ".join(f"{name} {memory.gib(memory.total(of))}" for name, of in held.moments.items())
    console.print(f"temporaries by moment: {moments}; needed {memory.gib(needed)} of {memory.gib(device.memory)}\n")
    kernels = estimate.kernels(settings, mesh)
    console.print(_kernel_table(kernels, device))
    computed, model = sum(kernel.flops for kernel in kernels), estimate.model_flops(settings, mesh)
    console.print(f"{computed:.4g} FLOP computed, {computed / model:.3f} × 6·parameters·tokens ({model:.4g})\n")
    sent = estimate.collectives(settings, mesh, fp4_kernels="fp4" in device.rates)
    console.print(_table("collectives: bytes sent by one device per step", sent, memory.gib))
    result = {name: _times(choice, mesh, device) for name, choice in choices.items()}
    for of in result.values():
        of["ratio"] = {e: result[BASELINE]["seconds"][e] / seconds for e, seconds in of["seconds"].items()}
    console.print(_time_table(result))
    console.print(_ratio_table(result))
    return {
        "device": device.name,
        "devices": COUNT.value,
        "argument_bytes": memory.total(arguments),
        "output_bytes": memory.output_bytes(settings, mesh),
        "temporary_bytes": held.bytes,
        "needed_bytes": needed,
        "memory_bytes": int(device.memory),
        "flops": computed,
        "sent_bytes": memory.total(sent),
        "recipes": result,
    }


def _times(settings: Any, mesh: Any, device: Any) -> dict[str, Any]:
    """Return the times of a recipe, in seconds, by efficiency, and what they are made of at efficiency 1."""
    from train import estimate, memory

    seconds = {f"{e}": estimate.time(settings, mesh, device, e) for e in EFFICIENCIES}
    parts = {"products": 0.0, "casts": 0.0, "rest": 0.0}
    for kernel in estimate.kernels(settings, mesh):
        part = "products" if kernel.kind else "casts" if kernel.name.endswith("casts") else "rest"
        parts[part] += kernel.seconds(device, 1.0)
    needed = memory.total(memory.state_lines(settings, mesh)) + memory.temporaries(settings, mesh).bytes
    return {
        "seconds": {e: time.seconds for e, time in seconds.items()},
        "parts": parts,
        "links": seconds["1.0"].links,
        "flops": estimate.flops(settings, mesh),
        "needed_bytes": needed,
    }


def _table(title: str, lines: list[Any], show: Any) -> rich.table.Table:
    table = rich.table.Table("what", "size", "formula", title=title, title_justify="left", box=None, pad_edge=False)
    for line in lines:
        table.add_row(line.name, show(line.value), line.formula)
    return table


def _kernel_table(kernels: list[Any], device: Any) -> rich.table.Table:
    title = "work of one device per step; ms at efficiency 1: the longer of products and traffic"
    table = rich.table.Table("what", "unit", "FLOP", "bytes", "ms", "formula", title=title, box=None, pad_edge=False)
    table.title_justify = "left"
    for k in kernels:
        unit, ms = device.unit(k.kind) if k.kind else "-", f"{1e3 * k.seconds(device, 1.0):.2f}"
        table.add_row(k.name, unit, f"{k.flops:.3g}" if k.kind else "-", f"{k.bytes:.3g}", ms, k.formula)
    return table


def _time_table(result: dict[str, Any]) -> rich.table.Table:
    title = "shortest step, ms: max(products + casts + rest, links); parts at efficiency 1"
    columns = ("recipe", "products", "casts", "rest", "links", *(f"step at {e}" for e in EFFICIENCIES), "needs, GiB")
    table = rich.table.Table(*columns, title=title, title_justify="left", box=None, pad_edge=False)
    for name, of in result.items():
        parts = [*of["parts"].values(), of["links"], *of["seconds"].values()]
        table.add_row(name, *(f"{1e3 * part:.0f}" for part in parts), f"{of['needed_bytes'] / 2**30:.1f}")
    return table


def _ratio_table(result: dict[str, Any]) -> rich.table.Table:
    title = f"throughput / {BASELINE}'s, by assumed efficiency"
    columns = ("recipe", *(f"{e}" for e in EFFICIENCIES), "study")
    table = rich.table.Table(*columns, title=title, title_justify="left", box=None, pad_edge=False)
    for name, of in result.items():
        ratios = (f"{ratio:.2f}" for ratio in of["ratio"].values())
        table.add_row(name, *ratios, f"{STUDY[name]:.2f}" if name in STUDY else "")
    return table


if __name__ == "__main__":
    cli.run(main)
