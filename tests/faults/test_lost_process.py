"""Several processes: when one is killed, cannot start or cannot write, the others end within a bounded time and say why."""

import signal

import jax
import pytest
from helpers import Processes, argv, wait_for_step

from train import cli
from train.errors import StorageError

STEPS = {"train__steps": 9, "train__checkpoint_every": 2, "train__eval_every": 4, "mesh__fsdp": 2, "mesh__tensor": 2}


@pytest.mark.parametrize("lost", [0, 1])
def test_the_others_end_when_a_process_is_lost(compiled_once, tmp_path, lost):
    two = Processes(argv(compiled_once, tmp_path / "run", **{**STEPS, "train__steps": 100_000}), 2)
    wait_for_step(tmp_path / "run", 1)
    two.send(lost, signal.SIGKILL)
    codes, _, errors = two.wait(timeout=90)
    assert codes == ([-9, 4] if lost == 0 else [4, -9])
    said = f"error: process {1 - lost} of 2 ends: another process was lost, or cannot be reached"
    assert errors[1 - lost].splitlines()[-1].startswith(said)


def test_an_error_of_one_process_ends_all(compiled_once, tmp_path):
    extra = {1: [f"--config.data.files={tmp_path}/none.txt"]}
    codes, _, errors = Processes(argv(compiled_once, tmp_path / "run", mesh__fsdp=4), 2, extra=extra).wait()
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
    cli._leave(StorageError("run/checkpoints/4 cannot be written: disk full"))
    assert left == [cli.STORAGE]
    assert capsys.readouterr().err == "error: process 0 of 2 ends: run/checkpoints/4 cannot be written: disk full\n"
