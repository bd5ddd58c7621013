"""A workdir that cannot be written: full, read-only or gone, from the start or in the middle of a run.

No file may grow beyond a limit of the operating system, as on a full disk; a directory cannot be written because a file lies in
its place. Neither needs another user than root, whom permissions do not stop, nor root.
"""

import contextlib
import dataclasses
import errno
import gc
import inspect
import resource
import shutil
import threading
import time

import pytest
from helpers import NoStop, restore, rows, snapshot, steps_saved, train
from orbax.checkpoint._src.multihost import multihost
from tensorboardX.record_writer import RecordWriter

from train import checkpoint, loop, metrics
from train.errors import InputError, StorageError

pytestmark = [
    pytest.mark.usefixtures("shared_programs"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),  # files and coroutines of failed saves
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


@contextlib.contextmanager
def full_beyond(size):
    """Let no file grow beyond so many bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch):
    """Let the threads that orbax 0.12.8 leaves waiting after a failed save end soon."""
    monkeypatch.setattr(multihost, "coordination_timeout", lambda: 5)


@pytest.fixture(scope="module", autouse=True)
def _nothing_left():
    """Wait for those threads, and close what they never awaited: Python warns of it where it collects it, in another module."""
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        threading.Thread.join(thread, 10)  # orbax 0.12.8 has a join of its own, which raises
    for item in gc.get_objects():
        if inspect.iscoroutine(item) and inspect.getcoroutinestate(item) == inspect.CORO_CREATED:
            item.close()


@contextlib.contextmanager
def blocked(directory):
    """Put a file in place of a directory."""
    aside = directory.with_name("aside")
    directory.rename(aside)
    directory.touch()
    try:
        yield
    finally:
        directory.unlink()
        aside.rename(directory)


def poll(check, *, seconds=60):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        check()
        time.sleep(0.01)


@pytest.fixture(scope="module")
def whole(saved, tmp_path_factory):
    """Settings of six steps that keep one checkpoint, and the workdir of an uninterrupted run."""
    s, directory = saved[0], tmp_path_factory.mktemp("whole")
    train_settings = dataclasses.replace(s.train, steps=6, checkpoint_every=2, keep_checkpoints=1, eval_every=3)
    s = dataclasses.replace(s, train=train_settings)
    train(s, directory / "run")
    return s, directory / "run"


def fail_saves(monkeypatch, fault, *, at):
    """Let the fault begin before the save of step `at`; it ends with the test."""
    real, stack = checkpoint.Checkpoints.save, contextlib.ExitStack()

    def save(self, step, *arguments):
        if step == at:
            self.wait()
            stack.enter_context(fault(self.path))
        real(self, step, *arguments)

    monkeypatch.setattr(checkpoint.Checkpoints, "save", save)
    return stack


FAULTS = {
    "full": (lambda _: full_beyond(20_000), "File too large"),
    "read-only": (blocked, "Not a directory"),
}


@pytest.mark.parametrize(("fault", "reason"), FAULTS.values(), ids=FAULTS)
@pytest.mark.parametrize("at", [4, 6])  # found by the step that follows, and by the end
def test_a_save_that_fails_ends_the_run_and_the_checkpoint_before_stays(whole, tmp_path, monkeypatch, fault, reason, at):
    s, workdir = whole
    with fail_saves(monkeypatch, fault, at=at) as _, pytest.raises(StorageError) as error:
        train(s, tmp_path / "run")
    assert f"{tmp_path}/run/checkpoints/{at} cannot be written: " in str(error.value)
    assert reason in str(error.value)
    monkeypatch.undo()
    assert steps_saved(tmp_path / "run") == [at - 2]
    restore(s, tmp_path / "run")
    train(s, tmp_path / "run")
    assert rows(tmp_path / "run") == rows(workdir)
    assert steps_saved(tmp_path / "run") == [6]


def test_a_failed_save_is_found_without_waiting_for_the_next(whole, tmp_path):
    s, workdir = whole
    state, run = restore(s, workdir)
    checkpoints = checkpoint.Checkpoints(tmp_path / "run")
    checkpoints.check()
    with full_beyond(20_000):
        checkpoints.save(6, state, {k: v for k, v in run.items() if "checksum" not in k})
        with pytest.raises(StorageError, match="checkpoints/6 cannot be written"):
            poll(checkpoints.check)
    assert checkpoints.latest() is None
    checkpoints.close()


def test_metrics_that_cannot_be_written_end_the_run(whole, tmp_path):
    s, workdir = whole
    s = dataclasses.replace(s, train=dataclasses.replace(s.train, checkpoint_every=0))
    with contextlib.ExitStack() as stack:
        looks = iter([lambda: stack.enter_context(full_beyond(700)), *[lambda: None] * 99])
        with pytest.raises(StorageError, match=r"(metrics\.jsonl|events\S*) cannot be written: File too large"):
            train(s, tmp_path / "run", NoStop(lambda: bool(next(looks)() and False)))
    train(s, tmp_path / "run")
    assert rows(tmp_path / "run") == rows(workdir)


def test_events_that_cannot_be_written_end_the_run(tmp_path, monkeypatch):
    """tensorboardX writes in a thread of its own, by default: that would die, and the run wait for it for ever."""
    writer = metrics.Metrics(tmp_path, restored_step=0)

    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(RecordWriter, "write", fail)
    with pytest.raises(StorageError, match=r"events\S* cannot be written: No space left on device"):
        poll(lambda: writer.write({"step": 1, "train_loss": 1.0}))
    writer.close()


@pytest.mark.parametrize("name", ["lock", "checkpoints", "config.json.tmp", "census.json.tmp"])
def test_a_workdir_that_cannot_be_written_is_refused_at_once(saved, tmp_path, name):
    s, workdir = saved
    copy = tmp_path / "run"
    shutil.copytree(workdir, copy)
    path = copy / name
    if name == "checkpoints":
        shutil.rmtree(path)
        path.touch()
    else:
        path.unlink(missing_ok=True)
        path.mkdir()
    before = snapshot(copy / "checkpoints")
    with pytest.raises(InputError, match="cannot be written"):
        train(s, copy)
    assert snapshot(copy / "checkpoints") == before
    assert not (copy / "damaged").exists()
    loop.lock(copy).close() if name != "lock" else None
