"""The protocol of arXiv 2605.09825 (MLPerf Training, Llama 3.1 8B) for a node of 8 GPUs: docs/mlperf.md.

    python -m train.prepare --train=FILES --val=FILES --tokenizer=tokenizer.json --documents=none \\
        --output=prepared/c4                                            # docs/mlperf.md says of what
    python -m train.main --config=configs/llama3_8b_mlperf.py[:RECIPE]
    python -m train.ablate --config=configs/llama3_8b_mlperf.py ...      # the study's 12 rows, one after the other

Until validation log-perplexity 3.3: 172 032 to 196 608 sequences of 8 192 tokens in the study (5 376 to 6 144 steps). Not
trained with this code yet.
"""

from typing import Any

from ml_collections import ConfigDict

from configs import llama3
from configs.ablation_tiny import LADDER, PARTIAL
from train.grid import default_section


def get_config(recipe: str = "mxfp4_h16") -> ConfigDict:
    config: Any = llama3.get_config(f"8b,{recipe}").unlock()
    config.model.rope_scaling = "none"
    config.data.update(source="prepared", files="prepared/c4", tokenizer="", seq_len=8192)
    config.data.update(max_val_sequences=1024, val_choice="first")
    # Warm-up, then a cosine over 1 200 000 steps: in effect a constant rate.
    config.optimizer.update(peak_lr=8e-4, end_lr=0.0, warmup_steps=128, decay_steps=1_200_000, eps=1e-5)
    # Evaluated every 12 288 sequences; `steps` is where a run that does not reach the target ends.
    config.train.update(batch_size=32, steps=8064, eval_every=384, checkpoint_every=384, target_loss=3.3)
    config.mesh.fsdp = 8
    config.quant.residuals, config.model.remat = "packed", "packed"
    config.diagnose.every = 384
    config.ablate = default_section()
    config.ablate.update(rows=(*LADDER, *PARTIAL), seeds=(0, 1), perturbed=("fp8_current",), horizons=())
    return config.lock()
