"""Write a checkpoint in Hugging Face's layout:  python -m train.export --workdir=DIR --output=DIR [--step=N] [--dtype=mxfp4]

The directory holds safetensors files, config.json and the tokenizer, as transformers loads them, and fp4jax.json, which says
what was written from what. Written are the master weights of the run, rounded to bfloat16 unless --dtype says otherwise: a
model trained in FP4 has no other, its FP4 codes are made anew at every step. --dtype=mxfp4 or nvfp4 writes the codes and scales
that fprop multiplies (`train.packing`), for the linear layers of the blocks without those that the run kept in high precision;
docs/checkpoints.md says who reads them. --ema writes the averaged weights of a run that has them. The last line of stdout is a
JSON object.
"""

import importlib.metadata
import logging
import pathlib

from absl import flags

from train import cli
from train.errors import InputError

WORKDIR = flags.DEFINE_string("workdir", None, "The workdir of a training run.")
OUTPUT = flags.DEFINE_string("output", None, "The directory to write, which must not be there yet.")
STEP = flags.DEFINE_integer("step", None, "The checkpoint; default the newest.")
DTYPE = flags.DEFINE_string("dtype", "bfloat16", "bfloat16, float32, mxfp4 or nvfp4.")
EMA = flags.DEFINE_bool("ema", False, "Write the average of the weights.")
UNROTATED = flags.DEFINE_bool("unrotated", False, "With mxfp4 or nvfp4: pack the weights that fprop rotates without rotation.")
SHARED = flags.DEFINE_bool(
    "shared_scales", None, "With nvfp4: one tensor scale for q, k, v and one for gate, up, as vLLM needs it; the default."
)
HIGH, PACKED = ("bfloat16", "float32"), ("mxfp4", "nvfp4")
log = logging.getLogger(__name__)


def main() -> int:
    if not WORKDIR.value or not OUTPUT.value:
        raise InputError("--workdir=DIR and --output=DIR are needed")
    if DTYPE.value not in (*HIGH, *PACKED):
        raise InputError(f"--dtype={DTYPE.value} is not one of {', '.join((*HIGH, *PACKED))}")
    if UNROTATED.value and DTYPE.value not in PACKED:
        raise InputError(f"--unrotated does not apply to --dtype={DTYPE.value}, only to {', '.join(PACKED)}")
    shared = DTYPE.value == "nvfp4" if SHARED.value is None else SHARED.value
    if SHARED.value is not None and DTYPE.value != "nvfp4":
        raise InputError(f"--shared_scales does not apply to --dtype={DTYPE.value}, which has no tensor scales: only to nvfp4")
    from models import huggingface, llama  # after the flags were read: importing jax takes seconds
    from train import loop, packing, step
    from train import tokenizer as tokenizer_lib

    workdir, output = pathlib.Path(WORKDIR.value), pathlib.Path(OUTPUT.value)
    settings, _, tokenizer, mesh, checkpoints = loop.open_run(workdir, own_data=False)
    if EMA.value and not settings.optimizer.ema_decay:
        raise InputError(f"{workdir} has no averaged weights for --ema: it was trained with optimizer.ema_decay=0")
    at = checkpoints.latest() if STEP.value is None else STEP.value
    assert at is not None
    settings = settings.phase(max(at - 1, 0))  # that of the last step done
    choice = packing.choose(settings, DTYPE.value, unrotated=UNROTATED.value) if DTYPE.value in PACKED else None
    state, run = checkpoints.restore(at, step.abstract_state(settings, mesh))
    checkpoints.close()
    params = step.averaged(state).params if EMA.value else state.params
    result = {"step": at, "recipe": run["recipe"], "dtype": DTYPE.value, "parameters": llama.num_params(settings.model)}
    manifest = {
        **result,
        "ema": EMA.value,
        "document_end": settings.model.document_end,
        "bos": tokenizer.bos,
        "recipe_digest": settings.numerics.recipe.digest(),
        "state_checksum": run["state_checksum"],
        "versions": {name: importlib.metadata.version(name) for name in ("fp4jax", "jax", "safetensors")},
    }
    if choice is not None:
        manifest |= packing.describe(settings, choice)
        result["packed"], result["kept"] = len(choice.casts), len(choice.kept)
    if DTYPE.value == "nvfp4":
        manifest["shared_scales"] = shared
        if not shared:
            log.info("q, k, v and gate, up have tensor scales of their own: vLLM needs --shared_scales (docs/checkpoints.md)")
    if tokenizer.bos is None and tokenizer.prefix() is not None:
        log.info("the run's documents had no BOS, its tokenizer.json puts one: elsewhere, pass add_special_tokens=False")
    try:
        huggingface.save(
            output,
            params,
            settings.model,
            dtype="bfloat16" if choice else DTYPE.value,
            packing=packing.packing(settings, DTYPE.value, choice, shared=shared) if choice else None,
            manifest=manifest,
            bos_id=tokenizer.bos_id,
            eos_id=tokenizer.eos_id,
            more=tokenizer_lib.to_files(tokenizer),
        )
    except ValueError as error:
        raise InputError(f"--output: {error}") from None
    cli.print_result({"output": str(output), **result, "ema": EMA.value})
    return cli.DONE


if __name__ == "__main__":
    cli.run(main)
