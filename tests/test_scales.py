"""Every block format and scale rule against the oracle, bit for bit; square blocks; what clips, and what is unbiased."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from helpers import assert_same, patterns

from fp4jax import OperandSpec, bits, formats, hadamard, quantize, scales
from fp4jax.ops.quantize import fake_quantize, inside_clip

ROUNDINGS = [
    (name, block, rule, rounding)
    for name, fmt in formats.FORMATS.items()
    for block in fmt.blocks
    for rule, roundings in fmt.rules.items()
    for rounding in roundings
    if block and rule != "delayed"
]
LINEAR = [OperandSpec(name, block, rule, rounding) for name, block, rule, rounding in ROUNDINGS]
SQUARE = [
    OperandSpec(name, block, rule, rounding, across=block)
    for name, block, rule, rounding in ROUNDINGS
    if rule not in formats.ONE_DIMENSIONAL_RULES
]
DETERMINISTIC = [s for s in LINEAR + SQUARE if not s.draws]
SR = [s for s in LINEAR + SQUARE if s.rounding == "sr"]
KEY = jax.random.key(3)


def normal(seed=0, size=1.0):
    x = np.random.default_rng(seed).normal(size=(256, 256)) * size
    return np.asarray(jnp.asarray(x, jnp.bfloat16).astype(jnp.float32))


def wide():
    """Float32 over 60 binades, zero blocks and rows, both zeros, subnormals."""
    rng = np.random.default_rng(1)
    x = (rng.normal(size=(256, 256)) * np.exp2(rng.uniform(-30, 30, (256, 1)))).astype(np.float32)
    x[:2] = 0
    x[2, ::2], x[3], x[4, :128] = -0.0, np.float32(2.0**-140), 0
    x[128:, 128:] = 0
    return x


def near_ties():
    """Multiples of a sixteenth of the block maximum's grid: many elements on decision points."""
    rng = np.random.default_rng(2)
    return (rng.integers(-48, 49, (256, 256)) * 0.125 * np.exp2(rng.integers(-3, 4, (256, 1)))).astype(np.float32)


INPUTS = {
    "normal": normal(),
    "wide": wide(),
    "near ties": near_ties(),
    "thousands": normal(4, 200.0) + 5000,
    "thousandths": normal(5, 1e-4) + 1e-3,
    "tiny": normal(6, 1e-36),
    "huge": normal(7, 1e37),
    "zero": np.zeros((256, 256), np.float32),
    "minus zero": -np.zeros((256, 256), np.float32),
}


def check(x, spec, axis, words=None, key=None):
    expected = oracle.block_quantize(x, spec, axis, words)
    q = quantize(x, spec, axis, key=key)
    sure = ~expected["close"]
    assert sure.mean() > 0.95 or not x.any()
    np.testing.assert_array_equal(np.asarray(q.codes)[sure], expected["codes"][sure])
    assert_same(np.asarray(q.dequantize())[sure], expected["values"][sure])
    if expected["close"].any():
        return
    stored = np.asarray(q.scale.astype(jnp.float32))
    assert_same(np.moveaxis(stored, axis, -1).reshape(-1), expected["scales"])
    if q.tensor_scale is not None:
        assert_same(np.asarray(q.tensor_scale).reshape(()), expected["tensor"])


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("spec", DETERMINISTIC, ids=str)
def test_codes_scales_values_bit_for_bit(spec, name):
    check(INPUTS[name], spec, 1)


@pytest.mark.parametrize("spec", DETERMINISTIC, ids=str)
def test_along_the_other_axis_and_with_leading_axes(spec):
    check(INPUTS["normal"], spec, 0)
    x = INPUTS["wide"][:, :128].reshape(2, 128, 128)
    q = quantize(x, spec, 1)
    if spec.scale != "e4m3":  # these have a scale over the whole tensor
        for i in range(2):
            assert_same(q.dequantize()[i], quantize(x[i], spec, 0).dequantize())
    elif spec.across == 1:
        assert_same(q.dequantize(), np.moveaxis(np.asarray(quantize(np.moveaxis(x, 1, 2), spec, 2).dequantize()), 2, 1))


@pytest.mark.parametrize("spec", [*SR, OperandSpec("nvfp4", scale_rule="eden")], ids=str)
def test_stochastic_rounding_follows_the_words(spec):
    for axis, name in ((1, "normal"), (0, "wide")):
        words = np.asarray(bits.random_bits(bits.as_key(KEY), (256, 256)))
        check(INPUTS[name], spec, axis, words, KEY)


@pytest.mark.parametrize("spec", LINEAR + SQUARE, ids=str)
def test_fake_quantize_is_quantize_then_dequantize_eager_and_jitted(spec):
    key = bits.as_key(KEY) if spec.draws else None
    for axis, name in itertools.product((0, 1), ("normal", "wide", "near ties")):
        x = INPUTS[name]
        expected = quantize(x, spec, axis, key=key).dequantize()
        assert_same(fake_quantize(jnp.asarray(x), spec, axis, key), expected)
        assert_same(jax.jit(fake_quantize, static_argnums=(1, 2))(x, spec, axis, key), expected)


@pytest.mark.parametrize("spec", LINEAR + SQUARE, ids=str)
def test_what_is_not_finite_spoils_its_block_and_no_more(spec):
    key = KEY if spec.draws else None
    for bad in (np.inf, -np.inf, np.nan):
        x = normal().copy()
        x[5, 7] = bad
        q = quantize(x, spec, 1, key=key)
        values = np.asarray(q.dequantize())
        reach = np.zeros(x.shape, bool)
        reach[5 // spec.across * spec.across :][: spec.across, : spec.block] = True
        if spec.scale == "e4m3":
            reach[:] = True
        assert np.isnan(values[reach]).all()
        assert np.isfinite(values[~reach]).all()
        assert not np.asarray(q.codes)[reach].any()


def test_every_finite_bfloat16_in_nvfp4():
    finite = (np.arange(2**16, dtype=np.uint32) << 16).view(np.float32)
    finite = np.sort(finite[np.isfinite(finite)]).reshape(-1, 256)
    small = finite * np.float32(2.0**-64)
    for rule in formats.FORMATS["nvfp4"].rules:
        if rule != "eden":
            for x in (finite, small):
                check(x, OperandSpec("nvfp4", scale_rule=rule), 1)


@pytest.mark.parametrize("rule", ["two_level", "headroom", "four_over_six"])
@pytest.mark.parametrize("size", [5000.0, 1e-3, 1e-30, 1e30])
def test_nvfp4_is_within_an_eighth_at_any_size(rule, size):
    x = np.full((64, 64), size, np.float32)
    values = np.asarray(quantize(x, OperandSpec("nvfp4", scale_rule=rule), 1).dequantize())
    assert (np.abs(values - x) <= np.abs(x) / 8).all()


def test_scale_rules_in_words():
    block = lambda amax: np.concatenate([[amax], np.zeros(31)]).astype(np.float32)[None]  # noqa: E731
    byte = lambda amax, name, rule: int(quantize(block(amax), OperandSpec(name, scale_rule=rule), 1).scale_bytes[0, 0]) - 127  # noqa: E731
    assert [byte(448.0, "mxfp8_e4m3", r) for r in ("ceil", "floor", "even")] == [0, 0, 0]
    assert [byte(449.0, "mxfp8_e4m3", r) for r in ("ceil", "floor", "even")] == [1, 0, 0]
    assert [byte(496.0, "mxfp8_e4m3", r) for r in ("ceil", "floor", "even")] == [1, 0, 1]
    assert [byte(57344.0, "mxfp8_e5m2", r) for r in ("ceil", "floor", "even")] == [0, 0, 0]
    assert [byte(61440.0, "mxfp8_e5m2", r) for r in ("ceil", "floor", "even")] == [1, 0, 1]
    assert byte(7.0, "mxfp4", "floor_3_4") == byte(7.0, "mxfp4", "floor") == 0
    assert float(quantize(block(7.0), OperandSpec("mxfp4", scale_rule="floor_3_4"), 1).dequantize()[0, 0]) == 6.0  # 5.25
    assert [byte(7.9, "mxfp4", r) for r in ("floor", "mse")] == [0, 1]  # an error of 0.1 instead of 1.9
    assert [byte(5.9, "mxfp4", r) for r in ("floor", "mse")] == [0, 0]
    # four over six: 4.2, 3.1 beside a maximum of 6: 4, 3, 6 by six; of 4 · 1.5: 4.5, 3, 6
    x = np.zeros((1, 16), np.float32)
    x[0, :3] = 6, 4.45, 3
    q = quantize(x, OperandSpec("nvfp4", scale_rule="four_over_six"), 1)
    np.testing.assert_allclose(q.dequantize()[0, :3], [6, 4.5, 3], rtol=1e-6)


def test_headroom_never_clips_and_two_level_does():
    x = np.abs(INPUTS["wide"]) + np.float32(1e-30)
    for rule, clips in (("headroom", False), ("two_level", True)):
        blocks = x.reshape(-1, 16)
        scale, tensor = scales.nvfp4_scales(blocks, (1,), rule)
        over = blocks.max(-1) > 6 * np.asarray(scale * tensor)[:, 0] * (1 + 1e-6)
        assert over.any() == clips


# ---- Bias ----

STEPS = 200_000


def mean_of_draws(x, spec, draws=STEPS):
    """Return (mean, standard error) of the dequantized values of `draws` independent casts of the vector x."""
    rows = np.broadcast_to(x, (draws, len(x)))
    values = np.asarray(jax.jit(fake_quantize, static_argnums=(1, 2))(rows, spec, 1, bits.as_key(KEY)), np.float64)
    return values.mean(0), values.std(0) / np.sqrt(draws)


def fifty_values(block):
    """Return a vector of whole blocks with 50 values at least that are worth a look: the maximum, ties, tiny ones."""
    rng = np.random.default_rng(8)
    x = rng.normal(size=max(block, 64)).astype(np.float32)
    x[:6] = 3.9, -3.9, 0.26, -(2.0**-12), 0.0, 3.3
    return x


@pytest.mark.parametrize("spec", [s for s in SR if s.across == 1], ids=str)
def test_stochastic_rounding_is_unbiased_where_the_rule_says_so(spec):
    x = fifty_values(spec.block)
    mean, error = mean_of_draws(x, spec)
    off = np.abs(mean - spec.gain * x) > 5 * error + 1e-7
    if spec.scale_rule in formats.NEVER_CLIPS:
        assert not off.any()
    clipped = np.full(len(x), 1.0, np.float32)
    clipped[:: spec.block] = 6.9 if spec.element is formats.E2M1 else 7.4  # of 6 and of 7 times a power of two
    mean, error = mean_of_draws(clipped, spec)
    at_maximum = np.abs(mean - spec.gain * clipped)[:: spec.block] > 5 * error[:: spec.block] + 1e-6
    assert at_maximum.all() == (spec.scale_rule in ("floor", "even", "single_level"))


def test_eden_is_unbiased_over_rotations_and_rounding_to_nearest_is_not():
    draws, spec = 20_000, OperandSpec("nvfp4", scale_rule="eden")
    x = np.random.default_rng(9).normal(size=128).astype(np.float32) ** 3
    signs = jnp.where(jax.random.bernoulli(jax.random.key(1), shape=(draws, 128)), 1.0, -1.0)

    @jax.jit
    def rotate_cast_and_back(spec_key):
        rotated = hadamard(x[None] * signs, 128, 1)
        eden = hadamard(fake_quantize(rotated, spec, 1, bits.as_key(spec_key)), 128, 1) * signs
        nearest = hadamard(fake_quantize(rotated, OperandSpec("nvfp4"), 1), 128, 1) * signs
        return eden, nearest

    eden, nearest = (np.asarray(v, np.float64) for v in rotate_cast_and_back(KEY))
    error = eden.std(0) / np.sqrt(draws)
    assert (np.abs(eden.mean(0) - x) < 5 * error).all()
    along = lambda v: (v @ x / (x @ x)).mean()  # noqa: E731
    assert abs(along(eden) - 1) < 1e-3
    assert abs(along(nearest) - 1) > 3e-3


def test_quest_passes_the_gradient_of_what_it_does_not_clip():
    spec = OperandSpec("mxfp4", scale_rule="quest")
    x = INPUTS["normal"].copy()
    x[:, ::32] *= 10
    q = quantize(x, spec, 1)
    scale = np.repeat(np.asarray(q.scale.astype(jnp.float32)), 32, axis=1)
    inside = np.asarray(inside_clip(x, spec, 1))
    np.testing.assert_array_equal(inside, np.abs(x) < 6 * scale)
    assert 0.001 < (~inside).mean() < 0.1
    assert patterns(x).shape == inside.shape
