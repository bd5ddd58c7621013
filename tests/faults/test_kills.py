"""Kills and signals: a run killed at random moments and started again gives the rows of an uninterrupted one, bit for bit.

One kill per suite; FP4JAX_KILLS=10 makes it ten (minutes), soak.py fifty at all moments of one run. Each process starts
from what the last one left on disk.
"""

import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest
from helpers import ROOT, NoStop, argv, command, environment, rows, run, settings, snapshot, steps_saved, train, write_corpus

from train import cli, loop
from train.errors import InputError

KILLS = int(os.environ.get("FP4JAX_KILLS", "1"))
RECIPE = "mxfp4_sr:wgrad.rotation.size=16,wgrad.rotation.signs=redrawn"  # random bits and random signs
FEW = ("lm_head", "attn/[kvo]", "mlp/*")  # leaves attn/q, which compiles quickly


def steps_done(workdir):
    path = workdir / "metrics.jsonl"
    return len([line for line in path.read_text().splitlines() if "train_loss" in line]) if path.exists() else 0


def kill_at_random(arguments, workdir, draw, *, target, at_once):
    """Start the run and kill it a moment after step `target`, or at_once: while it starts; return whether it was running."""
    with open(workdir.parent / "stderr", "w") as stderr:
        process = subprocess.Popen(
            command("train.main", *arguments), cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL, stderr=stderr
        )
    if at_once:
        time.sleep(draw.uniform(0, 10))
    while not at_once and steps_done(workdir) <= target and process.poll() is None:
        time.sleep(0.002)
    time.sleep(draw.uniform(0, 0.03))
    running = process.poll() is None
    process.kill()
    process.wait()
    return running


@pytest.fixture(scope="module")
def optimized():
    """Compile as for users where there are many kills."""
    with pytest.MonkeyPatch.context() as patch:
        if KILLS > 1:
            patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "0")
        yield


def test_killed_runs_continue_bit_for_bit(tmp_path, optimized):
    corpus, steps = write_corpus(tmp_path), 12 * KILLS
    changes = {"quant__recipe": RECIPE, "quant__exempt": FEW, "train__steps": steps, "train__checkpoint_every": 2}
    code, out, _ = run("train.main", *argv(corpus, tmp_path / "whole", **changes))
    assert code == 0
    whole = rows(tmp_path / "whole")

    draw = random.Random(RECIPE)
    workdir = tmp_path / "killed"
    running = []
    for i in range(KILLS):  # every fourth while it starts, the others somewhere in an equal share of the steps
        target = draw.randint(12 * i, 12 * i + 8)
        arguments = argv(corpus, workdir, **changes)
        running.append(kill_at_random(arguments, workdir, draw, target=target, at_once=i % 4 == 3))
    code, resumed_out, stderr = run("train.main", *argv(corpus, workdir, **changes))
    assert code == 0, stderr
    assert running[0], "the run ended before it was killed"
    assert rows(workdir) == whole
    assert resumed_out[-1] == out[-1]
    each = [(row["step"], "val_loss" in row) for row in whole]
    assert len(set(each)) == len(each)


# ---- Stopping ----


@pytest.mark.parametrize("looks", range(1, 7))
def test_a_signal_at_any_moment_leaves_a_checkpoint_of_the_step_reached(saved, tmp_path, looks):
    """The request turns true at its n-th look, as if the signal had come just before it."""
    s, _ = saved
    s = dataclasses.replace(s, train=dataclasses.replace(s.train, steps=9, checkpoint_every=0))
    count = iter(range(1, 1000))
    result = train(s, tmp_path / "run", NoStop(lambda: next(count) >= looks))
    assert result.stopped
    assert steps_saved(tmp_path / "run") == ([result.step] if result.step else [])
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines if "train_loss" in line] == list(range(1, result.step + 1))


@pytest.mark.parametrize(("first", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_of_either_kind_ends_the_process(first, code, second):
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        stop = cli.StopRequest()
        assert (stop.signal, stop.exit_code) == (None, 0)
        signal.raise_signal(first)
        assert (stop.signal, stop.exit_code) == (first, code)
        assert signal.getsignal(second) == signal.SIG_DFL
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# ---- Two runs in one workdir ----


def test_a_second_run_in_a_workdir_is_refused_while_the_first_lives(saved, tmp_path):
    s, _ = saved
    dataset, mesh, _ = loop.prepare(s, tmp_path / "run")
    first = loop.Run(s, tmp_path / "run", dataset, mesh)
    with pytest.raises(InputError, match="in use by another run"):
        loop.Run(s, tmp_path / "run", dataset, mesh)
    first.close()
    loop.Run(s, tmp_path / "run", dataset, mesh).close()


HOLD = """
import pathlib, sys, time
from train import cli
lock = cli.lock_file(pathlib.Path(sys.argv[1]))
print(1, flush=True)
time.sleep(99)
"""


def test_the_lock_of_a_killed_process_is_free(saved, tmp_path):
    s, workdir = saved
    held = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path / "lock")], cwd=ROOT, stdout=subprocess.PIPE)
    assert held.stdout.read(2) == b"1\n"
    before = snapshot(tmp_path)
    with pytest.raises(InputError, match="in use by another run"):
        train(s, tmp_path)
    assert snapshot(tmp_path) == before  # refused before it wrote anything
    held.kill()
    held.communicate()
    train(s, tmp_path)
    assert rows(tmp_path) == rows(workdir)


def test_of_two_runs_that_start_at_once_the_second_leaves_the_workdir_of_the_first(saved, tmp_path, monkeypatch):
    """The first one begins while the second reads its data."""
    s, _ = saved
    other = settings(s.data.files, quant__recipe="none", train__seed=1)
    check = loop._check

    def slow(*arguments):
        checked = check(*arguments)
        monkeypatch.setattr(loop, "_check", check)
        loop.prepare(s, tmp_path / "run")
        return checked

    monkeypatch.setattr(loop, "_check", slow)
    with pytest.raises(InputError, match="in use by another run, which has just begun"):
        loop.prepare(other, tmp_path / "run")
    loop.prepare(s, tmp_path / "run")
