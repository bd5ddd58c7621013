"""Evaluate a checkpoint:  python -m train.evaluate --workdir=DIR | --hf=DIR [--recipe=NAME] [--data=FILES …] [--generate=TEXT]

A run of kernels on a GPU can be evaluated on a CPU with --impl=reference; --ema takes the averaged weights of a run that has
them (optimizer.ema_decay). --hf takes a Llama in Hugging Face's layout, not quantized unless --recipe names what.
Evaluation rounds to nearest, uses the random signs of step 0 and takes per-tensor scales per sequence, so the result does
not depend on batch size or device count; --stochastic keeps the recipe's own rounding and the checkpoint's step. The last
line of stdout is a JSON object.

    --workdir alone      the run's own validation loss: step, val_loss, perplexity, tokens, recipe
    --data=GLOB[,GLOB]   text files, each glob a dataset: nats per token, perplexity, bits per byte over sliding windows, with
                         how they were cut. Documents are joined by an empty line, or --per_document separate; BOS is what the
                         tokenizer puts in front of a text, once per stream, --bos=no: none
    --window --stride    every token after a stream's first is predicted once, after at least window − stride + 1 tokens (or all
                         there are); without --data the run's validation split is read that way
    --protocol=mlperf    Llama 3.1 8B of MLPerf: the first 1 024 sequences of 8 192 tokens, target 3.3 nats per token
    --generate=TEXT      continue a text, to look at: --max_tokens, --temperature (0: greedy), --top_k, --seed
    --tasks=NAME,…       tasks of lm-evaluation-harness, which must be installed (pip install lm-eval; no PyTorch)
"""

import math
import pathlib
import sys

from absl import flags

from train import cli
from train.errors import InputError

WORKDIR = flags.DEFINE_string("workdir", None, "The workdir of a training run.")
HF = flags.DEFINE_string("hf", None, "A Llama in Hugging Face's layout, in place of --workdir.")
STEP = flags.DEFINE_integer("step", None, "Checkpoint to restore; default the newest.")
RECIPE = flags.DEFINE_string("recipe", None, "Evaluate in this recipe's numerics; default the run's own.")
IMPL = flags.DEFINE_string("impl", None, "What multiplies: auto, reference, xla or triton; default the run's own.")
DTYPE = flags.DEFINE_string("dtype", "float32", "With --hf: what is not quantized is computed in float32 or bfloat16.")
STOCHASTIC = flags.DEFINE_bool("stochastic", False, "Keep stochastic rounding and the step's random signs.")
EMA = flags.DEFINE_bool("ema", False, "Evaluate the average of the weights.")
BATCH_SIZE = flags.DEFINE_integer("batch_size", None, "Sequences per call; it does not change the result.")
DATA = flags.DEFINE_multi_string("data", [], "Globs of text files; several flags, or commas, for several datasets.")
TEXT_KEY = flags.DEFINE_string("text_key", "text", "The key of a .jsonl object's text.")
PROTOCOL = flags.DEFINE_enum("protocol", None, ["mlperf"], "A published evaluation.")
WINDOW = flags.DEFINE_integer("window", None, "Positions per sequence; default the run's, or up to 2048 of --hf.")
STRIDE = flags.DEFINE_integer("stride", None, "Tokens from one window to the next; default the window.")
PER_DOCUMENT = flags.DEFINE_bool("per_document", False, "Evaluate every document by itself.")
BOS = flags.DEFINE_enum("bos", "auto", ["auto", "yes", "no"], "Whether streams begin with the tokenizer's BOS.")
GENERATE = flags.DEFINE_string("generate", None, "A text to continue.")
MAX_TOKENS = flags.DEFINE_integer("max_tokens", 64, "With --generate: at most so many tokens.")
TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "With --generate: 0 takes the likeliest token.")
TOP_K = flags.DEFINE_integer("top_k", 0, "With --generate: draw among so many likeliest tokens; 0: all.")
SEED = flags.DEFINE_integer("seed", 0, "With --generate: what is drawn.")
TASKS = flags.DEFINE_list("tasks", [], "Tasks of lm-evaluation-harness.")
LIMIT = flags.DEFINE_integer("limit", None, "With --tasks: examples per task.")


def main() -> int:
    _check_flags()
    from train import evaluation, generate, harness

    sources, reads, asks = _sources(), _reads(), _asks()
    if HF.value:
        where = pathlib.Path(HF.value)
        model = evaluation.open_directory(where, recipe=RECIPE.value, impl=IMPL.value, dtype=DTYPE.value)
    else:
        where = pathlib.Path(WORKDIR.value or "")
        how = {"at": STEP.value, "recipe": RECIPE.value, "impl": IMPL.value, "ema": EMA.value}
        model = evaluation.open_workdir(where, **how, own_data=not sources and (reads or not asks))
    result = dict(model.about)
    losses = []
    try:
        if reads or (HF.value and not asks):
            result["datasets"] = evaluation.evaluate(model, sources, _options(evaluation))
            losses = [found["nats_per_token"] for found in result["datasets"]]
        elif not asks:
            losses = [evaluation.own_loss(model, batch_size=BATCH_SIZE.value or 0, stochastic=STOCHASTIC.value)]
            result |= {"val_loss": losses[0], "perplexity": cli.perplexity(losses[0])}
        if GENERATE.value is not None:
            how = {"max_tokens": MAX_TOKENS.value, "temperature": TEMPERATURE.value, "top_k": TOP_K.value, "seed": SEED.value}
            result["generation"] = generate.generate(model, GENERATE.value, bos=BOS.value, **how)
        if TASKS.value:
            result["tasks"] = harness.run(model, TASKS.value, limit=LIMIT.value, batch_size=BATCH_SIZE.value or 8)
    except ValueError as error:
        raise InputError(f"recipe {model.settings.recipe_name}: {error}") from None
    for loss in (loss for loss in losses if not math.isfinite(loss)):
        print(f"stopped by a guard: {where}: validation loss is {loss}", file=sys.stderr)
        return cli.GUARD
    cli.print_result(result)
    return cli.DONE


def _sources() -> list[str]:
    return [source for given in DATA.value for source in given.split(",") if source]


def _reads() -> bool:
    """Text is read window by window."""
    return bool(_sources() or PROTOCOL.value or WINDOW.value is not None or STRIDE.value is not None)


def _asks() -> bool:
    """The model is asked for text, or by a harness."""
    return GENERATE.value is not None or bool(TASKS.value)


def _check_flags() -> None:
    if bool(WORKDIR.value) == bool(HF.value):
        raise InputError("--workdir=DIR is missing, or --hf=DIR" if not HF.value else "--workdir and --hf exclude each other")
    for flag in (BATCH_SIZE, WINDOW, STRIDE, MAX_TOKENS):
        if flag.value is not None and flag.value < 1:
            raise InputError(f"--{flag.name}={flag.value} is not positive")
    scores = _reads() or not _asks()
    applies = {
        "--hf": (HF.value, (DTYPE,)),
        "--data": (_sources(), (PER_DOCUMENT, TEXT_KEY)),
        "--data or --generate": (_sources() or GENERATE.value is not None, (BOS,)),
        "--generate": (GENERATE.value is not None, (MAX_TOKENS, TEMPERATURE, TOP_K, SEED)),
        "--tasks": (TASKS.value, (LIMIT,)),
        "a loss": (scores, (STOCHASTIC,)),
        "a loss or --tasks": (scores or TASKS.value, (BATCH_SIZE,)),
    }
    for needed, (given, flags_) in applies.items():
        for flag in flags_:
            if flag.value != flag.default and not given:
                raise InputError(f"--{flag.name} applies to {needed}, which is not asked for")
    if HF.value and (STEP.value is not None or EMA.value):
        raise InputError("--step and --ema do not apply to --hf")
    if PROTOCOL.value and (WINDOW.value or STRIDE.value or PER_DOCUMENT.value or BOS.value == "yes"):
        raise InputError(f"--protocol={PROTOCOL.value} says how text is cut: no --window, --stride, --per_document or --bos")
    if PROTOCOL.value and not DATA.value:
        raise InputError(f"--protocol={PROTOCOL.value} needs --data=FILES, its validation text")


def _options(evaluation):
    return evaluation.Options(
        window=WINDOW.value or 0,
        stride=STRIDE.value or 0,
        separate=PER_DOCUMENT.value,
        bos=BOS.value,
        batch_size=BATCH_SIZE.value or 8,
        stochastic=STOCHASTIC.value,
        protocol=PROTOCOL.value or "",
        text_key=TEXT_KEY.value,
    )


if __name__ == "__main__":
    cli.run(main)
