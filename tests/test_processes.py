"""Several processes over loopback train what one process trains, stop together, and end when one of them is lost."""

import os
import signal
import socket
import subprocess
import time

import pytest
from helpers import ROOT, argv, command, environment, rows, run, write_corpus

from train import processes
from train.errors import InputError

STEPS = {"train__steps": 9, "train__checkpoint_every": 2, "train__eval_every": 4, "mesh__fsdp": 2, "mesh__tensor": 2}


class Processes:
    """`count` processes of one run, with 4 / count devices each; extra: further flags of single processes."""

    def __init__(self, arguments, count, *, extra=None):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        self._all = [
            subprocess.Popen(
                command("train.main", *arguments, f"--coordinator={address}", f"--processes={count}", f"--process={i}")
                + list((extra or {}).get(i, ())),
                cwd=ROOT,
                env=environment(devices=4 // count),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for i in range(count)
        ]

    def send(self, process, number):
        self._all[process].send_signal(number)

    def wait(self, timeout=300):
        """Return (exit codes, stdouts without Gloo's lines, stderrs); all are killed at the time-out."""
        deadline = time.monotonic() + timeout
        try:
            done = [process.communicate(timeout=max(deadline - time.monotonic(), 1)) for process in self._all]
        finally:
            for process in self._all:
                process.kill()
        outs = ["".join(line for line in out.splitlines(True) if "[Gloo]" not in line) for out, _ in done]
        return [process.returncode for process in self._all], outs, [err for _, err in done]


def wait_for_step(workdir, step):
    path, deadline = workdir / "metrics.jsonl", time.monotonic() + 200
    while not (path.exists() and len([row for row in rows(workdir) if "train_loss" in row]) >= step):
        assert time.monotonic() < deadline, f"no step {step} in {path}"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    directory = tmp_path_factory.mktemp("corpus")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
        yield write_corpus(directory)


def test_two_then_four_processes_train_what_one_does(corpus, tmp_path):
    """Stopped by a signal that only one process gets, with one process's part of the newest checkpoint cut short."""
    changes = {**STEPS, "quant__recipe": "mxfp4_sr"}
    code, out, err = run("train.main", *argv(corpus, tmp_path / "one", **changes), devices=4)
    assert code == 0, err

    workdir = tmp_path / "many"
    longer = argv(corpus, workdir, **changes)
    two = Processes(longer, 2)
    wait_for_step(workdir, 5)
    two.send(1, signal.SIGTERM)
    codes, outs, errors = two.wait()
    assert codes in ([143, 143], [0, 0]), errors  # 0: the signal came after the last step
    assert outs[1] == errors[1] == ""
    assert f'"step": {rows(workdir)[-1]["step"]}' in outs[0]

    newest = max((workdir / "checkpoints").iterdir(), key=lambda path: int(path.name))
    part = max((p for p in newest.glob("state/ocdbt.process_1/**/*") if p.is_file()), key=lambda p: p.stat().st_size)
    os.truncate(part, 100)
    codes, outs, errors = Processes(longer, 4).wait()
    assert codes == [0] * 4, errors
    assert "going back to step" in errors[0]
    assert outs == ["".join(line + "\n" for line in out), "", "", ""]
    assert errors[1:] == ["", "", ""]
    assert rows(workdir) == rows(tmp_path / "one")


def test_the_others_end_when_a_process_is_lost(corpus, tmp_path):
    two = Processes(argv(corpus, tmp_path / "run", **{**STEPS, "train__steps": 100_000}), 2)
    wait_for_step(tmp_path / "run", 1)
    two.send(1, signal.SIGKILL)
    codes, _, errors = two.wait(timeout=90)
    assert codes == [4, -9]
    assert errors[0].splitlines()[-1].startswith("error: process 0 of 2 ends: another process was lost, or cannot be reached")


def test_processes_with_different_configs_are_refused_together(corpus, tmp_path):
    codes, _, errors = Processes(argv(corpus, tmp_path / "run", mesh__fsdp=4), 2, extra={1: ["--config.train.seed=5"]}).wait()
    assert codes == [2, 2]
    assert errors == ["error: process 0: processes [1] have another config or data than process 0\n", ""]
    assert not (tmp_path / "run").exists()


def test_an_error_of_one_process_ends_all(corpus, tmp_path):
    extra = {1: [f"--config.data.files={tmp_path}/none.txt"]}
    codes, _, errors = Processes(argv(corpus, tmp_path / "run", mesh__fsdp=4), 2, extra=extra).wait()
    assert codes == [2, 2]
    assert errors[0] == ""
    assert errors[1].startswith("error: process 1: ")
    assert "none.txt" in errors[1]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"cluster": "lsf"}, "--cluster='lsf' is not one of slurm"),
        ({"cluster": "slurm", "process": 1}, "without --process"),
        ({"coordinator": "host:1", "processes": 2}, "without --process"),
        ({"coordinator": "host", "processes": 2, "process": 0}, "is not HOST:PORT"),
        ({"coordinator": "host:1", "processes": 2, "process": 2}, "--process=2 is not in"),
        ({"coordinator": "host:1", "processes": 2, "process": 0, "heartbeat_s": 0}, "below one second"),
        ({"cluster": "slurm"}, "--cluster=slurm cannot join the run"),
    ],
)
def test_what_cannot_find_its_processes_is_refused(flags, message):
    with pytest.raises(InputError, match=message):
        processes.start(**flags)
