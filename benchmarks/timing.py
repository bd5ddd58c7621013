"""Time several functions in turn, round by round, so that a ratio compares neighbours in time; quartiles over rounds."""

import subprocess
import time
from collections.abc import Callable

import jax
import numpy as np


def interleave(functions: dict[str, Callable[[], object]], *, rounds: int) -> dict[str, np.ndarray]:
    """Return seconds per call, [rounds], for each function; every result is waited for. Two calls each are not counted."""
    for function in functions.values():
        jax.block_until_ready(function())
        jax.block_until_ready(function())
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            start = time.perf_counter()
            jax.block_until_ready(function())
            seconds[name].append(time.perf_counter() - start)
    return {name: np.array(values) for name, values in seconds.items()}


def print_ratios(seconds: dict[str, np.ndarray], rows: list[tuple[str, str, float | None]]) -> None:
    """Print a table of (name, base, limit): median time and the ratio to `base`, with quartiles over rounds."""
    print(f"{'':28} {'ms':>9}  ratio to {'':16} {'q1':>6} {'median':>6} {'q3':>6}  limit")
    for name, base, limit in rows:
        q1, median, q3 = np.percentile(seconds[name] / seconds[base], [25, 50, 75])
        verdict = "" if limit is None else f"{limit:.2f} " + ("met" if q1 <= limit else "NOT met")
        milliseconds = np.median(seconds[name]) * 1e3
        print(f"{name:28} {milliseconds:9.2f}  {base:24} {q1:6.3f} {median:6.3f} {q3:6.3f}  {verdict}")


def print_header(rounds: int) -> None:
    """Print commit, device and rounds, so that a pasted table says where it comes from."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    cpus = len(jax.devices())
    print(f"commit {commit or 'unknown'}, jax {jax.__version__}, {cpus} × {jax.devices()[0].device_kind}, {rounds} rounds")
