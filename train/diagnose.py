"""Diagnose checkpoints of a run:  python -m train.diagnose --workdir=DIR [--step=N,N] [--recipe=NAME --recipe=NAME]

For every checkpoint and recipe: gradients of the weights under the recipe, and under each of its GEMMs alone, against exact
ones on the batches that training would take next; what every cast and GEMM does to its operands; what share of the weights'
codes flips from step to step when training goes on in the run's own recipe. Writes diagnosis.json, report.md, report.html and
figures to WORKDIR/diagnosis, and changes nothing else. The last line of stdout is a JSON object.
"""

import dataclasses
import logging
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from fp4jax.recipe import Recipe
from train import checkpoint, cli, config, data, diagnosis, diagnosis_report, loop, sharding, step
from train.errors import InputError

log = logging.getLogger(__name__)
WORKDIR = flags.DEFINE_string("workdir", None, "The workdir of a training run.")
STEP = flags.DEFINE_list("step", [], "Checkpoints to look at; default the newest.")
RECIPE = flags.DEFINE_multi_string("recipe", [], "Recipes to diagnose, one flag each; default the run's own.")
IMPL = flags.DEFINE_string("impl", None, "What multiplies: auto, reference, xla or triton; default the run's own.")
BATCHES = flags.DEFINE_integer("batches", 64, "Microbatches to compare gradients on; late in training 64 are few.")
FLIP_STEPS = flags.DEFINE_integer("flip_steps", 8, "Optimizer steps over which flips of the weights' codes are counted.")
OUTPUT = flags.DEFINE_string("output", None, "Where the report goes; default WORKDIR/diagnosis.")


def main() -> int:
    if not WORKDIR.value:
        raise InputError("--workdir=DIR is missing")
    workdir = pathlib.Path(WORKDIR.value)
    if BATCHES.value < 2 or FLIP_STEPS.value < 0:
        raise InputError(f"--batches={BATCHES.value} must be at least 2 and --flip_steps={FLIP_STEPS.value} not negative")
    settings, dataset, _, mesh, checkpoints = loop.open_run(workdir)
    assert dataset is not None
    if IMPL.value is not None:
        settings = config.with_impl(settings, IMPL.value)
    try:
        steps = [int(text) for text in STEP.value] or checkpoints.steps()[-1:]
    except ValueError:
        raise InputError(f"--step={','.join(STEP.value)} holds something that is no step") from None
    missing = [at for at in steps if at not in checkpoints.steps()]
    if missing:
        raise InputError(f"no checkpoint of step {missing[0]} in {checkpoints.path}: there are {checkpoints.steps()}")
    output = pathlib.Path(OUTPUT.value or workdir / "diagnosis")
    diagnoser = _Diagnoser(settings, dataset, mesh, tuple(dict.fromkeys(RECIPE.value)))
    results: dict[str, Any] = {"workdir": str(workdir), "batches": BATCHES.value, "flip_steps": FLIP_STEPS.value}
    results["checkpoints"] = {str(at): diagnoser.diagnose(checkpoints, at) for at in steps}
    checkpoints.close()
    report = diagnosis_report.write(output, results, settings)
    for line in diagnosis_report.findings(results):
        log.warning("%s", line)
    cli.print_result({"steps": steps, "recipes": diagnosis_report.recipes(results), "report": str(report)})
    return cli.DONE


class _Diagnoser:
    """Keeps the compiled programs while it goes from checkpoint to checkpoint."""

    def __init__(self, settings: config.Settings, dataset: data.Dataset, mesh: jax.sharding.Mesh, recipes: tuple[str, ...]):
        self.settings, self.dataset, self.mesh = settings, dataset, mesh
        train = dataclasses.replace(settings.train, batch_size=settings.train.microbatch)
        numerics = dataclasses.replace(
            settings.numerics, residuals="operands"
        )  # every recipe can, and the gradient is the same
        self.microbatch = dataclasses.replace(settings, numerics=numerics, train=dataclasses.replace(train, accumulation=1))
        self.recipes = {name: config.in_recipe(self.microbatch, name) for name in recipes}
        for of_recipe in self.recipes.values() or [self.microbatch]:
            size, seq_len = of_recipe.train.batch_size, settings.data.seq_len
            sharding.check(mesh, settings.model, of_recipe.numerics, microbatch=size, seq_len=seq_len)
        self._programs: dict[Any, Any] = {}

    def diagnose(self, checkpoints: checkpoint.Checkpoints, at: int) -> dict[str, Any]:
        """Return the diagnosis of one checkpoint as JSON data."""
        state, run = checkpoints.restore(at, step.abstract_state(self.settings, self.mesh))

        def stream(batch_size: int):
            iterator = data.train_iterator(
                self.dataset, seq_len=self.settings.data.seq_len, batch_size=batch_size, seed=self.settings.train.seed
            )
            iterator.set_state(run["iterator"])
            return iterator

        recipes = self.recipes or {run["recipe"]: self.microbatch.phase(max(at - 1, 0))}
        log.info("step %d, trained in %s: %d batches under %s", at, run["recipe"], BATCHES.value, ", ".join(recipes))
        of_recipes = self._compare(recipes, state, at, stream(self.microbatch.train.batch_size))
        flips = self._flips(recipes, state, at, stream(self.settings.train.batch_size))
        for name in recipes:
            of_recipes[name]["flips"] = flips[name]
        return {"trained_in": run["recipe"], "val_loss": run["val_loss"], "recipes": of_recipes}

    def _program(self, name: Any, make):
        if name not in self._programs:
            self._programs[name] = make()
        return self._programs[name]

    def _compare(self, recipes: dict[str, Any], state, at: int, stream) -> dict[str, dict[str, Any]]:
        """Return {recipe: gradients and casts} over the batches of `stream`."""

        def gradient(settings: config.Settings, arm: str):
            def change(recipe):
                return Recipe() if arm == "exact" else diagnosis.arm(recipe, arm)

            name = ("exact" if arm == "exact" else settings.numerics, arm)
            make = diagnosis.make_weight_gradient
            return self._program(name, lambda: make(settings, self.mesh, change, measured=arm == "all"))

        comparisons = {(name, arm): diagnosis.Comparison(BATCHES.value) for name in recipes for arm in diagnosis.ARMS}
        sums: dict[str, Any] = {}
        for i in range(BATCHES.value):
            tokens = jax.device_put(next(stream)["tokens"], sharding.batch_sharding(self.mesh))
            exact, _ = gradient(self.microbatch, "exact")(state.params, tokens, state.seed, at + i)
            for (name, arm), comparison in comparisons.items():
                quantized, measured = gradient(recipes[name], arm)(state.params, tokens, state.seed, at + i)
                comparison.add(exact, quantized)
                if arm == "all":
                    sums[name] = measured if name not in sums else jax.tree.map(jnp.add, sums[name], measured)
            if i in (0, 7) or (i + 1) % 16 == 0:
                log.info("step %d: batch %d of %d", at, i + 1, BATCHES.value)
        out: dict[str, dict[str, Any]] = {name: {"gradients": {}, "modules": {}} for name in recipes}
        for (name, arm), comparison in comparisons.items():
            out[name]["gradients"][arm], out[name]["modules"][arm] = comparison.figures()
        for name in recipes:
            out[name]["casts"] = diagnosis.rows(at, sums[name])
        return out

    def _flips(self, recipes: dict[str, Any], state, at: int, stream) -> dict[str, dict[str, Any]]:
        """Return {recipe: share of codes that flip per step and by module, share of flipped weights that returned}."""
        phase = self.settings.phase(at)
        train_step = self._program(("train", phase.numerics), lambda: step.make_train_step(phase, self.mesh))
        codes_of = {
            name: self._program(("codes", s.numerics), lambda s=s: diagnosis.make_codes(s)) for name, s in recipes.items()
        }
        state = jax.tree.map(jnp.copy, state)  # training steps take it over
        first = {name: of(state.params, state.seed, at) for name, of in codes_of.items()}
        before, ever = dict(first), {name: jax.tree.map(jnp.zeros_like, codes) for name, codes in first.items()}
        shares: dict[str, list[Any]] = {name: [] for name in recipes}
        for _ in range(FLIP_STEPS.value):
            tokens = jax.device_put(next(stream)["tokens"], sharding.batch_sharding(self.mesh))
            state, _ = train_step(state, tokens)
            for name, of in codes_of.items():
                after = of(state.params, state.seed, at)
                shares[name].append(jax.tree.map(np.asarray, diagnosis.flip_shares(before[name], after)))
                ever[name] = jax.tree.map(lambda e, a, b: e | (a != b), ever[name], after, before[name])
                before[name] = after
        out = {}
        for name in recipes:
            flipped, away = (
                sum(int(jnp.sum(jnp.astype(leaf, bool))) for leaf in jax.tree.leaves(tree))
                for tree in (ever[name], jax.tree.map(lambda a, b: a != b, first[name], before[name]))
            )
            mean = jax.tree.map(lambda *of_steps: np.mean(of_steps, axis=0), *shares[name]) if shares[name] else {}
            modules = {module: float(v) for module, v in diagnosis.by_module(mean).items()}
            per_step = float(np.mean(list(modules.values()))) if modules else None
            returned = 1 - away / flipped if flipped else None
            out[name] = {"per_step": per_step, "returned": returned, "modules": modules}
        return out


if __name__ == "__main__":
    cli.run(main)
