"""The quantize kernel in Triton's interpreter against the reference, bit for bit. Run by tests/test_kernels.py."""

import interpreter
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp4jax import bits, formats, rotation
from fp4jax.ops import quantize as reference
from fp4jax.ops import quantize_triton
from fp4jax.ops.kernels import Cast
from fp4jax.recipe import OperandSpec, Rotation

KEY = bits.fold_in(bits.step_key(3, 7), 5)._replace(row_offset=jnp.uint32(1000))
SPECS = [
    OperandSpec(fmt, scale_rule=rule, rounding=rounding, across=across)
    for fmt in ("mxfp4", "nvfp4")
    for rule, roundings in formats.FORMATS[fmt].rules.items()
    for rounding in roundings
    for across in ((1,) if rule in formats.ONE_DIMENSIONAL_RULES else (1, formats.FORMATS[fmt].blocks[0]))
]


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch):
    with interpreter.installed(monkeypatch):
        yield


def run(x, row, col, tile=(256, 256)):
    """Launch the kernel in the interpreter."""
    return quantize_triton.quantize(jnp.asarray(x), row, col, tile=tile)


def wide(shape, seed=0, dtype=np.float32) -> np.ndarray:
    """Values over the whole exponent range of a block's neighbourhood, with ties, zeros, tiny and huge blocks."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * np.exp2(rng.integers(-6, 7, shape))
    flat = x.reshape(-1)
    flat[::7] = rng.choice([0.0, -0.0, 0.25, 0.75, 1.25, 2.5, 3.5, 5.0, 6.0, -7.0], len(flat[::7]))  # ties
    x *= np.exp2(rng.integers(-8, 9, (shape[0], 1)))
    for row, value in ((1, 0.0), (2, 1e-39), (3, 1e-37), (4, 1e30)):
        if shape[0] > row:
            x[row] = x[row] * value
    return np.array(jnp.asarray(x, dtype))


def expected(x, cast: Cast, axis: int):
    """Return (codes packed along the contraction, scale bytes for every row) of the reference, contraction last."""
    x = jnp.asarray(x)
    if cast.size:
        x = rotation.hadamard(x, cast.size, axis, cast.signs)
    q = jax.jit(lambda x: reference.quantize(x, cast.spec, axis, key=cast.key))(x)  # eager and jit are the same bits
    scale = q.scale_bytes
    if cast.spec.across > 1:
        scale = jnp.repeat(scale, cast.spec.across, axis=1 - axis)
    data, scale = (np.asarray(a) if axis == 1 else np.asarray(a).T for a in (q.data, scale))
    return data, scale, None if q.tensor_scale is None else np.asarray(q.tensor_scale)


def assert_equal(got, x, cast: Cast, axis: int):
    data, scale, tensor = expected(x, cast, axis)
    np.testing.assert_array_equal(np.asarray(got.scale_bytes), scale)
    np.testing.assert_array_equal(np.asarray(got.data), data)
    if tensor is not None:
        np.testing.assert_array_equal(np.asarray(got.tensor_scale), tensor)


def cast_of(spec: OperandSpec, **kwargs) -> Cast:
    return Cast(spec, key=KEY if spec.draws else None, **kwargs)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_kernel_equals_reference_for_every_rule_in_both_orientations(spec):
    cast = cast_of(spec)
    for dtype in (np.float32, jnp.bfloat16):
        x = wide((128, 256), dtype=dtype)
        row, col = run(x, cast, cast)
        assert_equal(row, x, cast, 1)
        assert_equal(col, x, cast, 0)


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("size", [4, 16, 32, 128])
@pytest.mark.parametrize("spec", [OperandSpec("mxfp4"), OperandSpec("nvfp4", scale_rule="headroom", rounding="sr")], ids=str)
def test_rotated_values_that_are_exact_give_the_same_bits(spec, size, dtype):
    """Integers rotate without rounding: sums of up to 128 of them, times 1/√size rounded once."""
    x = np.asarray(jnp.asarray(np.random.default_rng(size).integers(-8, 9, (128, 256)), dtype))
    signs = rotation.rotation_signs(Rotation(size, "redrawn"), KEY)
    row, col = run(x, cast_of(spec, size=size), cast_of(spec, size=size, signs=signs))
    assert_equal(row, x, cast_of(spec, size=size), 1)
    assert_equal(col, x, cast_of(spec, size=size, signs=signs), 0)


@pytest.mark.parametrize("rounding", ["rne", "sr"])
def test_other_rotated_values_differ_only_next_to_a_decision_point(rounding):
    """A code may differ where the exact rotated value lies within 16·2⁻²⁴·Σ|x| of where the codes change."""
    spec = OperandSpec("mxfp4", rounding=rounding)
    x = np.random.default_rng(0).standard_normal((256, 256)).astype(np.float32)
    row, _ = run(x, cast_of(spec, size=16), None)
    data, scale, _ = expected(x, cast_of(spec, size=16), 1)
    exact = (x.astype(np.float64).reshape(256, 16, 16) @ rotation.hadamard_matrix(16) / 4).reshape(256, 256)
    slack = np.repeat(np.abs(x.astype(np.float64)).reshape(256, 16, 16).sum(-1), 16, axis=-1) * 16 * 2.0**-24
    assert np.array_equal(np.asarray(row.scale_bytes), scale)  # no block maximum here lies next to a threshold
    got, wanted = (np.stack([d & 15, d >> 4], -1).reshape(256, 256) for d in (np.asarray(row.data), data))
    unit = np.exp2(np.repeat(scale, 32, axis=1).astype(np.float64) - 127)
    value = np.abs(exact) / unit
    step = np.where(value < 2, 0.5, np.where(value < 4, 1.0, 2.0))
    if rounding == "rne":
        distance = np.abs(value / step - np.floor(value / step) - 0.5) * step
    else:
        words = np.asarray(bits.random_bits(KEY, (256, 256)))
        distance = np.abs(value / step - np.floor(value / step) - ((words >> 8) + 1.0) * 2.0**-24) * step
    assert np.all((got == wanted) | (distance * unit <= slack))
    assert (got == wanted).mean() > 0.999


@pytest.mark.parametrize("rows", [1, 3, 31, 33, 511, 1000])
def test_ragged_rows(rows):
    for spec in (OperandSpec("mxfp4", rounding="sr"), OperandSpec("nvfp4")):
        x = wide((rows, 160), seed=rows)
        row, col = run(x, cast_of(spec), None)
        assert col is None
        assert_equal(row, x, cast_of(spec), 1)
        x = wide((160, rows), seed=rows)
        row, col = run(x, None, cast_of(spec))
        assert row is None
        assert_equal(col, x, cast_of(spec), 0)


def test_two_different_casts_in_one_launch_and_many_tiles():
    """Three tiles each way, the last ones cut off; one cast rotated with signs, the other stochastic with its own key."""
    x = np.random.default_rng(1).integers(-8, 9, (160, 288)).astype(np.float32)
    one = Cast(OperandSpec("mxfp4", scale_rule="floor"), size=32, signs=rotation.rotation_signs(Rotation(32, "fixed"), None))
    other = Cast(OperandSpec("mxfp4", scale_rule="ceil", rounding="sr"), key=KEY._replace(col_offset=jnp.uint32(77)))
    row, col = run(x, one, other, tile=(64, 128))
    assert_equal(row, x, one, 1)
    assert_equal(col, x, other, 0)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_nan_or_infinity_takes_its_block_along_and_under_nvfp4_the_tensor(bad):
    x = wide((32, 64))
    x[5, 40] = bad
    for fmt in ("mxfp4", "nvfp4"):
        cast = cast_of(OperandSpec(fmt))
        row, col = run(x, cast, cast)
        assert_equal(row, x, cast, 1)
        assert_equal(col, x, cast, 0)


def test_it_works_under_jit_and_vmap():
    x = jnp.stack([jnp.asarray(wide((32, 64), seed)) for seed in range(3)])
    cast = Cast(OperandSpec("mxfp4"))
    batched = jax.jit(jax.vmap(lambda x: quantize_triton.quantize(x, cast, None)[0].data))(x)
    for i in range(3):
        np.testing.assert_array_equal(batched[i], run(x[i], cast, None)[0].data)


def test_refusals():
    x = jnp.zeros((32, 48))
    with pytest.raises(ValueError, match="contraction length 48 is not a multiple of 32"):
        run(x, Cast(OperandSpec("mxfp4")), None)
    with pytest.raises(ValueError, match="not a multiple of 64"):
        run(x, None, Cast(OperandSpec("mxfp4"), size=64))
    with pytest.raises(ValueError, match="knows mxfp4 and nvfp4, not fp8_e4m3"):
        run(x, Cast(OperandSpec("fp8_e4m3")), None)
