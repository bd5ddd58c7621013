"""Write a checkpoint in Hugging Face's layout:  python -m train.export --workdir=DIR --output=DIR [--step=N] [--dtype=float32]

The directory holds safetensors files, config.json and the tokenizer, as transformers loads them. What is written are the
master weights of the run, rounded to bfloat16 unless --dtype says float32: a model trained in FP4 has no other, its FP4 codes
are made anew at every step. --ema writes the averaged weights of a run that has them. The last line of stdout is a JSON object.
"""

import json
import pathlib

from absl import flags

from train import cli
from train.errors import InputError

WORKDIR = flags.DEFINE_string("workdir", None, "The workdir of a training run.")
OUTPUT = flags.DEFINE_string("output", None, "The directory to write, which must not be there yet.")
STEP = flags.DEFINE_integer("step", None, "The checkpoint; default the newest.")
DTYPE = flags.DEFINE_string("dtype", "bfloat16", "bfloat16 or float32.")
EMA = flags.DEFINE_bool("ema", False, "Write the average of the weights.")


def main() -> int:
    if not WORKDIR.value or not OUTPUT.value:
        raise InputError("--workdir=DIR and --output=DIR are needed")
    from models import huggingface, llama  # after the flags were read: importing jax takes seconds
    from train import loop, step

    workdir, output = pathlib.Path(WORKDIR.value), pathlib.Path(OUTPUT.value)
    settings, dataset, mesh, checkpoints = loop.open_run(workdir)
    if EMA.value and not settings.optimizer.ema_decay:
        raise InputError(f"{workdir} has no averaged weights for --ema: it was trained with optimizer.ema_decay=0")
    at = checkpoints.latest() if STEP.value is None else STEP.value
    assert at is not None
    state, run = checkpoints.restore(at, step.abstract_state(settings, mesh))
    checkpoints.close()
    params = step.averaged(state).params if EMA.value else state.params
    more = {
        "tokenizer.json": dataset.tokenizer.to_json(),
        "tokenizer_config.json": json.dumps(
            {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        ),
    }
    try:
        huggingface.save(output, params, settings.model, dtype=DTYPE.value, more=more)
    except ValueError as error:
        raise InputError(f"--output: {error}") from None
    parameters = llama.num_params(settings.model)
    cli.print_result(
        {
            "output": str(output),
            "step": at,
            "recipe": run["recipe"],
            "dtype": DTYPE.value,
            "parameters": parameters,
            "ema": EMA.value,
        }
    )
    return cli.DONE


if __name__ == "__main__":
    cli.run(main)
