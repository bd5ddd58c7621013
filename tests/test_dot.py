"""The quantized dot: each GEMM against a hand-written oracle, gradients, dimension numbers, transforms, padding, refusals.

GEMM key: M tokens, K input features, N output features. Bound on a product: |C − C64| ≤ √K · 2⁻²⁴ · (|A|·|B|), doubled.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax import lax

from fp4jax import GemmSpec, OperandSpec, Recipe, Rotation, bits, hadamard, quantized_dot_general, recipes
from fp4jax.dot import roll_history
from fp4jax.ops import quantize
from fp4jax.recipe import GEMMS, override
from fp4jax.rotation import rotation_signs

M, K, N = 64, 96, 128
DN = (((1,), (0,)), ((), ()))
KEY = jax.random.key(7)
MX, MX_SR, E4M3, E5M2 = (
    OperandSpec("mxfp4"),
    OperandSpec("mxfp4", rounding="sr"),
    OperandSpec("fp8_e4m3"),
    OperandSpec("fp8_e5m2"),
)
ALL_MX = Recipe(*[GemmSpec(MX, MX)] * 3)
FLOOR = OperandSpec("mxfp4", scale_rule="floor")
CEIL_SR = OperandSpec("mxfp4", scale_rule="ceil", rounding="sr")
MIXED = {
    "mx × none": Recipe(GemmSpec(MX), GemmSpec(rhs=MX), GemmSpec(MX)),
    "forward only": Recipe(fprop=GemmSpec(MX, MX)),
    "floor, ceil with SR": Recipe(GemmSpec(FLOOR, CEIL_SR), GemmSpec(CEIL_SR, FLOOR), GemmSpec(CEIL_SR, CEIL_SR)),
    "fp8 SR × bf16, rotated": Recipe(
        GemmSpec(dataclasses.replace(E4M3, rounding="sr"), OperandSpec("bf16"), Rotation(32, "fixed")),
        GemmSpec(E5M2, MX, Rotation(64, "redrawn")),
        GemmSpec(rhs=MX_SR, rotation=Rotation(8, "redrawn")),
    ),
}
RECIPES = {**{n: recipes.get(n) for n in recipes.names() if n != "mxfp4_mean_split"}, **MIXED}  # split: a test of its own
QUANTIZED = [n for n in recipes.names() if n.startswith("mxfp4")]


def make_operands(seed=0, shape=(M, K, N), dtype=np.float32):
    """Draw x, w, dy with magnitudes that vary along every axis, so that blocks along different axes have different scales."""
    rng = np.random.default_rng(seed)
    m, k, n = shape
    spread = lambda a, b: 2.0 ** rng.integers(-3, 4, (a, 1)) * 2.0 ** rng.integers(-3, 4, (1, b))  # noqa: E731
    return tuple((rng.normal(size=s) * spread(*s)).astype(dtype) for s in ((m, k), (k, n), (m, n)))


def integers(shape, seed=0):
    """Draw integers from -4 to 4: lossless in MXFP4 in any block, whatever its maximum."""
    return np.random.default_rng(seed).integers(-4, 5, shape).astype(np.float32)


@functools.partial(jax.jit, static_argnames=("recipe", "dimension_numbers", "out"))
def run(x, w, dy, recipe, key=None, dimension_numbers=DN, out=None, history=None):
    """Return y, dx, dw."""
    f = lambda x, w: quantized_dot_general(  # noqa: E731
        x, w, dimension_numbers, None, out, recipe=recipe, key=key, history=history
    )
    y, pull = jax.vjp(f, x, w)
    return y, *pull(dy)


def plan(x, w, dy):
    """Return what each GEMM multiplies: (lhs, its contraction axis, rhs, its contraction axis)."""
    return {"fprop": (x, 1, w, 0), "dgrad": (dy, 1, w, 1), "wgrad": (x, 0, dy, 0)}


def pad(x, axis, multiple):
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, -x.shape[axis] % multiple)
    return np.pad(x, widths)


def rotate(operand, axis, spec, gemm_key, *, back=False):
    """Rotate along an axis by the oracle; back: undo it."""
    if not spec.rotation.size:
        return operand
    signs = rotation_signs(spec.rotation, None if gemm_key is None else bits.fold_in(gemm_key, 2))
    if not back:
        return oracle.hadamard(operand, spec.rotation.size, axis, signs)
    operand = oracle.hadamard(operand, spec.rotation.size, axis)
    tiled = 1 if signs is None else np.expand_dims(np.tile(signs, operand.shape[axis] // spec.rotation.size), 1 - axis)
    return operand * tiled


def cast(operand, axis, spec, index, gemm_key):
    """Pad, rotate and quantize one operand of a GEMM by the oracle, and take out the gain of its scale rule."""
    words, operand_spec = None, (spec.lhs, spec.rhs)[index]
    free = operand.shape[1 - axis]
    if spec.pad:
        operand = pad(pad(operand, axis, spec.multiple), 1 - axis, operand_spec.across)
    operand = rotate(operand, axis, spec, gemm_key)
    if operand_spec.rounding == "eden":  # its oracle is only exact away from decision points (test_scales)
        values = np.asarray(quantize.fake_quantize(jnp.asarray(operand), operand_spec, axis, bits.fold_in(gemm_key, index)))
    else:
        if operand_spec.rounding == "sr":
            words = np.asarray(bits.random_bits(bits.fold_in(gemm_key, index), operand.shape))
        values = oracle.fake_quantize(operand, operand_spec, axis, words)
    return values.take(range(free), 1 - axis).astype(np.float64) / operand_spec.gain


def expected(recipe, x, w, dy, key=None, axes=None, twice=False):
    """Return {gemm: (product, bound)} in float64; axes: other cast axes; twice: cast a cast along the other axis."""
    out = {}
    for gemm, (lhs, lhs_axis, rhs, rhs_axis) in plan(x, w, dy).items():
        spec = getattr(recipe, gemm)
        gemm_key = None if key is None else bits.fold_in(bits.as_key(key), GEMMS.index(gemm))
        cast_axes = (lhs_axis, rhs_axis) if axes is None else axes[gemm]
        if twice:
            lhs, rhs = (cast(o, 1 - a, spec, i, gemm_key) for i, (o, a) in enumerate(((lhs, lhs_axis), (rhs, rhs_axis))))
        a = np.moveaxis(cast(lhs, cast_axes[0], spec, 0, gemm_key), lhs_axis, 1).astype(np.float64)
        b = np.moveaxis(cast(rhs, cast_axes[1], spec, 1, gemm_key), rhs_axis, 0).astype(np.float64)
        out[gemm] = a @ b, 2 * np.sqrt(a.shape[1]) * 2.0**-24 * (np.abs(a) @ np.abs(b))
    return out


def expected_on_fprop_operands(recipe, x, w, dy, key):
    """Return {gemm: (product, bound)} where the backward casts what fprop has quantized, and clipped elements pass nothing."""
    keys = [None if key is None else bits.fold_in(bits.as_key(key), i) for i in range(3)]
    first = recipe.fprop
    x_q, w_q = (cast(o, 1 - i, first, i, keys[0]).astype(np.float32) for i, o in enumerate((x, w)))
    product = expected(recipe, x, w, dy, key)["fprop"]
    out = {"fprop": product}
    for gemm, index, (lhs, rhs), axes in (("dgrad", 0, (dy, w_q), (1, 1)), ("wgrad", 1, (x_q, dy), (0, 0))):
        spec, gemm_key = getattr(recipe, gemm), keys[GEMMS.index(gemm)]
        a, b = (
            np.moveaxis(cast(o, ax, spec, i, gemm_key), ax, 1 - i)
            for i, (o, ax) in enumerate(zip((lhs, rhs), axes, strict=True))
        )
        gradient, size = a @ b, np.abs(a) @ np.abs(b)
        axis = 1 - index  # that of K
        if (first.lhs, first.rhs)[index].scale_rule == "quest":
            rotated = rotate((x, w)[index], axis, first, keys[0])
            scale = oracle.block_quantize(rotated, first.lhs, axis)["scales"]
            scale = oracle.untile(np.repeat(scale[:, None], 32, 1), rotated.shape, first.lhs, axis)
            gradient = np.where(np.abs(rotated) < 6 * scale, gradient, 0)
        gradient = rotate(gradient.astype(np.float32), axis, first, keys[0], back=True).astype(np.float64)
        out[gemm] = (
            gradient,
            4 * 2.0**-24 * np.sqrt(a.shape[1]) * size.max(axis, keepdims=True) * np.sqrt(first.rotation.size or 1),
        )
    return out


def assert_within(got, reference):
    for value, (gemm, (product, bound)) in zip(got, reference.items(), strict=True):
        error = np.abs(np.asarray(value, np.float64) - product)
        assert value.shape == product.shape
        assert (error <= bound).all(), f"{gemm}: {(error > bound).mean():.2%} outside, worst {(error / bound).max():.3g} bounds"


def share_outside(got, reference):
    """Return, per GEMM, the share of entries outside 100 bounds."""
    pairs = zip(got, reference.values(), strict=True)
    return [(np.abs(np.asarray(value, np.float64) - product) > 100 * bound).mean() for value, (product, bound) in pairs]


# ------------------------------------------------------------------------------------------------- each GEMM


@pytest.mark.parametrize("name", RECIPES)
def test_each_gemm_against_the_oracle(name):
    recipe = RECIPES[name]
    key = KEY if recipe.needs_key else None
    x, w, dy = make_operands()
    reference = expected_on_fprop_operands if recipe.dgrad.rhs.source == "fprop" else expected
    history = jnp.zeros((3, 2, 4)) if recipe.needs_history else None
    assert_within(run(x, w, dy, recipe, key, history=history), reference(recipe, x, w, dy, key))


def test_delayed_scales_come_from_the_newest_maximum_and_the_history_leaves_as_a_cotangent():
    recipe, (x, w, dy) = recipes.get("fp8_delayed"), make_operands()
    history = jnp.asarray(np.random.default_rng(5).uniform(0.5, 2, (3, 2, 4)), jnp.float32).at[0, 1, 0].set(0)
    f = lambda x, w, history: quantized_dot_general(x, w, DN, recipe=recipe, history=history)  # noqa: E731
    y, pull = jax.vjp(f, x, w, history)
    measured = pull(dy)[2]
    for gemm, (lhs, _, rhs, _), got in zip(GEMMS, plan(x, w, dy).values(), measured, strict=True):
        np.testing.assert_array_equal(got[:, 0], [np.abs(lhs).max(), np.abs(rhs).max()], err_msg=gemm)
        assert not np.asarray(got[:, 1:]).any()
    scale = np.float32(history[0, 0, 0]) / np.float32(448)
    codes = oracle.encode(np.float64(np.float32(x / scale)), "e4m3")  # saturates: x is larger than the old maximum
    a, b = oracle.decode(codes, "e4m3") * np.float64(scale), oracle.fake_quantize(w, E4M3, 0)
    assert np.abs(a).max() < np.abs(x).max()
    np.testing.assert_allclose(y, a @ b, rtol=1e-4, atol=1e-4)
    rolled = roll_history(history, measured)
    np.testing.assert_array_equal(rolled[..., 1:], history[..., :-1])
    np.testing.assert_array_equal(rolled[..., 0], measured[..., 0])
    with pytest.raises(ValueError, match="pass history="):
        quantized_dot_general(x, w, DN, recipe=recipe)


@pytest.mark.parametrize("split", ["mean", "first"])
def test_what_is_split_off_stays_exact(split):
    """Operands that are constant over tokens lie wholly in the part that is split off; others gain by it."""
    rotation = Rotation(16, "deterministic")
    recipe = Recipe(*[GemmSpec(MX, MX, rotation, split=split)] * 3)
    plain = Recipe(*[GemmSpec(MX, MX, rotation)] * 3)
    x, w, dy = make_operands(6)
    exact = [x @ w, dy @ w.T, x.T @ dy]
    errors = [
        [np.linalg.norm(g - e) / np.linalg.norm(e) for g, e in zip(run(x, w, dy, r), exact, strict=True)]
        for r in (plain, recipe)
    ]
    assert np.max(errors) < 0.3
    flat = np.broadcast_to(x[:1], x.shape), w, np.broadcast_to(dy[:1], dy.shape)
    exact = [flat[0] @ w, flat[2] @ w.T, flat[0].T @ flat[2]]
    got, worse = run(*flat, recipe), run(*flat, plain)
    gemms = (0, 1, 2) if split == "mean" else (2,)  # "first" gathers means along the contraction: of tokens in wgrad only
    for i in gemms:
        assert np.linalg.norm(got[i] - exact[i]) < (1e-5 if split == "mean" else 5e-3) * np.linalg.norm(exact[i])
        assert np.linalg.norm(worse[i] - exact[i]) > 2e-2 * np.linalg.norm(exact[i])


def test_the_answers_of_usual_mistakes_are_far_away():
    x, w, dy = make_operands(1)
    axes = {gemm: (lhs_axis, rhs_axis) for gemm, (_, lhs_axis, _, rhs_axis) in plan(x, w, dy).items()}
    for name in ("mxfp4", "mxfp4_h16", "mxfp4_sr"):
        recipe = recipes.get(name)
        key = KEY if recipe.needs_key else None
        got = run(x, w, dy, recipe, key)
        for side in (0, 1):  # one operand cast along its free axis
            wrong = {g: tuple(1 - a if i == side else a for i, a in enumerate(pair)) for g, pair in axes.items()}
            assert min(share_outside(got, expected(recipe, x, w, dy, key, wrong))) > 0.9
        assert min(share_outside(got, expected(recipe, x, w, dy, key, twice=True))) > 0.9
    got = run(x, w, dy, recipes.get("mxfp4_sr"), KEY)
    assert min(share_outside(got, expected(recipes.get("mxfp4_sr"), x, w, dy, jax.random.key(8)))) > 0.9
    got = run(x, w, dy, recipes.get("mxfp4_rht16"), KEY)
    assert min(share_outside(got, expected(recipes.get("mxfp4_h16"), x, w, dy))) > 0.9


def test_error_of_every_rung_is_that_of_its_format():
    """Relative error of y, dx, dw on Gaussians: E4M3 about 3.7 %, E5M2 about 6 %, MXFP4 about 16 %; a rotation cancels."""
    rng = np.random.default_rng(2)
    x, w, dy = (rng.normal(size=s).astype(np.float32) for s in ((M, K), (K, N), (M, N)))
    exact = [x @ w, dy @ w.T, x.T @ dy]
    for name in ("fp8_current", "mxfp4", "mxfp4_h16", "mxfp4_rht16"):
        low, high = (0.02, 0.08) if name == "fp8_current" else (0.13, 0.19)
        recipe = recipes.get(name)
        for got, want in zip(run(x, w, dy, recipe, KEY if recipe.needs_key else None), exact, strict=True):
            assert low < np.linalg.norm(got - want) / np.linalg.norm(want) < high


@pytest.mark.parametrize("name", ["mxfp4", "mxfp4_sr", "mxfp4_rht16", "fp8_current"])
def test_every_cast_starts_from_the_high_precision_tensor(name, monkeypatch):
    seen = []
    original = quantize.fake_quantize

    def spy(x, spec, axis, key=None, amax=None):
        jax.debug.callback(lambda v: seen.append((str(spec), axis, np.array(v))), x)
        return original(x, spec, axis, key)

    monkeypatch.setattr(quantize, "fake_quantize", spy)
    recipe = recipes.get(name)
    x, w, dy = make_operands(3)
    f = lambda x, w: quantized_dot_general(x, w, DN, recipe=recipe, key=KEY)  # noqa: E731
    jax.block_until_ready(jax.jit(lambda x, w, dy: jax.vjp(f, x, w)[1](dy))(x, w, dy))
    jax.effects_barrier()
    wanted = []
    for gemm, (lhs, lhs_axis, rhs, rhs_axis) in plan(x, w, dy).items():
        spec = getattr(recipe, gemm)
        gemm_key = bits.fold_in(bits.as_key(KEY), GEMMS.index(gemm))
        signs = rotation_signs(spec.rotation, bits.fold_in(gemm_key, 2)) if spec.rotation.size else None
        rotate = lambda o, a, s=spec, d=signs: oracle.hadamard(o, s.rotation.size, a, d) if s.rotation.size else o  # noqa: E731
        wanted += [(str(spec.lhs), lhs_axis, rotate(lhs, lhs_axis)), (str(spec.rhs), rhs_axis, rotate(rhs, rhs_axis))]
    assert len(seen) == len(wanted) == 6
    signature = lambda entry: (*entry[:2], entry[2].tobytes())  # noqa: E731
    assert sorted(map(signature, seen)) == sorted(map(signature, wanted))


# ------------------------------------------------------------------------------------------------- exactness


def test_products_of_unit_scales_are_exact_whatever_the_order():
    rng = np.random.default_rng(4)
    grid = np.concatenate([oracle.grid_array("e2m1"), -oracle.grid_array("e2m1")]).astype(np.float32)
    m, k, n = 32, 8192, 64
    x, w, dy = (rng.choice(grid, s) for s in ((m, k), (k, n), (m, n)))
    for a, axis in ((x, 0), (x, 1), (w, 0), (w, 1), (dy, 0), (dy, 1)):
        np.testing.assert_array_equal(oracle.mx_quantize(a, axis)[2], a)
    exact = [a.astype(np.float64) for a in (x, w, dy)]
    want = (exact[0] @ exact[1], exact[2] @ exact[1].T, exact[0].T @ exact[2])
    for got, product in zip(run(x, w, dy, ALL_MX), want, strict=True):
        np.testing.assert_array_equal(np.asarray(got, np.float64), product)


@pytest.mark.parametrize("signs", ["deterministic", "fixed", "per_layer", "redrawn"])
def test_a_rotation_without_loss_cancels_in_all_three_gemms(signs):
    """Rotated FP8 operands whose largest rotated value is 7/4 are lossless: the scale is a power of two, the rest integers ≤ 7.

    Every block of 16, along rows and along columns, has at most 7 entries ±1; one row block and one column block attain 7.
    """
    rotation = Rotation(16, signs)
    recipe = Recipe(GemmSpec(E4M3, E4M3, rotation), GemmSpec(E5M2, E4M3, rotation), GemmSpec(E4M3, E5M2, rotation))
    key = bits.step_key(0, 1)
    diagonals = []
    for index in range(3):
        d = rotation_signs(rotation, bits.fold_in(bits.fold_in(key, index), 2))
        diagonals.append(np.ones(16, np.float32) if d is None else np.asarray(d))
    fprop, dgrad, wgrad = diagonals  # along K, N, M

    def operand(rows, cols, row_signs, col_signs, seed):
        rng = np.random.default_rng(seed)
        z = np.zeros((rows, cols), np.float32)
        for i, j in itertools.product(range(0, rows, 16), range(0, cols, 16)):
            order = rng.permutation(16)
            for shift in range(3):  # three permutation matrices: three entries per row and column of the tile
                z[i + np.arange(16), j + order[(np.arange(16) + shift) % 16]] = rng.choice([-1, 1], 16)
        z[:16, :16] = 0
        z[0, :7] = z[:7, 0] = 1
        return z * np.tile(row_signs, rows // 16)[:, None] * np.tile(col_signs, cols // 16)[None]

    x, w, dy = operand(M, K, wgrad, fprop, 0), operand(K, N, fprop, dgrad, 1), operand(M, N, wgrad, dgrad, 2)
    for a, d, axis in ((x, fprop, 1), (x, wgrad, 0), (w, fprop, 0), (w, dgrad, 1), (dy, dgrad, 1), (dy, wgrad, 0)):
        assert np.abs(oracle.hadamard(a, 16, axis, d)).max() == 7 / 4
    got = run(x, w, dy, recipe, key if rotation.draws else None)
    for value, product in zip(got, (x @ w, dy @ w.T, x.T @ dy), strict=True):
        np.testing.assert_array_equal(value, product)


# ------------------------------------------------------------------------------------------------- dimension numbers

CASES = {
    "plain": ((64, 96), (96, 32), DN),
    "transposed kernel": ((64, 96), (32, 96), (((1,), (1,)), ((), ()))),
    "transposed lhs": ((96, 64), (96, 32), (((0,), (0,)), ((), ()))),
    "several free axes": ((2, 32, 64), (64, 4, 8), (((2,), (0,)), ((), ()))),
    "free axes around": ((4, 64, 8), (2, 64, 16), (((1,), (1,)), ((), ()))),
    "several contracting": ((2, 32, 4, 8), (4, 8, 32), (((2, 3), (0, 1)), ((), ()))),
    "contracting permuted": ((8, 32, 4), (32, 4, 8), (((2, 0), (1, 2)), ((), ()))),
    "contracting scattered": ((4, 2, 32, 8, 16), (8, 64, 4), (((3, 0), (0, 2)), ((), ()))),
    "batch": ((3, 32, 64), (3, 64, 32), (((2,), (1,)), ((0,), (0,)))),
    "batches anywhere": ((32, 3, 64, 2), (2, 64, 32, 3), (((2,), (1,)), ((1, 3), (3, 0)))),
    "batches and several": ((2, 4, 8, 32), (8, 4, 2, 32), (((1, 2), (1, 0)), ((0,), (2,)))),
}


@pytest.mark.parametrize("case", CASES)
def test_dimension_numbers_equal_lax_on_lossless_data(case):
    lhs_shape, rhs_shape, dn = CASES[case]
    x, w = integers(lhs_shape, 1), integers(rhs_shape, 2)
    y, pull = jax.vjp(lambda x, w: lax.dot_general(x, w, dn), x, w)
    dy = integers(y.shape, 3)
    for got, want in zip(run(x, w, dy, ALL_MX, dimension_numbers=dn), (y, *pull(dy)), strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("case", CASES)
def test_dimension_numbers_quantize_along_the_flattened_contraction(case):
    lhs_shape, rhs_shape, dn = CASES[case]
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dn
    rng = np.random.default_rng(5)
    x, w = rng.normal(size=lhs_shape).astype(np.float32), rng.normal(size=rhs_shape).astype(np.float32)
    lhs_free = [a for a in range(x.ndim) if a not in lhs_contract + lhs_batch]
    rhs_free = [a for a in range(w.ndim) if a not in rhs_contract + rhs_batch]
    size = lambda a, axes: int(np.prod([a.shape[i] for i in axes]))  # noqa: E731
    x_order, w_order = (*lhs_batch, *lhs_free, *lhs_contract), (*rhs_batch, *rhs_contract, *rhs_free)
    x3 = x.transpose(x_order).reshape(size(x, lhs_batch), size(x, lhs_free), -1)
    w3 = w.transpose(w_order).reshape(size(x, lhs_batch), size(w, rhs_contract), -1)
    dy3 = rng.normal(size=(len(x3), x3.shape[1], w3.shape[2])).astype(np.float32)
    out_shape = [x.shape[i] for i in (*lhs_batch, *lhs_free)] + [w.shape[i] for i in rhs_free]
    recipe = recipes.get("mxfp4")
    y, dx, dw = run(x, w, dy3.reshape(out_shape), recipe, dimension_numbers=dn)
    y3 = np.asarray(y).reshape(dy3.shape)
    dx3, dw3 = np.asarray(dx).transpose(x_order).reshape(x3.shape), np.asarray(dw).transpose(w_order).reshape(w3.shape)
    for b in range(len(x3)):
        assert_within((y3[b], dx3[b], dw3[b]), expected(recipe, x3[b], w3[b], dy3[b]))


def test_batches_have_draws_of_their_own():
    x, w, dy = make_operands(6)
    dn = (((2,), (1,)), ((0,), (0,)))
    three = lambda a: np.stack([a] * 3)  # noqa: E731
    y, dx, dw = run(three(x), three(w), three(dy), recipes.get("mxfp4_sr"), KEY, dimension_numbers=dn)
    for out in (y, dx, dw):
        for i, j in ((0, 1), (0, 2), (1, 2)):
            assert (out[i] != out[j]).mean() > 0.9


@pytest.mark.parametrize(
    ("lhs_shape", "rhs_shape", "dn"),
    [
        ((32, 64), (32, 32), DN),
        ((32, 64, 32), (32, 64, 32), (((1, 2), (0, 1)), ((), ()))),  # 64·32 = 32·64, axis by axis different
        ((2, 3, 32, 32), (3, 2, 32, 32), (((3,), (2,)), ((0, 1), (0, 1)))),
    ],
)
def test_lengths_that_do_not_match_raise_as_in_lax(lhs_shape, rhs_shape, dn):
    for f in (lax.dot_general, functools.partial(quantized_dot_general, recipe=ALL_MX)):
        with pytest.raises((TypeError, ValueError)):
            jax.eval_shape(lambda x, w, f=f: f(x, w, dn), jnp.ones(lhs_shape), jnp.ones(rhs_shape))


# ------------------------------------------------------------------------------------------------- dtypes


@pytest.mark.parametrize("name", ["bf16", "fp8_current", "mxfp4", "mxfp4_h16", "mxfp4_fprop"])
def test_bfloat16_operands_round_only_the_result(name):
    recipe = recipes.get(name)
    x, w, dy = (jnp.asarray(a, jnp.bfloat16) for a in make_operands(7))
    full = [np.asarray(a.astype(jnp.float32)) for a in (x, w, dy)]
    want = run(*full, recipe)
    got = run(x, w, dy, recipe)
    for g, f in zip(got, want, strict=True):
        assert g.dtype == jnp.bfloat16
        np.testing.assert_array_equal(g, f.astype(jnp.bfloat16))
    y, dx, dw = run(x, w, full[2], recipe, out=jnp.dtype(jnp.float32))
    assert (y.dtype, dx.dtype, dw.dtype) == (jnp.float32, jnp.bfloat16, jnp.bfloat16)
    np.testing.assert_array_equal(y, want[0])


def test_mixed_operands_promote_and_gradients_keep_their_dtypes():
    x, w, dy = make_operands(8)
    for recipe in (ALL_MX, MIXED["forward only"], recipes.get("bf16")):
        y, dx, dw = run(jnp.asarray(x, jnp.bfloat16), w, dy, recipe)
        assert (y.dtype, dx.dtype, dw.dtype) == (jnp.float32, jnp.bfloat16, jnp.float32)


# ------------------------------------------------------------------------------------------------- transforms


@pytest.mark.parametrize("name", ["mxfp4", "mxfp4_sr", "mxfp4_rht16", "fp8_current"])
def test_eager_equals_jit(name):
    recipe = recipes.get(name)
    key = KEY if recipe.needs_key else None
    x, w, dy = (jnp.asarray(a) for a in make_operands(9))
    y, pull = jax.vjp(lambda x, w: quantized_dot_general(x, w, DN, recipe=recipe, key=key), x, w)
    assert_within((y, *pull(dy)), expected(recipe, *map(np.asarray, (x, w, dy)), key))
    for got, want in zip((y, *pull(dy)), run(x, w, dy, recipe, key), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * np.abs(want).max())


def test_vmap_equals_one_example_at_a_time():
    x, w, dy = integers((3, M, K), 1), integers((K, N), 2), integers((3, M, N), 3)
    for name in ("mxfp4", "mxfp4_h16", "mxfp4_sr"):  # lossless data: even SR draws cannot move it, but with H16 it is lossy
        recipe = recipes.get(name)
        key = KEY if recipe.needs_key else None
        got = jax.vmap(lambda x, dy, r=recipe, k=key: run(x, w, dy, r, k))(x, dy)
        for i in range(3):
            for g, want in zip(got, run(x[i], w, dy[i], recipe, key), strict=True):
                np.testing.assert_array_equal(g[i], want)
    keys = jax.random.split(KEY, 3)
    x, w, dy = make_operands(10)
    sr = recipes.get("mxfp4_sr")
    for f in (lambda k: run(x, w, dy, sr, k), lambda k: run(x, w, dy, recipes.get("mxfp4_rht16"), k)):
        got = jax.vmap(f)(keys)
        for i in range(3):
            for g, want in zip(got, f(keys[i]), strict=True):
                np.testing.assert_allclose(g[i], want, rtol=1e-5, atol=1e-5 * np.abs(want).max())
    y, dx, dw = jax.vmap(lambda x: run(x, w, dy, sr, KEY))(np.stack([x, x]))
    assert (y[0] != y[1]).mean() > 0.9
    assert (dw[0] != dw[1]).mean() > 0.9
    np.testing.assert_array_equal(dx[0], dx[1])  # dgrad sees neither x nor the batch


def test_scan_equals_a_loop():
    x = make_operands(11)[0]
    w = np.stack([make_operands(s)[1] for s in range(3)])
    recipe = recipes.get("mxfp4_sr")

    def layer(x, w, i):
        key = bits.fold_in(bits.as_key(KEY), i)
        return quantized_dot_general(x, w, DN, recipe=recipe, key=key)

    def scanned(x, w):
        return lax.scan(lambda c, wi: (c, layer(x, *wi)), 0.0, (w, jnp.arange(3)))[1]

    def unrolled(x, w):
        return jnp.stack([layer(x, w[i], i) for i in range(3)])

    dy = np.random.default_rng(12).normal(size=(3, M, N)).astype(np.float32)
    results = []
    for f in (scanned, unrolled):
        y, pull = jax.vjp(jax.jit(f), x, w)
        results.append((y, *pull(dy)))
    for a, b in zip(*results, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(b).max())


@pytest.mark.parametrize("name", ["mxfp4_sr", "mxfp4_rht16", "mxfp4_sr_grad"])
def test_remat_draws_the_same_bits(name):
    recipe = recipes.get(name)
    x, w, dy = make_operands(13)

    def block(x, w):
        return jnp.tanh(quantized_dot_general(x, w, DN, recipe=recipe, key=KEY) * 0.01)

    loss = lambda f: jax.jit(jax.grad(lambda x, w: (f(x, w) * dy).sum(), (0, 1)))  # noqa: E731
    for plain, remat in zip(loss(block)(x, w), loss(jax.checkpoint(block))(x, w), strict=True):
        np.testing.assert_array_equal(plain, remat)
        assert np.abs(plain).max() > 0


def test_a_part_of_the_tokens_with_its_row_offset_draws_what_the_whole_draws():
    x, w, dy = make_operands(14)
    recipe, key = recipes.get("mxfp4_sr"), bits.as_key(KEY)
    y, dx, dw = run(x, w, dy, recipe, key)
    parts = [run(x[a : a + 32], w, dy[a : a + 32], recipe, key._replace(row_offset=a)) for a in (0, 32)]
    for whole, pieces in ((y, [p[0] for p in parts]), (dx, [p[1] for p in parts])):
        np.testing.assert_allclose(np.concatenate(pieces), whole, rtol=1e-5, atol=1e-5 * np.abs(whole).max())
    np.testing.assert_allclose(parts[0][2] + parts[1][2], dw, rtol=1e-5, atol=1e-5 * np.abs(dw).max())
    signs = recipes.get("mxfp4_rht16")
    np.testing.assert_array_equal(run(x, w, dy, signs, key)[0], run(x, w, dy, signs, key._replace(row_offset=32))[0])


def test_operands_and_gemms_draw_different_words(monkeypatch):
    words, signs = [], []

    def spy(function, drawn):
        def call(*args):
            drawn.append(function(*args))
            return drawn[-1]

        return call

    monkeypatch.setattr(quantize, "random_bits", spy(quantize.random_bits, words))
    monkeypatch.setattr(bits, "random_signs", spy(bits.random_signs, signs))
    x, w, dy = (jnp.asarray(a) for a in make_operands(15, (64, 64, 64)))
    redrawn = {f"{g}.rotation.{leaf}": value for g in GEMMS for leaf, value in (("size", 16), ("signs", "redrawn"))}
    recipe = override(recipes.get("mxfp4_sr"), redrawn)
    pull = jax.vjp(lambda x, w: quantized_dot_general(x, w, DN, recipe=recipe, key=KEY), x, w)[1]
    pull(dy)
    words, signs = [np.asarray(a) for a in words], [np.asarray(a) for a in signs]
    assert len(words) == 6
    for a, b in itertools.combinations(words, 2):
        assert not np.isin(a, b).any()
    assert len({tuple(s.tolist()) for s in signs}) == len(signs) == 3


# ------------------------------------------------------------------------------------------------- padding, refusals, programs


@pytest.mark.parametrize("name", ["mxfp4", "mxfp4_sr", "mxfp4_h16"])
def test_padding_equals_zeros_appended_by_hand(name):
    recipe = override(recipes.get(name), {f"{g}.pad": True for g in GEMMS})
    m, k, n = 50, 70, 40
    x, w, dy = make_operands(16, (m, k, n))
    up = lambda a: np.pad(a, [(0, -s % 32) for s in a.shape])  # noqa: E731
    key = KEY if recipe.needs_key else None
    y, dx, dw = run(x, w, dy, recipe, key)
    wide = run(up(x), up(w), up(dy), recipes.get(name), key)
    for got, want in zip((y, dx, dw), (wide[0][:m, :n], wide[1][:m, :k], wide[2][:k, :n]), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * np.abs(want).max())
    x, w, dy = make_operands(17)
    for got, want in zip(run(x, w, dy, recipe, key), run(x, w, dy, recipes.get(name), key), strict=True):
        np.testing.assert_array_equal(got, want)  # nothing to pad


@pytest.mark.parametrize(("axis", "gemm"), enumerate(["wgrad", "fprop", "dgrad"]))
def test_a_ragged_contraction_is_refused_with_its_length(axis, gemm):
    shape = [64, 64, 64]
    shape[axis] = 40
    x, w, _ = make_operands(0, shape)
    with pytest.raises(ValueError, match=rf"{gemm}: contraction length 40 is not a multiple of 32.*{gemm}\.pad=True"):
        quantized_dot_general(x, w, DN, recipe=recipes.get("mxfp4"))
    only = Recipe(**{g: GemmSpec(MX, MX) for g in GEMMS if g != gemm})
    traced = jax.eval_shape(lambda x, w: quantized_dot_general(x, w, DN, recipe=only), x, w)
    assert traced.shape == (shape[0], shape[2])
    x, w, _ = make_operands(0, [96 if s == 40 else s for s in shape])
    h64 = override(recipes.get("mxfp4_h16"), {f"{gemm}.rotation.size": 64})
    with pytest.raises(ValueError, match=rf"{gemm}: contraction length 96 is not a multiple of 64"):
        quantized_dot_general(x, w, DN, recipe=h64)


def test_missing_keys_unknown_implementations_and_integers_raise():
    x, w, _ = make_operands()
    for name in ("mxfp4_sr", "mxfp4_sr_grad", "mxfp4_rht16"):
        with pytest.raises(ValueError, match="key="):
            quantized_dot_general(x, w, DN, recipe=recipes.get(name))
    for name, impl in itertools.product(("mxfp4", "none"), ("cuda", "Reference", None)):
        with pytest.raises(ValueError, match="impl="):
            quantized_dot_general(x, w, DN, recipe=recipes.get(name), impl=impl)
    with pytest.raises(ValueError, match="int32"):
        quantized_dot_general(x.astype(np.int32), w.astype(np.int32), DN, recipe=recipes.get("mxfp4"))
    reference = quantized_dot_general(x, w, DN, recipe=ALL_MX, impl="reference")
    np.testing.assert_array_equal(reference, quantized_dot_general(x, w, DN, recipe=ALL_MX))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("precision", [None, lax.Precision.HIGHEST])
def test_the_none_recipe_lowers_to_the_program_of_lax(dtype, precision):
    x, w, dy = (jnp.asarray(a, dtype) for a in make_operands())

    def text(function):
        f = lambda x, w, dy: jax.vjp(lambda x, w: function(x, w, DN, precision), x, w)[1](dy)  # noqa: E731
        return jax.jit(f).lower(x, w, dy).as_text()

    quantized = functools.partial(quantized_dot_general, recipe=recipes.get("none"))
    assert text(quantized) == text(lax.dot_general)
    assert text(functools.partial(quantized_dot_general, recipe=recipes.get("bf16"))) != text(lax.dot_general)


def test_precision_reaches_the_gemms_that_stay_plain_only():
    x, w, dy = make_operands()
    f = lambda x, w: quantized_dot_general(x, w, DN, lax.Precision.DEFAULT, recipe=MIXED["forward only"])  # noqa: E731
    lowered = jax.jit(lambda x, w, dy: (f(x, w), *jax.vjp(f, x, w)[1](dy))).lower(x, w, dy).as_text()
    dots = [line for line in lowered.splitlines() if "dot_general" in line]
    assert sum("HIGHEST" in line for line in dots) >= 1
    assert sum("DEFAULT" in line or "precision" not in line for line in dots) == 2


@pytest.mark.parametrize("name", ["mxfp4", "mxfp4_sr", "mxfp4_h16", "fp8_current"])
def test_nothing_recompiles_on_the_second_call(name):
    recipe = recipes.get(name)
    key = KEY if recipe.needs_key else None
    traces = []

    @jax.jit
    def step(x, w, dy, key):
        traces.append(1)
        y, pull = jax.vjp(lambda x, w: quantized_dot_general(x, w, DN, recipe=recipe, key=key), x, w)
        return y, *pull(dy)

    compiled = []
    for seed in (18, 19):
        jax.block_until_ready(step(*make_operands(seed), None if key is None else jax.random.key(seed)))
        if seed == 18:
            jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: compiled.append(event))
    jax.monitoring.clear_event_listeners()
    assert len(traces) == 1
    assert not [e for e in compiled if "compile" in e]


def test_rotation_on_its_own_matches_the_public_function():
    x, w, dy = make_operands(20)
    rotated = run(hadamard(x, 16, 1), hadamard(w, 16, 0), dy, Recipe(fprop=GemmSpec(MX, MX)))[0]
    got = run(x, w, dy, Recipe(fprop=GemmSpec(MX, MX, Rotation(16))))[0]
    np.testing.assert_array_equal(got, rotated)


@pytest.mark.parametrize("name", ["mxfp4", "mxfp4_h16", "fp8_current", "tseng_mxfp4", "bf16"])
@pytest.mark.parametrize("argnum", [0, 1])
def test_second_derivatives_raise_instead_of_being_zero(name, argnum):
    recipe, operands = recipes.get(name), [jnp.asarray(a) for a in make_operands(shape=(64, 64, 64))[:2]]
    key = KEY if recipe.needs_key else None

    def squares(*operands):
        return jnp.sum(quantized_dot_general(*operands, DN, recipe=recipe, key=key) ** 2)

    inner = jax.grad(squares, argnum)
    with pytest.raises(NotImplementedError, match="second derivatives"):
        jax.grad(lambda x: jnp.sum(inner(*operands[:argnum], x, *operands[argnum + 1 :])))(operands[argnum])
