"""Paired differences, intervals, crossings and overheads against figures worked out by hand."""

import math

import numpy as np
import pytest

from train import statistics


def test_an_interval_of_three_values_by_hand():
    """Mean 2, s = 1, t₀.₉₇₅(2) = 4.3027: 2 ± 4.3027/√3."""
    got = statistics.estimate([1.0, 2.0, 3.0])
    np.testing.assert_allclose(got[:4], (2.0, 2 - 2.484138, 2 + 2.484138, 1.0), rtol=1e-6)
    assert got.seeds == 3


def test_one_value_has_no_interval_and_none_no_mean():
    assert statistics.estimate([5.0])[:1] == (5.0,)
    assert math.isnan(statistics.estimate([5.0]).low)
    assert math.isnan(statistics.estimate([]).mean)
    assert statistics.estimate([]).seeds == 0


def test_pairing_removes_what_seeds_have_in_common():
    baseline = {0: 1.0, 1: 3.0, 2: 8.0}
    got = statistics.paired({0: 1.1, 1: 3.1, 2: 8.1, 9: 100.0}, baseline)
    assert got.seeds == 3
    assert got.mean == pytest.approx(0.1)
    assert got.deviation < 1e-12


@pytest.mark.parametrize(("deviation", "difference", "seeds"), [(1.0, 1.0, 10), (1.0, -1.0, 10), (0.5, 1.0, 5), (0.0, 1.0, 2)])
def test_seeds_needed_for_eighty_percent_power(deviation, difference, seeds):
    """Effect size 1: the textbook's paired t-test needs 10."""
    assert statistics.seeds_needed(deviation, difference) == seeds


def test_no_number_of_seeds_resolves_nothing():
    assert statistics.seeds_needed(1.0, 0.0) is None
    assert statistics.seeds_needed(math.nan, 1.0) is None
    assert statistics.seeds_needed(1.0, 1e-9) is None


CURVE = (np.array([10.0, 20.0, 30.0, 40.0]), np.array([4.0, 3.0, 2.0, 1.5]))


@pytest.mark.parametrize(("target", "tokens"), [(4.0, 10.0), (3.5, 15.0), (2.0, 30.0), (1.75, 35.0), (5.0, 10.0), (1.0, None)])
def test_crossing_interpolates_and_not_reached_is_a_value(target, tokens):
    assert statistics.crossing(CURVE, target) == tokens


def test_the_first_crossing_counts_where_a_curve_rises_again():
    curve = (np.array([1.0, 2.0, 3.0, 4.0]), np.array([3.0, 1.0, 2.0, 0.5]))
    assert statistics.crossing(curve, 1.0) == 2.0


def test_overhead_of_a_curve_that_needs_a_quarter_more_tokens():
    tokens = np.linspace(1, 100, 100)
    baseline, slower = (tokens, 5 - np.log(tokens)), (tokens, 5 - np.log(tokens / 1.25))
    assert statistics.crossing_overhead(slower, baseline, 0.6) == pytest.approx(0.25, abs=0.01)
    assert statistics.crossing_overhead(baseline, baseline, 0.6) == pytest.approx(0.0, abs=1e-9)
    assert statistics.crossing_overhead((tokens, np.full(100, 9.0)), baseline, 0.6) is None


def test_slope_and_iso_loss_overhead_of_a_power_law():
    s = statistics.slope({d: 3.0 - 0.25 * math.log(d) for d in (60.0, 80.0, 100.0, 125.0)})
    assert s == pytest.approx(0.25)
    assert statistics.iso_loss_overhead(0.25 * math.log(1.3), s) == pytest.approx(0.3)
    assert statistics.iso_loss_overhead(0.0, s) == 0.0
