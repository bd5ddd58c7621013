"""Run an ablation, recipes × seeds, and report:  python -m train.ablate --config=configs/ablation_tiny.py [--workdir=DIR]

Every row of a seed starts from the same weights and sees the same data. Each cell is a run in a workdir of its own under
cells/, so any number of interruptions costs nothing but the steps after the last checkpoint: the same command continues.
Processes work side by side (--jobs), each on one row at a time, whose seeds share what it compiles; on a CPU each has one
thread, so that a cell's figures do not depend on how many there are. The last line of stdout is a JSON object.
"""

import json
import logging
import os
import pathlib
import subprocess
import sys
import time
from typing import Any

from absl import flags
from ml_collections import config_flags

from train import ablation_report, cli, grid, loop
from train.errors import InputError, write_whole
from train.metrics import read_rows

log = logging.getLogger(__name__)
CONFIG = config_flags.DEFINE_config_file("config", None, "Config file with an `ablate` section.", lock_config=True)
WORKDIR = flags.DEFINE_string("workdir", None, "Where the grid lives; default runs/<config name>[_<argument>].")
JOBS = flags.DEFINE_integer("jobs", 0, "Processes side by side; 0: one per CPU core, or one on an accelerator.")
WORKER = flags.DEFINE_bool("worker", False, "Internal: work on cells and report nothing.")
REPORT = flags.DEFINE_string("report", None, "Where the report goes; default WORKDIR.")
REPORT_ONLY = flags.DEFINE_bool("report_only", False, "Write the report of the cells that are finished, run none.")


def main() -> int:
    if CONFIG.value is None:
        raise InputError("--config=FILE[:ARGUMENT] is missing, for instance --config=configs/ablation_tiny.py")
    if "ablate" not in CONFIG.value:
        raise InputError("the config has no `ablate` section: see configs/ablation_tiny.py")
    path = config_flags.get_config_filename(flags.FLAGS["config"])
    workdir = pathlib.Path(WORKDIR.value or cli.default_workdir(path))
    cells = grid.cells(CONFIG.value.ablate)
    if WORKER.value:
        return grid.work(CONFIG.value, cells, workdir)
    for cell in cells:  # a wrong row is found before any runs
        try:
            loop.check_fits(grid.settings_of(CONFIG.value, cell))
        except InputError as error:
            raise InputError(f"row {cell.label}: {error}") from None
    grid.check_begun(CONFIG.value, cells, workdir)
    _claim(workdir, CONFIG.value)
    code = cli.DONE if REPORT_ONLY.value else supervise(cells, workdir, CONFIG.value.train.steps, JOBS.value or _default_jobs())
    result = ablation_report.write(workdir, CONFIG.value, cells, pathlib.Path(REPORT.value or workdir))
    cli.print_result(result)
    return code


def supervise(cells: list[grid.Cell], workdir: pathlib.Path, steps: int, jobs: int) -> int:
    """Start the workers, show the progress of the whole grid, wait; return the exit code."""
    stop = cli.StopRequest()
    of_worker = (f"--workdir={workdir}", "--worker")  # the last of a flag counts
    command = [sys.executable, "-m", "train.ablate", *sys.argv[1:], *of_worker]
    logs = [open(workdir / f"worker{i}.log", "a") for i in range(jobs)]  # noqa: SIM115
    # A terminal's Ctrl-C goes to a whole process group: workers have their own, as a second signal would end them unsaved.
    options: Any = {"env": _worker_environment(), "process_group": 0}
    workers = [subprocess.Popen(command, stdout=out, stderr=out, **options) for out in logs]
    total = sum(round(steps * cell.share) for cell in cells)
    first, started, said = _steps_done(cells, workdir, steps), time.monotonic(), 0.0
    try:
        while any(worker.poll() is None for worker in workers):
            time.sleep(0.5)
            if stop.signal:
                for worker in workers:
                    worker.terminate()
                for worker in workers:
                    worker.wait()
                return stop.exit_code
            if time.monotonic() - said > 30:
                done, said = _steps_done(cells, workdir, steps), time.monotonic()
                finished = sum(grid.result_of(workdir / cell.path) is not None for cell in cells)
                rate = (done - first) / max(said - started, 1e-9)
                eta = f"{(total - done) / rate / 60:.0f} min" if rate > 0 else "unknown"
                log.info("%d of %d cells, %d of %d steps, ETA %s", finished, len(cells), done, total, eta)
    finally:
        for out in logs:
            out.close()
    for i, worker in enumerate(workers):
        if worker.returncode:
            lines = (workdir / f"worker{i}.log").read_text().splitlines()
            print(f"worker {i} ended with {worker.returncode}: {lines[-1] if lines else ''}", file=sys.stderr)
            return worker.returncode
    if left := [cell.path for cell in cells if grid.result_of(workdir / cell.path) is None]:
        print(f"error: {len(left)} cells are still run by others, {left[0]} first: run this again later", file=sys.stderr)
        return cli.BAD_INPUT
    return cli.DONE


def _steps_done(cells: list[grid.Cell], workdir: pathlib.Path, steps: int) -> int:
    done = 0
    for cell in cells:
        if grid.result_of(workdir / cell.path) is not None:
            done += round(steps * cell.share)
        else:
            done += max((row["step"] for row in read_rows(workdir / cell.path / "metrics.jsonl")), default=0)
    return done


def _worker_environment() -> dict[str, str]:
    """Return the environment of a worker: one thread on a CPU, and huge pages, a quarter of a step's time (LOG.md)."""
    flags_ = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    huge_pages = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    return {**huge_pages, **os.environ, "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags_}".strip()}


def _default_jobs() -> int:
    import jax

    return (os.cpu_count() or 1) if jax.default_backend() == "cpu" else 1


def _claim(workdir: pathlib.Path, config: Any) -> None:
    """Write the grid's config, or refuse a workdir of another one; rows and seeds may be added."""
    shared = json.loads(json.dumps({k: v for k, v in config.to_dict().items() if k not in ("ablate", "diagnose")}))
    path = workdir / "ablation.json"
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        if path.exists() and json.loads(path.read_text()) != shared:
            raise InputError(f"{workdir} holds an ablation of another config: choose another --workdir")
        if not path.exists():
            write_whole(path, json.dumps(shared, sort_keys=True, indent=1))
    except (OSError, ValueError) as error:
        raise InputError(f"workdir {workdir} cannot be used: {error}") from None


if __name__ == "__main__":
    cli.run(main)
