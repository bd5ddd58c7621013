"""Several processes over loopback train what one process trains and stop together; faults/test_lost_process.py loses one."""

import os
import signal

import jax
import numpy as np
import pytest
from helpers import Processes, argv, rows, run, wait_for_step, write_corpus

from train import checkpoint, processes
from train.errors import InputError, ToldElsewhere

STEPS = {"train__steps": 9, "train__checkpoint_every": 2, "train__eval_every": 4, "mesh__fsdp": 2, "mesh__tensor": 2}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def test_two_then_four_processes_train_what_one_does(corpus, tmp_path):
    """Stopped by a signal that only one process gets, with one process's part of the newest checkpoint cut short."""
    few = ("lm_head", "attn/[kvo]", "mlp/gate", "mlp/up")  # leaves attn/q and mlp/down, which compile sooner
    changes = {**STEPS, "quant__recipe": "mxfp4_sr", "quant__exempt": few}
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


def test_processes_with_different_configs_are_refused_together(corpus, tmp_path):
    codes, _, errors = Processes(argv(corpus, tmp_path / "run", mesh__fsdp=4), 2, extra={1: ["--config.train.seed=5"]}).wait()
    assert codes == [2, 2]
    assert errors == ["error: process 0: processes [1] have another config or data than process 0\n", ""]
    assert not (tmp_path / "run").exists()


def test_a_config_that_only_one_process_cannot_use_ends_all_with_2(corpus, tmp_path):
    extra = {1: ["--config.optimizer.eps=0.0"]}
    codes, _, errors = Processes(argv(corpus, tmp_path / "run", mesh__fsdp=4), 2, extra=extra).wait()
    assert codes == [2, 2]
    assert errors[0] == ""
    assert errors[1].startswith("error: process 1: optimizer.peak_lr=")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"cluster": "lsf"}, "--cluster='lsf' is not one of slurm"),
        ({"cluster": "slurm", "process": 1}, "without --process"),
        ({"coordinator": "host:1", "processes": 2}, "without --process"),
        *(
            ({"coordinator": c, "processes": 2, "process": 0}, "is not HOST:PORT")
            for c in ("host", "1234", ":1", "h:0", "h:65536")
        ),
        ({"coordinator": "no.such.host.invalid:1", "processes": 2, "process": 0, "join_s": 1}, "has no address after 1 s"),
        ({"coordinator": "host:1", "processes": 2, "process": 2}, "--process=2 is not in"),
        ({"coordinator": "host:1", "processes": 2, "process": 0, "heartbeat_s": 0}, "below one second"),
        ({"coordinator": "host:1", "processes": 2, "process": 0, "join_s": 0}, "join_timeout=0 is below one second"),
        ({"cluster": "slurm"}, "--cluster=slurm cannot join the run"),
    ],
)
def test_what_cannot_find_its_processes_is_refused(flags, message):
    with pytest.raises(InputError, match=message):
        processes.start(**flags)


def test_an_error_keeps_its_kind_where_it_happened_and_is_told_elsewhere(monkeypatch):
    """A checkpoint that one process cannot reach just now must not be taken for a damaged one there."""
    text = np.frombuffer(b"later".ljust(processes.TEXT, b"\0"), np.uint8)
    monkeypatch.setattr(processes.multihost_utils, "process_allgather", lambda mine: np.stack([np.zeros_like(mine), text]))
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    for process, kind in ((1, checkpoint.Unavailable), (0, ToldElsewhere)):
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        with pytest.raises(InputError, match="process 1: later") as raised:
            fail_together(checkpoint.Unavailable("later") if process == 1 else None)
        assert type(raised.value) is kind


def fail_together(error):
    with processes.together():
        if error is not None:
            raise error


def test_what_waiting_for_a_name_took_is_not_waited_for_again(monkeypatch):
    now, given = [0.0], {}
    monkeypatch.setattr(processes.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(processes, "_wait_for_name", lambda *_: now.append(now.pop() + 200))
    monkeypatch.setattr(jax.distributed, "initialize", lambda *_, **options: given.update(options))
    processes.start(coordinator="host:1", processes=2, process=0, join_s=300)
    assert given["initialization_timeout"] == 100
