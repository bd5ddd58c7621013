"""What a diagnosed step costs:  python -m benchmarks.diagnosis [RECIPE …]

One measurement (`train.diagnosis.make_measure`, a gradient that also measures every cast and GEMM) against one optimizer step
of the tiny model, interleaved in one process. A run with --config.diagnose.every=N takes (1 + ratio/N) times as long.
"""

import sys

import jax
import numpy as np

from benchmarks import timing
from configs import tiny_cpu
from train import config, diagnosis, sharding, step

ROUNDS = 9


def functions(recipe: str) -> dict:
    settings = config.resolve(tiny_cpu.get_config(recipe))
    mesh = sharding.make_mesh(settings.mesh)
    held = [step.init_state(settings, mesh)]
    ids = np.random.default_rng(0).integers(0, 256, (settings.train.batch_size, settings.data.seq_len + 1), np.int32)
    tokens = jax.device_put(ids, sharding.batch_sharding(mesh))
    train_step, measure = step.make_train_step(settings, mesh), diagnosis.make_measure(settings, mesh)

    def one_step():
        held[0], _ = train_step(held[0], tokens)
        return held[0].step

    return {recipe: one_step, f"{recipe} measured": lambda: measure(held[0], tokens)}


def main() -> None:
    timing.print_header(ROUNDS)
    recipes = sys.argv[1:] or ["fp8_current", "mxfp4", "mxfp4_h16"]
    of = {name: function for recipe in recipes for name, function in functions(recipe).items()}
    seconds = timing.interleave(of, rounds=ROUNDS)
    timing.print_ratios(seconds, [(name, name.removesuffix(" measured"), None) for name in of])


if __name__ == "__main__":
    main()
