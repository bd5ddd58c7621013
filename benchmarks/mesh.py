"""Does a mesh train like one device? A table of meshes × recipes, and the collectives of each compiled step.

    python -m benchmarks.mesh [--devices=2,4,8] [--axes=tensor,context] [--recipes=none,mxfp4_h16] [--workdir=runs/mesh]
    python -m benchmarks.mesh --lower       # llama3_8b_mlperf for 8 and 512 devices, without any

Eight virtual CPU devices, FP4 emulated. A Llama of d 512, 2 blocks, 8 heads of 32, FFN 1 024, on bytes of the embedded text,
512 tokens per step: 8 sequences of 64, or 2 of 256 where a context axis splits them. Against one device on the same tokens:

    loss     `none`: within 1e-5, relative, at each of 20 steps; otherwise at step 0
    dw       each layer's of step 0, relative Frobenius: 1e-3 (`none`: 1e-5)
    alone    y, dx and dw of a layer of each kind by itself, for the same x, w and dy: 1e-5
    casts    x, w and dy of a layer of each kind: codes, scales and so the random bits, equal bit for bit for the same input
    drift    of the loss within 20 steps: at most twice the largest of 5 runs on one device whose weights moved by 1e-7
    sums     collectives of the compiled step: no more than those of `none`, and a scalar maximum per tensor scale and dimension

Finished cells are kept in the workdir; results/mesh/table.md and .json are written from all of them.
"""

import argparse
import collections
import datetime
import json
import math
import pathlib
import re
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import mesh_cell
from benchmarks.mesh_cell import STEPS, Program, casts, difference, layers_alone, relative, settings_for, unexpected, worst
from fp4jax.ops import triton_call
from train import config, page, sharding, step

PERTURBATIONS = 5
RECIPES = ("none", "mxfp4_h16", "nvidia_nvfp4", "mxfp4_sr", "nvidia_nvfp4 keep_last=0")
MESHES: tuple[dict[str, int], ...] = (
    *({axis: size} for size in (2, 4, 8) for axis in ("data", "fsdp", "tensor", "context")),
    {"fsdp": 2, "tensor": 2},
    {"data": 2, "context": 2},
    {"data": 2, "fsdp": 2, "tensor": 2},
    {"fsdp": 2, "context": 2, "tensor": 2},
)
OUT = pathlib.Path("results/mesh")
BOUNDS = {"loss": 1e-5, "dw": 1e-3, "alone": 1e-5, "drift": 2.0}


class Cells:
    """Finished measurements by name, one JSON file each: a run goes on where it was stopped, and two may share the work."""

    def __init__(self, workdir: pathlib.Path):
        self._dir = workdir
        workdir.mkdir(parents=True, exist_ok=True)
        self.done: dict[str, Any] = {}
        for path in sorted(workdir.glob("*.json")):
            self.done |= json.loads(path.read_text())

    def add(self, name: str, values: dict[str, Any]) -> None:
        self.done[name] = values = {**values, "commit": page.commit()}
        path = self._dir / (re.sub(r"[^\w=]+", "_", name) + ".json")
        path.write_text(json.dumps({name: values}, indent=1, ensure_ascii=False))
        print(f"{datetime.datetime.now():%H:%M:%S}  {name}  {json.dumps(values, ensure_ascii=False)[:400]}", flush=True)


def key_of(recipe: str, mesh: dict[str, int], long: bool) -> str:
    return f"{recipe} | {mesh_cell.name_of(mesh)}" if mesh else f"{recipe} | one device, {'2 × 256' if long else '8 × 64'}"


def measure_one_device(recipe: str, long: bool, cells: Cells):
    """Return (losses, gradients, casts) of one device; its drifts under perturbations go into the cells."""
    program = Program(settings_for(recipe, {}, long=long))
    name = key_of(recipe, {}, long)
    losses, gradients = program.run(steps=STEPS if name not in cells.done else 1)
    if name not in cells.done:
        runs = [program.run(perturb=seed) for seed in range(PERTURBATIONS if recipe != "none" else 1)]
        drifts = [relative(moved, losses) for moved, _ in runs]
        moved = [worst(grads, gradients)[0] for _, grads in runs]
        cells.add(name, {"losses": losses.tolist(), "drifts": drifts, "dw": moved})
    alone = (casts(program.settings), layers_alone(program.settings)) if recipe != "none" else ({}, {})
    return np.array(cells.done[name]["losses"]), gradients, *alone


def measure_cell(recipe: str, mesh: dict[str, int], one) -> dict[str, Any]:
    start = time.perf_counter()
    losses, gradients, expected_casts, expected = one
    program = Program(settings_for(recipe, mesh, long="context" in mesh))
    on_mesh, of_mesh = program.run()
    dw, where = worst(of_mesh, gradients)
    cell = {"loss": relative(on_mesh[:1], losses[:1]), "drift": relative(on_mesh, losses), "dw": dw, "where": where}
    if recipe != "none":
        found = casts(program.settings)
        cell["casts"] = [sum(np.array_equal(found[name], want) for name, want in expected_casts.items()), len(expected_casts)]
        cell["alone"], cell["alone_where"] = worst(layers_alone(program.settings), expected)
    cell["collectives"] = program.collectives
    return {**cell, "seconds": round(time.perf_counter() - start)}


def verdicts(recipe: str, mesh: dict[str, int], done: dict[str, Any]) -> dict[str, bool]:
    """Return for each criterion whether the cell meets it."""
    cell = done[key_of(recipe, mesh, False)]
    if recipe == "none":
        return {"loss": cell["drift"] <= BOUNDS["loss"], "dw": cell["dw"] <= 1e-5}
    one = done[key_of(recipe, {}, "context" in mesh)]
    met = {"loss": cell["loss"] <= BOUNDS["loss"], "dw": cell["dw"] <= BOUNDS["dw"]}
    if "alone" in cell:
        met["alone"] = cell["alone"] <= BOUNDS["alone"]
    met |= {"casts": cell["casts"][0] == cell["casts"][1], "drift": cell["drift"] <= BOUNDS["drift"] * max(one["drifts"])}
    if (plain := done.get(key_of("none", mesh, False))) is not None:
        met["sums"] = not unexpected(settings_for(recipe, mesh, long=False), cell["collectives"], plain["collectives"])
    return met


def render(done: dict[str, Any]) -> str:
    """Return the table as Markdown."""
    commits = ", ".join(sorted({cell["commit"] for cell in done.values() if "commit" in cell}))
    lines = ["# Meshes against one device", "", str(__doc__).split("\n\n", 2)[2].strip().split("\n    loss")[0], ""]
    how = f"{MACHINE}, jax {jax.__version__}, `python -m benchmarks.mesh`"
    lines += [f"Measured at commit {commits}; written {datetime.date.today()}; {how}.", ""]
    cells = [(recipe, mesh) for recipe in RECIPES for mesh in MESHES if key_of(recipe, mesh, False) in done]
    all_met = {(recipe, mesh_cell.name_of(mesh)): verdicts(recipe, mesh, done) for recipe, mesh in cells}
    count = collections.Counter(what for met in all_met.values() for what, ok in met.items() if ok)
    of = collections.Counter(what for met in all_met.values() for what in met)
    lines += ["Met: " + ", ".join(f"{what} {count[what]} of {of[what]}" for what in of) + ".", ""]
    lines += [
        "| recipe | mesh | loss, step 0 | worst dw | ÷ moved | of | alone | casts equal | loss, 20 steps | ÷ moved | not met |"
    ]
    lines += _row(["---"] * 11)
    for recipe, mesh in cells:
        cell, one = done[key_of(recipe, mesh, False)], done[key_of(recipe, {}, "context" in mesh)]
        unmet = [what for what, ok in all_met[recipe, mesh_cell.name_of(mesh)].items() if not ok]
        equal = " of ".join(map(str, cell["casts"])) if "casts" in cell else "-"
        alone = f"{cell['alone']:.1e}" if "alone" in cell else "-"
        dw = [f"{cell['dw']:.1e}", f"{cell['dw'] / max(one['dw']):.2g}", cell["where"]]
        figures = [f"{cell['loss']:.1e}", *dw, alone, equal, f"{cell['drift']:.1e}"]
        lines += _row(
            [recipe, mesh_cell.name_of(mesh), *figures, f"{cell['drift'] / max(one['drifts']):.2f}", ", ".join(unmet)]
        )
    lines += [
        "",
        "One device, weights moved by 1e-7: largest difference of the loss within 20 steps, and of a dw of step 0.",
        "",
    ]
    lines += _row(["recipe", "tokens", "loss, 20 steps", "worst dw"]) + _row(["---"] * 4)
    for recipe in RECIPES:
        for long in (False, True):
            if (one := done.get(key_of(recipe, {}, long))) is not None:
                spans = [f"{min(one[what]):.1e} to {max(one[what]):.1e}" for what in ("drifts", "dw")]
                lines += _row([recipe, "2 × 256" if long else "8 × 64", *spans])
    lines += ["", "Collectives of the compiled step, arrays by kind and element type; a loop's body counts once.", ""]
    names = [recipe for recipe in RECIPES if recipe != "none"]
    lines += _row(["mesh", "`none`", *(f"{name}, more than that" for name in names)]) + _row(["---"] * (2 + len(names)))
    for mesh in MESHES:
        if (plain := done.get(key_of("none", mesh, False))) is not None:
            others = (done.get(key_of(name, mesh, False)) for name in names)
            more = ["not run" if c is None else _counts(difference(c["collectives"], plain["collectives"])) for c in others]
            lines += _row([mesh_cell.name_of(mesh), _counts(plain["collectives"]), *more])
    if lowered := done.get("lowered"):
        lines += ["", "`llama3_8b_mlperf` (mxfp4_h16, kernels) lowered for ROCm on meshes that are not there.", ""]
        lines += _row(["mesh", "batch", "seconds", "kernel calls", "collectives written out"]) + _row(["---"] * 5)
        for name, row in ((name, row) for name, row in lowered.items() if name != "commit"):
            lines += _row([name, row["batch"], row["seconds"], row["kernel calls"], _counts(row["written"])])
    return "\n".join(lines) + "\n"


def _row(cells: list[Any]) -> list[str]:
    return ["| " + " | ".join(map(str, cells)) + " |"]


def _counts(collective: dict[str, int]) -> str:
    return ", ".join(f"{n} {kind}" for kind, n in collective.items()) or "none"


MACHINE = "8 virtual devices on 2 cores of an AMD EPYC (Zen 4) VM, beside other work"


# ---- A model that does not fit here ----

LOWERED = ({"fsdp": 8}, {"data": 64, "fsdp": 8}, {"data": 16, "fsdp": 8, "tensor": 4})


def lower_mlperf(mesh: dict[str, int], arch: str = "gfx950") -> dict[str, Any]:
    """Lower the train step of configs/llama3_8b_mlperf.py on an abstract mesh; return batch, time, calls, collectives."""
    from configs import llama3_8b_mlperf

    c: Any = llama3_8b_mlperf.get_config().unlock()
    c.quant.impl = "triton"
    c.mesh.update({axis: mesh.get(axis, 1) for axis in sharding.AXES})
    c.train.batch_size = max(c.train.batch_size, c.mesh.data * c.mesh.fsdp)
    settings = config.resolve(c)
    on: Any = sharding.abstract_mesh(settings.mesh, math.prod(mesh.values()))
    start = time.perf_counter()
    with triton_call.assume_target(arch):
        rows = settings.train.microbatch
        sharding.check(on, settings.model, settings.numerics, microbatch=rows, seq_len=settings.data.seq_len)
        tokens = jax.ShapeDtypeStruct((settings.train.batch_size, settings.data.seq_len + 1), jnp.int32)
        train_step: Any = step.make_train_step(settings, on)
        traced = train_step.trace(step.abstract_state(settings, on), tokens)
        text = traced.lower(lowering_platforms=("rocm",)).as_text()
    return {
        "batch": settings.train.batch_size,
        "seconds": round(time.perf_counter() - start),
        "kernel calls": text.count("@triton_kernel_call_ffi"),
        "written": dict(collections.Counter(re.findall(r'"stablehlo\.(all_reduce|reduce_scatter|all_gather)"', text))),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="2,4,8")
    parser.add_argument("--axes", default=",".join(sharding.AXES), help="meshes of these axes only")
    parser.add_argument("--recipes", default=",".join(RECIPES))
    parser.add_argument("--workdir", type=pathlib.Path, default=pathlib.Path("runs/mesh"))
    parser.add_argument("--lower", action="store_true")
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)  # before anything starts JAX
    cells, axes = Cells(args.workdir), set(args.axes.split(","))
    if args.lower:
        cells.add("lowered", {mesh_cell.name_of(mesh): lower_mlperf(mesh) for mesh in LOWERED})
    meshes = [mesh for mesh in MESHES if {*mesh} <= axes and str(np.prod([*mesh.values()])) in args.devices.split(",")]
    for recipe in () if args.lower else args.recipes.split(","):
        for long in (False, True):
            todo = [m for m in meshes if ("context" in m) == long and key_of(recipe, m, long) not in cells.done]
            if not todo:
                continue
            one = measure_one_device(recipe, long, cells)
            for mesh in todo:
                cells.add(key_of(recipe, mesh, long), measure_cell(recipe, mesh, one))
                jax.clear_caches()
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / "table.json").write_text(json.dumps(cells.done, indent=1, ensure_ascii=False) + "\n")
    (OUT / "table.md").write_text(render(cells.done))


if __name__ == "__main__":
    main()
