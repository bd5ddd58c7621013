"""Numerics of a model: which recipe a layer follows, exemptions, the census, and keys that differ wherever they should."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from fp4jax import bits, quantized_dot_general, recipes
from fp4jax.numerics import Context, Numerics, census
from fp4jax.recipe import GEMMS, override

DN = (((1,), (0,)), ((), ()))
KEY = bits.step_key(0, 0)
PATHS = ("attn/q", "attn/k", "attn/v", "attn/o", "mlp/gate", "mlp/up", "mlp/down")
X = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
W = np.random.default_rng(1).normal(size=(64, 64)).astype(np.float32)


def gradients(f):
    return jax.jit(jax.grad(lambda x, w: (f(x, w, DN) ** 2).sum(), (0, 1)))(X, W)


def model(numerics, shape=(64, 64, 64), layers=2):
    m, k, n = shape
    x = jnp.ones((m, k))
    for layer in range(layers):
        for path in ("attn/q", "mlp/up"):
            numerics.dot(path, layer, KEY)(x, jnp.ones((k, n)), DN)
    return numerics.dot("lm_head", None, KEY)(x, jnp.ones((k, n)), DN)


def test_census_has_one_row_per_module_and_gemm():
    rows = census(Numerics(recipes.get("mxfp4_h16_wgrad")), model)
    assert [(r["module"], r["gemm"]) for r in rows] == [
        (m, g) for m in ("layers/0/attn/q", "layers/0/mlp/up", "layers/1/attn/q", "layers/1/mlp/up", "lm_head") for g in GEMMS
    ]
    mx = "mxfp4.1x32.even.rne"
    assert rows[2] == {
        "module": "layers/0/attn/q",
        "gemm": "wgrad",
        "lhs": mx,
        "rhs": mx,
        "rotation": "H16d",
        "impl": "reference",
        "why": "auto: no GPU",
        "exempt": "",
    }
    assert rows[0]["rotation"] == "-"
    assert rows[-1] == {
        "module": "lm_head",
        "gemm": "wgrad",
        "lhs": "none",
        "rhs": "none",
        "rotation": "-",
        "impl": "lax",
        "why": "",
        "exempt": "exempt='lm_head' in the config",
    }


def test_census_of_scanned_blocks_shares_a_name_and_only_traces():
    def scanned(numerics):
        def body(x, layer):
            jax.debug.callback(lambda: pytest.fail("executed"))
            return numerics.dot("attn/q", layer, KEY)(x, W, DN), None

        return lax.scan(body, X, jnp.arange(3))

    rows = census(Numerics(recipes.get("mxfp4_sr")), scanned)
    assert [r["module"] for r in rows] == ["layers/*/attn/q"] * 3


def test_census_shows_every_exemption_even_where_a_module_runs_in_two_shapes():
    def two_shapes(numerics):
        numerics.dot("attn/q", 0, KEY)(jnp.ones((64, 64)), jnp.ones((64, 64)), DN)
        numerics.dot("attn/q", 0, KEY)(jnp.ones((40, 64)), jnp.ones((64, 64)), DN)

    rows = census(Numerics(recipes.get("mxfp4"), strict=False), two_shapes)
    assert any("40" in r["exempt"] for r in rows if r["gemm"] == "wgrad")


@pytest.mark.parametrize(
    ("patterns", "exempted"),
    [
        ((), ()),
        (("lm_head",), ("lm_head",)),
        (("mlp/*",), ("mlp/up",)),
        (("*/q", "lm_*"), ("attn/q", "lm_head")),
        (("*",), ("attn/q", "mlp/up", "lm_head")),
        (("q", "head"), ()),
    ],
)
def test_exempt_patterns_match_paths(patterns, exempted):
    rows = census(Numerics(recipes.get("mxfp4"), exempt=patterns), model)
    for row in rows:
        path = row["module"].split("/", 2)[-1] if row["module"].startswith("layers/") else row["module"]
        assert bool(row["exempt"]) == (row["impl"] == "lax") == (row["lhs"] == "none") == (path in exempted)
        if row["exempt"]:
            assert any(f"exempt={p!r}" in row["exempt"] for p in patterns)


def test_an_exempt_layer_is_the_program_of_lax():
    lower = lambda f: jax.jit(lambda x, w: f(x, w, DN)).lower(X, W).as_text()  # noqa: E731
    exempt = Numerics(recipes.get("mxfp4_sr"), exempt=("attn/*",)).dot("attn/q", 0, KEY)
    assert lower(exempt) == lower(lax.dot_general) == lower(Numerics(recipes.get("none")).dot("attn/q", 0))


def test_strict_refuses_a_ragged_layer_and_the_opposite_exempts_the_gemm_with_a_reason():
    shape = (64, 64, 40)
    with pytest.raises(ValueError, match="dgrad: contraction length 40 is not a multiple of 32"):
        census(Numerics(recipes.get("mxfp4")), lambda n: model(n, shape))
    rows = census(Numerics(recipes.get("mxfp4"), strict=False), lambda n: model(n, shape))
    for row in rows:
        if row["module"] == "lm_head":
            continue
        if row["gemm"] == "dgrad":
            assert (row["impl"], row["lhs"], row["exempt"]) == ("lax", "none", "contraction length 40 is not a multiple of 32")
        else:
            assert (row["impl"], row["lhs"], row["exempt"]) == ("reference", "mxfp4.1x32.even.rne", "")
    loose = Numerics(recipes.get("mxfp4"), strict=False).dot("attn/q", 0)
    dy = np.random.default_rng(2).normal(size=(64, 40)).astype(np.float32)
    dx = jax.vjp(lambda x: loose(x, W[:, :40], DN), X)[1](dy)[0]
    np.testing.assert_allclose(dx, dy @ W[:, :40].T, rtol=1e-5, atol=1e-5)


def test_a_layer_is_the_dot_with_the_key_of_its_path_and_index():
    recipe = recipes.get("mxfp4_sr")
    for path, layer in (("attn/q", 3), ("mlp/down", None)):
        words = (bits.path_word(path), 0xFFFFFFFF if layer is None else layer)
        key = bits.fold_in(KEY, *words)
        direct = lambda x, w, dn, key=key: quantized_dot_general(x, w, dn, recipe=recipe, key=key)  # noqa: E731
        for a, b in zip(gradients(Numerics(recipe).dot(path, layer, KEY)), gradients(direct), strict=True):
            np.testing.assert_array_equal(a, b)


def test_the_layer_as_a_python_int_and_as_a_traced_one_give_the_same_bits():
    hook = Numerics(recipes.get("mxfp4_sr"))
    traced = jax.jit(jax.grad(lambda x, w, i: (hook.dot("attn/k", i, KEY)(x, w, DN) ** 2).sum(), (0, 1)))
    for layer in (0, 31):
        for a, b in zip(gradients(hook.dot("attn/k", layer, KEY)), traced(X, W, jnp.int32(layer)), strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", ["mxfp4_sr", "mxfp4_rht16"])
def test_draws_differ_by_layer_path_seed_and_step(name):
    hook = Numerics(recipes.get(name))
    f = jax.jit(lambda path_word, layer, key: quantized_dot_general(
        X, W, DN, recipe=hook.recipe, key=bits.fold_in(key, path_word, layer)))  # fmt: skip
    outs = [np.asarray(hook.dot(p, i, KEY)(X, W, DN)) for p, i in itertools.product(PATHS[:3], (0, 1))]
    outs += [np.asarray(hook.dot("attn/q", None, KEY)(X, W, DN))]
    outs += [np.asarray(f(jnp.uint32(bits.path_word("attn/q")), 0, bits.step_key(s, t))) for s, t in ((0, 1), (1, 0), (1, 1))]
    for a, b in itertools.combinations(outs, 2):
        assert (a != b).mean() > 0.5
    assert len({bits.path_word(p) for p in (*PATHS, "lm_head")}) == 8


def test_signs_per_layer_differ_by_layer_path_and_seed_and_are_the_same_at_every_step():
    recipe = override(recipes.get("mxfp4_rht16"), {f"{gemm}.rotation.signs": "per_layer" for gemm in GEMMS})
    hook = Numerics(recipe)

    def out(path="attn/q", layer=0, seed=0, step=0):
        return np.asarray(hook.dot(path, layer, bits.step_key(seed, step))(X, W, DN))

    base = out()
    np.testing.assert_array_equal(out(step=1), base)
    for other in (out(path="attn/k"), out(layer=1), out(seed=1)):
        assert (other != base).mean() > 0.5


def test_missing_key_and_unknown_implementation_raise():
    with pytest.raises(ValueError, match="key="):
        Numerics(recipes.get("mxfp4_sr")).dot("attn/q", 0)(X, W, DN)
    for recipe, path in itertools.product(("mxfp4", "none"), ("attn/q", "lm_head")):
        with pytest.raises(ValueError, match="impl='cuda'"):
            Numerics(recipes.get(recipe), impl="cuda").dot(path, 0)(X, W, DN)


def test_observe_is_called_for_every_gemm_of_every_traced_dot():
    rows = []
    hook = Numerics(recipes.get("mxfp4"), observe=rows.append)
    f = jax.jit(lambda x: hook.dot("attn/q", 0)(x, W, DN))
    f(X)
    f(X)
    assert [r["gemm"] for r in rows] == list(GEMMS)
    assert {r["impl"] for r in rows} == {"reference"}


# ---- Rules, kept blocks, history ----


def scanned(numerics, n_layers=4):
    def body(x, layer):
        for path in PATHS:
            x = numerics.dot(path, layer, KEY)(x, W / 8, DN)
        return x, None

    return lax.scan(body, X, jnp.arange(n_layers))[0]


def unrolled(numerics, n_layers=4):
    x = X
    for layer in range(n_layers):
        for path in PATHS:
            x = numerics.dot(path, layer, KEY)(x, W / 8, DN)
    return x


SR, BF16 = recipes.get("mxfp4_sr"), recipes.get("bf16")
RULES = (("layers/2/attn/q", recipes.get("none")), ("attn/q", BF16), ("mlp/*", recipes.get("mxfp4")))


def test_the_first_match_wins():
    numerics = Numerics(SR, ("attn/k",), rules=RULES, keep_first=1, keep_last=1, n_layers=4)
    table = {(p, i): numerics.recipe_for(p, i) for p in ("attn/q", "attn/k", "attn/v", "mlp/up") for i in range(4)}
    assert [table["attn/q", i] for i in range(4)] == [
        (BF16, "rule 'attn/q'"),
        (BF16, "rule 'attn/q'"),
        (recipes.get("none"), "rule 'layers/2/attn/q'"),
        (BF16, "rule 'attn/q'"),
    ]
    assert {table["attn/k", i] for i in range(4)} == {(recipes.get("none"), "exempt='attn/k' in the config")}
    assert [table["attn/v", i][1] for i in range(4)] == ["keep_first=1", "", "", "keep_last=1"]
    assert table["attn/v", 0][0] == table["attn/v", 3][0] == BF16
    assert table["attn/v", 1][0] == SR
    assert {table["mlp/up", i][0] for i in range(4)} == {recipes.get("mxfp4")}
    assert numerics.recipe_for("lm_head", None) == (SR, "")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rules": (("attn/quer", BF16),)}, "rule 'attn/quer' matches no layer"),
        ({"rules": (("attn/*", BF16), ("attn/q", SR))}, "rule 'attn/q' matches no layer that an earlier"),
        ({"rules": (("layers/4/attn/q", BF16),)}, "rule 'layers/4/attn/q'"),
        ({"exempt": ("lm_head", "head")}, "exempt pattern 'head'"),
        ({"exempt": ("lm_head",), "rules": (("lm_head", BF16),)}, "rule 'lm_head'"),
        ({"rules": (("mlp/up", BF16), ("mlp/up", SR))}, "rule 'mlp/up' matches no layer that an earlier"),
    ],
)
def test_a_pattern_that_matches_nothing_is_an_error(options, message):
    with pytest.raises(ValueError, match=message):
        Numerics(SR, n_layers=4, **options).check_patterns((*PATHS, "lm_head"))


def test_kept_blocks_must_fit_the_model():
    for options in ({"keep_last": 5}, {"keep_first": 3, "keep_last": 2}, {"keep_first": -1}, {"keep_last": 1, "n_layers": 0}):
        with pytest.raises(ValueError, match="do not fit"):
            Numerics(SR, **{"n_layers": 4} | options)
    with pytest.raises(ValueError, match="n_layers"):
        scanned(Numerics(SR, rules=(("layers/0/*", BF16),)))


def test_scanned_and_unrolled_blocks_follow_the_same_rules():
    numerics = Numerics(SR, rules=RULES, keep_first=1, n_layers=4)
    a, b = jax.jit(lambda: scanned(numerics))(), jax.jit(lambda: unrolled(numerics))()
    plain = jax.jit(lambda: unrolled(Numerics(SR, n_layers=4)))()
    norm = np.linalg.norm
    assert norm(a - b) < 1e-5 * norm(b)
    assert norm(plain - b) > 1e-2 * norm(b)
    rows = census(numerics, scanned)
    names = [r["module"] for r in rows if r["gemm"] == "fprop" and r["module"].endswith("attn/q")]
    assert names == ["layers/0-1,3/attn/q", "layers/2/attn/q"]
    assert {r["module"] for r in rows if r["module"].endswith("attn/v")} == {"layers/0/attn/v", "layers/1-3/attn/v"}


def test_history_is_indexed_by_block_and_its_cotangent_holds_the_maxima():
    numerics = Numerics(recipes.get("fp8_delayed"), n_layers=4)
    history = numerics.init_history((*PATHS, "lm_head"))
    assert {k: v.shape for k, v in history.items()} == dict.fromkeys(PATHS, (4, 3, 2, 4))
    assert Numerics(recipes.get("fp8_current"), n_layers=4).init_history(PATHS) == {}

    def run(history, step=None):
        def body(x, layer):
            return numerics.dot("attn/q", layer, Context(None, history))(x, W / 8, DN), None

        return (lax.scan(body, X, jnp.arange(4))[0] ** 2).sum()

    maxima = jax.jit(jax.grad(run))(history)
    assert (np.asarray(maxima["attn/q"][..., 0]) > 0).all()
    np.testing.assert_array_equal(maxima["attn/q"][0, 0, :, 0], [np.abs(X).max(), np.abs(W / 8).max()])
    assert not np.asarray(maxima["attn/q"][..., 1:]).any()
    assert not np.asarray(maxima["mlp/up"]).any()


@pytest.mark.parametrize("name", ["tetrajet", "quartet", "amd_primus_turbo", "nvidia_nvfp4", "fp8_block"])
@pytest.mark.parametrize("shape", [(32, 20, 64), (32, 64, 20), (20, 64, 64)])
def test_not_strict_runs_every_recipe_on_ragged_shapes(name, shape):
    m, k, n = shape
    numerics = Numerics(recipes.get(name), n_layers=1, strict=False)
    rows = census(numerics, lambda n_: n_.dot("attn/q", 0, KEY)(jnp.ones((m, k)), jnp.ones((k, n)), DN))
    f = lambda x, w: numerics.dot("attn/q", 0, KEY)(x, w, DN).sum()  # noqa: E731
    gradients = jax.grad(f, (0, 1))(jnp.ones((m, k)), jnp.ones((k, n)))
    assert all(np.isfinite(g).all() for g in gradients)
    assert len(rows) == 3
    assert any(row["exempt"] for row in rows) == (name != "fp8_block")
