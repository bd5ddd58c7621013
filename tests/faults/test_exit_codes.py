"""What a user sees of a fault: one line, an exit code, and what the workdir holds afterwards."""

import json
import shutil
import signal
import subprocess
import time

from helpers import (
    FINISHED,
    ROOT,
    NoStop,
    argv,
    command,
    environment,
    rows,
    run,
    settings,
    snapshot,
    steps_saved,
    train,
)

from train import cli, loop

GRACE_S = 30  # what schedulers commonly allow between SIGTERM and SIGKILL


def test_sigterm_stops_with_a_checkpoint_of_the_step_reached(finished, tmp_path):
    corpus, *_ = finished
    changes = {**FINISHED, "train__steps": 100_000, "train__checkpoint_every": 0, "optimizer__decay_steps": 6}
    arguments = argv(corpus, tmp_path / "run", **changes)
    process = subprocess.Popen(
        command("train.main", *arguments),
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    path = tmp_path / "run" / "metrics.jsonl"
    while process.poll() is None and not (path.exists() and len(path.read_text().splitlines()) > 3):
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=GRACE_S)
    assert process.returncode == 143
    result = json.loads(out.splitlines()[-1])
    assert result["step"] == rows(tmp_path / "run")[-1]["step"]
    assert steps_saved(tmp_path / "run")[-1] == result["step"] > 0


def test_a_signal_before_the_first_step_says_that_nothing_was_saved(finished, tmp_path, caplog):
    s = settings(finished[0], quant__recipe="none", train__steps=3)
    caplog.set_level("INFO")
    result = train(s, tmp_path / "run", NoStop(lambda: True))
    assert (result.step, result.stopped) == (0, signal.SIGTERM)
    assert "SIGTERM: before the first step; the same command continues" in caplog.messages
    assert steps_saved(tmp_path / "run") == []


def test_a_signal_during_the_last_evaluation_comes_too_late(finished, tmp_path, monkeypatch):
    s = settings(finished[0], quant__recipe="none", train__steps=2, optimizer__warmup_steps=1)
    evaluated = []
    real = loop.Run.evaluate
    monkeypatch.setattr(loop.Run, "evaluate", lambda *args: evaluated.append(real(*args)))
    result = train(s, tmp_path / "run", NoStop(lambda: bool(evaluated)))
    assert (result.step, result.stopped, steps_saved(tmp_path / "run")[-1]) == (2, 0, 2)


def test_flags_of_many_processes_have_no_effect_on_one(finished, tmp_path):
    code, out, err = run("train.main", *argv(finished[0], tmp_path / "run"), "--heartbeat=5")
    assert (code, out, err) == (cli.BAD_INPUT, [], ["error: --heartbeat has no effect on a run of one process"])


def test_divergence_exits_with_3_and_keeps_a_finite_checkpoint(finished, tmp_path):
    changes = {**FINISHED, "optimizer__peak_lr": 1e38, "optimizer__warmup_steps": 0, "train__checkpoint_every": 1}
    code, out, err = run("train.main", *argv(finished[0], tmp_path / "run", **changes))
    assert (code, out) == (cli.GUARD, [])
    assert "stopped by a guard" in err[-1]
    kept = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])["step"]
    assert f"newest checkpoint is that of step {kept}" in err[-1]


def copy_of(finished, directory):
    shutil.copytree(finished[1], directory / "run")
    return directory / "run"


def test_a_cut_checkpoint_is_said_and_the_run_ends_as_it_did(finished, tmp_path):
    workdir = copy_of(finished, tmp_path)
    path = max((p for p in (workdir / "checkpoints" / "6").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    code, out, err = run("train.main", *argv(finished[0], workdir, **FINISHED))
    assert (code, out, rows(workdir)) == (cli.DONE, finished[2], rows(finished[1]))
    assert any("checkpoints/6 cannot be read" in line and "going back to step 3" in line for line in err), err


def test_a_disk_that_fills_up_during_a_save_is_one_line_and_the_checkpoint_before_stays(finished, tmp_path):
    workdir = copy_of(finished, tmp_path)
    shutil.rmtree(workdir / "checkpoints" / "6")
    before = snapshot(workdir / "checkpoints" / "3")
    done = subprocess.run(  # no file may grow beyond 64 kB
        ["bash", "-c", 'ulimit -f 64; exec "$@"', "bash", *command("train.main", *argv(finished[0], workdir, **FINISHED))],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stdout) == (cli.STORAGE, "")
    assert f"error: {workdir}/checkpoints/6 cannot be written: Failed to write" in done.stderr.splitlines()[-1]
    assert "File too large" in done.stderr.splitlines()[-1]
    assert done.stderr.count("File too large") == 1
    assert "Traceback" not in done.stderr
    assert steps_saved(workdir) == [3]
    assert snapshot(workdir / "checkpoints" / "3") == before
