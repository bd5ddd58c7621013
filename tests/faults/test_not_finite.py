"""Losses, gradients and states that are not finite: skipped and counted, or the run stops and says where it began."""

import dataclasses

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import NoStop, restore, rows, steps_saved, train

from train import loop, optimizer, step

pytestmark = pytest.mark.usefixtures("shared_programs")


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
    assert steps_saved(tmp_path / "run") == [1]
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


FEW = ("lm_head", "attn/[kvo]", "mlp/up", "mlp/down")  # leaves attn/q and mlp/gate, which compile quickly


def test_a_run_that_is_not_finite_says_where_it_began(saved, tmp_path):
    """A weight of the second block is poisoned before step 1: x of that block is finite, its gate's product is not."""
    settings = helpers.settings(saved[0].data.files, quant__recipe="mxfp4", quant__exempt=FEW, train__steps=3)
    dataset, mesh, _ = loop.prepare(settings, tmp_path / "run")

    def poison(state):
        kernel = state.params["layers"]["mlp"]["gate"]["kernel"]
        state.params["layers"]["mlp"]["gate"]["kernel"] = kernel.at[1, 0, 0].set(jnp.inf)
        return state

    run = loop.Run(settings, tmp_path / "run", dataset, mesh, initial=poison)
    before = int(step.checksum(run.state))
    with pytest.raises(loop.GuardError, match=r"step 1: .*not finite at first: fprop of layers/1/mlp/gate: w; the newest"):
        run.train(NoStop())
    unchanged = run.state._replace(step=run.state.step * 0)
    assert int(step.checksum(unchanged)) == before
    run.close()


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
