"""What one cell of the table of meshes measures (`benchmarks.mesh`): training, casts, layers alone, collectives."""

import collections
import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from fp4jax import bits, dot, numerics
from fp4jax.recipe import GEMMS, OPERANDS, GemmSpec, OperandSpec, Recipe
from models.llama import LINEAR_PATHS
from train import config, data, sharding, step

STEPS, PERTURBED_BY = 20, 1e-7
KINDS = ("attn/q", "attn/o", "mlp/gate", "mlp/down")  # column- and row-parallel, of both widths


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


def casts(settings: config.Settings, *, kinds: tuple[str, ...] = KINDS, step_number: int = 0) -> dict[str, np.ndarray]:
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

    arguments = _placed(settings, mesh, kinds)
    done = jax.jit(lambda all_: [cast_layer(path, *a) for path, a in zip(kinds, all_, strict=True)])(arguments)
    pieces = sharding.split(mesh, "time")
    return {
        f"{what} {i}": np.asarray(_in_time_order(what, np.asarray(leaf), settings.train.batch_size, pieces)).view(np.uint8)
        for layer in done
        for what, leaves in layer.items()
        for i, leaf in enumerate(leaves)
    }


def layers_alone(settings: config.Settings, *, kinds: tuple[str, ...] = KINDS) -> dict[str, np.ndarray]:
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

    run_all = jax.jit(lambda all_: [run(path, *a) for path, a in zip(kinds, all_, strict=True)])
    done = run_all(_placed(settings, mesh, kinds))
    return {f"{path} {name}": np.asarray(z) for path, of in zip(kinds, done, strict=True) for name, z in of.items()}


def _placed(settings: config.Settings, mesh, kinds: tuple[str, ...]) -> list[tuple[jax.Array, ...]]:
    """Return x [B, T, K], w and dy [B, T, N] of every kind of layer, where training has them."""

    def place(array, *axes):
        return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*axes)))

    part_of, out = sharding.partition(mesh), []
    for path in kinds:
        x, w, dy = _operands(settings, path)
        part = part_of(path) if part_of else None
        k, n, stored = (part.k, part.n, part.stored) if part else (None, None, (None, None))
        tokens = sharding.spec(mesh, "batch", "time")
        out.append((place(x, *tokens, k), place(w, *stored), place(dy, *tokens, n)))
    return out


def _operands(settings: config.Settings, path: str) -> list[np.ndarray]:
    """Return x [B, T, K], w [K, N] and dy [B, T, N], of uneven rows and columns, small dy."""
    rng, model = np.random.default_rng(len(path)), settings.model
    heads = model.n_heads * model.head_size
    sizes = {"attn/q": (model.d_model, heads), "mlp/gate": (model.d_model, model.d_ff)}
    sizes |= {"attn/o": sizes["attn/q"][::-1], "mlp/down": sizes["mlp/gate"][::-1]}
    (k, n), tokens = sizes[path], (settings.train.batch_size, settings.data.seq_len)
    out = []
    for shape, scale in (((*tokens, k), 1.0), ((k, n), 0.02), ((*tokens, n), 1e-5)):
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
    """Return how many scalar maxima a step needs, scanned blocks counted once.

    One per cast under a tensor scale and per dimension of it that the mesh splits; two where a scale of an earlier step might
    not be there yet.
    """
    part_of = sharding.partition(sharding.make_mesh(settings.mesh))
    count = 0
    if part_of is None:
        return count
    for path in [path for path in LINEAR_PATHS if path not in settings.numerics.exempt]:
        for gemm in GEMMS:
            for spec, operand in zip(_operand_specs(settings.numerics.recipe, gemm), OPERANDS[gemm], strict=True):
                split = sum(axis is not None for axis in part_of(path).of(operand))
                count += split * (spec.scale in ("e4m3", "float32")) * (2 if spec.scale_rule == "delayed" else 1)
    return count


def _operand_specs(recipe: Recipe, gemm: str) -> tuple[OperandSpec, OperandSpec]:
    spec: GemmSpec = getattr(recipe, gemm)
    return spec.lhs, spec.rhs


def unexpected(settings: config.Settings, found: dict[str, int], plain: dict[str, int]) -> dict[str, int]:
    """Return the collectives that a recipe has more than `none` on the same mesh, but for the maxima of its tensor scales."""
    allowed = {MAXIMUM: tensor_maxima(settings)}
    return {kind: n for kind, n in difference(found, plain).items() if n > allowed.get(kind, 0)}


def difference(found: dict[str, int], plain: dict[str, int]) -> dict[str, int]:
    both = {kind: found.get(kind, 0) - plain.get(kind, 0) for kind in sorted({*found, *plain})}
    return {kind: n for kind, n in both.items() if n}
