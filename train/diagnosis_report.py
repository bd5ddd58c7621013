"""The report of a diagnosis: diagnosis.json, report.md, report.html and its figures."""

import json
import math
import pathlib
from typing import Any

import numpy as np

from fp4jax import stats
from fp4jax.recipe import GEMMS, OPERANDS
from train import diagnosis, page
from train.config import Settings
from train.errors import InputError
from train.page import plt

_ARMS = {"all": "all three", **{gemm: f"{gemm} alone" for gemm in GEMMS}}


def write(directory: pathlib.Path, results: dict[str, Any], settings: Settings) -> pathlib.Path:
    """Write the report into `directory`; return the page's path."""
    results["run"] = page.provenance()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "diagnosis.json").write_text(json.dumps(results, indent=1) + "\n")
    except OSError as error:
        raise InputError(f"{directory} cannot be written: {error}") from None
    items = [_gradients(results), _products(results), _casts(results), _flips(results), *_figures(directory, results)]
    return page.write(directory, f"Diagnosis of {results['workdir']}", _notes(results), items, settings.to_dict())


def recipes(results: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(name for at in results["checkpoints"].values() for name in at["recipes"]))


def findings(results: dict[str, Any]) -> list[str]:
    """Return `stats.findings` of every checkpoint and recipe, each with its place."""
    return [f"step {at}, {name}: {finding}" for at, name, of in _each(results) for finding in stats.findings(of["casts"])]


def _each(results: dict[str, Any]):
    for at, checkpoint in results["checkpoints"].items():
        for name, of_recipe in checkpoint["recipes"].items():
            yield at, name, of_recipe


def _notes(results: dict[str, Any]) -> list[str]:
    run, trained = results["run"], {at: c["trained_in"] for at, c in results["checkpoints"].items()}
    return [
        "Trained in " + ", ".join(f"{recipe} (step {at})" for at, recipe in trained.items()) + ".",
        f"{results['batches']} microbatches of the training data that comes next; commit {run['commit']}, jax {run['jax']}, "
        f"{run['device']}" + (", FP4 emulated." if run["emulated"] else "."),
        "e: quantized − exact gradient g of the weights in blocks; ±: the jackknife's standard error over groups of batches.",
        "systematic²: the mean over pairs of different batches of ⟨e, e⟩ over that of ⟨g, g⟩, what does not average out; 'gain "
        "removed' after the best common gain, which Adam ignores. noise ratio: Var(e)/Var(g). gradient-to-noise: the mean "
        "gradient over the quantization's noise, to be held against √3 = 1.73 (2505.19115).",
        "excess: the error of a product over what independent errors of its operands explain; 1 means no structure.",
        "scale, dead zone, grid: shares of the squared error of a cast (fp4jax/stats.py). → : without and with the rotation.",
        *findings(results),
    ]


def _gradients(results: dict[str, Any]) -> page.Table:
    names = ("gain", "cosine", "relative_error", "systematic2", "gain_removed2", "noise_ratio", "gradient_to_noise")
    columns = ("step", "recipe", "quantized", "gain", "cosine", "relative error", "systematic²", "gain removed", "noise ratio")
    rows = [
        (at, name, _ARMS[arm], *(_with_error(figures[key]) for key in names))
        for at, name, of_recipe in _each(results)
        for arm, figures in of_recipe["gradients"].items()
    ]
    return page.Table("Gradients of the weights", (*columns, "gradient-to-noise"), rows)


def _products(results: dict[str, Any]) -> page.Table:
    rows = []
    for at, name, of_recipe in _each(results):
        for gemm in GEMMS:
            of_gemm = [row for row in of_recipe["casts"] if row["gemm"] == gemm]
            if of_gemm:
                gain, error, excess = (_spread([row[key] for row in of_gemm]) for key in ("gain", "relative_error", "excess"))
                rows.append((at, name, gemm, gain, error, excess))
    columns = ("step", "recipe", "GEMM", "gain", "relative error", "excess")
    return page.Table("Products of the same operands: median over modules (smallest to largest)", columns, rows)


def _casts(results: dict[str, Any]) -> page.Table:
    rows = []
    for at, name, of_recipe in _each(results):
        for gemm in GEMMS:
            for operand in OPERANDS[gemm]:
                cast = [row[operand] for row in of_recipe["casts"] if row["gemm"] == gemm and operand in row]
                if cast:
                    rows.append((at, name, gemm, operand, *_cast_cells(cast)))
    columns = ("step", "recipe", "GEMM", "operand", "SQNR (dB)", "crest", "zeroed", "clipped")
    columns += ("scale / dead zone / grid", "first coefficient")
    return page.Table("Casts: means over modules", columns, rows)


def _cast_cells(cast: list[dict[str, Any]]) -> tuple[str, ...]:
    def mean(key: str, of: list[dict[str, Any]]) -> float:
        return float(np.mean([figures[key] for figures in of]))

    unrotated = [figures["unrotated"] for figures in cast if "unrotated" in figures]

    def pair(key: str, pattern: str) -> str:
        before = pattern.format(mean(key, unrotated)) + " → " if unrotated else ""
        return before + pattern.format(mean(key, cast))

    shares = " / ".join(f"{mean(key, cast):.0%}" for key in ("scale_share", "dead_zone_share", "grid_share"))
    first = f"{mean('first_share', cast):.1%}" if unrotated else ""
    return (
        pair("sqnr_db", "{:.2f}"),
        pair("crest", "{:.2f}"),
        pair("zeroed", "{:.1%}"),
        pair("clipped", "{:.2%}"),
        shares,
        first,
    )


def _flips(results: dict[str, Any]) -> page.Table:
    rows = []
    for at, name, of_recipe in _each(results):
        flips = of_recipe["flips"]
        if flips["per_step"] is not None:
            returned = "" if flips["returned"] is None else f"{flips['returned']:.1%}"
            rows.append((at, name, f"{flips['per_step']:.2%}", returned))
    title = f"Codes of the weights over {results['flip_steps']} more steps"
    return page.Table(title, ("step", "recipe", "flip per step", "of the flipped, back at the end"), rows)


def _figures(directory: pathlib.Path, results: dict[str, Any]) -> list[page.Figure]:
    return [_systematic(directory, results), _heat(directory, results), _histogram(directory, results)]


def _systematic(directory: pathlib.Path, results: dict[str, Any]) -> page.Figure:
    """Draw systematic² by arm and recipe, a panel per checkpoint."""
    steps, names, arms = list(results["checkpoints"]), recipes(results), diagnosis.ARMS
    figure, panels = plt.subplots(1, len(steps), figsize=(max(4 * len(steps), 6), 4), dpi=120, sharey=True, squeeze=False)
    width = 0.8 / len(names)
    for axes, at in zip(panels[0], steps, strict=True):
        for i, name in enumerate(names):
            of_recipe = results["checkpoints"][at]["recipes"].get(name)
            if of_recipe:
                values, errors = zip(*(of_recipe["gradients"][arm]["systematic2"] for arm in arms), strict=True)
                errors = None if any(map(math.isnan, errors)) else errors
                axes.bar(np.arange(len(arms)) + i * width, values, width, yerr=errors, label=name, capsize=2)
        axes.set_xticks(np.arange(len(arms)) + 0.4 - width / 2, [_ARMS[arm] for arm in arms], fontsize=8)
        axes.set_title(f"step {at}", fontsize=10)
        axes.set_yscale("log", nonpositive="clip")
        axes.grid(alpha=0.3, axis="y")
    panels[0][0].set_ylabel("systematic²")
    panels[0][0].legend(fontsize=8)
    return page.save(
        figure, directory / "systematic.png", "Systematic part of the gradient's squared error, by the GEMMs quantized"
    )


def _heat(directory: pathlib.Path, results: dict[str, Any]) -> page.Figure:
    """Draw the relative error of dw by layer and path under each recipe, at the last checkpoint."""
    at, names = list(results["checkpoints"])[-1], recipes(results)
    figure, panels = plt.subplots(1, len(names), figsize=(max(3.2 * len(names), 4), 3.6), dpi=120, squeeze=False)
    for axes, name in zip(panels[0], names, strict=True):
        modules = results["checkpoints"][at]["recipes"][name]["modules"]["all"]
        paths = list(dict.fromkeys(module.split("/", 2)[2] for module in modules))
        layers = sorted({int(module.split("/")[1]) for module in modules})
        values = np.array([[modules[f"layers/{layer}/{path}"]["relative_error"][0] for layer in layers] for path in paths])
        image = axes.imshow(values, aspect="auto", cmap="viridis")
        axes.set_xticks(range(len(layers)), layers, fontsize=7)
        axes.set_yticks(range(len(paths)), paths, fontsize=7)
        axes.set_xlabel("layer", fontsize=8)
        axes.set_title(name, fontsize=9)
        figure.colorbar(image, ax=axes).ax.tick_params(labelsize=7)
    return page.save(figure, directory / "modules.png", f"Relative error of dw by module, all three GEMMs quantized, step {at}")


def _histogram(directory: pathlib.Path, results: dict[str, Any]) -> page.Figure:
    """Draw how the scales of each GEMM's operands are spread, at the last checkpoint."""
    at, names = list(results["checkpoints"])[-1], recipes(results)
    figure, panels = plt.subplots(1, 3, figsize=(10, 3.4), dpi=120, sharey=True)
    for axes, gemm in zip(panels, GEMMS, strict=True):
        for name, style in zip(names, ("-", "--", ":", "-.") * len(names), strict=False):
            for operand, color in zip(OPERANDS[gemm], ("C0", "C1"), strict=True):
                rows = [row for row in results["checkpoints"][at]["recipes"][name]["casts"] if row["gemm"] == gemm]
                cast = [row[operand]["scale_histogram"] for row in rows if operand in row]
                exponents = sorted({int(exponent) for one in cast for exponent in one})
                if exponents:
                    span = range(exponents[0], exponents[-1] + 1)
                    shares = [float(np.mean([one.get(str(exponent), 0.0) for one in cast])) for exponent in span]
                    axes.plot(list(span), shares, style, color=color, label=f"{operand}, {name}", linewidth=1.2)
        axes.set_title(gemm, fontsize=10)
        axes.set_xlabel("log₂ scale", fontsize=8)
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=6)
    panels[0].set_ylabel("share of blocks")
    return page.save(figure, directory / "scales.png", f"Scales of the casts, mean over modules, step {at}")


def _with_error(figure: diagnosis.Figure) -> str:
    value, error = figure
    if math.isnan(value):
        return "–"
    return f"{value:.4g}" if math.isnan(error) else f"{value:.4g} ± {error:.2g}"


def _spread(values: list[float]) -> str:
    return f"{np.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"
