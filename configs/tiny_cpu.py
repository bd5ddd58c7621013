"""A 0.8 M-parameter byte-level Llama on the King James text, for a laptop CPU.

    python -m train.main --config=configs/tiny_cpu.py[:RECIPE] [--workdir=runs/NAME]

Hardware: 2 CPU cores, about 4 minutes. Expected validation loss of mxfp4_h16, seed 0: 1.41 nats
per byte (README.md). The argument names a recipe
(`python -m fp4jax list`); the default is mxfp4_h16.
"""

from typing import Any

from ml_collections import ConfigDict

from train.config import default_config


def get_config(recipe: str = "mxfp4_h16") -> ConfigDict:
    config: Any = default_config()
    config.quant.recipe = recipe
    config.data.seq_len = 128
    config.data.max_val_sequences = 256
    config.optimizer.peak_lr = 4e-3
    config.optimizer.end_lr = 4e-4
    config.optimizer.warmup_steps = 40
    config.train.steps = 600
    config.train.batch_size = 16
    config.train.eval_every = 100
    config.train.checkpoint_every = 100
    return config.lock()
