"""The grid of an ablation: its cells (recipes × seeds, and arms for the noise), and how any number of processes runs them.

A cell is a training run in a workdir of its own; `result.json` in it says that it is finished.
"""

import dataclasses
import json
import logging
import pathlib
import re
import time
from typing import Any

import jax
from ml_collections import ConfigDict

from train import config as train_config
from train import loop, page, step
from train.cli import DONE, StopRequest, lock_file
from train.errors import InputError

log = logging.getLogger(__name__)
PERTURBED, HORIZON = "perturbed", "horizon"


def default_section() -> ConfigDict:
    """Return the `ablate` section of a config with its defaults."""
    return ConfigDict(
        {
            # Recipes as quant.recipe takes them, (label, recipe), or (label, recipe, ((share of the steps, recipe), …)).
            "rows": (),
            "contrasts": (),  # (label, label) pairs whose difference is reported too
            "seeds": (0, 1, 2),
            "baseline": "fp8_current",  # a label
            "perturb": 1e-7,  # relative size of the perturbation of the initial weights, one more run of each row below
            "perturbed": ("fp8_current",),  # labels
            "horizons": (0.6, 0.8, 1.25),  # shares of train.steps at which runs of the baseline end, for the iso-loss overhead
            "horizon_seeds": 2,
        }
    )


@dataclasses.dataclass(frozen=True)
class Cell:
    """One run of the grid. arm: "" the row itself, "perturbed", or "horizon" with its share of the steps.

    schedule: (share of the run's steps, recipe) pairs, as quant.schedule has (step, recipe).
    """

    label: str
    recipe: str
    seed: int
    arm: str = ""
    share: float = 1.0
    schedule: tuple[tuple[float, str], ...] = ()

    @property
    def path(self) -> str:
        arm = {"": "", PERTURBED: "-perturbed", HORIZON: f"-horizon{self.share:g}"}[self.arm]
        return f"cells/{re.sub(r'[^\w.-]', '_', self.label)}/seed{self.seed}{arm}"


def cells(section: Any) -> list[Cell]:
    """Return the cells of an `ablate` section, those of one row together; raises InputError for one that cannot be."""
    rows = {label: (recipe, schedule) for label, recipe, schedule in map(_row, section.rows)}
    seeds = tuple(section.seeds)
    for name, kind, values in (("seeds", int, seeds), ("horizons", int | float, section.horizons)):
        if not all(isinstance(value, kind) and not isinstance(value, bool) for value in values):
            raise InputError(f"ablate.{name}={values} must be numbers")
    if not all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in section.contrasts):
        raise InputError(f"ablate.contrasts={section.contrasts} must be pairs of labels")
    if len(rows) != len(section.rows) or not rows or not seeds or len(set(seeds)) != len(seeds):
        raise InputError(f"ablate.rows={section.rows} and ablate.seeds={seeds} must not be empty or hold anything twice")
    for label in (section.baseline, *section.perturbed, *(label for pair in section.contrasts for label in pair)):
        if label not in rows:
            raise InputError(f"ablate: {label!r} is no row; choose from {list(rows)}")
    out = []
    for label, (recipe, schedule) in rows.items():
        row = [Cell(label, recipe, seed, schedule=schedule) for seed in seeds]
        out += row
        if label in section.perturbed:
            out += [dataclasses.replace(cell, arm=PERTURBED) for cell in row]
        if label == section.baseline:
            shares = section.horizons
            out += [dataclasses.replace(c, arm=HORIZON, share=share) for share in shares for c in row[: section.horizon_seeds]]
    paths = [cell.path for cell in out]
    if twice := [path for path in paths if paths.count(path) > 1]:
        raise InputError(f"ablate: two cells would share {twice[0]}: their labels or horizons must differ in more than signs")
    return out


def _row(row: Any) -> tuple[str, str, tuple[tuple[float, str], ...]]:
    """Return label, recipe and schedule of one of ablate.rows."""
    match (row, row) if isinstance(row, str) else row:
        case [str(label), str(recipe)] if label.strip("."):
            return label, recipe, ()
        case [str(label), str(recipe), [*phases]] if label.strip("."):
            pairs = [phase for phase in phases if isinstance(phase, tuple | list) and len(phase) == 2]
            if len(pairs) == len(phases) and all(isinstance(p[0], int | float) and isinstance(p[1], str) for p in pairs):
                return label, recipe, tuple((share, name) for share, name in pairs)
    raise InputError(f"ablate.rows: {row!r} is no recipe, (label, recipe) or (label, recipe, ((share, recipe), …))")


def settings_of(config: Any, cell: Cell):
    """Return the settings of one cell; raises InputError."""
    changed: Any = ConfigDict(config.to_dict())
    changed.quant.recipe, changed.train.seed = cell.recipe, cell.seed
    steps = changed.train.steps = round(config.train.steps * cell.share)
    if cell.arm:
        changed.diagnose.every = 0  # the row itself is diagnosed
    if cell.schedule:
        changed.quant.schedule = tuple((round(steps * share), recipe) for share, recipe in cell.schedule)
    return train_config.resolve(changed)


def check_begun(config: Any, cells: list[Cell], workdir: pathlib.Path) -> None:
    """Raise InputError where a cell ran, whole or in part, with another recipe, schedule or perturbation than its row has."""
    for cell in cells:
        directory, asked = workdir / cell.path, json.loads(json.dumps(_asked(config, cell)))
        ran = result_of(directory) or _read(directory / "asked.json") or {}
        for key, value in asked.items():
            if ran.get(key, value) != value:
                raise InputError(f"{directory} ran with {key} {ran[key]}, not {value}: choose another label or --workdir")


def work(config: Any, grid: list[Cell], workdir: pathlib.Path) -> int:
    """Run the cells of rows that no other process works on, then those left of the others' rows, until none is free."""
    stop = StopRequest()
    rows = [[cell for cell in grid if cell.label == label] for label in dict.fromkeys(cell.label for cell in grid)]
    for row in rows:  # a row's programs are compiled once
        lock = lock_file(workdir / "cells" / (pathlib.Path(row[0].path).parent.name + ".lock"))
        if lock is not None:
            with lock:
                run_row(config, row, workdir, stop)
    for row in rows:  # and once more where somebody helps, from the row's other end
        run_row(config, row[::-1], workdir, stop)
    return stop.exit_code if stop.signal else DONE


def run_row(config: Any, row: list[Cell], workdir: pathlib.Path, stop: StopRequest) -> None:
    """Run the cells of one row that nobody else runs, one after the other; those of one length share their programs."""
    programs: dict[Any, Any] = {}
    for cell in row:
        directory = workdir / cell.path
        if stop.signal or result_of(directory) is not None:
            continue
        claim = lock_file(directory.with_name(directory.name + ".lock"))
        if claim is not None:
            with claim:
                if result_of(directory) is None:  # it may have been finished just now
                    _run_cell(config, cell, directory, programs.setdefault(cell.share, {}), stop)
    if programs:
        jax.clear_caches()


def _run_cell(config: Any, cell: Cell, directory: pathlib.Path, shared: dict[Any, Any], stop: StopRequest) -> None:
    settings = settings_of(config, cell)
    dataset, mesh, _ = loop.prepare(settings, directory)
    loop.write_json(directory / "asked.json", _asked(config, cell))
    initial = (lambda state: step.perturb(state, config.ablate.perturb)) if cell.arm == PERTURBED else None
    run = loop.Run(settings, directory, dataset, mesh, programs=shared, initial=initial)
    started = time.monotonic()
    result: dict[str, Any] = {"label": cell.label, "seed": cell.seed, "arm": cell.arm, **_asked(config, cell)}
    try:
        done = run.train(stop)
        if done.stopped:
            return
        if "plain" not in shared:
            shared["plain"] = step.make_eval_step(train_config.in_recipe(settings, "none"), mesh)
        unquantized = step.validation_loss(shared["plain"], mesh, run.state, step.val_batches(settings, mesh, dataset))
        result |= {"val_loss": done.val_loss, "val_loss_unquantized": unquantized, "diverged": None}
    except loop.GuardError as error:
        log.info("%s: %s", cell.path, error)
        result |= {"val_loss": None, "val_loss_unquantized": None, "diverged": str(error)}
    finally:
        run.close()
    result |= {
        "commit": page.commit(),
        "steps": settings.train.steps,
        "share": cell.share,
        "seconds": round(time.monotonic() - started, 1),
    }
    loop.write_json(directory / "result.json", result)


def _asked(config: Any, cell: Cell) -> dict[str, Any]:
    """Return what a cell's config.json does not tell: kept beside it and in its result, compared when the grid runs again."""
    perturb = {"perturb": config.ablate.perturb} if cell.arm == PERTURBED else {}
    return {"recipe": cell.recipe, "schedule": cell.schedule, **perturb}


def result_of(directory: pathlib.Path) -> dict[str, Any] | None:
    """Return what a finished cell wrote, None for one that is not finished."""
    return _read(directory / "result.json")


def _read(path: pathlib.Path) -> dict[str, Any] | None:
    return json.loads(path.read_text()) if path.exists() else None
