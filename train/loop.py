"""The training loop: prepare a workdir, restore or initialise, step, evaluate, checkpoint, stop.

Order that makes resume exact: the rows up to step n are on disk and step n is known to be finite before the checkpoint of
step n is started; on resume, rows past the restored step are cut and the data iterator continues from the checkpoint.
"""

import dataclasses
import json
import logging
import math
import pathlib
import signal
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TextIO

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from fp4jax import stats
from models import llama
from train import config, data, diagnosis, memory, pretrained, processes, sharding, step
from train import tokenizer as tokenizer_lib
from train.checkpoint import Checkpoints, Unavailable, data_fingerprint, read_config, saved_steps
from train.cli import StopRequest, lock_file
from train.config import Settings
from train.errors import InputError, write_whole
from train.metrics import Metrics, Progress

log = logging.getLogger(__name__)
PROFILED_STEPS = (3, 6)  # counted from the run's first step: compiled, warm


class GuardError(Exception):
    """The run stopped because a loss, a gradient or the state was not finite."""


class Result(NamedTuple):
    """Where a run ended. val_loss: of the newest evaluation, None before the first; stopped: the signal that did it, or 0."""

    step: int
    val_loss: float | None
    stopped: int


def prepare(settings: Settings, workdir: pathlib.Path) -> tuple[data.Dataset, Mesh, list[dict[str, Any]]]:
    """Check everything that can be checked before a compile, then write config.json and census.json.

    Returns (dataset, mesh, census rows). Raises InputError, with nothing written, when the config, the data, the mesh or
    an existing workdir does not fit, or another run is in it.
    """
    with processes.together():
        stored, dataset, mesh, (census, *later) = _check(settings, workdir)
    processes.check_same("config or data", json.dumps(_config_json(settings, dataset)))
    with processes.together():
        if processes.is_primary():
            with lock(workdir):
                if read_config(workdir) != stored:  # reading the data took a while
                    raise InputError(f"{workdir} is in use by another run, which has just begun")
                if stored is None:  # an old one is rewritten once its checkpoint was read
                    write_json(workdir / "config.json", _config_json(settings, dataset))
                write_json(workdir / "census.json", census)
                for name, content in tokenizer_lib.to_files(dataset.tokenizer).items():
                    write_text(workdir / name, content)
                for phase, rows in zip(settings.schedule, later, strict=True):
                    write_json(workdir / f"census_from_step_{phase.start}.json", rows)
    return dataset, mesh, census


def lock(workdir: pathlib.Path) -> TextIO:
    """Return the open file whose lock says that a run is in the workdir; raises InputError where another one is."""
    file = lock_file(workdir / "lock")
    if file is None:
        raise InputError(f"{workdir} is in use by another run")
    return file


def _check(settings: Settings, workdir: pathlib.Path):
    """Return (stored config or None, dataset, mesh, census of every phase); raises InputError where something does not fit."""
    stored, new = read_config(workdir), settings.to_dict()
    strays = [name for name in ("census.json", "metrics.jsonl", "checkpoints") if (workdir / name).exists()]
    if stored is None and strays:
        raise InputError(f"{workdir} has {strays[0]} but no config.json: not a workdir of this program")
    changed = [] if stored is None else config.differences({k: v for k, v in stored.items() if k != "run"}, new)
    if changed:
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        raise InputError(f"{workdir} belongs to another run, choose another --workdir: {'; '.join(changed[:3])}{more}")
    mesh = check_fits(settings)
    dataset = data.load(settings.data, part=jax.process_index(), parts=jax.process_count())
    data.check_ids(dataset, vocab_size=settings.model.vocab_size, document_end=settings.model.document_end)
    if stored is not None and (trained_on := data_fingerprint(stored)) != dataset.fingerprint:
        raise InputError(f"{workdir} was trained on other data: {trained_on} ≠ {dataset.fingerprint}")
    steps = saved_steps(workdir)
    if stored is not None and steps:
        config.check_cooldown(stored, new, steps[-1])
    if settings.train.initial_weights and not steps:
        pretrained.check(settings, dataset.tokenizer)
    try:
        return stored, dataset, mesh, [step.census_rows(phase) for phase in settings.phases()]
    except ValueError as error:
        raise InputError(f"quant: {error}") from None


def check_fits(settings: Settings) -> Mesh:
    """Return the mesh over the devices here; raises InputError where some phase of the run does not fit it or their memory."""
    mesh = sharding.make_mesh(settings.mesh)
    for phase in settings.phases():
        lengths = {"microbatch": settings.train.microbatch, "seq_len": settings.data.seq_len}
        sharding.check(mesh, settings.model, phase.numerics, **lengths, reduce=settings.train.grad_reduce_dtype)
        memory.check_fits(phase, mesh, memory.bytes_limit())
    return mesh


def _config_json(settings: Settings, dataset: data.Dataset) -> dict[str, Any]:
    return {**settings.to_dict(), "run": {"data_fingerprint": dataset.fingerprint}}


def write_json(path: pathlib.Path, value: Any) -> None:
    """Write JSON data as `write_text` does."""
    write_text(path, json.dumps(value, indent=1) + "\n")


def write_text(path: pathlib.Path, text: str) -> None:
    """Write a file so that it is either whole or not there; raises InputError where it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)
    except OSError as error:
        raise InputError(f"workdir {path.parent} cannot be written: {error}") from None


def open_run(
    workdir: pathlib.Path, *, own_data: bool = True
) -> tuple[Settings, data.Dataset | None, tokenizer_lib.Tokenizer, Mesh, Checkpoints]:
    """Return (settings, dataset, tokenizer, mesh over the devices here, checkpoints) of a training run, to look at it.

    own_data=False: without its dataset (None), which may be elsewhere. Raises InputError where there is no run, or its data
    changed; of prepared data the training split is not read for that.
    """
    stored = read_config(workdir)
    if stored is None or not (workdir / "checkpoints").is_dir():
        raise InputError(f"{workdir} is not the workdir of a training run: no config.json with checkpoints/ beside it")
    settings, fingerprint = config.from_json_dict(stored), data_fingerprint(stored)
    if own_data or not (workdir / "tokenizer.json").exists():  # runs of older versions have none
        dataset = data.load(settings.data, splits=("val",))
        tokenizer = dataset.tokenizer
        if dataset.fingerprint != fingerprint:
            raise InputError(f"the data of {workdir} changed: {fingerprint} ≠ {dataset.fingerprint}")
    else:
        dataset, tokenizer = None, tokenizer_lib.read_files(workdir)
    settings = dataclasses.replace(settings, mesh=sharding.over_all_devices(settings.model))
    mesh = sharding.make_mesh(settings.mesh)
    checkpoints = Checkpoints(workdir)
    if checkpoints.latest() is None:
        raise InputError(f"{workdir} has no checkpoint yet")
    return settings, dataset, tokenizer, mesh, checkpoints


class Run:
    """One training run over a prepared workdir, which it locks: a second run there is refused.

    A newest checkpoint that cannot be read is moved to damaged/, and the run goes back to the one before; where none can be
    read, that is an InputError and nothing is moved.

    programs: a dict that runs which differ in their seed only may share, so that they compile once. initial: changes the
    initial state of a run that begins.
    """

    def __init__(
        self,
        settings: Settings,
        workdir: pathlib.Path,
        dataset: data.Dataset,
        mesh: Mesh,
        *,
        programs: dict[Any, Any] | None = None,
        initial: Callable[[step.TrainState], step.TrainState] | None = None,
    ):
        self.settings, self.workdir, self.dataset, self.mesh = settings, workdir, dataset, mesh
        with processes.together():  # before anything looks at the checkpoints of a run that may be alive
            self._lock = lock(workdir) if processes.is_primary() else None
        train = settings.train
        self.tokens_per_step = train.batch_size * settings.data.seq_len
        part, parts = sharding.process_rows(mesh, train.batch_size)
        self.iterator = data.train_iterator(
            dataset,
            seq_len=settings.data.seq_len,
            batch_size=train.batch_size,
            seed=train.seed,
            process_index=part,
            process_count=parts,
        )
        self.val_loss: float | None = None
        self._skipped = 0  # steps in a row
        self._tokens: dict[int, jax.Array] = {}  # of the newest two steps, by number
        self._programs = {} if programs is None else programs
        try:
            self.checkpoints = Checkpoints(workdir, keep=train.keep_checkpoints, keep_every=train.keep_every, clean=True)
            self.state, self.done = self._restore_or_init(initial)
            with processes.together():
                if processes.is_primary():
                    write_json(workdir / "config.json", _config_json(settings, dataset))
        except BaseException:
            self._unlock()
            raise

    def _phase_programs(self, at: int) -> tuple[Any, Any]:
        """Return (train step, evaluation step) of the schedule's phase at optimizer step `at`, made once per recipe."""
        phase = self.settings.phase(at)
        name = f"{phase.numerics.recipe.digest()} {phase.numerics.keep_last}"
        if name not in self._programs:
            self._programs[name] = (step.make_train_step(phase, self.mesh), step.make_eval_step(phase, self.mesh))
        return self._programs[name]

    def _diagnose(self, tokens: jax.Array) -> Callable[[Metrics], None]:
        """Measure the step that is about to be done; return what writes the rows once it is done."""
        measure, codes_of = self._diagnosis_programs(self.done)
        at = jnp.copy(self.state.step)  # the state will be donated
        sums = jax.block_until_ready(measure(self.state, tokens))
        before = codes_of(self.state.params, self.state.seed, at)

        def finish(metrics: Metrics) -> None:
            flips = diagnosis.flip_shares(before, codes_of(self.state.params, self.state.seed, at))
            rows = diagnosis.rows(self.done, sums, flips)
            metrics.write_diagnosis(rows, diagnosis.averages(rows))
            for finding in stats.findings(rows):
                log.warning("step %d: %s", self.done, finding)

        return finish

    def _diagnosis_programs(self, at: int) -> tuple[Any, Any]:
        """Return (measure, codes) of the schedule's phase at optimizer step `at`, made once."""
        phase = self.settings.phase(at)
        key = ("diagnosis", phase.numerics)
        if key not in self._programs:
            log.info("compiling the diagnosis")
            self._programs[key] = diagnosis.make_measure(phase, self.mesh), diagnosis.make_codes(phase)
        return self._programs[key]

    def _origin(self, at: int) -> str:
        """Return where step `at`, which was not finite and so changed nothing, left the finite numbers, by repeating it.

        The step after it may have been done by then, with which the weights have moved.
        """
        if not self.settings.phase(at - 1).numerics.init_sums(llama.LINEAR_PATHS):
            return ""
        state = self.state._replace(step=self.state.step - (self.done - at + 1))
        try:
            sums = jax.block_until_ready(self._diagnosis_programs(at - 1)[0](state, self._tokens[at]))
        except jax.errors.JaxRuntimeError as error:  # it needs more memory than a step
            return f"; it could not be repeated to find the layer ({str(error).splitlines()[0][:100]})"
        found = stats.first_nonfinite(diagnosis.rows(at, sums), llama.LINEAR_PATHS)
        again = f"repeated with the weights of step {self.done}, " if self.done > at else "repeated, "
        return f"; {again}not finite at first: {found}" if found else f"; {again}its quantized GEMMs are finite"

    def _restore_or_init(self, initial) -> tuple[step.TrainState, int]:
        damaged: dict[int, InputError] = {}
        abstract = step.abstract_state(self.settings, self.mesh)
        for at in reversed(self.checkpoints.steps()):
            try:
                state, run = self.checkpoints.restore(at, abstract)
            except InputError as error:
                if processes.anywhere(isinstance(error, Unavailable)):
                    raise
                damaged[at] = error
                continue
            for worse, error in damaged.items():
                self.checkpoints.set_aside(worse)
                log.warning("%s: moved to %s, going back to step %d", error, self.workdir / "damaged", at)
            self.iterator.set_state(run["iterator"])
            self.val_loss, self._skipped = run["val_loss"], run.get("skipped", 0)
            log.info("restored step %d from %s", at, self.workdir)
            return state, at
        if damaged:
            raise next(iter(damaged.values()))
        state = step.init_state(self.settings, self.mesh)
        if self.settings.train.initial_weights:
            state = pretrained.start_from(self.settings, self.mesh, state)
        return state if initial is None else initial(state), 0

    def train(self, stop: StopRequest, *, profile: bool = False) -> Result:
        """Train until train.steps, the target loss, a signal, or a guard (raises GuardError).

        Raises StorageError when the workdir cannot be written any more, also by a save that began some steps ago.
        """
        train, first = self.settings.train, self.done
        metrics = Metrics(self.workdir if processes.is_primary() else None, restored_step=first)
        agreement, stopped = processes.Agreement(self.mesh), 0
        bar = processes.is_primary()
        with Progress(steps=train.steps, done=first, log_every=train.log_every, bar=bar) as progress:
            try:
                pending, clock = None, time.perf_counter()
                if first < train.steps:
                    log.info("compiling the training step")
                while self.done < train.steps and not self._reached_target():
                    if stopped := agreement.largest(stop.signal or 0):
                        break
                    self.checkpoints.check()
                    self._profile(profile, self.done - first)
                    tokens = sharding.put_rows(self.mesh, next(self.iterator)["tokens"], train.batch_size)
                    self._tokens = {at: kept for at, kept in self._tokens.items() if at == self.done} | {self.done + 1: tokens}
                    finish_diagnosis = None
                    if self.settings.diagnose.every and (self.done + 1) % self.settings.diagnose.every == 0:
                        if pending:
                            self._report(*pending, clock, metrics, progress)
                        finish_diagnosis, pending, clock = self._diagnose(tokens), None, time.perf_counter()
                    self.state, figures = self._phase_programs(self.done)[0](self.state, tokens)
                    self.done += 1
                    if pending:  # fetched only now, while the next step runs
                        clock = self._report(*pending, clock, metrics, progress)
                    pending = (self.done, figures)
                    evaluates = self._is_due(train.eval_every)
                    saves = self._is_due(train.checkpoint_every)
                    if evaluates or saves or finish_diagnosis:
                        clock, pending = self._report(*pending, clock, metrics, progress), None
                        if finish_diagnosis:
                            finish_diagnosis(metrics)
                        if evaluates:
                            self.evaluate(metrics)
                        if saves or self._reached_target():
                            self.save(metrics)
                        clock = time.perf_counter()
                stopped = stopped or agreement.largest(stop.signal or 0)  # it may have come after the last look at it
                if self.done == train.steps or self._reached_target():
                    stopped = 0  # it came too late: all is done and saved
                if stopped and self.done > first:
                    if pending:
                        self._report(*pending, clock, metrics, progress)
                    self.save(metrics)
                if first == self.done and not stopped:
                    log.info("nothing left to train: step %d of %d", self.done, train.steps)
                    if self.val_loss is None:
                        self.evaluate(None)
                self.checkpoints.wait()
            finally:
                self._profile(False, 0)
                metrics.close()
        if stopped:
            name = signal.Signals(stopped).name
            kept = f"checkpoint of step {self.done} in {self.workdir}" if self.done else "before the first step"
            log.info("%s: %s; the same command continues", name, kept)
        return Result(self.done, self.val_loss, stopped)

    def _is_due(self, every: int) -> bool:
        return self.done == self.settings.train.steps or (every > 0 and self.done % every == 0)

    def _reached_target(self) -> bool:
        target = self.settings.train.target_loss
        return bool(target) and self.val_loss is not None and self.val_loss <= target

    def _report(self, done: int, figures: dict[str, jax.Array], clock: float, metrics: Metrics, progress: Progress) -> float:
        """Write the row of one finished step; raises GuardError when it is not finite. Returns the time."""
        loss, grad_norm, lr = (float(figures[k]) for k in (*step.WATCHED, "lr"))
        now = time.perf_counter()
        row = {"step": done, "tokens": done * self.tokens_per_step, "train_loss": loss, "grad_norm": grad_norm}
        row.update(lr=lr, tokens_per_s=round(self.tokens_per_step / max(now - clock, 1e-9), 1))
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            self._skipped += 1
            if self._skipped > (allowed := self.settings.train.skip_nonfinite):
                skipped = f", after {allowed} skipped steps" if allowed else ""
                kept = self.checkpoints.latest()
                what = f"step {done}: {loss=} {grad_norm=}{skipped}{self._origin(done)}"
                raise GuardError(f"{what}; the newest checkpoint is that of step {kept}")
            log.warning("step %d skipped: loss %s, gradient norm %s", done, loss, grad_norm)
            metrics.write({"step": done, "tokens": row["tokens"], "skipped": self._skipped})
            return now
        self._skipped = 0
        if figures.get("spike", False):
            log.warning("step %d skipped as a spike: loss %.4f, gradient norm %.3g", done, loss, grad_norm)
            row["spike"] = 1
        metrics.write(row)
        progress.update(row)
        return now

    def evaluate(self, metrics: Metrics | None) -> None:
        """Measure the validation loss of the trained weights, and of their average where there is one."""
        losses = {"val_loss": self._validation_loss(self.state)}
        if self.state.ema:
            losses["val_loss_ema"] = self._validation_loss(step.averaged(self.state), " of the averaged weights")
        self.val_loss = losses["val_loss"]
        if metrics:
            metrics.write({"step": self.done, "tokens": self.done * self.tokens_per_step, **losses})

    def _validation_loss(self, state: step.TrainState, of: str = "") -> float:
        batches = step.val_batches(self.settings, self.mesh, self.dataset)
        eval_step = self._phase_programs(max(self.done - 1, 0))[1]  # in the numerics of the last step done
        loss = step.validation_loss(eval_step, self.mesh, state, batches)
        if not math.isfinite(loss):
            raise GuardError(f"step {self.done}: validation loss{of} is {loss}")
        log.info("step %d  validation loss%s %.4f", self.done, of, loss)
        return loss

    def save(self, metrics: Metrics) -> None:
        if not step.is_finite(self.state):
            kept = self.checkpoints.latest()
            raise GuardError(f"step {self.done}: the state is not finite; the newest checkpoint is that of step {kept}")
        phase = self.settings.phase(max(self.done - 1, 0))
        metrics.sync()
        self.checkpoints.save(
            self.done,
            self.state,
            {
                "step": self.done,
                "tokens": self.done * self.tokens_per_step,
                "iterator": self.iterator.get_state(),
                "val_loss": self.val_loss,
                "skipped": self._skipped,
                "data_fingerprint": self.dataset.fingerprint,
                "recipe": phase.recipe_name,
                "recipe_digest": phase.numerics.recipe.digest(),
            },
        )

    def _profile(self, wanted: bool, steps_run: int) -> None:
        """Start and stop the trace around PROFILED_STEPS; called with wanted=False, stop one that is open."""
        if wanted and steps_run == PROFILED_STEPS[0] and processes.is_primary():
            jax.profiler.start_trace(str(self.workdir / "profile"))
            self._tracing = True
        elif getattr(self, "_tracing", False) and (not wanted or steps_run == PROFILED_STEPS[1]):
            jax.block_until_ready(self.state)
            jax.profiler.stop_trace()
            self._tracing = False

    def close(self) -> None:
        try:
            self.checkpoints.close()
        finally:
            self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.close()
