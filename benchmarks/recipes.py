"""Final losses of every recipe on a tiny model:  python -m benchmarks.recipes [--seeds=3] [--steps=200] [RECIPE …]

Two layers, d 128, sequence 64, batch 8, byte-level King James text; a smoke test of all recipes with a figure, no comparison:
200 steps tell whether a recipe learns, not which is better. Prints validation losses as they come, and a NaN as such.
"""

import argparse
import dataclasses
from typing import Any

import jax
import numpy as np

from benchmarks import timing
from fp4jax import recipes
from train import config, data, sharding, step


def settings_for(recipe: str, *, steps: int) -> config.Settings:
    c: Any = config.default_config()
    c.quant.recipe = recipe
    c.model.update(n_layers=2, d_ff=256)
    c.data.update(seq_len=64, max_val_sequences=128)
    c.optimizer.update(peak_lr=4e-3, end_lr=4e-4, warmup_steps=20)
    c.train.update(steps=steps, batch_size=8)
    return config.resolve(c)


def final_loss(settings: config.Settings, dataset: data.Dataset) -> float:
    """Train, and return the validation loss in nats per byte, in the recipe's own numerics."""
    mesh = sharding.make_mesh(sharding.MeshConfig(fsdp=1))
    train_step, state = step.make_train_step(settings, mesh), step.init_state(settings, mesh)
    batches = data.train_iterator(dataset, seq_len=64, batch_size=8, seed=settings.train.seed)
    for _ in range(settings.train.steps):
        state, _ = train_step(state, next(batches)["tokens"])
    return step.validation_loss(step.make_eval_step(settings, mesh), mesh, state, step.val_batches(settings, mesh, dataset))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="default: all")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    timing.print_header(args.seeds)
    for name in args.names or recipes.names():
        settings = settings_for(name, steps=args.steps)
        dataset = data.load(settings.data)
        seeded = (dataclasses.replace(settings.train, seed=seed) for seed in range(args.seeds))
        losses = [final_loss(dataclasses.replace(settings, train=train), dataset) for train in seeded]
        jax.clear_caches()
        print(f"{name:26s}" + "".join(f"  {loss:.4f}" for loss in losses) + f"   mean {np.mean(losses):.4f}", flush=True)


if __name__ == "__main__":
    main()
