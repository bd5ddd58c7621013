"""Llama 3 shapes from 1 M to 8 B parameters:  --config=configs/llama3.py:SIZE[,RECIPE]

    python -m train.main --config=configs/llama3.py:25m,mxfp4_h16 --workdir=runs/25m

SIZE is a key of `SHAPES`; 1b, 3b and 8b are the published Llama 3.2 1B, 3.2 3B and 3.1 8B. Hardware: 1m and 10m a laptop CPU,
25m to 350m one GPU, 1b to 8b an 8-GPU node (--config.mesh.tensor splits heads and FFN). The data are the embedded bytes until
--config.data says otherwise, so no loss is stated here; 8b has been built abstractly only, not trained.
"""

from typing import Any

from ml_collections import ConfigDict

from train.config import default_config

# d_model, n_layers, n_heads, n_kv_heads, d_ff, vocab_size
SHAPES = {
    "1m": (128, 4, 4, 2, 352, 256),
    "10m": (384, 6, 6, 2, 1024, 256),
    "25m": (512, 8, 8, 4, 1408, 4096),
    "125m": (768, 12, 12, 4, 2048, 32768),
    "350m": (1024, 24, 16, 8, 2816, 32768),
    "1b": (2048, 16, 32, 8, 8192, 128256),
    "3b": (3072, 28, 24, 8, 8192, 128256),
    "8b": (4096, 32, 32, 8, 14336, 128256),
}


def get_config(argument: str = "1m") -> ConfigDict:
    size, _, recipe = argument.partition(",")
    if size not in SHAPES:
        raise ValueError(f"unknown size {size!r}: choose from {list(SHAPES)}")
    config: Any = default_config()
    config.quant.recipe = recipe or "mxfp4_h16"
    names = ("d_model", "n_layers", "n_heads", "n_kv_heads", "d_ff", "vocab_size")
    config.model.update(dict(zip(names, SHAPES[size], strict=True)))
    config.optimizer.peak_lr, config.optimizer.end_lr = 3e-3, 3e-4
    config.optimizer.warmup_steps = 100
    config.train.eval_every = config.train.checkpoint_every = 200
    if size in ("125m", "350m", "1b", "3b", "8b"):
        config.data.seq_len = 2048
        config.model.update(dtype="bfloat16", remat="dots", loss_chunk=256)
        config.optimizer.peak_lr, config.optimizer.end_lr = 8e-4, 8e-5
    if size in ("1b", "3b"):
        config.model.update(tie_embeddings=True, rope_scaling="llama3.1", rope_factor=32.0)
    if size == "8b":
        config.data.seq_len = 8192
        config.model.update(remat="full", rope_scaling="llama3.1", attention="blockwise", attention_block=512)
        config.train.batch_size = 32
    return config.lock()
