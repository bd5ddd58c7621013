"""The report of an ablation: results.json, report.md, report.html (self-contained) and its figures, from the cells on disk."""

import math
import pathlib
from typing import Any

import numpy as np

from fp4jax.recipe import GEMMS
from train import diagnosis, grid, loop, page, statistics
from train.metrics import read_rows
from train.page import plt
from train.statistics import Curve, Estimate

CROSSING_SHARE = 0.6  # of the baseline's schedule: between 50 and 67 %
# Extra tokens to the target against FP8 in arXiv 2605.09825 (notes of its tables), for the recipes that it trained.
STUDY = {
    "fp8_current": "0",
    "mxfp4_fprop": "8–9 %",
    "mxfp4_fprop_dgrad": "10–11 %",
    "mxfp4": "26–27 %",
    "mxfp4_fprop_sr": "8–9 %",
    "mxfp4_fprop_dgrad_sr": "10–11 %",
    "mxfp4_sr": "did not converge",
    "mxfp4_fprop_rht16": "8–9 %",
    "mxfp4_fprop_dgrad_rht16": "10–11 %",
    "mxfp4_rht16": "did not converge",
    "mxfp4_h16": "8–9 %",
    "mxfp4_h32": "8–9 %",
}
STUDY_TIME = {"mxfp4_h16": "−9 to −10 %"}


def write(workdir: pathlib.Path, config: Any, cells: list[grid.Cell], directory: pathlib.Path) -> dict[str, Any]:
    """Write the report of the finished cells of `workdir` into `directory`; return its summary."""
    results = analyse(workdir, config.ablate, cells, target=config.train.target_loss)
    shown = {k: v for k, v in config.to_dict().items() if k != "quant"}
    results["run"] = {**page.provenance(), "config": shown}
    loop.write_json(directory / "results.json", results)
    tables = [page.Table("", _columns(results), _table(results))]
    if results["contrasts"]:
        columns = ("recipe", "−", "difference (95 %)", "p", "seeds", "seeds to resolve it", "unquantized forward")
        tables.append(page.Table("Contrasts, paired within seeds", columns, _contrasts(results)))
    items = [*tables, *_figures(workdir, cells, directory)]
    path = page.write(directory, "Ablation", _notes(results), items, shown)
    finished, total = results["cells"]["finished"], results["cells"]["total"]
    return {"finished": finished, "cells": total, "report": str(path)}


def analyse(workdir: pathlib.Path, section: Any, cells: list[grid.Cell], *, target: float = 0.0) -> dict[str, Any]:
    """Return the statistics of the finished cells as JSON data; a row that diverged or did not reach keeps its place.

    target: the validation loss whose tokens are compared, 0: that of the baseline at CROSSING_SHARE of its length.
    """
    done = {cell: result for cell in cells if (result := grid.result_of(workdir / cell.path)) is not None}
    logged = {cell: read_rows(workdir / cell.path / "metrics.jsonl") for cell in done}
    curves = {cell: curve(rows) for cell, rows in logged.items()}

    def of(label: str, arm: str = "") -> dict[int, grid.Cell]:
        return {cell.seed: cell for cell in done if (cell.label, cell.arm) == (label, arm)}

    def losses(label: str, key: str = "val_loss", arm: str = "") -> dict[int, float]:
        values = {seed: done[cell][key] for seed, cell in of(label, arm).items()}
        return {seed: value for seed, value in values.items() if value is not None}

    def paired(row: str, other: str, key: str = "val_loss") -> Estimate:
        return statistics.paired(losses(row, key), losses(other, key))

    baseline = section.baseline
    slopes = _slopes(done, curves, baseline)
    s = float(np.mean(list(slopes.values()))) if slopes else math.nan
    labels = dict.fromkeys(cell.label for cell in cells)
    rates = {label: _rate([row for cell in of(label).values() for row in logged[cell]]) for label in labels}
    rows = {}
    for label in labels:
        difference = paired(label, baseline)
        crossings = {
            seed: statistics.crossing_overhead(curves[cell], curves[of(baseline)[seed]], CROSSING_SHARE, target)
            for seed, cell in of(label).items()
            if seed in of(baseline) and len(curves[cell][0]) and len(curves[of(baseline)[seed]][0])
        }
        reached = [value for value in crossings.values() if value is not None]
        rows[label] = {
            "finished": len(of(label)),
            "diverged": sum(done[cell]["diverged"] is not None for cell in of(label).values()),
            "val_losses": losses(label),
            "val_loss": statistics.estimate(list(losses(label).values()))._asdict(),
            "difference": difference._asdict(),
            "difference_unquantized": paired(label, baseline, "val_loss_unquantized")._asdict(),
            "overhead_iso_loss": _overhead(difference, s),
            "extrapolated": difference.mean > statistics.EXTRAPOLATION,
            "overhead_crossing": statistics.estimate(reached)._asdict(),
            "did_not_reach": len(crossings) - len(reached),
            "seeds_needed": statistics.seeds_needed(difference.deviation, difference.mean),
            "throughput_ratio": rates[label] / rates[baseline],
            "study": STUDY.get(label),
        }
    perturbed = {
        label: [
            abs(value - losses(label)[seed])
            for seed, value in losses(label, arm=grid.PERTURBED).items()
            if seed in losses(label)
        ]
        for label in section.perturbed
    }
    contrasts = [
        {"row": row, "other": other, **(difference := paired(row, other))._asdict()}
        | {"unquantized": paired(row, other, "val_loss_unquantized")._asdict()}
        | {"p": statistics.p_value(difference), "seeds_needed": statistics.seeds_needed(difference.deviation, difference.mean)}
        for row, other in section.contrasts
    ]
    return {
        "baseline": baseline,
        "target": target,
        "contrasts": contrasts,
        "cells": {
            "finished": len(done),
            "total": len(cells),
            "commits": sorted({result.get("commit", "unknown") for result in done.values()}),
        },
        "rows": rows,
        "baseline_spread": statistics.estimate(list(losses(baseline).values())).deviation,
        "perturbation": {
            label: {"mean": _mean(v), "largest": max(v, default=math.nan), "runs": len(v)} for label, v in perturbed.items()
        },
        "slope": {"per_seed": slopes, "mean": s},
    }


def _rate(rows: list[dict[str, Any]]) -> float:
    """Return the tokens per second of these rows of metrics.jsonl, the median over all steps, NaN without any."""
    rates = [row["tokens_per_s"] for row in rows if "tokens_per_s" in row]
    return float(np.median(rates)) if rates else math.nan


def curve(rows: list[dict[str, Any]]) -> Curve:
    """Return (tokens, validation losses) of a cell's rows of metrics.jsonl."""
    rows = [row for row in rows if "val_loss" in row]
    return np.array([row["tokens"] for row in rows], float), np.array([row["val_loss"] for row in rows], float)


def _slopes(done, curves, baseline: str) -> dict[int, float]:
    """Return −dL/dln D of the baseline for every seed with runs of at least three lengths, each decayed to its own end."""
    by_seed: dict[int, dict[float, float]] = {}
    for cell, result in done.items():
        if cell.label == baseline and cell.arm in ("", grid.HORIZON) and result["val_loss"] is not None:
            by_seed.setdefault(cell.seed, {})[float(curves[cell][0][-1])] = result["val_loss"]
    return {seed: statistics.slope(horizons) for seed, horizons in by_seed.items() if len(horizons) >= 3}


def _overhead(difference: Estimate, slope: float) -> dict[str, float]:
    """Return the iso-loss overhead at the mean difference and the ends of its interval; the slope's own error is left out."""
    values = {name: getattr(difference, name) for name in ("mean", "low", "high")}
    known = math.isfinite(slope) and slope > 0
    return {
        name: statistics.iso_loss_overhead(v, slope) if known and math.isfinite(v) else math.nan for name, v in values.items()
    }


def _mean(values: list[float]) -> float:
    return float(np.mean(values)) if values else math.nan


def _figures(workdir: pathlib.Path, cells: list[grid.Cell], directory: pathlib.Path) -> list[page.Figure]:
    """Draw loss curves, whole and zoomed, gradient norms, and where cells were diagnosed, the errors of their products."""
    labels = list(dict.fromkeys(cell.label for cell in cells))
    palette = plt.colormaps["tab10" if len(labels) <= 10 else "tab20"]
    colors = {label: palette(i % palette.N) for i, label in enumerate(labels)}
    own = [cell for cell in cells if cell.arm == ""]
    rows = {cell: read_rows(workdir / cell.path / "metrics.jsonl") for cell in own}
    end = max((row["tokens"] for cell in rows for row in rows[cell]), default=1)
    kinds = {
        "Validation loss": ("val_loss", "curves.png", 0.0),
        "Validation loss, last 40 %": ("val_loss", "curves_zoomed.png", 0.6),
        "Gradient norm": ("grad_norm", "grad_norm.png", 0.0),
    }
    figures = []
    for caption, (key, name, start) in kinds.items():
        series = {
            label: [
                {row["tokens"] / 1e6: row[key] for row in rows[cell] if key in row and start * end <= row["tokens"]}
                for cell in own
                if cell.label == label
            ]
            for label in labels
        }
        unit = "nats per token" if key == "val_loss" else "gradient norm"
        smooth = 20 if key == "grad_norm" else 1  # a moving average, in steps
        figures.append(_draw(directory / name, caption, unit, series, colors, smooth))
    measured = {cell: read_rows(workdir / cell.path / "diagnosis.jsonl") for cell in own}
    if any(measured.values()):
        per_step = {row["step"]: row["tokens"] / 1e6 for cell in own for row in rows[cell]}
        for gemm in GEMMS:
            series = {label: [_error_of(gemm, measured[c], per_step) for c in own if c.label == label] for label in labels}
            caption = f"Relative error of {gemm}'s product, mean over modules"
            figures.append(_draw(directory / f"error_{gemm}.png", caption, "‖q − p‖ / ‖p‖", series, colors, 1, marker="o"))
    return figures


def _error_of(gemm: str, rows: list[dict[str, Any]], tokens: dict[int, float]) -> dict[float, float]:
    """Return {tokens: mean relative error of a GEMM's products} of one cell's diagnosis."""
    by_step: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        by_step.setdefault(row["step"], []).append(row)
    name = f"{gemm}/relative_error"
    means = {at: diagnosis.averages(of_step) for at, of_step in by_step.items() if at in tokens}
    return {tokens[at]: mean[name] for at, mean in means.items() if name in mean}


def _draw(path: pathlib.Path, caption: str, unit: str, series, colors, smooth: int, marker: str = "") -> page.Figure:
    """Draw {label: [{x: value} per seed]}: the mean over seeds at the places that all have, and the band they span."""
    figure, axes = plt.subplots(figsize=(8, 4.5), dpi=120)
    for label, seeds in series.items():
        common = sorted(set.intersection(*(set(s) for s in seeds))) if seeds else []
        if not common:
            continue
        values = np.array([[s[x] for x in common] for s in seeds])
        if smooth > 1 and len(common) > 2 * smooth:
            values = np.apply_along_axis(lambda v: np.convolve(v, np.ones(smooth) / smooth, "valid"), 1, values)
            common = common[smooth - 1 :]
        axes.plot(common, values.mean(0), marker=marker, color=colors[label], label=label, linewidth=1.3, markersize=3)
        axes.fill_between(common, values.min(0), values.max(0), color=colors[label], alpha=0.12, linewidth=0)
    axes.set_xlabel("tokens (millions)")
    axes.set_ylabel(unit)
    axes.set_title(f"{caption} (mean over seeds, band: smallest to largest)", fontsize=10)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=7, ncols=2)
    return page.save(figure, path, caption)


def _columns(results: dict[str, Any]) -> tuple[str, ...]:
    target = results["target"]
    return (
        "recipe",
        "seeds",
        "validation loss",
        "− baseline (95 %)",
        "− baseline, unquantized forward",
        "extra tokens, iso-loss",
        f"extra tokens to {target:g}" if target else f"extra tokens, crossing at {CROSSING_SHARE:.0%}",
        "seeds to resolve it",
        "study",
        f"time to target (study: {STUDY_TIME['mxfp4_h16']} for mxfp4_h16)",
    )


def _table(results: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the overhead table, a tuple of cells per row."""
    table = []
    for label, row in results["rows"].items():
        difference, overhead, crossing = row["difference"], row["overhead_iso_loss"], row["overhead_crossing"]
        is_baseline = label == results["baseline"]
        seeds = f"{row['finished']}" + (f", {row['diverged']} diverged" if row["diverged"] else "")
        crossed = _percent(crossing["mean"], crossing["low"], crossing["high"])
        if row["did_not_reach"]:
            crossed = f"{row['did_not_reach']} of {row['did_not_reach'] + crossing['seeds']} did not reach" + (
                f"; {crossed}" if crossing["seeds"] else ""
            )
        table.append(
            (
                label + (" (baseline)" if is_baseline else ""),
                seeds,
                _number(row["val_loss"]["mean"], "{:.4f}"),
                "" if is_baseline else _interval(difference),
                "" if is_baseline else _interval(row["difference_unquantized"]),
                ""
                if is_baseline
                else _percent(overhead["mean"], overhead["low"], overhead["high"]) + (" *" if row["extrapolated"] else ""),
                "" if is_baseline else crossed,
                "" if is_baseline else str(row["seeds_needed"] or "–"),
                row["study"] or "",
                "" if is_baseline else _time_to_target(results, row),
            )
        )
    return table


def _time_to_target(results: dict[str, Any], row: dict[str, Any]) -> str:
    """Return (1 + extra tokens) ÷ throughput ratio − 1; on a CPU there is no throughput to speak of."""
    if results["run"]["emulated"]:
        return "emulated, not a speed"
    if row["did_not_reach"]:
        return "did not reach"
    ratio = row["throughput_ratio"]
    return (
        _number((1 + row["overhead_crossing"]["mean"]) / ratio - 1, "{:+.1%}")
        + f" at {_number(ratio, '{:.3f}')} × the tokens/s"
    )


def _contrasts(results: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the table of contrasts."""
    return [
        (
            c["row"],
            c["other"],
            _interval(c),
            _number(c["p"], "{:.3f}"),
            str(c["seeds"]),
            str(c["seeds_needed"] or "–"),
            _interval(c["unquantized"]),
        )
        for c in results["contrasts"]
    ]


def _notes(results: dict[str, Any]) -> list[str]:
    run = results["run"]
    notes = [
        f"{results['cells']['finished']} of {results['cells']['total']} cells finished.",
        f"Cells run at commit {', '.join(results['cells']['commits']) or '–'}, report at {run['commit']}; jax {run['jax']}, "
        f"{run['device']}.",
        "Differences are paired within seeds; intervals are Student's t at 95 % over seeds.",
        f"Spread of the baseline over seeds (standard deviation): {_number(results['baseline_spread'], '{:.4f}')} nats.",
    ]
    for label, floor in results["perturbation"].items():
        notes.append(
            f"Floor: {label} with its initial weights perturbed ends {_number(floor['mean'], '{:.4f}')} nats away in the mean, "
            f"{_number(floor['largest'], '{:.4f}')} at most ({floor['runs']} runs). No smaller difference means anything."
        )
    notes.append(
        f"Iso-loss overhead: exp(difference / s) − 1, s = {_number(results['slope']['mean'], '{:.3f}')} nats per e-fold of "
        f"tokens, from runs of the baseline of other lengths; * extrapolates beyond {statistics.EXTRAPOLATION} nats."
    )
    return notes


def _number(value: float | None, pattern: str) -> str:
    return "–" if value is None or not math.isfinite(value) else pattern.format(value)


def _interval(estimate: dict[str, float]) -> str:
    mean = _number(estimate["mean"], "{:+.4f}")
    return mean if not math.isfinite(estimate["low"]) else f"{mean} ({estimate['low']:+.4f} to {estimate['high']:+.4f})"


def _percent(mean: float, low: float, high: float) -> str:
    text = _number(mean, "{:+.1%}")
    return text if not (math.isfinite(low) and math.isfinite(high)) else f"{text} ({low:+.0%} to {high:+.0%})"
