"""The report of an ablation: results.json, report.md, report.html (self-contained) and its figures, from the cells on disk."""

import base64
import html
import json
import math
import pathlib
import platform
import subprocess
from typing import Any

import jax
import numpy as np

from train import grid, statistics
from train.metrics import read_rows
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


def write(workdir: pathlib.Path, config: Any, cells: list[grid.Cell]) -> dict[str, Any]:
    """Write the report of the finished cells; return its summary."""
    results = analyse(workdir, config.ablate, cells)
    results["run"] = {
        "commit": _commit(),
        "jax": jax.__version__,
        "device": f"{jax.devices()[0].device_kind}, {platform.machine()}",
        "emulated": jax.default_backend() == "cpu",
        "config": {k: v for k, v in config.to_dict().items() if k != "quant"},
    }
    (workdir / "results.json").write_text(json.dumps(results, indent=1, allow_nan=True) + "\n")
    figures = _figures(workdir, config.ablate, cells)
    (workdir / "report.md").write_text(_markdown(results, figures))
    (workdir / "report.html").write_text(_html(results, workdir, figures))
    finished, total = results["cells"]["finished"], results["cells"]["total"]
    return {"finished": finished, "cells": total, "report": str(workdir / "report.html")}


def analyse(workdir: pathlib.Path, section: Any, cells: list[grid.Cell]) -> dict[str, Any]:
    """Return the statistics of the finished cells as JSON data; a row that diverged or did not reach keeps its place."""
    done = {cell: result for cell in cells if (result := grid.result_of(workdir / cell.path)) is not None}
    curves = {cell: curve(workdir / cell.path) for cell in done}

    def of(label: str, arm: str = "") -> dict[int, grid.Cell]:
        return {cell.seed: cell for cell in done if (cell.label, cell.arm) == (label, arm)}

    def losses(label: str, key: str = "val_loss", arm: str = "") -> dict[int, float]:
        values = {seed: done[cell][key] for seed, cell in of(label, arm).items()}
        return {seed: value for seed, value in values.items() if value is not None}

    baseline = section.baseline
    slopes = _slopes(done, curves, baseline)
    s = float(np.mean(list(slopes.values()))) if slopes else math.nan
    rows = {}
    for label in dict.fromkeys(cell.label for cell in cells):
        difference = statistics.paired(losses(label), losses(baseline))
        crossings = {
            seed: statistics.crossing_overhead(curves[cell], curves[of(baseline)[seed]], CROSSING_SHARE)
            for seed, cell in of(label).items()
            if seed in of(baseline) and len(curves[cell][0]) and len(curves[of(baseline)[seed]][0])
        }
        reached = [value for value in crossings.values() if value is not None]
        rows[label] = {
            "finished": len(of(label)),
            "diverged": sum(done[cell]["diverged"] is not None for cell in of(label).values()),
            "val_loss": statistics.estimate(list(losses(label).values()))._asdict(),
            "difference": difference._asdict(),
            "difference_unquantized": statistics.paired(
                losses(label, "val_loss_unquantized"), losses(baseline, "val_loss_unquantized")
            )._asdict(),
            "overhead_iso_loss": _overhead(difference, s),
            "extrapolated": difference.mean > statistics.EXTRAPOLATION,
            "overhead_crossing": statistics.estimate(reached)._asdict(),
            "did_not_reach": len(crossings) - len(reached),
            "seeds_needed": statistics.seeds_needed(difference.deviation, difference.mean),
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
    return {
        "baseline": baseline,
        "cells": {"finished": len(done), "total": len(cells)},
        "rows": rows,
        "baseline_spread": statistics.estimate(list(losses(baseline).values())).deviation,
        "perturbation": {
            label: {"mean": _mean(v), "largest": max(v, default=math.nan), "runs": len(v)} for label, v in perturbed.items()
        },
        "slope": {"per_seed": slopes, "mean": s},
    }


def curve(directory: pathlib.Path) -> Curve:
    """Return (tokens, validation losses) of a cell."""
    rows = [row for row in read_rows(directory / "metrics.jsonl") if "val_loss" in row]
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


def _figures(workdir: pathlib.Path, section: Any, cells: list[grid.Cell]) -> dict[str, str]:
    """Draw loss curves, whole and zoomed, and gradient norms; return {caption: file name}."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    labels = list(dict.fromkeys(cell.label for cell in cells))
    colors = dict(zip(labels, plt.colormaps["tab20"](np.linspace(0, 1, max(len(labels), 2))), strict=False))
    rows = {cell: read_rows(workdir / cell.path / "metrics.jsonl") for cell in cells if cell.arm == ""}
    end = max((row["tokens"] for cell in rows for row in rows[cell]), default=1)
    figures = {
        "Validation loss": ("val_loss", "curves.png", (0.0, 1.0)),
        "Validation loss, last 40 %": ("val_loss", "curves_zoomed.png", (0.6, 1.0)),
        "Gradient norm": ("grad_norm", "grad_norm.png", (0.0, 1.0)),
    }
    for caption, (key, name, window) in figures.items():
        figure, axes = plt.subplots(figsize=(8, 4.5), dpi=120)
        for label in labels:
            series = [
                {r["tokens"]: r[key] for r in rows[cell] if key in r and window[0] * end <= r["tokens"]}
                for cell in rows
                if cell.label == label
            ]
            common = sorted(set.intersection(*(set(s) for s in series))) if series else []
            if not common:
                continue
            values = np.array([[s[t] for t in common] for s in series])
            if key == "grad_norm" and len(common) > 40:  # a moving average over 20 steps
                values = np.apply_along_axis(lambda v: np.convolve(v, np.ones(20) / 20, "valid"), 1, values)
                common = common[19:]
            tokens = np.array(common) / 1e6
            axes.plot(tokens, values.mean(0), color=colors[label], label=label, linewidth=1.3)
            axes.fill_between(tokens, values.min(0), values.max(0), color=colors[label], alpha=0.12, linewidth=0)
        axes.set_xlabel("tokens (millions)")
        axes.set_ylabel("nats per token" if key == "val_loss" else "gradient norm")
        axes.set_title(f"{caption} (mean over seeds, band: smallest to largest)", fontsize=10)
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=7, ncols=2)
        figure.tight_layout()
        figure.savefig(workdir / name)
        plt.close(figure)
    return {caption: name for caption, (_, name, _) in figures.items()}


COLUMNS = (
    "recipe",
    "seeds",
    "validation loss",
    "− baseline (95 %)",
    "− baseline, unquantized forward",
    "extra tokens, iso-loss",
    f"extra tokens, crossing at {CROSSING_SHARE:.0%}",
    "seeds to resolve it",
    "study",
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
            )
        )
    return table


def _notes(results: dict[str, Any]) -> list[str]:
    run = results["run"]
    notes = [
        f"{results['cells']['finished']} of {results['cells']['total']} cells finished.",
        f"Commit {run['commit']}, jax {run['jax']}, {run['device']}.",
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
    if run["emulated"]:
        notes.append("FP4 is emulated on a CPU: step times are no speeds, so there is no time-to-target column.")
    return notes


def _markdown(results: dict[str, Any], figures: dict[str, str]) -> str:
    lines = ["# Ablation", "", *(f"- {note}" for note in _notes(results)), ""]
    lines += ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    lines += ["| " + " | ".join(cells) + " |" for cells in _table(results)]
    lines += ["", *(f"![{caption}]({name})\n" for caption, name in figures.items())]
    return "\n".join(lines) + "\n"


def _html(results: dict[str, Any], workdir: pathlib.Path, figures: dict[str, str]) -> str:
    """Return the report as one page, its figures inside."""
    head = "".join(f"<th>{html.escape(column)}</th>" for column in COLUMNS)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>" for cells in _table(results))
    notes = "".join(f"<li>{html.escape(note)}</li>" for note in _notes(results))
    images = "".join(
        f'<figure><img alt="{html.escape(caption)}" src="data:image/png;base64,'
        f'{base64.b64encode((workdir / name).read_bytes()).decode()}"><figcaption>{html.escape(caption)}</figcaption></figure>'
        for caption, name in figures.items()
    )
    config = html.escape(json.dumps(results["run"]["config"], indent=1))
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Ablation</title><style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 2em auto; padding: 0 1em; color: #1b1f24; }}
table {{ border-collapse: collapse; width: 100%; font-size: 13px; }}
th, td {{ text-align: left; padding: .35em .6em; border-bottom: 1px solid #d8dee4; vertical-align: top; }}
th {{ background: #f6f8fa; }} tr:hover td {{ background: #f6f8fa; }}
figure {{ margin: 1.5em 0; }} img {{ max-width: 100%; }} figcaption {{ color: #57606a; font-size: 13px; }}
pre {{ background: #f6f8fa; padding: 1em; overflow-x: auto; font-size: 12px; }}
</style></head><body><h1>Ablation</h1><ul>{notes}</ul>
<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>
{images}<details><summary>Configuration</summary><pre>{config}</pre></details></body></html>
"""


def _number(value: float | None, pattern: str) -> str:
    return "–" if value is None or not math.isfinite(value) else pattern.format(value)


def _interval(estimate: dict[str, float]) -> str:
    mean = _number(estimate["mean"], "{:+.4f}")
    return mean if not math.isfinite(estimate["low"]) else f"{mean} ({estimate['low']:+.4f} to {estimate['high']:+.4f})"


def _percent(mean: float, low: float, high: float) -> str:
    text = _number(mean, "{:+.1%}")
    return text if not (math.isfinite(low) and math.isfinite(high)) else f"{text} ({low:+.0%} to {high:+.0%})"


def _commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"
