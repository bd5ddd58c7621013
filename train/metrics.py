"""What a run reports: metrics.jsonl, TensorBoard events, a progress bar on a terminal or log lines without one."""

import contextlib
import json
import logging
import math
import os
import pathlib
import socket
import sys
import time
from typing import Any

import rich.progress
from tensorboardX import summary
from tensorboardX.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
from tensorboardX.record_writer import RecordWriter

from train.errors import writing

log = logging.getLogger(__name__)


FLUSH_S = 10  # between two flushes of TensorBoard's events


class Rows:
    """A file of JSON rows with a step each, written as they come; on resume, rows past the restored step are cut.

    Raises StorageError where it cannot be written.
    """

    def __init__(self, path: pathlib.Path, *, restored_step: int):
        self._path, self._file = path, None
        kept = []
        if path.exists():
            kept = [row for row in read_rows(path) if row["step"] <= restored_step]
            temporary = path.with_suffix(".jsonl.tmp")
            with writing(path):
                temporary.write_text("".join(json.dumps(row) + "\n" for row in kept))
                os.replace(temporary, path)
        self.kept_steps = {row["step"] for row in kept}

    def write(self, row: dict[str, Any]) -> None:
        with writing(self._path):
            if self._file is None:  # no file before the first row
                self._file = self._path.open("a", buffering=1)
            self._file.write(json.dumps(row) + "\n")

    def sync(self) -> None:
        """Return once the rows are on the disk."""
        if self._file is not None:
            with writing(self._path):
                os.fsync(self._file.fileno())

    def close(self) -> None:
        if self._file is not None:
            with writing(self._path):
                self._file.close()


class Events:
    """TensorBoard's events of one run from a step on; those of an earlier run past that step are hidden.

    Written as they come, by the calling thread: that of tensorboardX's SummaryWriter dies of its first error, a full disk say,
    and ten scalars later the run waits for it for ever. Raises StorageError where they cannot be written.
    """

    def __init__(self, workdir: pathlib.Path, *, first_step: int):
        self._path = workdir / f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}"
        self._flushed = -math.inf
        with writing(self._path):
            self._file = RecordWriter(str(self._path))
        self._write(step=first_step, file_version="brain.Event:2")
        self._write(step=first_step, session_log=SessionLog(status=SessionLog.START))

    def scalar(self, name: str, value: float, step: int) -> None:
        self._write(step=step, summary=summary.scalar(name, value))

    def _write(self, **event: Any) -> None:
        with writing(self._path):
            self._file.write(Event(wall_time=time.time(), **event).SerializeToString())
            if time.monotonic() > self._flushed + FLUSH_S:
                self._file.flush()
                self._flushed = time.monotonic()

    def close(self) -> None:
        with writing(self._path):
            self._file.close()


class Metrics:
    """Writes metrics.jsonl, diagnosis.jsonl and TensorBoard's events, each step once; without a workdir, nothing."""

    def __init__(self, workdir: pathlib.Path | None, *, restored_step: int):
        self._writes = workdir is not None
        if workdir is None:
            return
        self._rows, self._diagnosis = (
            Rows(workdir / name, restored_step=restored_step) for name in ("metrics.jsonl", "diagnosis.jsonl")
        )
        if missing := restored_step - len(self._rows.kept_steps):
            log.warning("%s: no rows of %d of %d steps", workdir / "metrics.jsonl", missing, restored_step)
        with writing(workdir / "metrics.jsonl"):
            (workdir / "metrics.jsonl").touch()
        self._tensorboard = Events(workdir, first_step=restored_step + 1)

    def write(self, row: dict[str, Any]) -> None:
        if not self._writes:
            return
        self._rows.write(row)
        for name, value in row.items():
            if name not in ("step", "tokens"):
                self._tensorboard.scalar(name, value, row["step"])

    def write_diagnosis(self, rows: list[dict[str, Any]], averages: dict[str, float]) -> None:
        """Write one step's rows as they are, and their averages as TensorBoard scalars."""
        if not self._writes:
            return
        for row in rows:
            self._diagnosis.write(row)
        for name, value in averages.items():
            self._tensorboard.scalar(f"diagnosis/{name}", value, rows[0]["step"])

    def sync(self) -> None:
        """Return once all rows are on the disk: a checkpoint that follows must not outlive them."""
        if self._writes:
            self._rows.sync()
            self._diagnosis.sync()

    def close(self) -> None:
        if not self._writes:
            return
        with contextlib.ExitStack() as stack:  # all three, whichever fails
            for part in (self._rows, self._diagnosis, self._tensorboard):
                stack.callback(part.close)


def read_rows(path: pathlib.Path) -> list[dict[str, Any]]:
    """Return the rows of a metrics.jsonl; a last line cut short by a kill is dropped, a missing file has none."""
    rows = []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows.append(row)
        else:
            log.warning("%s: dropped a broken line", path)
    return rows


class Progress:
    """A bar with loss, tokens/s and ETA on a terminal's stderr; one log line every `log_every` steps otherwise.

    bar=False: log lines also on a terminal.
    """

    def __init__(self, *, steps: int, done: int, log_every: int, bar: bool = True):
        self._log_every, self._steps = log_every, steps
        self._started, self._first = time.monotonic(), done
        self._bar = rich.progress.Progress(
            rich.progress.TextColumn("step"),
            rich.progress.MofNCompleteColumn(),
            rich.progress.BarColumn(),
            rich.progress.TextColumn("{task.fields[text]}"),
            rich.progress.TextColumn("ETA"),
            rich.progress.TimeRemainingColumn(),
            console=rich.console.Console(stderr=True),
            disable=not (bar and sys.stderr.isatty()),
        )
        self._task = self._bar.add_task("train", total=steps, completed=done, text="compiling")

    def __enter__(self) -> "Progress":
        self._bar.start()
        return self

    def __exit__(self, *_) -> None:
        self._bar.stop()

    def update(self, row: dict[str, Any]) -> None:
        step = row["step"]
        text = f"loss {row['train_loss']:.4f}  {row['tokens_per_s']:,.0f} tokens/s"
        self._bar.update(self._task, completed=step, text=text)
        if self._bar.disable and (step % self._log_every == 0 or step == self._steps):
            left = (time.monotonic() - self._started) / max(step - self._first, 1) * (self._steps - step)
            log.info("step %d/%d  %s  ETA %.0f s", step, self._steps, text, left)
