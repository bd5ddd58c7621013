"""The in-graph figures: against numpy, the split of the error, what a dot reports, and what gives a fault away."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import unpair_rotations

import fp4jax
from fp4jax import bits, proof, recipes, stats
from fp4jax.ops import quantize
from fp4jax.recipe import GEMMS, OPERANDS, OperandSpec

DN = (((1,), (0,)), ((), ()))
SPECS = {
    "even": OperandSpec("mxfp4", scale_rule="even"),
    "ceil": OperandSpec("mxfp4", scale_rule="ceil"),
    "floor sr": OperandSpec("mxfp4", scale_rule="floor", rounding="sr"),
    "floor_3_4": OperandSpec("mxfp4", scale_rule="floor_3_4"),
    "square": OperandSpec("mxfp4", scale_rule="even", across=32),
    "nvfp4": OperandSpec("nvfp4"),
    "fp8": OperandSpec("fp8_e4m3"),
    "bf16": OperandSpec("bf16"),
}


def tensor(seed=0, shape=(64, 96)):
    """Normal numbers whose rows differ in size by up to 2^12, so that some are flushed, with a row of zeros."""
    x = jax.random.normal(jax.random.key(seed), shape) * 2.0 ** (-jnp.arange(shape[0]) % 13)[:, None]
    return x.at[3].set(0.0)


def key_for(spec):
    return bits.as_key(jax.random.key(9)) if spec.draws else None


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("axis", [0, 1])
def test_the_parts_of_an_error_add_up_to_it(name, axis):
    x, spec = tensor(), SPECS[name]
    values = np.asarray(quantize.fake_quantize(x, spec, axis, key_for(spec)), np.float64) / spec.gain
    scale, dead_zone, grid = (np.asarray(part, np.float64) for part in stats.split_error(x, spec, axis, key_for(spec)))
    error = values - np.asarray(x, np.float64)
    np.testing.assert_allclose(scale + dead_zone + grid, error, rtol=0, atol=2.0**-22 * np.abs(np.asarray(x)).max())
    assert not (dead_zone * grid).any()
    if spec.element is not None:
        assert dead_zone.any()
    if name in ("fp8", "bf16"):  # its scale is not rounded, or it has none
        assert not scale.any()


def test_the_parts_of_one_block_by_hand():
    """Largest 7: `even` has scale 1 for it and clips to 6, the unrounded scale is 7/6, under which it stays."""
    x = jnp.zeros((1, 32)).at[0, :3].set(jnp.array([7.0, 0.2, 3.5]))
    scale, dead_zone, grid = (np.asarray(p)[0] for p in stats.split_error(x, SPECS["ceil"], 1))
    # ceil: scale 2, values 8 → 7 is 3.5 in units, a tie, to even: 4 · 2 = 8; 0.2 → 0; 3.5 → 1.75, a tie: 2 · 2 = 4
    # unrounded 7/6: 6 · 7/6 = 7; 0.2 → 0.17 → 0; 3.5 → 3 · 7/6 = 3.5
    np.testing.assert_allclose(scale[:3], [1.0, 0.0, 0.5], atol=1e-6)
    np.testing.assert_allclose(dead_zone[:3], [0.0, -0.2, 0.0], atol=1e-6)
    np.testing.assert_allclose(grid[:3], [0.0, 0.0, 0.0], atol=1e-6)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("name", ["even", "floor sr", "nvfp4", "fp8"])
def test_the_figures_of_a_cast_are_those_of_numpy(name, axis):
    x, spec = tensor(1), SPECS[name]
    q = quantize.quantize(x, spec, axis, key=key_for(spec))
    values, exact = np.asarray(q.dequantize(), np.float64), np.asarray(x, np.float64)
    figures = stats.operand_figures(stats.operand_sums(x, spec, axis, key_for(spec)))
    relative = np.linalg.norm(values - exact) / np.linalg.norm(exact)
    np.testing.assert_allclose(figures["relative_error"], relative, rtol=1e-5)
    np.testing.assert_allclose(figures["sqnr_db"], -20 * np.log10(relative), rtol=1e-5)
    np.testing.assert_allclose(figures["zeroed"], ((values == 0) & (exact != 0)).sum() / (exact != 0).sum(), rtol=1e-5)
    if spec.scale == "e8m0":
        scale = 2.0 ** (np.asarray(q.scale_bytes, np.float64) - 127)
        spread = np.repeat(scale, 32, axis=axis)
        np.testing.assert_allclose(figures["clipped"], (np.abs(exact) > 6 * spread).mean(), rtol=1e-5, atol=1e-9)
        exponents, counts = np.unique(np.log2(scale), return_counts=True)
        expected = {str(int(e)): c / scale.size for e, c in zip(exponents, counts, strict=True)}
        assert figures["scale_histogram"].keys() == expected.keys()
        np.testing.assert_allclose(list(figures["scale_histogram"].values()), list(expected.values()), rtol=1e-5)
        blocks = np.moveaxis(exact, axis, -1).reshape(-1, 32)
        rms = np.sqrt((blocks**2).mean(1))
        crest = np.where(rms > 0, np.abs(blocks).max(1) / np.where(rms > 0, rms, 1), 1.0)
        np.testing.assert_allclose(figures["crest"], crest.mean(), rtol=1e-5)
    shares = [figures[f"{part}_share"] for part in ("scale", "dead_zone", "grid")]
    np.testing.assert_allclose(sum(shares), 1.0, rtol=1e-6)
    assert sum(figures["scale_histogram"].values()) == pytest.approx(1.0)


def test_sums_of_several_calls_are_averaged():
    sums = [stats.operand_sums(tensor(seed), SPECS["even"], 1) for seed in (1, 2)]
    one, two = (stats.operand_figures(s) for s in sums)
    both = stats.operand_figures(jax.tree.map(jnp.add, *sums))
    for name in ("crest", "clipped"):
        assert both[name] == pytest.approx((one[name] + two[name]) / 2)
    assert (
        min(one["relative_error"], two["relative_error"])
        < both["relative_error"]
        < max(one["relative_error"], two["relative_error"])
    )


def measured(recipe, x, w, dy, *, sums=True, key=None):
    """Return (dx, dw, sums) of one dot, jitted."""
    key = jax.random.key(3) if recipe.needs_key and key is None else key
    history = jnp.zeros((3, 2, 4)) if recipe.needs_history else None

    def loss(x, w, sums):
        y = fp4jax.quantized_dot_general(x, w, DN, recipe=recipe, key=key, history=history, sums=sums)
        return (y * dy).sum()

    if not sums:
        return jax.jit(jax.grad(lambda x, w: loss(x, w, None), argnums=(0, 1)))(x, w)
    return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(x, w, stats.zeros())


def operands():
    shapes = ((128, 256), (256, 128), (128, 128))
    return tuple(jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(shapes))


RECIPES = ("mxfp4_h16", "mxfp4_sr", "mxfp4_mean_split", "tetrajet", "quartet", "fp8_delayed", "nvidia_nvfp4")


@pytest.mark.parametrize("name", RECIPES)
def test_measuring_changes_no_gradient_and_its_products_are_the_real_ones(name):
    x, w, dy = operands()
    recipe = recipes.get(name)
    dx, dw, sums = measured(recipe, x, w, dy)
    plain = measured(recipe, x, w, dy, sums=False)
    assert np.array_equal(dx, plain[0])
    assert np.array_equal(dw, plain[1])
    rows = {row["gemm"]: row for row in stats.figures({"lm_head": sums})}
    assert set(rows) == set(GEMMS)
    exact = {"dgrad": np.asarray(dy, np.float64) @ np.asarray(w, np.float64).T}
    exact["wgrad"] = np.asarray(x, np.float64).T @ np.asarray(dy, np.float64)
    for gemm, quantized in (("dgrad", dx), ("wgrad", dw)):
        q, p, row = np.asarray(quantized, np.float64), exact[gemm], rows[gemm]
        np.testing.assert_allclose(row["gain"], (q * p).sum() / (p * p).sum(), rtol=1e-5)
        np.testing.assert_allclose(row["cosine"], (q * p).sum() / np.linalg.norm(q) / np.linalg.norm(p), rtol=1e-5)
        np.testing.assert_allclose(row["relative_error"], np.linalg.norm(q - p) / np.linalg.norm(p), rtol=1e-3)
        np.testing.assert_allclose(row["signal_to_noise"], 1 / row["relative_error"])
        assert 0.8 < row["excess"] < 2
    assert not stats.findings(rows.values())


def test_what_is_measured_is_what_was_cast_with_and_without_the_rotation():
    x, w, dy = operands()
    x = x * jnp.where(jnp.arange(256) % 16 == 5, 40.0, 1.0)[None, :]  # outlier features: the rotation spreads them
    recipe = recipes.get("mxfp4_h16")
    row = stats.figures({"lm_head": measured(recipe, x, w, dy)[2]})[0]
    rotated = fp4jax.hadamard(x, 16, 1)
    for figures, cast in ((row["x"], rotated), (row["x"]["unrotated"], x)):
        values = np.asarray(fp4jax.quantize(cast, recipe.fprop.lhs, 1).dequantize(), np.float64)
        relative = np.linalg.norm(values - np.asarray(cast, np.float64)) / np.linalg.norm(np.asarray(cast, np.float64))
        assert figures["relative_error"] == pytest.approx(relative, rel=1e-5)
    assert row["x"]["crest"] < 2 < 3 < row["x"]["unrotated"]["crest"]
    assert row["x"]["zeroed"] < 0.1 < 0.4 < row["x"]["unrotated"]["zeroed"]
    first = np.asarray(rotated).reshape(128, -1, 16)
    assert row["x"]["first_share"] == pytest.approx((first[..., 0] ** 2).sum() / (first**2).sum(), rel=1e-4)
    assert "unrotated" not in stats.figures({"lm_head": measured(recipes.get("mxfp4"), x, w, dy)[2]})[0]["x"]


def test_a_plain_gemm_has_no_row():
    recipe = recipes.parse("mxfp4:fprop=bf16,fprop.lhs.format=none,fprop.rhs.format=none")
    rows = stats.figures({"lm_head": measured(recipe, *operands())[2]})
    assert [row["gemm"] for row in rows] == ["dgrad", "wgrad"]


def test_batch_axes_add_up():
    x, w = (jax.random.normal(jax.random.key(i), (2, 64, 64)) for i in (0, 1))
    dims = (((2,), (1,)), ((0,), (0,)))

    def loss(sums):
        return fp4jax.quantized_dot_general(x, w, dims, recipe=recipes.get("mxfp4"), sums=sums).sum()

    sums = jax.grad(loss)(stats.zeros())
    assert sums.gemms.calls.tolist() == [2, 2, 2]
    assert stats.figures({"lm_head": sums})[0]["relative_error"] < 0.2


def test_without_sums_nothing_is_computed_for_them():
    x, w, _ = operands()
    recipe = recipes.get("mxfp4_h16")

    def dots(sums):
        def gradients(x, w):
            return jax.grad(lambda *a: fp4jax.quantized_dot_general(*a, DN, recipe=recipe, sums=sums).sum(), argnums=(0, 1))(
                x, w
            )

        return proof.count_dots(gradients, x, w)

    assert dots(None) == {"grid × grid": 3}
    assert dots(stats.zeros()) == {"grid × grid": 3, "plain × plain": 3}


def test_sums_do_not_apply_to_packed_residuals():
    x, w, _ = operands()
    with pytest.raises(ValueError, match="residuals='packed' does not apply where sums are taken"):
        fp4jax.quantized_dot_general(x, w, DN, recipe=recipes.get("mxfp4"), residuals="packed", sums=stats.zeros())


@pytest.mark.parametrize("name", ["mxfp4_h16", "mxfp4_rht16_fixed", "nvidia_nvfp4"])
def test_an_unpaired_rotation_is_found(name, monkeypatch):
    x, w, dy = operands()
    recipe = recipes.get(name)
    rotated = [gemm for gemm in GEMMS if getattr(recipe, gemm).rotation.size]
    assert not stats.findings(stats.figures({"lm_head": measured(recipe, x, w, dy)[2]}))
    unpair_rotations(monkeypatch)
    rows = stats.figures({"lm_head": measured(recipe, x, w, dy)[2]})
    found = [finding for finding in stats.findings(rows) if "do not belong together" in finding]
    assert [finding.partition(":")[0] for finding in found] == rotated
    assert all(row[operand]["sqnr_db"] > 15 for row in rows for operand in ("x", "w", "dy") if operand in row)


def test_other_findings():
    x, w, dy = operands()
    recipe = recipes.get("mxfp4")
    rows = stats.figures({"lm_head": measured(recipe, x.at[:, ::32].mul(1e4), w, dy)[2]})
    assert "fprop: 97% of x of lm_head is flushed to zero" in stats.findings(rows)
    rows = stats.figures({"lm_head": measured(recipe, x.at[0, 0].set(jnp.nan), w, dy)[2]})
    assert "fprop: the product of lm_head is not finite (1 of 1 modules)" in stats.findings(rows)
    noisy = recipes.parse(
        "mxfp4:wgrad.lhs.rounding=sr,wgrad.rhs.rounding=sr,wgrad.lhs.scale_rule=ceil,wgrad.rhs.scale_rule=ceil"
    )
    correlated = dy.at[64:].set(-dy[:64]) + 0.02 * dy  # tokens cancel in dw, their errors do not
    rows = stats.figures({"lm_head": measured(noisy, x.at[64:].set(x[:64]), w, correlated)[2]})
    assert any("times its quantization error, below √3" in finding for finding in stats.findings(rows))


def test_the_first_gemm_that_is_not_finite():
    """In the order of execution, which is not that of the rows: forward through the blocks, then back."""

    def row(module, gemm, *, product=0.1, **operands):
        names = OPERANDS[gemm]
        return {
            "module": module,
            "gemm": gemm,
            "relative_error": product,
            **{name: {"relative_error": operands.get(name, 0.1)} for name in names},
        }

    paths, nan = ("q", "up", "head"), float("nan")
    good = [row(module, gemm) for module in ("layers/0/q", "layers/0/up", "layers/1/q", "head") for gemm in GEMMS]
    assert stats.first_nonfinite(good, paths) is None
    backward = [row("layers/0/up", "dgrad", dy=nan, product=nan), row("layers/10/q", "wgrad", product=nan)]
    assert stats.first_nonfinite(good + backward, paths) == "wgrad of layers/10/q: the product of finite operands"
    backward.append(row("head", "dgrad", dy=nan))
    assert stats.first_nonfinite(good + backward, paths) == "dgrad of head: dy"
    forward = [row("head", "fprop", x=nan), row("layers/9/up", "fprop", x=nan, w=nan), row("layers/10/q", "fprop", x=nan)]
    assert stats.first_nonfinite(backward + good + forward, paths) == "fprop of layers/9/up: x and w"
