"""Exact arithmetic: rounding to every grid, codes, scale rules, pinned against what XLA may change under jit."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from fp4jax import formats, rounding, scales

ELEMENTS = [formats.E2M1, formats.E4M3, formats.E5M2]
by_name = pytest.mark.parametrize("element", ELEMENTS, ids=lambda e: e.name)


def bits_of(x):
    return np.asarray(x, np.float32).view(np.int32)


def neighbours(x):
    """Return the float32 values x, one ulp below, and one ulp above, with both signs."""
    x = np.asarray(x, np.float32)
    x = np.concatenate([np.nextafter(x, np.float32(0)), x, np.nextafter(x, np.float32(np.inf))])
    return np.concatenate([x, -x])


@by_name
def test_element_formats_match_their_definition(element):
    exponent_bits, mantissa_bits, bias, largest = oracle.ELEMENTS[element.name]
    assert (element.mantissa_bits, element.min_exponent, element.max) == (mantissa_bits, 1 - bias, largest)
    assert element.bits == 1 + exponent_bits + mantissa_bits
    assert oracle.grid("e2m1") == tuple(Fraction(n, 2) for n in (0, 1, 2, 3, 4, 6, 8, 12))


@by_name
def test_codes_round_trip_and_agree_with_the_dtype_of_ml_dtypes(element):
    values = oracle.grid_array(element.name)
    values = np.concatenate([values, -values]).astype(np.float32)
    codes = np.asarray(rounding.encode(jnp.asarray(values), element))
    np.testing.assert_array_equal(codes, oracle.encode(values.astype(np.float64), element.name))
    assert len(set(codes.tolist())) == len(values)
    np.testing.assert_array_equal(bits_of(rounding.decode(jnp.asarray(codes), element)), bits_of(values))
    dtype = {"e2m1": jnp.float4_e2m1fn, "e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2}[element.name]
    np.testing.assert_array_equal(bits_of(values.astype(dtype).astype(np.float32)), bits_of(values))
    if element.bits == 8:
        np.testing.assert_array_equal(values.astype(dtype).view(np.uint8), codes)


@by_name
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_rne_at_every_value_and_every_tie_one_ulp_either_side(element, wrap):
    grid = oracle.grid_array(element.name)
    points = np.concatenate([grid, (grid[:-1] + grid[1:]) / 2, [element.max * 1.01, element.max * 2, 3e38]])
    x = neighbours(points[points >= 2.0**-120])
    x = np.concatenate([x, np.float32([0.0, -0.0, 2.0**-126, -(2.0**-126)])])
    got = wrap(lambda x: rounding.round_to_grid(x, element))(jnp.asarray(x))
    codes = [oracle.rne_exact(Fraction(float(abs(v))), element.name) for v in x]
    expected = np.copysign(grid[codes], x)
    np.testing.assert_array_equal(bits_of(got), bits_of(expected))


@by_name
def test_rne_compiled_by_xla_is_the_rounding_of_numpy(element):
    rng = np.random.default_rng(0)
    x = (rng.normal(size=200_000) * 2.0 ** rng.integers(-12, 12, 200_000)).astype(np.float32)
    got = jax.jit(lambda x: rounding.round_to_grid(x, element))(x)
    expected = np.copysign(oracle.grid_array(element.name)[oracle.rne(np.abs(x).astype(np.float64), element.name)], x)
    np.testing.assert_array_equal(bits_of(got), bits_of(expected))


@by_name
def test_stochastic_rounding_uses_the_top_24_bits_and_never_moves_a_grid_value(element):
    grid = oracle.grid_array(element.name)
    extreme = np.array([0, 1, 0xFF, 0x100, 0x7FFFFFFF, 0x80000000, 0xFFFFFF00, 0xFFFFFFFF], np.uint32)
    x, words = np.meshgrid(np.concatenate([grid, -grid]).astype(np.float32), extreme)
    got = rounding.round_to_grid(jnp.asarray(x), element, jnp.asarray(words))
    np.testing.assert_array_equal(bits_of(got), bits_of(x))
    rng = np.random.default_rng(1)
    x = (rng.normal(size=100_000) * 2.0 ** rng.integers(-8, 10, 100_000)).astype(np.float32)
    words = rng.integers(2**32, size=x.shape, dtype=np.uint32)
    words[::3] = rng.choice(extreme, len(words[::3]))
    got = jax.jit(lambda x, w: rounding.round_to_grid(x, element, w))(x, words)
    expected = np.copysign(grid[oracle.stochastic(np.abs(x).astype(np.float64), element.name, words)], x)
    np.testing.assert_array_equal(bits_of(got), bits_of(expected))


@pytest.mark.parametrize("rule", ["floor", "even", "ceil"])
def test_scale_rule_in_every_binade_at_every_threshold(rule):
    mantissas = neighbours([1.0, 1.25, 1.5, 1.75])[:12]
    k = np.arange(-126, 128)
    amax = np.ldexp(mantissas[:, None].astype(np.float64), k[None]).astype(np.float32).ravel()
    amax = np.concatenate([amax[amax >= 2.0**-126], np.float32([0.0, np.finfo(np.float32).max, np.inf, np.nan])])
    got = np.asarray(jax.jit(lambda a: scales.mx_scale_byte(a, rule))(amax))
    np.testing.assert_array_equal(got, oracle.scale_byte(amax, rule))
    finite = (amax > 0) & np.isfinite(amax)
    exact = [min(max(oracle.scale_exponent_exact(Fraction(float(a)), rule) + 127, 1), 254) for a in amax[finite]]
    np.testing.assert_array_equal(got[finite], exact)
    ratio = amax[finite].astype(np.float64) / 2.0 ** (got[finite] - 127.0)
    low, high = {"floor": (4, 8), "even": (3.5, 7), "ceil": (3, 6)}[rule]
    inside = (ratio > low) & (ratio <= high) if rule == "ceil" else (ratio >= low) & (ratio < high)
    assert inside[got[finite] > 1].all()


def test_flush_keeps_signs_and_normal_numbers():
    patterns = np.uint32([0, 1, 0x007FFFFF, 0x00800000, 0x80000000, 0x80000001, 0x807FFFFF, 0x80800000, 0x7F800000, 0xFF800000])
    got = rounding.flush(jnp.asarray(patterns.view(np.float32)))
    expected = np.uint32([0, 0, 0, 0x00800000, 1 << 31, 1 << 31, 1 << 31, 0x80800000, 0x7F800000, 0xFF800000])
    np.testing.assert_array_equal(np.asarray(got).view(np.uint32), expected)


@pytest.mark.parametrize("element", ELEMENTS[1:], ids=lambda e: e.name)
def test_per_tensor_scale_is_the_correctly_rounded_quotient(element):
    rng = np.random.default_rng(2)
    amax = rng.integers(0x00800000, 0x7F800000, 20_000, dtype=np.uint32).view(np.float32)
    quotient = lambda a: scales.fp32_scale(a, element.max)  # noqa: E731
    eager, jitted = np.asarray(quotient(jnp.asarray(amax))), np.asarray(jax.jit(quotient)(amax))
    np.testing.assert_array_equal(bits_of(eager), bits_of(jitted))
    for a, s in zip(amax[:1000], jitted[:1000], strict=True):
        exact = Fraction(float(a)) / int(element.max)
        if exact < Fraction(oracle.TINY):
            assert s == np.float32(oracle.TINY)
            continue
        error = abs(Fraction(float(s)) - exact)
        others = [np.nextafter(s, np.float32(0)), np.nextafter(s, np.float32(np.inf))]
        assert all(error <= abs(Fraction(float(o)) - exact) for o in others)
    edge = np.float32([0.0, 2.0**-126, np.inf, np.nan, np.finfo(np.float32).max])
    expected = [oracle.fp8_scale(a, element.name) for a in edge]
    np.testing.assert_array_equal(np.asarray(jax.jit(quotient)(edge)), expected)
