"""Several processes: when one is killed, cannot start or cannot write, the others end within a bounded time and say why."""

import signal

import jax
import pytest
from helpers import Processes, argv, wait_for_step, write_corpus

from train import cli
from train.errors import StorageError

STEPS = {"quant__recipe": "none", "train__checkpoint_every": 2, "train__eval_every": 4, "mesh__fsdp": 2, "mesh__tensor": 2}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def test_the_others_end_when_a_process_is_lost(corpus, tmp_path):
    """Between steps: during a save they may have to wait for the heartbeat, as below."""
    changes = {**STEPS, "train__steps": 100_000, "train__checkpoint_every": 0}
    two = Processes(argv(corpus, tmp_path / "run", **changes), 2)
    wait_for_step(tmp_path / "run", 1)
    two.send(1, signal.SIGKILL)
    codes, _, errors = two.wait(timeout=90)
    assert codes[1] == -9
    said = {4: "error: process 0 of 2 ends: another process was lost, or cannot be reached", -6: "detected fatal errors"}
    assert said[codes[0]] in errors[0]  # JAX's own service may be faster than the next exchange: it aborts the process


def test_the_others_end_when_the_process_that_coordinates_is_lost(corpus, tmp_path):
    """JAX's own service may be faster than the next exchange: it aborts the process."""
    two = Processes(argv(corpus, tmp_path / "run", **{**STEPS, "train__steps": 100_000}), 2)
    wait_for_step(tmp_path / "run", 1)
    two.send(0, signal.SIGKILL)
    codes, _, errors = two.wait(timeout=90)
    assert codes[0] == -9
    said = {4: "another process was lost", -6: "distributed service detected fatal errors"}
    assert said[codes[1]] in errors[1]


def test_an_error_of_one_process_ends_all(corpus, tmp_path):
    extra = {1: [f"--config.data.files={tmp_path}/none.txt"]}
    codes, _, errors = Processes(argv(corpus, tmp_path / "run", mesh__fsdp=4), 2, extra=extra).wait()
    assert codes == [2, 2]
    assert errors[0] == ""
    assert errors[1].startswith("error: process 1: ")
    assert "none.txt" in errors[1]


def test_a_process_that_cannot_write_its_part_says_so_and_leaves(capsys, monkeypatch):
    """An ordinary exit would wait for the others, which wait for this one."""
    left = []
    monkeypatch.setattr(cli.os, "_exit", left.append)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    for path in ("run/checkpoints/4", "NCCL_barrier/checkpoints/4"):
        cli._leave(StorageError(f"{path} cannot be written: disk full"))
        assert left.pop() == cli.STORAGE
        assert capsys.readouterr().err == f"error: process 0 of 2 ends: {path} cannot be written: disk full\n"
    reason = "UNKNOWN: Gloo AllGather failed: Read error [127.0.0.1]:1: Connection reset by peer"
    for error in (StorageError(f"run/checkpoints/4 cannot be written: ValueError: {reason}"), ValueError(reason)):
        cli._leave(error)  # the other process is what is missing, not the disk
        assert left.pop() == cli.LOST
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: process 0 of 2 ends: another process was lost, or cannot be reached (")
    cli._leave(jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 8 bytes"))
    assert left.pop() == cli.BAD_INPUT
    assert capsys.readouterr().err.startswith("error: process 0 of 2 ends: out of memory on the device: RESOURCE_EXHAUSTED")
