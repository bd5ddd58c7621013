"""The train state and the two jitted programs: one optimizer step, and the per-token losses of evaluation.

Shape key: A microbatches, B sequences, T positions.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fp4jax import bits
from fp4jax.dot import roll_history
from fp4jax.numerics import Context, Numerics, census
from fp4jax.ops import matmul
from fp4jax.recipe import GEMMS, GemmSpec, Recipe, current_scaling, round_to_nearest
from models import llama
from train import data, optimizer, sharding
from train.config import Settings

WATCHED = ("train_loss", "grad_norm")  # for what is not finite, and for spikes


class TrainState(NamedTuple):
    """All arrays of a run.

    params, opt_state: float32. step: int32, the number of optimizer steps done. history: {path: float32 [L, 3, 2, 4]}, the
    maxima of delayed scaling (`fp4jax.numerics.Context`), empty when no phase of the run has it. seed: uint32[2], what random
    bits are drawn from; in the state, so that runs which differ in their seed only are one program. ema: the average of the
    params (`optimizer.average`), the initial ones before the first update; {} without optimizer.ema_decay. recent: of the
    last W = train.spike_window steps train_loss and grad_norm, float32 [W], and count, int32; {} without train.skip_spikes.
    """

    params: Any
    opt_state: Any
    step: jax.Array
    history: dict[str, jax.Array]
    seed: jax.Array
    ema: Any
    recent: dict[str, jax.Array]


def init_state(settings: Settings, mesh: Mesh) -> TrainState:
    """Return the initial state, born sharded: a pure function of (model, seed)."""
    return _init_program(_without_seed(settings), mesh)(bits.seed_words(settings.train.seed))


def abstract_state(settings: Settings, mesh: sharding.AnyMesh) -> TrainState:
    """Return the state's shapes, dtypes and shardings without allocating anything."""
    init, shardings = _init_and_shardings(settings, mesh)
    shapes = jax.eval_shape(init, bits.seed_words(0))
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)


def _without_seed(settings: Settings) -> Settings:
    return dataclasses.replace(settings, train=dataclasses.replace(settings.train, seed=0))


@functools.lru_cache(maxsize=1)
def _init_program(settings: Settings, mesh: Mesh) -> Callable[[np.ndarray], TrainState]:
    """Return the jitted initialisation, the same for every seed."""
    init, shardings = _init_and_shardings(settings, mesh)
    return jax.jit(init, out_shardings=shardings)


def _init_and_shardings(settings: Settings, mesh: sharding.AnyMesh):
    model = llama.Llama(settings.model)
    tx = optimizer.make_optimizer(settings.optimizer)

    def init(seed) -> TrainState:
        params = model.init(jax.random.key(seed[0]), jnp.zeros((1, settings.data.seq_len), jnp.int32))["params"]
        history = {}
        for phase in settings.phases():
            history |= phase.numerics.init_history(llama.LINEAR_PATHS)
        ema = params if settings.optimizer.ema_decay else {}
        recent = {}
        if settings.train.skip_spikes:
            recent = {name: jnp.zeros(settings.train.spike_window) for name in WATCHED} | {"count": jnp.zeros((), jnp.int32)}
        return TrainState(params, tx.init(params), jnp.zeros((), jnp.int32), history, jnp.asarray(seed), ema, recent)

    return init, sharding.state_shardings(mesh, jax.eval_shape(init, bits.seed_words(0)))


def averaged(state: TrainState) -> TrainState:
    """Return the state with the averaged weights in the place of the trained ones, to evaluate it."""
    return state._replace(params=state.ema)


@jax.jit
def perturb(state: TrainState, size: float) -> TrainState:
    """Return the state with every weight multiplied by 1 + size · z, z drawn from a normal distribution by the state's seed."""
    leaves, tree = jax.tree.flatten(state.params)
    keys = jax.random.split(jax.random.fold_in(jax.random.key(state.seed[0]), bits.path_word("perturb")), len(leaves))
    moved = [w * (1 + size * jax.random.normal(key, w.shape, w.dtype)) for w, key in zip(leaves, keys, strict=True)]
    return state._replace(params=jax.tree.unflatten(tree, moved))


@jax.jit
def is_finite(state: TrainState) -> jax.Array:
    """Return whether every parameter and moment is finite."""
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(state)]))


@jax.jit
def checksum(state: TrainState) -> jax.Array:
    """Return a sum over the state's 32-bit words with odd weights, mod 2³²: no single flipped bit leaves it unchanged.

    weight = 2 · Σ_d index_d · c_d + 1. Integer sums do not depend on their order: the result is the same on every mesh.
    """
    total = jnp.uint32(0)
    for x in jax.tree.leaves(state):
        weights = jnp.ones(x.shape, jnp.uint32)
        for axis in range(x.ndim):
            index = jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
            weights += 2 * index * jnp.uint32(pow(0x9E3779B1, axis + 1, 2**32))
        words = jax.lax.bitcast_convert_type(x, jnp.uint32)
        total = total * jnp.uint32(0x01000193) + jnp.sum(words * weights, dtype=jnp.uint32)
    return total


def make_gradient(settings: Settings, mesh: Mesh) -> Callable[..., tuple[jax.Array, tuple[Any, Any, Any]]]:
    """Return (params, history, sums, tokens_BT1, key) → (loss, cotangents of params, history and sums), to be jitted.

    The loss is the mean over all tokens of the global batch that are predicted (with model.document_end those that begin a
    document are not), whatever the number of microbatches; random bits are keyed by
    `key` and by the global row of each token. Over microbatches gradients and sums are added, of the maxima of delayed scaling
    the largest is kept. sums: `Numerics.init_sums`, or {} to measure nothing.
    """
    partition = sharding.partition(mesh, settings.train.grad_reduce_dtype)
    numerics = dataclasses.replace(settings.numerics, partition=partition)
    model = llama.Llama(settings.model, numerics.dot, **sharding.model_hooks(mesh, settings.model))
    accumulation = settings.train.accumulation

    def loss_share(params, history, sums, tokens_BT1, key, predicted):
        key = Context(key, history, sums)
        nll_BT: Any = model.apply({"params": params}, tokens_BT1[:, :-1], tokens_BT1[:, 1:], key, method="token_losses")
        return jnp.sum(nll_BT) / predicted

    def num_predicted(tokens_BT1):
        if settings.model.document_end < 0:
            return tokens_BT1.shape[0] * (tokens_BT1.shape[1] - 1)
        return jnp.maximum(jnp.sum(is_predicted(settings.model, tokens_BT1)), 1)

    value_and_grad = jax.value_and_grad(loss_share, argnums=(0, 1, 2))

    def at_once(params, history, sums, tokens_BT1, key):
        return value_and_grad(params, history, sums, tokens_BT1, key, num_predicted(tokens_BT1))

    def accumulate(params, history, sums, tokens_BT1, key):
        tokens_ABT1 = tokens_BT1.reshape(accumulation, -1, tokens_BT1.shape[1])
        spread = NamedSharding(mesh, sharding.spec(mesh, None, "batch"))
        tokens_ABT1 = jax.lax.with_sharding_constraint(tokens_ABT1, spread)
        rows = tokens_ABT1.shape[1] * (tokens_ABT1.shape[2] - 1)
        predicted = num_predicted(tokens_BT1)

        def add(carry, xs):
            index, tokens = xs
            shifted = key._replace(row_offset=index * jnp.uint32(rows))
            loss, grads = value_and_grad(params, history, sums, tokens, shifted, predicted)
            (old_loss, (old_grads, old_maxima, old_sums)), (new_grads, new_maxima, new_sums) = carry, grads
            summed = jax.tree.map(jnp.add, (old_grads, old_sums), (new_grads, new_sums))
            return (old_loss + loss, (summed[0], jax.tree.map(jnp.maximum, old_maxima, new_maxima), summed[1])), None

        zero = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, (params, history, sums)))
        return jax.lax.scan(add, zero, (jnp.arange(accumulation, dtype=jnp.uint32), tokens_ABT1))[0]

    return at_once if accumulation == 1 else accumulate


def is_predicted(model: llama.LlamaConfig, tokens_BT1: Any) -> Any:
    """Return whether each token after the first is predicted, bool [B, T]: not where it begins a document that is separated."""
    return tokens_BT1[:, :-1] != model.document_end


def make_train_step(settings: Settings, mesh: Mesh) -> Callable[..., tuple[TrainState, dict[str, jax.Array]]]:
    """Return the jitted, donating step: (state, tokens_BT1 int32) → (state, metrics).

    The gradient is that of `make_gradient`, keyed by (seed, step); delayed scaling rolls its history once per step. metrics:
    train_loss (nats per token), grad_norm (before clipping), lr, all float32 scalars, and with train.skip_spikes spike, bool. A
    step of which either of the first two is not finite, or a spike, changes nothing but the number of steps and `recent`.
    """
    tx = optimizer.make_optimizer(settings.optimizer)
    schedule = optimizer.learning_rate(settings.optimizer)
    gradient = make_gradient(settings, mesh)

    def train_step(state: TrainState, tokens_BT1: jax.Array):
        key = bits.step_key(state.seed, state.step)
        loss, (grads, maxima, _) = gradient(state.params, state.history, {}, tokens_BT1, key)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        updates_done = state.opt_state[-1].count  # by now: those of skipped steps were none
        metrics = {"train_loss": loss, "grad_norm": optax.tree.norm(grads), "lr": schedule(updates_done)}
        history = jax.tree.map(roll_history, state.history, maxima)
        decay = settings.optimizer.ema_decay
        ema = optimizer.average(state.ema, params, updates_done + 1, decay) if decay else {}
        new = TrainState(params, opt_state, state.step + 1, history, state.seed, ema, state.recent)
        good = jnp.isfinite(metrics["train_loss"]) & jnp.isfinite(metrics["grad_norm"])
        if settings.train.skip_spikes:
            metrics["spike"], recent = is_spike(metrics, state.recent, settings.train.skip_spikes)
            good &= ~metrics["spike"]
            state, new = state._replace(recent=recent), new._replace(recent=recent)
        return jax.tree.map(lambda a, b: jnp.where(good, a, b), new, state._replace(step=state.step + 1)), metrics

    shardings = state_shardings(settings, mesh)
    replicated = NamedSharding(mesh, PartitionSpec())
    return jax.jit(
        train_step,
        in_shardings=(shardings, sharding.batch_sharding(mesh)),
        out_shardings=(shardings, replicated),
        donate_argnums=0,
    )


def is_spike(
    figures: dict[str, jax.Array], recent: dict[str, jax.Array], sigmas: float
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return whether a loss or gradient norm exceeds mean + sigmas · standard deviation of `recent`, and what follows `recent`.

    Never before half of the window is filled. A spike enters `recent` too, so that a lasting change is soon none; what is not
    finite does not.
    """
    count, width = recent["count"], recent[WATCHED[0]].shape[0]
    seen = jnp.arange(width) < count
    spike, new = jnp.array(False), {}
    for name in WATCHED:
        mean = jnp.mean(recent[name], where=seen)
        spike |= figures[name] > mean + sigmas * jnp.std(recent[name], where=seen)
        new[name] = recent[name].at[count % width].set(figures[name])
    finite = jnp.all(jnp.stack([jnp.isfinite(figures[name]) for name in WATCHED]))
    new = {name: jnp.where(finite, values, recent[name]) for name, values in new.items()}
    return finite & spike & (count >= width // 2), new | {"count": count + finite}


def state_shardings(settings: Settings, mesh: sharding.AnyMesh) -> TrainState:
    """Return the sharding of every array of the state."""
    return _init_and_shardings(settings, mesh)[1]


def make_eval_step(settings: Settings, mesh: Mesh, *, stochastic: bool = False) -> Callable[..., jax.Array]:
    """Return the jitted (params, tokens_BT1, first_row, step, seed) → nll_BT float32, nats per token.

    Each sequence is evaluated by itself, so per-tensor scales are taken per sequence and the result does not depend on the
    batch. Only fprop runs, so a sequence need not divide into wgrad's blocks. Casts round to nearest and random signs are
    those of step 0; `stochastic` keeps the recipe's own rounding and the signs of `step`.
    first_row: the global index of the batch's first sequence, the row that its random bits are drawn for. step, seed: those of
    the train state.
    """
    numerics = eval_numerics(settings.numerics, stochastic=stochastic)
    fprops = _fprops(numerics)
    # Rows do not see each other without scales over them, and one kernel for all is faster than one for each sequence.
    together = any(matmul.choose(numerics.impl, spec)[0] == "triton" for spec in fprops) and not _has_tensor_scales(fprops)
    if together:
        numerics = dataclasses.replace(numerics, partition=sharding.partition(mesh))

    def eval_step(params, tokens_BT1, first_row, step, seed):
        length = tokens_BT1.shape[1] - 1
        dot = numerics.dot if together else _by_sequence(numerics.dot, length)
        model = llama.Llama(settings.model, dot, **sharding.model_hooks(mesh, settings.model))
        key = bits.step_key(seed, step if stochastic else 0)
        key = key._replace(row_offset=first_row * jnp.uint32(length))
        return model.apply({"params": params}, tokens_BT1[:, :-1], tokens_BT1[:, 1:], key, method="token_losses")

    return jax.jit(eval_step, out_shardings=NamedSharding(mesh, PartitionSpec()))


def _by_sequence(linear_dot: llama.LinearDot, length: int) -> llama.LinearDot:
    """Return the hook whose dots take every sequence of their lhs [B, T, K] by itself, so that no scale spans two of them.

    length: rows of random bits that a sequence has to itself; a chunk of the loss has fewer.
    """

    def of_layer(path: str, layer: Any, key: bits.Key, shared: Any):
        def dot(lhs, rhs, *rest, **options):
            def of_sequence(x_TK, sequence):
                of_row = key._replace(row_offset=key.row_offset + sequence * jnp.uint32(length))
                return linear_dot(path, layer, of_row, {})(x_TK[None], rhs, *rest, **options)[0]

            return jax.vmap(of_sequence)(lhs, jnp.arange(lhs.shape[0], dtype=jnp.uint32))

        return dot

    return of_layer


def eval_numerics(numerics: Numerics, *, stochastic: bool = False) -> Numerics:
    """Return the numerics of a forward pass alone, without a history, rounding to nearest unless `stochastic`."""
    numerics = numerics if stochastic else numerics.map(round_to_nearest)
    numerics = dataclasses.replace(numerics, residuals="operands")  # there is no backward pass
    return numerics.map(lambda recipe: Recipe(fprop=current_scaling(recipe).fprop))


def looks_ahead(numerics: Numerics) -> bool:
    """Return whether in evaluation a position depends on those after it: by a scale, or a mean, taken over a sequence."""

    def over_tokens(spec: GemmSpec) -> bool:
        x = spec.lhs
        whole = (x.scale == "e4m3" and x.scale_rule != "single_level") or (x.scale == "float32" and not x.block)
        return whole or (x.across or 1) > 1 or spec.split == "mean"

    return any(over_tokens(spec) for spec in _fprops(eval_numerics(numerics)))


def _fprops(numerics: Numerics) -> list[GemmSpec]:
    return [recipe.fprop for recipe in (numerics.recipe, *(recipe for _, recipe in numerics.rules))]


def _has_tensor_scales(specs: list[GemmSpec]) -> bool:
    return any(operand.scale in ("e4m3", "float32") for spec in specs for operand in (spec.lhs, spec.rhs))


def val_batches(
    settings: Settings, mesh: Mesh, dataset: data.Dataset, *, batch_size: int = 0
) -> Iterator[dict[str, np.ndarray]]:
    """Return the validation batches of a run; batch_size: 0 for the run's own, rounded up to what the mesh divides."""
    size = batch_size or settings.train.eval_batch_size or settings.train.microbatch
    batches = data.val_batches(
        dataset,
        seq_len=settings.data.seq_len,
        batch_size=size + -size % sharding.split(mesh, "batch"),
        max_sequences=settings.data.max_val_sequences,
        choice=settings.data.val_choice,
    )
    return ({**batch, "mask": batch["mask"] * is_predicted(settings.model, batch["tokens"])} for batch in batches)


def validation_loss(eval_step, mesh: Mesh, state: TrainState, batches: Iterable[dict[str, np.ndarray]]) -> float:
    """Return the token-weighted mean loss in nats over all batches, summed in float64."""
    total, count, first_row = 0.0, 0.0, 0
    for batch in batches:
        tokens = sharding.put_batch(mesh, batch["tokens"])
        nll_BT = np.asarray(eval_step(state.params, tokens, np.uint32(first_row), state.step, state.seed), np.float64)
        total += float((nll_BT * batch["mask"]).sum())
        count += float(batch["mask"].sum())
        first_row += len(nll_BT)
    return total / count if count else math.nan


def census_rows(settings: Settings) -> list[dict[str, Any]]:
    """Return the census of one training step: every linear layer's GEMMs, then the GEMMs no recipe covers."""
    train = settings.train
    tokens = jax.ShapeDtypeStruct((train.microbatch, settings.data.seq_len), jnp.int32)
    plain = llama.Llama(settings.model)
    params = jax.eval_shape(lambda t: plain.init(jax.random.key(0), t), tokens)

    def trace(numerics: Numerics):
        model = llama.Llama(settings.model, numerics.dot)
        key = Context(bits.step_key(0, 0), numerics.init_history(llama.LINEAR_PATHS))
        return jax.eval_shape(lambda p, t: model.apply(p, t, t, key, method="token_losses"), params, tokens)

    rows = census(settings.numerics, trace)
    dtype = settings.model.dtype
    uncovered = [("layers/*/attn/scores", "q·kᵀ and p·v are not linear layers"), ("embed", "a gather, no GEMM")]
    return rows + [
        {"module": m, "gemm": g, "lhs": dtype, "rhs": dtype, "rotation": "-", "impl": "lax", "why": "", "exempt": why}
        for m, why in uncovered
        for g in GEMMS
    ]
