"""Checkpoints: exact round trips, also to another mesh; from every kind of damage a run goes back to the one before."""

import asyncio
import dataclasses
import gc
import json
import re
import shutil
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import NoStop, leaves, rows, settings, snapshot, train, write_corpus
from orbax.checkpoint._src import asyncio_utils

from train import checkpoint, loop, optimizer, sharding, step
from train.errors import InputError

pytestmark = pytest.mark.usefixtures("shared_programs")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A finished run of two steps, both saved: (settings, workdir)."""
    directory = tmp_path_factory.mktemp("saved")
    s = settings(
        write_corpus(directory), quant__recipe="none", train__steps=2, train__checkpoint_every=1, optimizer__warmup_steps=1
    )
    train(s, directory / "run")
    return s, directory / "run"


def restore(s, workdir, at=None):
    checkpoints = checkpoint.Checkpoints(workdir)
    try:
        return checkpoints.restore(
            checkpoints.latest() if at is None else at, step.abstract_state(s, sharding.make_mesh(s.mesh))
        )
    finally:
        checkpoints.close()


def test_what_a_checkpoint_says(saved):
    s, workdir = saved
    state, run = restore(s, workdir, 1)
    assert int(state.step) == run["step"] == 1
    assert run["tokens"] == 8 * 32
    assert (run["recipe"], run["recipe_digest"]) == ("none", s.numerics.recipe.digest())
    assert set(run["versions"]) == set(checkpoint.VERSIONS)


@pytest.mark.parametrize("mesh", [{"fsdp": 4, "tensor": 2}, {"data": 8, "fsdp": 1}, {"fsdp": 2, "context": 2, "tensor": 2}])
def test_another_mesh_restores_the_same_bits(saved, mesh):
    s, workdir = saved
    here, _ = restore(s, workdir)
    other = dataclasses.replace(s, mesh=sharding.MeshConfig(**mesh))
    there, _ = restore(other, workdir)
    jax.tree.map(np.testing.assert_array_equal, leaves(here), leaves(there))
    wanted = jax.tree.leaves(step.abstract_state(other, sharding.make_mesh(other.mesh)))
    assert [x.sharding for x in jax.tree.leaves(there)] == [x.sharding for x in wanted]


def test_a_step_that_is_not_there(saved):
    with pytest.raises(InputError, match=r"no checkpoint of step 7.*\[1, 2\]"):
        restore(*saved, at=7)


def test_keep_checkpoints(saved, tmp_path):
    s, _ = saved
    train(dataclasses.replace(s, train=dataclasses.replace(s.train, keep_checkpoints=1)), tmp_path / "run")
    checkpoints = checkpoint.Checkpoints(tmp_path / "run")
    assert checkpoints.steps() == [2]
    checkpoints.close()
    every_second = dataclasses.replace(s.train, steps=5, keep_checkpoints=1, keep_every=2)
    train(dataclasses.replace(s, train=every_second), tmp_path / "every")
    checkpoints = checkpoint.Checkpoints(tmp_path / "every")
    assert checkpoints.steps() == [2, 4, 5]
    checkpoints.close()


class StateBefore(NamedTuple):
    """What a version without averaged weights stored."""

    params: Any
    opt_state: Any
    step: Any
    history: Any
    seed: Any


def test_a_state_of_a_version_without_averages_is_restored(saved, tmp_path, monkeypatch):
    s, workdir = saved
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_item", lambda state: StateBefore(*state[:5]))
        train(s, tmp_path / "run")
    jax.tree.map(np.testing.assert_array_equal, leaves(restore(s, tmp_path / "run")[0]), leaves(restore(s, workdir)[0]))


# ---- Damage ----


def biggest(directory):
    return max((p for p in directory.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path, bit):
    content = bytearray(path.read_bytes())
    content[bit // 8 % len(content)] ^= 1 << bit % 8
    path.write_bytes(content)


def edit_run(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


DAMAGE = {
    "state missing": lambda d: shutil.rmtree(d / "state"),
    "run missing": lambda d: shutil.rmtree(d / "run"),
    "run cut": lambda d: cut(d / "run" / "metadata"),
    "run garbage": lambda d: (d / "run" / "metadata").write_bytes(b"\x00garbage" * 9),
    "run of another program": lambda d: (d / "run" / "metadata").write_text('{"step": 2}'),
    "run a list": lambda d: (d / "run" / "metadata").write_text("[2]"),
    "run edited": lambda d: edit_run(d / "run" / "metadata", iterator={"next_index": 5}),
    "step of another": lambda d: shutil.copy(d.parent / "1" / "run" / "metadata", d / "run" / "metadata"),
    "state of another": lambda d: (shutil.rmtree(d / "state"), shutil.copytree(d.parent / "1" / "state", d / "state")),
    "tree missing": lambda d: (d / "state" / "_METADATA").unlink(),
    "tree cut": lambda d: cut(d / "state" / "_METADATA"),
    "manifest missing": lambda d: (d / "state" / "manifest.ocdbt").unlink(),
    "manifest cut": lambda d: cut(d / "state" / "manifest.ocdbt"),
    "arrays missing": lambda d: biggest(d).unlink(),
    "arrays cut": lambda d: cut(biggest(d)),
    "arrays garbage": lambda d: biggest(d).write_bytes(b"\x00garbage" * 9),
    **{f"arrays bit {n}": lambda d, n=n: flip(biggest(d), n * 99_991) for n in range(8)},
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_from_a_damaged_checkpoint_a_run_goes_back_to_the_one_before(saved, tmp_path, damage, caplog):
    s, workdir = saved
    copy = tmp_path / "run"
    shutil.copytree(workdir, copy)
    damage(copy / "checkpoints" / "2")
    damaged = snapshot(copy / "checkpoints" / "2")
    assert train(s, copy).step == 2
    gc.collect()  # a read that was dropped would be a warning here, so an error
    assert rows(copy) == rows(workdir)
    (message,) = [r.getMessage() for r in caplog.records if "going back to step 1" in r.getMessage()]
    assert re.search(r"checkpoints/2 (cannot be read|is damaged)", message)
    assert snapshot(copy / "damaged" / "2") == damaged
    jax.tree.map(np.testing.assert_array_equal, *(leaves(restore(s, w)[0]) for w in (copy, workdir)))


def test_where_every_checkpoint_is_damaged_the_run_is_refused_and_nothing_is_moved(saved, tmp_path):
    s, workdir = saved
    copy = tmp_path / "run"
    shutil.copytree(workdir, copy)
    for at in ("1", "2"):
        cut(biggest(copy / "checkpoints" / at))
    before = snapshot(copy)
    with pytest.raises(InputError, match=r"checkpoints/2 (cannot be read|is damaged)"):
        train(dataclasses.replace(s, train=dataclasses.replace(s.train, eval_every=7)), copy)
    assert snapshot(copy) == before


def test_a_second_run_in_a_workdir_is_refused_while_the_first_lives(saved, tmp_path):
    s, _ = saved
    dataset, mesh, _ = loop.prepare(s, tmp_path / "run")
    first = loop.Run(s, tmp_path / "run", dataset, mesh)
    with pytest.raises(InputError, match="in use by another run"):
        loop.Run(s, tmp_path / "run", dataset, mesh)
    first.close()
    loop.Run(s, tmp_path / "run", dataset, mesh).close()


def test_reads_that_failed_late_are_awaited():
    ended = []

    async def fail(seconds):
        try:
            await asyncio.sleep(seconds)
        finally:
            ended.append(seconds)
            raise OSError(seconds)

    async def both():
        await asyncio.gather(fail(0.0), fail(0.02))

    factory = asyncio.new_event_loop
    with checkpoint.reads_drained(), pytest.raises(OSError, match=r"^0\.0$"):
        asyncio_utils.run_sync(both())
    assert ended == [0.0, 0.02]
    assert asyncio.new_event_loop is factory


# ---- The guard ----


class Poison:
    """Wraps a train step; after `at` steps the weights, the moments or the loss are NaN."""

    def __init__(self, real, at, where):
        self.real, self.at, self.where = real, at, where

    def __call__(self, state, batch):
        state, figures = self.real(state, batch)
        if int(state.step) == self.at:
            if self.where == "loss":
                figures = {**figures, "train_loss": figures["train_loss"] * np.nan}
            elif self.where == "weights":
                state = state._replace(params=jax.tree.map(lambda x: x * np.nan, state.params))
            else:
                state = state._replace(opt_state=jax.tree.map(lambda x: x * np.inf if x.ndim else x, state.opt_state))
        return state, figures


@pytest.mark.parametrize("where", ["loss", "weights", "moments"])
def test_a_poisoned_step_stops_the_run_and_is_not_saved(saved, tmp_path, monkeypatch, where):
    s, _ = saved
    real = step.make_train_step
    monkeypatch.setattr(step, "make_train_step", lambda *a: Poison(real(*a), 2, where))
    with pytest.raises(loop.GuardError, match=r"step 2.*newest checkpoint is that of step 1"):
        train(dataclasses.replace(s, train=dataclasses.replace(s.train, eval_every=0, steps=3)), tmp_path / "run")
    checkpoints = checkpoint.Checkpoints(tmp_path / "run")
    assert checkpoints.steps() == [1]
    checkpoints.close()
    state, _ = restore(s, tmp_path / "run")
    assert step.is_finite(state)


class Infinite:
    """Wraps a train step; at some steps it starts from weights so large that loss and gradient overflow."""

    factor = 1e30

    def __init__(self, real, at):
        self.real, self.at = real, at

    def __call__(self, state, batch):
        if int(state.step) + 1 not in self.at:
            return self.real(state, batch)
        before = jax.tree.map(np.asarray, state)
        large = jax.tree.map(lambda x: x * self.factor, state.params)
        places = jax.tree.map(lambda x: x.sharding, state.params)
        bad, figures = self.real(state._replace(params=large), batch)
        for name in ("opt_state", "history"):  # what the real step keeps of a bad one
            jax.tree.map(np.testing.assert_array_equal, getattr(before, name), getattr(bad, name))
        return bad._replace(params=jax.device_put(before.params, places)), figures


def test_steps_that_are_not_finite_are_skipped_and_counted_up_to_a_number(saved, tmp_path, monkeypatch, caplog):
    s, _ = saved
    s = dataclasses.replace(s, train=dataclasses.replace(s.train, steps=7, eval_every=0, checkpoint_every=1, skip_nonfinite=2))
    real = step.make_train_step
    monkeypatch.setattr(step, "make_train_step", lambda *a: Infinite(real(*a), {2, 3, 5}))
    assert train(s, tmp_path / "run").step == 7
    found = rows(tmp_path / "run")
    assert [(r["step"], r["skipped"]) for r in found if "skipped" in r] == [(2, 1), (3, 2), (5, 1)]
    training = [r for r in found if "train_loss" in r]
    assert [r["step"] for r in training] == [1, 4, 6, 7]
    rates = optimizer.learning_rate(s.optimizer)
    assert [r["lr"] for r in training] == [float(np.float32(rates(n))) for n in range(4)]  # the schedule waits too
    assert sum("skipped" in r.getMessage() for r in caplog.records) == 3
    monkeypatch.setattr(step, "make_train_step", lambda *a: Infinite(real(*a), {2, 4, 5, 6}))
    with pytest.raises(loop.GuardError, match=r"step 6: .* after 2 skipped steps; the newest checkpoint is that of step 5"):
        train(s, tmp_path / "stops")


def test_a_poisoned_validation_loss_stops_the_run(saved, tmp_path, monkeypatch):
    s, _ = saved
    monkeypatch.setattr(step, "validation_loss", lambda *_: float("nan"))
    with pytest.raises(loop.GuardError, match="step 2: validation loss is nan"):
        train(s, tmp_path / "run")


def test_spikes_are_left_out_and_the_run_resumes_with_what_it_has_seen(saved, tmp_path, monkeypatch, caplog):
    """A step of which the gradient is that of weights three times as large, after a window of calm ones."""
    s, _ = saved
    changes = {"steps": 9, "eval_every": 0, "checkpoint_every": 1, "skip_spikes": 6.0, "spike_window": 8}
    s = dataclasses.replace(s, train=dataclasses.replace(s.train, **changes))
    real = step.make_train_step

    class Spike(Infinite):
        factor = 3.0

    monkeypatch.setattr(step, "make_train_step", lambda *a: Spike(real(*a), {7}))
    assert train(s, tmp_path / "run").step == 9
    found = rows(tmp_path / "run")
    assert [r["step"] for r in found if "spike" in r] == [7]
    assert [r["step"] for r in found if "train_loss" in r] == list(range(1, 10))
    assert sum("step 7 skipped as a spike" in r.getMessage() for r in caplog.records) == 1
    rates = optimizer.learning_rate(s.optimizer)
    assert found[7]["lr"] == float(np.float32(rates(6)))
    for stop in (4, 6, 7):
        path = tmp_path / "stopped" / "metrics.jsonl"
        train(s, tmp_path / "stopped", NoStop(lambda n=stop, p=path: p.exists() and len(rows(p.parent)) >= n))
    train(s, tmp_path / "stopped")
    assert rows(tmp_path / "stopped") == found


def test_what_is_a_spike():
    """Against numpy: both figures, the window's turn, and that a spike is remembered while what is not finite is not."""
    draw, width = np.random.default_rng(0), 8
    recent = {"train_loss": jnp.zeros(width), "grad_norm": jnp.zeros(width), "count": jnp.int32(0)}
    seen, spikes = [], []
    for at in range(40):
        loss, norm = 3 + 0.1 * draw.normal(), 1 + 0.1 * draw.normal()
        loss, norm = loss + (at in (2, 20, 21)), norm + (at in (30, 31, 32, 33))
        if at == 25:
            loss = np.nan
        window = np.array(seen[-width:], np.float64)
        expected = False
        if len(seen) >= width // 2 and np.isfinite(loss):
            expected = bool(((loss, norm) > window.mean(0) + 4 * window.std(0)).any())
        figures = {"train_loss": jnp.float32(loss), "grad_norm": jnp.float32(norm)}
        spike, recent = step.is_spike(figures, recent, 4.0)
        assert bool(spike) == expected, at
        spikes += [at] if expected else []
        seen += [(loss, norm)] if np.isfinite(loss) else []
    assert spikes == [20, 30]


# ---- Stopping ----


@pytest.mark.parametrize("looks", range(1, 7))
def test_a_signal_at_any_moment_leaves_a_checkpoint_of_the_step_reached(saved, tmp_path, looks):
    """The request turns true at its n-th look, as if the signal had come just before it."""
    s, _ = saved
    s = dataclasses.replace(s, train=dataclasses.replace(s.train, steps=9, checkpoint_every=0))
    count = iter(range(1, 1000))
    result = train(s, tmp_path / "run", NoStop(lambda: next(count) >= looks))
    assert result.stopped
    checkpoints = checkpoint.Checkpoints(tmp_path / "run")
    assert checkpoints.latest() == (result.step or None)
    checkpoints.close()
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines if "train_loss" in line] == list(range(1, result.step + 1))
