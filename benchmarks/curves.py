"""Plot the loss curves of training runs:  python -m benchmarks.curves WORKDIR … --out=FILE.png

Left: training loss, smoothed over 2 % of the run. Right: validation loss minus that of the first workdir given.
"""

import argparse
import json
import pathlib

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from train.metrics import read_rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workdirs", nargs="+", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    args = parser.parse_args()
    figure, (curves, gaps) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    base: np.ndarray | None = None
    for workdir in args.workdirs:
        recipe = json.loads((workdir / "config.json").read_text())["quant"]["recipe"]
        rows = read_rows(workdir / "metrics.jsonl")
        train = np.array([(r["tokens"], r["train_loss"]) for r in rows if "train_loss" in r])
        val = np.array([(r["tokens"], r["val_loss"]) for r in rows if "val_loss" in r])
        window = max(len(train) // 50, 1)
        smooth = np.convolve(train[:, 1], np.ones(window) / window, mode="valid")
        base = val[:, 1] if base is None else base
        curves.plot(train[window - 1 :, 0] / 1e6, smooth, label=f"{recipe}: {val[-1, 1]:.4f}", linewidth=1.2)
        gaps.plot(val[:, 0] / 1e6, val[:, 1] - base, marker="o", markersize=3, linewidth=1.2)
        print(f"{recipe:24} step {rows[-1]['step']}  validation loss {val[-1, 1]:.4f}")
    curves.set(xlabel="tokens (M)", ylabel="training loss (nats/byte)", ylim=(None, np.log(256) / 1.5))
    curves.legend(title="recipe: final validation loss", frameon=False)
    gaps.set(xlabel="tokens (M)", ylabel="validation loss − first run's (nats)")
    for axes in (curves, gaps):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.out, dpi=130)


if __name__ == "__main__":
    main()
