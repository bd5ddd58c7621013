"""Diagnosis of a model: its figures against brute force, that it changes nothing, and the entry point."""

import json
import math

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import NoStop, unpair_rotations

from fp4jax import hadamard, quantize, recipes, stats
from fp4jax.recipe import Recipe
from train import diagnosis, sharding, step
from train.metrics import read_rows


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return helpers.write_corpus(tmp_path_factory.mktemp("corpus"))


def measure(settings, *, devices=1):
    """Return {(module, gemm): row} of step 0."""
    mesh = sharding.make_mesh(sharding.MeshConfig(fsdp=devices))
    tokens = jax.device_put(np.asarray(helpers.tokens(settings)), sharding.batch_sharding(mesh))
    rows = stats.figures(diagnosis.make_measure(settings, mesh)(step.init_state(settings, mesh), tokens))
    return {(row["module"], row["gemm"]): row for row in rows}


def close(one, other, **tolerance):
    assert one.keys() == other.keys()
    for place, row in one.items():
        for name in ("gain", "cosine", "relative_error", "excess"):
            np.testing.assert_allclose(row[name], other[place][name], err_msg=f"{place} {name}", **tolerance)
        for name in set(row) & {"x", "w", "dy"}:
            for figure in ("sqnr_db", "crest", "zeroed", "first_share"):
                expected = other[place][name][figure]
                np.testing.assert_allclose(row[name][figure], expected, err_msg=f"{place} {name} {figure}", **tolerance)


FEW = ("lm_head", "attn/[kvo]", "mlp/up", "mlp/down")  # leaves attn/q and mlp/gate, which compile quickly
ONE = (*FEW, "mlp/gate")


def test_every_quantized_gemm_of_every_layer_has_a_row(corpus):
    rows = measure(helpers.settings(corpus, quant__recipe="mxfp4_h16", quant__exempt=(*FEW, "layers/1/mlp/gate")))
    modules = ("layers/0/attn/q", "layers/1/attn/q", "layers/0/mlp/gate")
    assert sorted(rows) == sorted((module, gemm) for module in modules for gemm in ("fprop", "dgrad", "wgrad"))


def test_figures_on_a_mesh_unrolled_and_in_microbatches(corpus):
    few = {"quant__recipe": "mxfp4_h16", "quant__exempt": ONE}
    rows = measure(helpers.settings(corpus, **few))
    close(rows, measure(helpers.settings(corpus, **few), devices=2), rtol=2e-3, atol=2e-3)
    for changed in ({"model__scan_layers": False}, {"train__accumulation": 2}):  # other initial weights; other blocks of tokens
        other = measure(helpers.settings(corpus, **changed, **few))
        assert other.keys() == rows.keys()
        for place, row in rows.items():
            assert other[place]["relative_error"] == pytest.approx(row["relative_error"], rel=0.5)


def test_an_unpaired_rotation_is_found_in_a_model(corpus, monkeypatch):
    settings = helpers.settings(corpus, quant__recipe="mxfp4_h16", quant__exempt=FEW)
    rows = measure(settings)
    assert max(row["excess"] for row in rows.values()) < 2.5
    assert not [finding for finding in stats.findings(rows.values()) if "belong" in finding]
    unpair_rotations(monkeypatch)
    rows = measure(settings)
    found = [finding for finding in stats.findings(rows.values()) if "do not belong together" in finding]
    assert [finding.partition(":")[0] for finding in found] == ["fprop", "dgrad", "wgrad"]
    assert min(row["excess"] for row in rows.values()) > stats.EXCESS


def test_diagnosis_during_training_changes_no_step_and_survives_a_resume(corpus, tmp_path):
    recipe = "mxfp4_sr:fprop.rotation.size=16,fprop.rotation.signs=redrawn"
    plain = helpers.settings(corpus, quant__recipe=recipe, quant__exempt=ONE)
    helpers.train(plain, tmp_path / "plain")
    diagnosed = helpers.settings(corpus, quant__recipe=recipe, quant__exempt=ONE, diagnose__every=5)
    counted = iter(range(1000))
    helpers.train(diagnosed, tmp_path / "diagnosed", NoStop(lambda: next(counted) > 30))
    assert not (tmp_path / "plain" / "diagnosis.jsonl").exists()
    if len(helpers.rows(tmp_path / "diagnosed")) < len(helpers.rows(tmp_path / "plain")):
        helpers.train(diagnosed, tmp_path / "diagnosed")
    assert helpers.rows(tmp_path / "plain") == helpers.rows(tmp_path / "diagnosed")
    rows = read_rows(tmp_path / "diagnosed" / "diagnosis.jsonl")
    assert [row["step"] for row in rows] == [5] * 6 + [10] * 6
    for row in rows:
        if row["gemm"] == "fprop":
            assert 0 < row["w"]["flipped"] < 1


def test_flips_are_counted_between_codes():
    before = {"attn/q": jnp.zeros((2, 4, 4), jnp.uint8), "lm_head": jnp.zeros((4, 4), jnp.uint8)}
    after = {"attn/q": before["attn/q"].at[1, 0, :2].set(3), "lm_head": before["lm_head"].at[0, 0].set(1)}
    shares = diagnosis.by_module(diagnosis.flip_shares(before, after))
    assert {k: float(v) for k, v in shares.items()} == {"layers/0/attn/q": 0, "layers/1/attn/q": 0.125, "lm_head": 0.0625}


def test_codes_are_those_that_fprop_multiplies(corpus):
    settings = helpers.settings(
        corpus, quant__recipe="mxfp4_h16", quant__rules=(("layers/1/attn/q", ":fprop.rotation.size=0"),)
    )
    mesh = sharding.make_mesh(settings.mesh)
    state = step.init_state(settings, mesh)
    codes = diagnosis.make_codes(settings)(state.params, state.seed, 0)
    kernel = state.params["layers"]["attn"]["q"]["kernel"]
    spec = recipes.get("mxfp4_h16").fprop.rhs
    for layer, rotated in ((0, hadamard(kernel[0], 16, 0)), (1, kernel[1])):
        expected = np.asarray(quantize(rotated, spec, 0).codes)
        assert np.array_equal(codes["attn/q"][layer], np.where(expected == 8, 0, expected))
    assert "lm_head" not in codes
    bf16 = helpers.settings(corpus, quant__recipe="bf16")
    assert diagnosis.make_codes(bf16)(state.params, state.seed, 0) == {}


def test_arms_quantize_one_gemm_and_nothing_else():
    for name in ("mxfp4_h16", "tetrajet", "nvidia_nvfp4"):
        recipe = recipes.get(name)
        assert diagnosis.arm(recipe, "all") == recipe
        for gemm in ("fprop", "dgrad", "wgrad"):
            alone = diagnosis.arm(recipe, gemm)
            others = [getattr(alone, other) for other in ("fprop", "dgrad", "wgrad") if other != gemm]
            assert all(spec.is_plain for spec in others)
            assert getattr(alone, gemm).rotation == getattr(recipe, gemm).rotation
            assert {s.source for s in (getattr(alone, gemm).lhs, getattr(alone, gemm).rhs)} == {"input"}


def batches_of_gradients(n=48, size=6, seed=0):
    """Return exact and quantized gradients [n, 2, size, size]: a common mean, noise, and errors that repeat."""
    rng = np.random.default_rng(seed)
    mean, repeats = rng.normal(size=(2, 2, size, size))
    g = mean + 2 * rng.normal(size=(n, 2, size, size))
    return g, 0.9 * g + 0.3 * repeats + 0.5 * rng.normal(size=g.shape)


def brute_force(g, q):
    """Return the figures from all pairs of batches, straight from their definitions."""
    n, e = len(g), q - g

    def pairs(a, b):
        return np.mean([np.vdot(a[i], b[j]) for i in range(n) for j in range(n) if i != j])

    def single(a, b):
        return np.mean([np.vdot(a[i], b[i]) for i in range(n)])

    common = pairs(q, g) / pairs(g, g)
    variance_e, variance_g = (np.sum(np.var(x, axis=0, ddof=1)) for x in (e, g))
    return {
        "gain": single(q, g) / single(g, g),
        "cosine": single(q, g) / math.sqrt(single(q, q) * single(g, g)),
        "relative_error": math.sqrt(single(e, e) / single(g, g)),
        "systematic2": pairs(e, e) / pairs(g, g),
        "gain_removed2": pairs(q - common * g, q - common * g) / pairs(g, g),
        "noise_ratio": variance_e / variance_g,
        "gradient_to_noise": math.sqrt(pairs(g, g) / variance_e),
    }


def test_a_comparison_of_gradients_is_that_of_all_pairs_of_batches():
    g, q = batches_of_gradients()
    comparison = diagnosis.Comparison(len(g))
    for one, other in zip(g, q, strict=True):
        comparison.add({"attn/q": jnp.asarray(one, jnp.float32)}, {"attn/q": jnp.asarray(other, jnp.float32)})
    together, modules = comparison.figures()
    assert modules.keys() == {"layers/0/attn/q", "layers/1/attn/q"}
    for figures, expected in (
        (together, brute_force(g, q)),
        (modules["layers/0/attn/q"], brute_force(g[:, 0], q[:, 0])),
        (modules["layers/1/attn/q"], brute_force(g[:, 1], q[:, 1])),
    ):
        for name, (value, error) in figures.items():
            np.testing.assert_allclose(value, expected[name], rtol=1e-3, atol=1e-5, err_msg=name)
            assert error > 0


def test_the_systematic_part_is_unbiased_and_its_error_is_honest():
    """Over many sets of batches the mean is that of the construction, and the jackknife says how far one set strays."""
    values, errors = [], []
    for seed in range(60):
        rng = np.random.default_rng(1000 + seed)
        mean, repeats = np.random.default_rng(5).normal(size=(2, 40))
        g = mean + 2 * rng.normal(size=(32, 40))
        e = 0.3 * repeats + 0.5 * rng.normal(size=g.shape)
        groups = np.repeat(np.arange(8), 4)
        sums = [np.stack([x[groups == k].sum(0) for k in range(8)]) for x in (e, g)]
        grams = np.stack([a @ b.T for a, b in ((sums[0], sums[0]), (sums[0], sums[1]), (sums[1], sums[1]))])
        dots = np.stack([[np.vdot(a[groups == k], b[groups == k]) for a, b in ((e, e), (e, g), (g, g))] for k in range(8)])
        value, error = diagnosis.with_errors(grams, dots, np.full(8, 4.0))["systematic2"]
        values.append(value)
        errors.append(error)
    truth = 0.09 * np.vdot(repeats, repeats) / np.vdot(mean, mean)
    assert abs(np.mean(values) - truth) < 4 * np.std(values) / math.sqrt(len(values)) + 0.02 * truth
    assert 0.6 < np.mean(errors) / np.std(values) < 1.6


def test_too_noisy_a_gradient_gives_no_figure():
    figures = diagnosis.gradient_figures(np.array([4.0, 0.0, 3.0]), np.array([4.0, 0.0, 4.0]), 4)
    assert math.isnan(figures["systematic2"])
    assert figures["relative_error"] == 1


def test_weight_gradients_are_exact_where_nothing_is_quantized(corpus):
    settings = helpers.settings(corpus, quant__recipe="mxfp4")
    mesh = sharding.make_mesh(settings.mesh)
    state, tokens = step.init_state(settings, mesh), helpers.tokens(settings)
    exact, sums = diagnosis.make_weight_gradient(settings, mesh, lambda _: Recipe())(state.params, tokens, state.seed, 0)
    plain = helpers.settings(corpus, quant__recipe="none")
    _, (grads, _, _) = jax.jit(step.make_gradient(plain, mesh))(state.params, {}, {}, tokens, None)
    np.testing.assert_allclose(exact["mlp/up"], grads["layers"]["mlp"]["up"]["kernel"], rtol=1e-5, atol=1e-8)
    assert sums == {}
    assert "lm_head" not in exact


def test_the_entry_point(corpus, tmp_path):
    settings = helpers.settings(corpus, quant__recipe="fp8_current", quant__exempt=ONE, train__checkpoint_every=6)
    workdir = tmp_path / "run"
    helpers.train(settings, workdir)
    before = sorted(path.name for path in workdir.iterdir())
    arguments = ["train.diagnose", f"--workdir={workdir}", "--step=6,12", "--recipe=mxfp4_h16", "--batches=8", "--flip_steps=2"]
    code, out, err = helpers.run(*arguments)
    assert code == 0, err
    assert json.loads(out[-1])["recipes"] == ["mxfp4_h16"]
    assert sorted(path.name for path in workdir.iterdir()) == sorted([*before, "diagnosis"])
    results = json.loads((workdir / "diagnosis" / "diagnosis.json").read_text())
    assert list(results["checkpoints"]) == ["6", "12"]
    for checkpoint in results["checkpoints"].values():
        assert checkpoint["trained_in"] == "fp8_current"
        of_recipe = checkpoint["recipes"]["mxfp4_h16"]
        assert list(of_recipe["gradients"]) == ["all", "fprop", "dgrad", "wgrad"]
        assert 1e-4 < of_recipe["gradients"]["wgrad"]["relative_error"][0] < 0.1  # most weights are exempt
        assert len(of_recipe["casts"]) == 6
        assert 0 < of_recipe["flips"]["per_step"] < 1
        assert 0 <= of_recipe["flips"]["returned"] <= 1
    page = (workdir / "diagnosis" / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 3
    assert "emulated" in page

    for more, message in ((["--step=7"], "no checkpoint of step 7"), (["--batches=1"], "--batches=1 must be at least 2")):
        code, _, err = helpers.run("train.diagnose", f"--workdir={workdir}", *more)
        assert code == 2
        assert len(err) == 1
        assert message in err[0]


def test_findings_are_logged_during_training(corpus, tmp_path, monkeypatch, caplog):
    unpair_rotations(monkeypatch)
    settings = helpers.settings(corpus, quant__recipe="mxfp4_h16", quant__exempt=ONE, train__steps=3, diagnose__every=3)
    with caplog.at_level("WARNING"):
        helpers.train(settings, tmp_path / "run")
    assert any("step 3: wgrad" in message and "do not belong together" in message for message in caplog.messages)
