"""AdamW or Muon, warm-up and decay of the rate, global-norm clipping, weight decay on matrices only, an average of the weights.

Muon moves the matrix of every linear layer of a block by its momentum with all singular values made about 1, and everything
else (embedding, lm_head, norms) by Adam. Kernels stacked by scan are so many matrices: the layer axis is no part of any.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax import contrib

from train.errors import InputError, check_types

NAMES = ("adamw", "muon")
SCHEDULES = ("cosine", "wsd")
_CHOICES = {"name": NAMES, "schedule": SCHEDULES}
_MUON_ONLY = ("muon_momentum", "muon_steps", "muon_rms")
_MIN_FLOAT32, _MAX_FLOAT32 = float(jnp.finfo(jnp.float32).tiny), float(jnp.finfo(jnp.float32).max)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Settings of the optimizer; raises InputError for a value out of range, or one that does not apply.

    Attributes:
      name: "adamw", or "muon" for the linear layers of the blocks and Adam for all else.
      peak_lr, end_lr: learning rate after the warm-up and at the end of the decay.
      warmup_steps: linear warm-up from 0; step n (from 0) runs at peak_lr · (n + 1) / warmup_steps.
      schedule: after the warm-up, "cosine" falls from there to decay_steps; "wsd" (warm-up, stable, decay; 2404.06395) stays at
        peak_lr and falls linearly in the last cooldown_steps, so that one run can end at several lengths: these two may
        change when a run is resumed, as long as the rate has not begun to fall.
      decay_steps: the step at which the rate reaches end_lr; 0 means train.steps.
      cooldown_steps: for "wsd", and only for it.
      b1, b2, eps, weight_decay: AdamW (Loshchilov & Hutter 2019); decay applies to kernels and embeddings, not to norms.
      clip_norm: the gradient's global norm is clipped to this; 0 means no clipping.
      muon_momentum, muon_steps: Nesterov momentum and Newton–Schulz iterations (Jordan 2024, as in `optax.contrib`).
      muon_rms: Muon's update has this root mean square, about that of Adam's, so that peak_lr and weight_decay suit both: the
        orthogonal matrix times muon_rms · √max(in, out), 0.2 in 2502.16982.
      ema_decay: β of an exponential moving average of the weights, which is evaluated beside them; 0 means none. See `average`.
    """

    name: str = "adamw"
    peak_lr: float = 1e-3
    end_lr: float = 1e-4
    warmup_steps: int = 50
    schedule: str = "cosine"
    decay_steps: int = 0
    cooldown_steps: int = 0
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    muon_momentum: float = 0.95
    muon_steps: int = 5
    muon_rms: float = 0.2
    ema_decay: float = 0.0

    def __post_init__(self):
        check_types("optimizer", self)
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise InputError(f"optimizer.{name}={getattr(self, name)!r} is not one of {', '.join(allowed)}")
        if (self.schedule == "wsd") != (self.cooldown_steps != 0):
            raise InputError(f"optimizer.schedule={self.schedule!r} does not go with cooldown_steps={self.cooldown_steps}")
        numbers = {name: value for name, value in dataclasses.asdict(self).items() if name not in _CHOICES}
        for name, value in numbers.items():
            if not 0 <= value <= _MAX_FLOAT32:
                raise InputError(f"optimizer.{name}={value} must be finite in float32 and not negative")
        if min(self.peak_lr, self.eps) < _MIN_FLOAT32:  # below it float32 is flushed to zero
            raise InputError(f"optimizer.peak_lr={self.peak_lr} and optimizer.eps={self.eps} must be positive in float32")
        if self.end_lr > self.peak_lr:
            raise InputError(f"optimizer.end_lr={self.end_lr} is above optimizer.peak_lr={self.peak_lr}")
        for name in ("b1", "b2", "muon_momentum", "ema_decay"):
            if np.float32(numbers[name]) >= 1:
                raise InputError(f"optimizer.{name}={numbers[name]} must be below 1 in float32")
        self._check_muon()

    def _check_muon(self) -> None:
        if self.muon_steps == 0 or self.muon_rms == 0:
            raise InputError(f"optimizer.muon_steps={self.muon_steps} and optimizer.muon_rms={self.muon_rms} must be positive")
        for field in dataclasses.fields(self):
            if self.name != "muon" and field.name in _MUON_ONLY and getattr(self, field.name) != field.default:
                value = getattr(self, field.name)
                raise InputError(f"optimizer.{field.name}={value} does not apply to optimizer.name={self.name!r}")


def learning_rate(config: OptimizerConfig) -> optax.Schedule:
    """Return step → learning rate; decay_steps must be resolved (above warmup_steps + cooldown_steps)."""
    after, length = config.warmup_steps, config.decay_steps - config.warmup_steps
    if config.schedule == "wsd":
        hold = length - config.cooldown_steps
        decay = optax.linear_schedule(config.peak_lr, config.end_lr, config.cooldown_steps, transition_begin=hold)
    else:
        decay = optax.cosine_decay_schedule(config.peak_lr, length, config.end_lr / config.peak_lr)

    def schedule(step):
        warm = config.peak_lr * (step + 1) / max(config.warmup_steps, 1)
        return jnp.where(step < after, warm, decay(step - after))

    return schedule


def is_matrix(params: Any) -> Any:
    """Return the tree of booleans that marks kernels and embeddings (norm scales are stacked to matrices under scan)."""
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key in ("kernel", "embedding"), params)


def is_hidden_matrix(params: Any) -> Any:
    """Return the tree of booleans that marks what Muon moves: the kernels of the blocks' linear layers."""

    def mark(path, _):
        return path[-1].key == "kernel" and path[-2].key != "lm_head"

    return jax.tree_util.tree_map_with_path(mark, params)


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """Return clip → Adam or Muon → decoupled weight decay → learning rate."""
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm) if config.clip_norm else optax.identity(),
        _direction(config),
        optax.add_decayed_weights(config.weight_decay, mask=is_matrix),
        optax.scale_by_learning_rate(learning_rate(config)),
    )


def _direction(config: OptimizerConfig) -> optax.GradientTransformation:
    adam = optax.scale_by_adam(config.b1, config.b2, config.eps)
    if config.name == "adamw":
        return adam

    def last_two(updates):  # of [layers, in, out] or [in, out]: axes that are not named are a batch of matrices
        return jax.tree.map(lambda _: contrib.MuonDimensionNumbers(reduction_axis=-2, output_axis=-1), updates)

    def to_rms(update, _):  # an orthogonal [in, out] has root mean square 1 / √max(in, out)
        return update * (config.muon_rms * math.sqrt(max(update.shape[-2:])))

    orthogonal = contrib.scale_by_muon(ns_steps=config.muon_steps, beta=config.muon_momentum, weight_dimension_numbers=last_two)
    muon = optax.chain(
        _layer_by_layer(orthogonal),
        optax.stateless_with_tree_map(to_rms),
    )

    def labels(params):
        return jax.tree.map(lambda hidden: "muon" if hidden else "adam", is_hidden_matrix(params))

    return optax.partition({"muon": muon, "adam": adam}, labels)


def _layer_by_layer(muon: optax.GradientTransformation) -> optax.GradientTransformation:
    """Return Muon over stacks [layers, in, out] that never holds the iterates of more than one layer."""

    def update(updates, state, params=None):
        if all(leaf.ndim == 2 for leaf in jax.tree.leaves(updates)):
            return muon.update(updates, state, params)

        def of_layer(layer):
            moved, after = muon.update(layer[0], state._replace(mu=layer[1]))
            assert isinstance(after, contrib.MuonState)
            return moved, after.mu

        moved, mu = jax.lax.map(of_layer, (updates, state.mu))
        return moved, state._replace(count=optax.safe_increment(state.count), mu=mu)

    return optax.GradientTransformation(muon.init, update)


def average(ema: Any, params: Any, updates: jax.Array, decay: float) -> Any:
    """Return the debiased moving average of the weights after `updates` updates, the last of which gave `params`.

    a_n = Σ_i β^(n−i) θ_i / Σ_i β^(n−i), i = 1 … n: what Adam's bias correction makes of a sum that starts at 0. So the initial
    weights never count, and early averages reach no further back than the run does: with β = 0.9999 an average that started
    at the initial weights would still hold a third of them at step 10 000. Kept as a_n itself, which needs no correction where
    it is read: a_n = a_{n−1} + (1 − β) / (1 − βⁿ) · (θ_n − a_{n−1}).
    """
    share = math.expm1(math.log(decay)) / jnp.expm1(updates.astype(jnp.float32) * math.log(decay))
    return jax.tree.map(lambda old, new: old + share * (new - old), ema, params)
