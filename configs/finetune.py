"""Continue to train a Llama in Hugging Face's layout:  --config=configs/finetune.py:DIR[,RECIPE]

    python -m train.main --config=configs/finetune.py:models/llama,mxfp4_h16 --config.data.source=files \\
        --config.data.files='text/*.jsonl.gz' --config.train.steps=2000 --config.quant.schedule='((1800,"fp8_current"),)'

The model has the shape of DIR/config.json and its weights at step 0 (train.initial_weights); text is tokenized by its
tokenizer.json, by which data.source=prepared must have been too. The schedule above heals in FP8 for the last 10 % of the
steps. A small rate, warmed up: the moments begin at zero. Not trained at any published size with this code yet.
"""

import dataclasses
import pathlib
from typing import Any

from ml_collections import ConfigDict

from models import huggingface
from train.config import default_config

LARGE = 1024  # d_model from which on memory is saved and the rest is computed in bfloat16


def get_config(argument: str = "") -> ConfigDict:
    directory, _, recipe = argument.partition(",")
    if not directory:
        raise ValueError("name a model: --config=configs/finetune.py:DIR[,RECIPE]")
    model = huggingface.read_config(pathlib.Path(directory))
    config: Any = default_config()
    config.model.update(dataclasses.asdict(model))
    tokenizer = pathlib.Path(directory) / "tokenizer.json"
    config.data.tokenizer = str(tokenizer) if tokenizer.is_file() else config.data.tokenizer
    config.data.seq_len = min(model.max_seq_len, 2048 if model.d_model >= LARGE else 128)
    if model.d_model >= LARGE:
        config.model.update(dtype="bfloat16", remat="full")
        if config.data.seq_len == 2048:
            config.model.loss_chunk = 256
    config.quant.recipe = recipe or "mxfp4_h16"
    config.optimizer.update(peak_lr=2e-5, end_lr=2e-6, warmup_steps=20)
    config.train.update(initial_weights=directory, steps=200, eval_every=50, checkpoint_every=50)
    return config.lock()
