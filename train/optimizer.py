"""AdamW with linear warm-up and a cosine or late linear decay, global-norm clipping, and weight decay on matrices only."""

import dataclasses
from typing import Any

import jax
import optax

from train.errors import InputError, check_types

SCHEDULES = ("cosine", "wsd")
_MAX_FLOAT32 = float(jax.numpy.finfo(jax.numpy.float32).max)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Settings of AdamW; raises InputError for a value out of range.

    Attributes:
      peak_lr, end_lr: learning rate after the warm-up and at the end of the decay.
      warmup_steps: linear warm-up from 0; step n (from 0) runs at peak_lr · (n + 1) / warmup_steps.
      schedule: after the warm-up, "cosine" falls from there to decay_steps; "wsd" (warm-up, stable, decay; 2404.06395) stays at
        peak_lr and falls linearly in the last cooldown_steps, so that one run can end at several lengths.
      decay_steps: the step at which the rate reaches end_lr; 0 means train.steps.
      cooldown_steps: for "wsd", and only for it.
      b1, b2, eps, weight_decay: AdamW (Loshchilov & Hutter 2019); decay applies to kernels and embeddings, not to norms.
      clip_norm: the gradient's global norm is clipped to this; 0 means no clipping.
    """

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

    def __post_init__(self):
        check_types("optimizer", self)
        if self.schedule not in SCHEDULES:
            raise InputError(f"optimizer.schedule={self.schedule!r} is not one of {', '.join(SCHEDULES)}")
        if (self.schedule == "wsd") != (self.cooldown_steps != 0):
            raise InputError(f"optimizer.schedule={self.schedule!r} does not go with cooldown_steps={self.cooldown_steps}")
        numbers = {name: value for name, value in dataclasses.asdict(self).items() if name != "schedule"}
        for name, value in numbers.items():
            if not 0 <= value <= _MAX_FLOAT32:
                raise InputError(f"optimizer.{name}={value} must be finite in float32 and not negative")
        if self.peak_lr == 0 or self.eps == 0:
            raise InputError(f"optimizer.peak_lr={self.peak_lr} and optimizer.eps={self.eps} must be positive")
        if self.end_lr > self.peak_lr:
            raise InputError(f"optimizer.end_lr={self.end_lr} is above optimizer.peak_lr={self.peak_lr}")
        if not (self.b1 < 1 and self.b2 < 1):
            raise InputError(f"optimizer.b1={self.b1} and optimizer.b2={self.b2} must be below 1")


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
        return jax.numpy.where(step < after, warm, decay(step - after))

    return schedule


def is_matrix(params: Any) -> Any:
    """Return the tree of booleans that marks kernels and embeddings (norm scales are stacked to matrices under scan)."""
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key in ("kernel", "embedding"), params)


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """Return clip → Adam → decoupled weight decay → learning rate."""
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm) if config.clip_norm else optax.identity(),
        optax.scale_by_adam(config.b1, config.b2, config.eps),
        optax.add_decayed_weights(config.weight_decay, mask=is_matrix),
        optax.scale_by_learning_rate(learning_rate(config)),
    )
