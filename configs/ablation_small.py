"""The study's ladder on one GPU: recipes × seeds of a 30 M-parameter byte-level Llama.

    python -m train.ablate --config=configs/ablation_small.py [--workdir=DIR]
    python -m train.ablate --config=configs/ablation_small.py --config.data.source=files --config.data.files='my/*.jsonl.gz'

2 000 steps of 65 536 tokens per cell, on the source code of the pinned dependencies (20 MB, so 6 epochs) until --config.data
says otherwise. Hardware: one GPU; on one with FP4 units the report compares step times too. It has not been run yet, so no loss
is stated; configs/ablation_tiny.py is the size whose results are in results/.
"""

from typing import Any

from ml_collections import ConfigDict

from configs.ablation_tiny import LADDER, PARTIAL
from train.config import default_config
from train.grid import default_section


def get_config() -> ConfigDict:
    config: Any = default_config()
    config.model.update(d_model=512, n_layers=10, n_heads=8, n_kv_heads=4, d_ff=1408, dtype="bfloat16", loss_chunk=256)
    config.data.update(source="python", seq_len=512, max_val_sequences=512)
    config.optimizer.update(peak_lr=2e-3, end_lr=2e-4, warmup_steps=100)
    config.train.update(steps=2000, batch_size=128, eval_every=100, checkpoint_every=500, keep_checkpoints=0)
    config.diagnose.every = 500
    config.ablate = default_section()
    config.ablate.update(rows=(*LADDER, *PARTIAL), perturbed=("fp8_current", "mxfp4_h16"))
    return config.lock()
