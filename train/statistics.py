"""What an ablation concludes from its curves: paired differences, tokens to a target, and how far noise alone would go.

A curve is a pair of arrays (tokens, validation loss in nats), both rising in time. All differences are taken within a seed:
seeds change weights and data, and what they change is common to all rows.
"""

import math
from typing import NamedTuple

import numpy as np
from scipy import stats

Curve = tuple[np.ndarray, np.ndarray]
EXTRAPOLATION = 0.07  # nats: beyond this gap the iso-loss overhead leaves the losses that the slope was measured on


class Estimate(NamedTuple):
    """A mean over seeds, its 95 % confidence interval (Student's t) and the sample standard deviation, NaN from one seed."""

    mean: float
    low: float
    high: float
    deviation: float
    seeds: int


def estimate(values: list[float]) -> Estimate:
    """Return the mean of independent values with its interval; of none, all NaN."""
    n = len(values)
    mean = float(np.mean(values)) if n else math.nan
    if n < 2:
        return Estimate(mean, math.nan, math.nan, math.nan, n)
    deviation = float(np.std(values, ddof=1))
    half = float(stats.t.ppf(0.975, n - 1)) * deviation / math.sqrt(n)
    return Estimate(mean, mean - half, mean + half, deviation, n)


def paired(values: dict[int, float], baseline: dict[int, float]) -> Estimate:
    """Return the difference value − baseline over the seeds that both have."""
    return estimate([values[seed] - baseline[seed] for seed in values if seed in baseline])


def p_value(difference: Estimate) -> float:
    """Return the two-sided p of Student's t for a mean of zero, NaN from one seed or without any spread."""
    if difference.seeds < 2 or not difference.deviation > 0:
        return math.nan
    t = difference.mean / (difference.deviation / math.sqrt(difference.seeds))
    return float(2 * stats.t.sf(abs(t), difference.seeds - 1))


def seeds_needed(deviation: float, difference: float) -> int | None:
    """Return how many paired seeds would resolve a difference: 80 % power at the 5 % level, two-sided; None if not above 0.

    deviation: standard deviation of the paired differences. The smallest n with
    t₀.₉₇₅(n−1) + t₀.₈(n−1) ≤ √n · |difference| / deviation.
    """
    if not (difference and math.isfinite(deviation) and math.isfinite(difference)):
        return None
    for n in range(2, 1001):
        if stats.t.ppf(0.975, n - 1) + stats.t.ppf(0.8, n - 1) <= math.sqrt(n) * abs(difference) / max(deviation, 1e-12):
            return n
    return None


def crossing(curve: Curve, target: float) -> float | None:
    """Return the tokens at which the curve first is at or below `target`, interpolated linearly; None: it did not reach it."""
    tokens, losses = curve
    below = np.flatnonzero(losses <= target)
    if not len(below):
        return None
    i = int(below[0])
    if i == 0:
        return float(tokens[0])
    share = (losses[i - 1] - target) / (losses[i - 1] - losses[i])
    return float(tokens[i - 1] + share * (tokens[i] - tokens[i - 1]))


def crossing_overhead(curve: Curve, baseline: Curve, share: float, target: float = 0.0) -> float | None:
    """Return the extra tokens, as a fraction, at which a curve reaches `target` against the baseline's tokens to it.

    target 0: the loss that the baseline has at `share` of its length, between half and two thirds of a schedule: near its end
    the rate has decayed, and no curve crosses any more. None: the curve, or the baseline, did not reach it.
    """
    tokens, losses = baseline
    at = crossing(baseline, target) if target else share * tokens[-1]
    if at is None:
        return None
    reached = crossing(curve, target or float(np.interp(at, tokens, losses)))
    return None if reached is None else reached / at - 1


def slope(horizons: dict[float, float]) -> float:
    """Return s = −dL/dln D > 0 by least squares; horizons: {tokens D of a run whose rate decays fully at D: its final loss}."""
    log_tokens = np.log(np.array(list(horizons)))
    return -float(np.polyfit(log_tokens, np.array(list(horizons.values())), 1)[0])


def iso_loss_overhead(difference: float, slope: float) -> float:
    """Return the extra tokens, as a fraction, that would make up for a loss difference: exp(difference / slope) − 1."""
    return math.expm1(difference / slope)
