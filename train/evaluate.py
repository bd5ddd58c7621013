"""Restore a checkpoint and report its validation loss:  python -m train.evaluate --workdir=DIR [--step=N] [--recipe=NAME]

A run of kernels on a GPU can be evaluated on a CPU with --impl=reference; --ema takes the averaged weights of a run that has
them (optimizer.ema_decay).
Evaluation rounds to nearest, uses the random signs of step 0 and takes per-tensor scales per sequence, so the result does
not depend on batch size or device count; --stochastic keeps the recipe's own rounding and the checkpoint's step. The last
line of stdout is a JSON object with step, val_loss, perplexity, tokens and recipe.
"""

import logging
import math
import pathlib
import sys

from absl import flags

from train import cli
from train.errors import InputError

log = logging.getLogger(__name__)
WORKDIR = flags.DEFINE_string("workdir", None, "The workdir of a training run.")
STEP = flags.DEFINE_integer("step", None, "Checkpoint to restore; default the newest.")
RECIPE = flags.DEFINE_string("recipe", None, "Evaluate in this recipe's numerics; default the run's own.")
IMPL = flags.DEFINE_string("impl", None, "What multiplies: auto, reference, xla or triton; default the run's own.")
STOCHASTIC = flags.DEFINE_bool("stochastic", False, "Keep stochastic rounding and the step's random signs.")
EMA = flags.DEFINE_bool("ema", False, "Evaluate the average of the weights.")
BATCH_SIZE = flags.DEFINE_integer("batch_size", None, "Sequences per call; it does not change the result.")


def main() -> int:
    from train import config, loop, step

    if not WORKDIR.value:
        raise InputError("--workdir=DIR is missing")
    if BATCH_SIZE.value is not None and BATCH_SIZE.value < 1:
        raise InputError(f"--batch_size={BATCH_SIZE.value} is not positive")
    workdir = pathlib.Path(WORKDIR.value)
    settings, dataset, mesh, checkpoints = loop.open_run(workdir)
    if EMA.value and not settings.optimizer.ema_decay:
        raise InputError(f"{workdir} has no averaged weights for --ema: it was trained with optimizer.ema_decay=0")
    if IMPL.value is not None:
        settings = config.with_impl(settings, IMPL.value)
    in_recipe = None if RECIPE.value is None else config.in_recipe(settings, RECIPE.value)
    at = STEP.value if STEP.value is not None else checkpoints.latest()
    assert at is not None
    state, run = checkpoints.restore(at, step.abstract_state(settings, mesh))
    checkpoints.close()
    state = step.averaged(state) if EMA.value else state
    settings = in_recipe or settings.phase(max(at - 1, 0))  # that of the last step done
    batches = step.val_batches(settings, mesh, dataset, batch_size=BATCH_SIZE.value or 0)
    which = ", averaged weights" if EMA.value else ""
    log.info("evaluating step %d of %s, trained in %s, in %s%s", at, workdir, run["recipe"], settings.recipe_name, which)
    try:
        eval_step = step.make_eval_step(settings, mesh, stochastic=STOCHASTIC.value)
        loss = step.validation_loss(eval_step, mesh, state, batches)
    except ValueError as error:
        raise InputError(f"recipe {settings.recipe_name}: {error}") from None
    if not math.isfinite(loss):
        print(f"stopped by a guard: step {at}: validation loss is {loss}", file=sys.stderr)
        return cli.GUARD
    result = {"step": at, "val_loss": loss, "perplexity": cli.perplexity(loss), "tokens": run["tokens"]}
    cli.print_result({**result, "recipe": settings.recipe_name})
    return cli.DONE


if __name__ == "__main__":
    cli.run(main)
