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
    sums     collectives of the compiled step: those of `none`, and one scalar maximum per tensor scale

Finished cells are kept in the workdir; results/mesh/table.md and .json are written from all of them.
"""

import argparse
import collections
import dataclasses
import datetime
import functools
import json
import pathlib
import re
import subprocess
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from fp4jax import bits, dot, numerics
from fp4jax.ops import triton_call
from fp4jax.recipe import GEMMS, OPERANDS, GemmSpec, OperandSpec, Recipe
from models.llama import LINEAR_PATHS
from train import config, data, sharding, step

STEPS, PERTURBATIONS, PERTURBED_BY = 20, 5, 1e-7
RECIPES = ("none", "mxfp4_h16", "nvidia_nvfp4", "mxfp4_sr", "nvidia_nvfp4 keep_last=0")
MESHES: tuple[dict[str, int], ...] = (
    *({axis: size} for size in (2, 4, 8) for axis in ("data", "fsdp", "tensor", "context")),
    {"fsdp": 2, "tensor": 2},
    {"data": 2, "context": 2},
    {"data": 2, "fsdp": 2, "tensor": 2},
    {"fsdp": 2, "context": 2, "tensor": 2},
)
KINDS = ("attn/q", "attn/o", "mlp/gate", "mlp/down")  # column- and row-parallel, of both widths
OUT = pathlib.Path("results/mesh")
BOUNDS = {"loss": 1e-5, "dw": 1e-3, "alone": 1e-5, "drift": 2.0}


def settings_for(recipe: str, mesh: dict[str, int], *, long: bool) -> config.Settings:
    """Return the settings of one cell; recipe: its name, and "keep_last=0" behind it to quantize every block."""
    c: Any = config.default_config()
    c.model.update(d_model=512, n_layers=2, n_heads=8, n_kv_heads=8, head_dim=32, d_ff=1024)
    c.data.seq_len, c.train.batch_size = (256, 2) if long else (64, 8)
    c.optimizer.update(warmup_steps=2, clip_norm=0.0)
    c.train.steps = STEPS
    name, *kept = recipe.split(" keep_last=")
    c.quant.recipe = name
    if kept:
        c.quant.keep_last = int(kept[0])
    c.mesh.update({"fsdp": 1, **mesh})
    return config.resolve(c)


def name_of(mesh: dict[str, int]) -> str:
    return " × ".join(f"{axis} {size}" for axis, size in mesh.items()) or "one device"


# ---- Training on a mesh ----


@functools.cache
def _initial(settings: config.Settings) -> step.TrainState:
    """Return the initial state on the host; it does not depend on recipe and mesh."""
    return jax.tree.map(np.asarray, step.init_state(settings, sharding.make_mesh(sharding.MeshConfig(fsdp=1))))


@functools.cache
def _batches(data_config: data.DataConfig, batch_size: int) -> list[np.ndarray]:
    rows = data.train_iterator(data.load(data_config), seq_len=data_config.seq_len, batch_size=batch_size, seed=0)
    return [np.asarray(next(rows)["tokens"]) for _ in range(STEPS)]


class Program:
    """The compiled train step of some settings, and its collectives."""

    def __init__(self, settings: config.Settings):
        self.settings, self.mesh = settings, sharding.make_mesh(settings.mesh)
        shape = (settings.train.batch_size, settings.data.seq_len + 1)
        abstract = step.abstract_state(settings, self.mesh), jax.ShapeDtypeStruct(shape, jnp.int32)
        train_step: Any = step.make_train_step(settings, self.mesh)
        self._step = train_step.lower(*abstract).compile()
        self.collectives = collectives(self._step.as_text())

    def run(self, *, steps: int = STEPS, perturb: int | None = None) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Return (losses, each layer's gradient of step 0); perturb: the seed of a relative noise on the initial weights."""
        s = self.settings
        plain = dataclasses.replace(s, mesh=sharding.MeshConfig(fsdp=1), numerics=numerics.Numerics(Recipe()))
        state = _initial(plain)
        if perturb is not None:
            moved = step.perturb(state._replace(seed=bits.seed_words(perturb)), PERTURBED_BY)
            state = moved._replace(seed=state.seed)
        state = jax.device_put(jax.tree.map(np.array, state), step.state_shardings(s, self.mesh))
        losses, gradients = [], {}
        for tokens in _batches(s.data, s.train.batch_size)[:steps]:
            state, metrics = self._step(state, sharding.put_batch(self.mesh, tokens))
            losses.append(float(metrics["train_loss"]))
            gradients = gradients or per_layer(state.opt_state[1].mu)  # Adam's mean: the gradient times 1 − b1
        return np.array(losses), gradients


def per_layer(tree: Any) -> dict[str, np.ndarray]:
    """Return {path: array} with the scanned blocks apart."""
    out = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = "/".join(str(part.key) for part in path)
        blocks = enumerate(np.asarray(leaf)) if name.startswith("layers/") else ()
        out |= {name.replace("layers/", f"layers/{i}/"): block for i, block in blocks} or {name: np.asarray(leaf)}
    return out


def relative(a: np.ndarray, b: np.ndarray) -> float:
    """Return the largest relative difference of two losses."""
    return float(np.max(np.abs(a - b) / np.abs(b)))


def worst(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> tuple[float, str]:
    """Return the largest relative Frobenius difference of two sets of gradients, and where it is."""
    return max((float(np.linalg.norm(a[path] - b[path]) / np.linalg.norm(b[path])), path) for path in b)


# ---- Casts ----


def casts(settings: config.Settings, *, step_number: int = 0) -> dict[str, np.ndarray]:
    """Return codes and scales of every operand of a layer of each kind, as bytes, tokens in the order [B, T].

    The operands are the same for every mesh and lie on the settings' mesh as in training; the key is that of a step.
    """
    mesh = sharding.make_mesh(settings.mesh)
    part_of = sharding.partition(mesh)
    recipe = settings.numerics.recipe
    key = bits.step_key(0, step_number)

    def cast_layer(path, x_BTK, w_KN, dy_BTN):
        part = part_of(path) if part_of else None
        layer_key = numerics._layer_key(key, path, 0) if recipe.needs_key else None  # pyright: ignore[reportPrivateUsage]
        flat, keys = {"w": w_KN}, {"w": layer_key}
        for name, operand in (("x", x_BTK), ("dy", dy_BTN)):
            if part is not None and part.pieces > 1:
                operand, keys[name] = dot._time_first(operand, part.pieces, recipe, layer_key)  # pyright: ignore
            else:
                keys[name] = layer_key
            flat[name] = operand.reshape(-1, operand.shape[-1])
        how = dot._How(recipe, dict.fromkeys(GEMMS, "xla"), None, jnp.float32, "operands", part)  # pyright: ignore
        out = {}
        for gemm, axes in {"fprop": (1, 0), "dgrad": (1, 1), "wgrad": (0, 0)}.items():
            for index, (name, axis) in enumerate(zip(OPERANDS[gemm], axes, strict=True)):
                gemm_key = dot._gemm_key(keys[name], gemm)  # pyright: ignore[reportPrivateUsage]
                signs = dot._signs(how.spec(gemm), gemm_key)  # pyright: ignore[reportPrivateUsage]
                cast, *_ = dot._cast_operand(how, gemm, index, (flat[name], axis), gemm_key, signs, None)  # pyright: ignore
                out[f"{path} {gemm} {name}"] = jax.tree.leaves(cast)
        return out

    arguments = _placed(settings, mesh)
    done = jax.jit(lambda all_: [cast_layer(p, *a) for p, a in zip(KINDS, all_, strict=True)])(arguments)
    pieces = sharding.split(mesh, "time")
    return {
        f"{what} {i}": np.asarray(_in_time_order(what, np.asarray(leaf), settings.train.batch_size, pieces)).view(np.uint8)
        for layer in done
        for what, leaves in layer.items()
        for i, leaf in enumerate(leaves)
    }


def layers_alone(settings: config.Settings) -> dict[str, np.ndarray]:
    """Return y, dx and dw of a layer of each kind by itself, for the operands and the key of `casts`."""
    mesh = sharding.make_mesh(settings.mesh)
    part_of = sharding.partition(mesh, settings.train.grad_reduce_dtype)
    recipe = settings.numerics.recipe

    def run(path, x_BTK, w_KN, dy_BTN):
        layer_key = numerics._layer_key(bits.step_key(0, 0), path, 0)  # pyright: ignore[reportPrivateUsage]
        how = {"recipe": recipe, "key": layer_key if recipe.needs_key else None, "partition": part_of and part_of(path)}
        product = lambda x, w: dot.quantized_dot_general(x, w, (((2,), (0,)), ((), ())), **how)  # noqa: E731
        y, pull = jax.vjp(product, x_BTK, w_KN)
        return dict(zip(("y", "dx", "dw"), (y, *pull(dy_BTN)), strict=True))

    run_all = jax.jit(lambda all_: [run(path, *a) for path, a in zip(KINDS, all_, strict=True)])
    done = run_all(_placed(settings, mesh))
    return {f"{path} {name}": np.asarray(z) for path, of in zip(KINDS, done, strict=True) for name, z in of.items()}


def _placed(settings: config.Settings, mesh) -> list[tuple[jax.Array, ...]]:
    """Return x [B, T, K], w and dy [B, T, N] of every kind of layer, where training has them."""

    def place(array, *axes):
        return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*axes)))

    part_of, out = sharding.partition(mesh), []
    for path in KINDS:
        x, w, dy = _operands(path, settings.train.batch_size, settings.data.seq_len)
        part = part_of(path) if part_of else None
        k, n, stored = (part.k, part.n, part.stored) if part else (None, None, (None, None))
        tokens = sharding.spec(mesh, "batch", "time")
        out.append((place(x, *tokens, k), place(w, *stored), place(dy, *tokens, n)))
    return out


def _operands(path: str, batch: int, length: int) -> list[np.ndarray]:
    """Return x [B, T, K], w [K, N] and dy [B, T, N], of uneven rows and columns, small dy."""
    rng = np.random.default_rng(len(path))
    k, n = {"attn/q": (512, 256), "attn/o": (256, 512), "mlp/gate": (512, 1024), "mlp/down": (1024, 512)}[path]
    out = []
    for shape, scale in (((batch, length, k), 1.0), ((k, n), 0.02), ((batch, length, n), 1e-5)):
        spread = np.exp(rng.normal(size=(*shape[:-1], 1))) * np.exp(rng.normal(size=shape[-1]))
        out.append((scale * spread * rng.normal(size=shape)).astype(np.float32))
    return out


def _in_time_order(what: str, leaf: np.ndarray, batch: int, pieces: int) -> np.ndarray:
    if pieces == 1 or what.endswith(" w") or len(leaf) == 1:
        return leaf
    return np.ascontiguousarray(leaf.reshape(pieces, batch, -1, leaf.shape[1]).swapaxes(0, 1)).reshape(leaf.shape)


# ---- Collectives ----

_COLLECTIVE = re.compile(r"= (\(.*?\)|\S+) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")
MAXIMUM = "all-reduce s32 scalar"  # of magnitudes, taken on their bits


def collectives(text: str) -> dict[str, int]:
    """Return how many arrays each kind of collective of a compiled program has, by element type; scalars apart.

    "all-reduce f32": 5, "all-reduce s32 scalar": 2, … A collective of several arrays counts each (an all-to-all is given as so
    many pieces of one and counts once); what stands in the body of a loop counts once, however often it runs.
    """
    out = collections.Counter()
    for result, kind in _COLLECTIVE.findall(text):
        arrays = re.findall(r"(\w+)\[([\d,]*)\]", result)
        for dtype, shape in arrays[: 1 if kind == "all-to-all" else None]:
            scalar = all(size == "1" for size in shape.split(",") if size)
            out[f"{kind} {dtype}" + (" scalar" if scalar else "")] += 1
    return dict(sorted(out.items()))


def tensor_maxima(settings: config.Settings) -> int:
    """Return how many scalar maxima a step needs, scanned blocks counted once: one per cast under a tensor scale."""
    specs = [spec for gemm in GEMMS for spec in _operand_specs(settings.numerics.recipe, gemm)]
    return (len(LINEAR_PATHS) - len(settings.numerics.exempt)) * sum(spec.scale in ("e4m3", "float32") for spec in specs)


def _operand_specs(recipe: Recipe, gemm: str) -> tuple[OperandSpec, OperandSpec]:
    spec: GemmSpec = getattr(recipe, gemm)
    return spec.lhs, spec.rhs


# ---- The table ----


class Cells:
    """Finished measurements by name, one JSON file each: a run goes on where it was stopped, and two may share the work."""

    def __init__(self, workdir: pathlib.Path):
        self._dir = workdir
        workdir.mkdir(parents=True, exist_ok=True)
        self.done: dict[str, Any] = {}
        for path in sorted(workdir.glob("*.json")):
            self.done |= json.loads(path.read_text())

    def add(self, name: str, values: dict[str, Any]) -> None:
        self.done[name] = values
        path = self._dir / (re.sub(r"[^\w=]+", "_", name) + ".json")
        path.write_text(json.dumps({name: values}, indent=1, ensure_ascii=False))
        print(f"{datetime.datetime.now():%H:%M:%S}  {name}  {json.dumps(values, ensure_ascii=False)[:400]}", flush=True)


def key_of(recipe: str, mesh: dict[str, int], long: bool) -> str:
    return f"{recipe} | {name_of(mesh)}" if mesh else f"{recipe} | one device, {'2 × 256' if long else '8 × 64'}"


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
        met["sums"] = not unexpected(recipe, cell["collectives"], plain["collectives"])
    return met


def unexpected(recipe: str, found: dict[str, int], plain: dict[str, int]) -> dict[str, int]:
    """Return the collectives that a recipe has more (or, negative, fewer) than `none` on the same mesh, but for the maxima."""
    more = difference(found, plain)
    allowed = tensor_maxima(settings_for(recipe, {}, long=False))
    return {kind: n for kind, n in more.items() if not (kind == MAXIMUM and 0 < n <= allowed)}


def difference(found: dict[str, int], plain: dict[str, int]) -> dict[str, int]:
    both = {kind: found.get(kind, 0) - plain.get(kind, 0) for kind in sorted({*found, *plain})}
    return {kind: n for kind, n in both.items() if n}


def render(done: dict[str, Any], command: str) -> str:
    """Return the table as Markdown."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    lines = ["# Meshes against one device", "", str(__doc__).split("\n\n", 2)[2].strip().split("\n    loss")[0], ""]
    lines += [f"Commit {commit}, {datetime.date.today()}, {MACHINE}, jax {jax.__version__}, `{command}`.", ""]
    cells = [(recipe, mesh) for recipe in RECIPES for mesh in MESHES if key_of(recipe, mesh, False) in done]
    all_met = {(recipe, name_of(mesh)): verdicts(recipe, mesh, done) for recipe, mesh in cells}
    count = collections.Counter(what for met in all_met.values() for what, ok in met.items() if ok)
    of = collections.Counter(what for met in all_met.values() for what in met)
    lines += ["Met: " + ", ".join(f"{what} {count[what]} of {of[what]}" for what in of) + ".", ""]
    head = [
        "recipe",
        "mesh",
        "loss, step 0",
        "worst dw",
        "of",
        "alone",
        "casts equal",
        "loss, 20 steps",
        "÷ moved by 1e-7",
        "not met",
    ]
    lines += _row(head) + _row(["---"] * len(head))
    for recipe, mesh in cells:
        cell, one = done[key_of(recipe, mesh, False)], done[key_of(recipe, {}, "context" in mesh)]
        unmet = [what for what, ok in all_met[recipe, name_of(mesh)].items() if not ok]
        equal = " of ".join(map(str, cell["casts"])) if "casts" in cell else "-"
        alone = f"{cell['alone']:.1e}" if "alone" in cell else "-"
        figures = [f"{cell['loss']:.1e}", f"{cell['dw']:.1e}", cell["where"], alone, equal, f"{cell['drift']:.1e}"]
        lines += _row([recipe, name_of(mesh), *figures, f"{cell['drift'] / max(one['drifts']):.2f}", ", ".join(unmet)])
    lines += ["", "One device, weights moved by 1e-7: largest difference of the loss within 20 steps, of a dw of step 0.", ""]
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
            lines += _row([name_of(mesh), _counts(plain["collectives"]), *more])
    if lowered := done.get("lowered"):
        lines += ["", "`llama3_8b_mlperf` (mxfp4_h16, kernels) lowered for ROCm on meshes that are not there.", ""]
        lines += _row(["mesh", "batch", "seconds", "kernel calls", "collectives written out"]) + _row(["---"] * 5)
        for name, row in lowered.items():
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
    sizes = {axis: mesh.get(axis, 1) for axis in sharding.AXES}
    c.mesh.update(sizes)
    c.train.batch_size = max(c.train.batch_size, sizes["data"] * sizes["fsdp"])
    settings = config.resolve(c)
    on: Any = AbstractMesh(tuple(sizes.values()), sharding.AXES, axis_types=(AxisType.Auto,) * len(sizes))
    start = time.perf_counter()
    with triton_call.assume_target(arch):
        rows = settings.train.batch_size // settings.train.accumulation
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
        cells.add("lowered", {name_of(mesh): lower_mlperf(mesh) for mesh in LOWERED})
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
    (OUT / "table.md").write_text(render(cells.done, " ".join(["python -m benchmarks.mesh", *sys.argv[1:]])))


if __name__ == "__main__":
    main()
