"""What a run reports: metrics.jsonl, TensorBoard events, a progress bar on a terminal or log lines without one."""

import json
import logging
import os
import pathlib
import sys
import time
from typing import Any

import rich.progress
import tensorboardX

log = logging.getLogger(__name__)


class Metrics:
    """Writes rows as they come, each step once; on resume, rows past the restored step are cut."""

    def __init__(self, workdir: pathlib.Path, *, restored_step: int):
        self._path = workdir / "metrics.jsonl"
        kept = [row for row in read_rows(self._path) if row["step"] <= restored_step]
        temporary = self._path.with_suffix(".jsonl.tmp")
        temporary.write_text("".join(json.dumps(row) + "\n" for row in kept))
        os.replace(temporary, self._path)
        self._file = self._path.open("a", buffering=1)
        self._tensorboard = tensorboardX.SummaryWriter(
            str(workdir), purge_step=restored_step + 1, write_to_disk=True, flush_secs=10
        )

    def write(self, row: dict[str, Any]) -> None:
        self._file.write(json.dumps(row) + "\n")
        for name, value in row.items():
            if name not in ("step", "tokens"):
                self._tensorboard.add_scalar(name, value, row["step"])

    def close(self) -> None:
        self._file.close()
        self._tensorboard.close()


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
    """A bar with loss, tokens/s and ETA on a terminal's stderr; one log line every `log_every` steps otherwise."""

    def __init__(self, *, steps: int, done: int, log_every: int):
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
            disable=not sys.stderr.isatty(),
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
