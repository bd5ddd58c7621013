"""The study's ladder at laptop size: recipes × seeds.

    python -m train.ablate --config=configs/ablation_tiny.py[:full|:smoke] [--workdir=DIR] [--jobs=N]

A 0.8 M-parameter byte-level Llama on the King James text, 600 steps of 2 048 tokens per cell. Hardware: 2 CPU cores. `full`
adds what is missing of the study's 12 rows, `smoke` is two rows, one seed, 30 steps of a smaller model, for a test.
`mxfp4_floor` and `mxfp4_h16_floor` have OCP's scale rule in place of the study's `even`.
"""

from typing import Any

from ml_collections import ConfigDict

from train.config import default_config
from train.grid import default_section

GEMMS, OPERANDS = ("fprop", "dgrad", "wgrad"), ("lhs", "rhs")
LADDER = ("fp8_current", "mxfp4_fprop", "mxfp4_fprop_dgrad", "mxfp4", "mxfp4_sr", "mxfp4_rht16", "mxfp4_h16", "mxfp4_h32")
PARTIAL = ("mxfp4_fprop_sr", "mxfp4_fprop_dgrad_sr", "mxfp4_fprop_rht16", "mxfp4_fprop_dgrad_rht16")


def with_rule(recipe: str, rule: str) -> tuple[str, str]:
    """Return (label, recipe) of a recipe whose six operands have another scale rule."""
    changes = ",".join(f"{gemm}.{operand}.scale_rule={rule}" for gemm in GEMMS for operand in OPERANDS)
    return f"{recipe}_{rule}", f"{recipe}:{changes}"


def get_config(argument: str = "") -> ConfigDict:
    if argument not in ("", "full", "smoke"):
        raise ValueError(f"unknown argument {argument!r}: choose full or smoke")
    config: Any = default_config()
    config.data.seq_len, config.data.max_val_sequences = 128, 256
    config.optimizer.update(peak_lr=4e-3, end_lr=4e-4, warmup_steps=40)
    config.train.update(steps=600, batch_size=16, eval_every=25, checkpoint_every=200, keep_checkpoints=0)
    config.diagnose.every = 200
    config.ablate = default_section()
    config.ablate.rows = (*LADDER, with_rule("mxfp4", "floor"), with_rule("mxfp4_h16", "floor"))
    config.ablate.perturbed = ("fp8_current", "mxfp4")
    if argument == "full":
        config.ablate.rows = (*config.ablate.rows, *PARTIAL)
    if argument == "smoke":
        config.model.update(n_layers=1, d_model=64, n_heads=2, n_kv_heads=1, d_ff=128)
        config.data.update(seq_len=64, max_val_sequences=32)
        config.train.update(steps=30, eval_every=5, checkpoint_every=10)
        config.optimizer.warmup_steps, config.diagnose.every = 5, 15
        config.ablate.update(rows=("fp8_current", "mxfp4_h16"), seeds=(0,), perturbed=("fp8_current",), horizons=(0.8, 1.25))
        config.ablate.horizon_seeds = 1
    return config.lock()
