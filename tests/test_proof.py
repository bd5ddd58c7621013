"""The jaxpr check counts what really runs: every recipe in a whole model, and a cast that is missing is seen."""

from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from fp4jax import proof, quantized_dot_general, recipes
from fp4jax.numerics import Context, Numerics
from fp4jax.ops import quantize
from fp4jax.recipe import GEMMS
from models import llama

TOKENS = jnp.zeros((4, 64), jnp.int32)
KEPT = 3  # blocks


def model_dots(numerics, *, scan=True, remat="none"):
    """Count the dots of a training step's loss and gradient."""
    config = llama.LlamaConfig(
        vocab_size=256, d_model=128, n_layers=KEPT, n_heads=4, n_kv_heads=4, d_ff=256, scan_layers=scan, remat=remat
    )
    model = llama.Llama(config, numerics and numerics.dot)
    params = jax.eval_shape(lambda: llama.Llama(config).init(jax.random.key(0), TOKENS))
    history = numerics.init_history(llama.LINEAR_PATHS) if numerics else {}

    def loss(params, key):
        return model.apply(params, TOKENS, TOKENS, Context(key, history), method="token_losses").sum()

    key = jax.eval_shape(lambda: numerics_key())
    return proof.count_dots(jax.make_jaxpr(jax.grad(loss))(params, key))


def numerics_key():
    from fp4jax import bits

    return bits.step_key(0, 0)


def word(spec):
    return "grid" if spec.element else "bf16" if spec.format == "bf16" else "plain"


def dots_of(recipe):
    return Counter(f"{word(getattr(recipe, g).lhs)} × {word(getattr(recipe, g).rhs)}" for g in GEMMS)


def times(counter, n):
    return Counter({k: v * n for k, v in counter.items()})


@pytest.fixture(scope="module")
def plain():
    return model_dots(None)["plain × plain"]


@pytest.mark.parametrize("name", recipes.names())
def test_every_linear_of_a_model_runs_as_its_recipe_says(name, plain):
    recipe = recipes.get(name)
    rank_one = sum(7 for g in GEMMS if getattr(recipe, g).split != "none")  # the part that is split off, not quantized
    expected = times(dots_of(recipe), 7) + Counter({"plain × plain": plain - 21 + rank_one})
    assert model_dots(Numerics(recipe, n_layers=KEPT)) == expected


def test_unrolled_rematerialised_and_partly_kept(plain):
    recipe = recipes.get("mxfp4_h16")
    unrolled = model_dots(Numerics(recipe, n_layers=KEPT), scan=False)
    assert unrolled["grid × grid"] == KEPT * 21
    assert (
        model_dots(Numerics(recipe, n_layers=KEPT), remat="full")["grid × grid"] == 21 + 6
    )  # fprop runs twice, but for the last one
    kept = model_dots(Numerics(recipe, n_layers=KEPT, keep_last=1), scan=False)
    assert (kept["grid × grid"], kept["bf16 × bf16"]) == (2 * 21, 21)
    scanned = model_dots(Numerics(recipe, n_layers=KEPT, keep_last=1))  # both branches of each switch
    assert (scanned["grid × grid"], scanned["bf16 × bf16"]) == (21, 21)
    ruled = model_dots(Numerics(recipe, n_layers=KEPT, rules=(("mlp/*", recipes.parse(":fprop=bf16", recipe)),)))
    assert (ruled["grid × grid"], ruled["bf16 × bf16"]) == (21 - 3, 3)


def test_a_missing_cast_is_seen(monkeypatch):
    real = quantize.fake_quantize

    def forgets_dy_of_wgrad(x, spec, axis, *args):
        return x.astype(jnp.float32) if x.shape == (64, 32) and axis == 0 else real(x, spec, axis, *args)

    def dots():
        f = lambda x, w: quantized_dot_general(x, w, (((1,), (0,)), ((), ())), recipe=recipes.get("mxfp4")).sum()  # noqa: E731
        return proof.count_dots(jax.grad(f, (0, 1)), jnp.ones((64, 128)), jnp.ones((128, 32)))

    assert dots() == {"grid × grid": 3}
    monkeypatch.setattr(quantize, "fake_quantize", forgets_dy_of_wgrad)
    assert dots() == {"grid × grid": 2, "grid × plain": 1}


def test_a_rounding_followed_by_other_arithmetic_does_not_count():
    x = jnp.ones((4, 4))
    for spoil in (lambda v: v + 0.1, jnp.exp, lambda v: v @ x, lambda v: v / x):
        assert proof.count_dots(lambda a, s=spoil: s(jnp.round(a)) @ jnp.round(x), x)["grid × grid"] == 0
    assert proof.count_dots(lambda a: (jnp.round(a) * 0.5).T @ jnp.round(a), x) == {"grid × grid": 1}


def test_what_is_only_partly_rounded_does_not_count():
    w, x = jnp.ones((4, 4)), jnp.ones((4, 4))
    functions = [
        lambda x: (x * jnp.round(2 * x)) @ w,
        lambda x: (x * jnp.floor(jnp.max(jnp.abs(x)))) @ w,  # scaled, never rounded
        lambda x: jnp.where(x > 1e9, jnp.round(x), x) @ w,
        lambda x: jnp.maximum(jnp.round(x), x) @ w,
        lambda x: jnp.concatenate([jnp.round(x[:, :1]), x[:, 1:]], 1) @ w,
        lambda x: lax.cond(x[0, 0] > 0, jnp.round, lambda x: x, x) @ w,
        lambda x: lax.scan(lambda c, _: (c + 0.1, c @ w), jnp.round(x), None, length=3)[1],
        lambda x: lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] @ w), (0, jnp.round(x)))[1],
    ]
    for function in functions:
        assert proof.count_dots(function, x) == {"plain × plain": 1}
    conv = lambda x: lax.conv(x[None, None], x[None, None], (1, 1), "SAME")  # noqa: E731
    assert proof.count_dots(conv, x) == {"plain × plain": 1}


def test_packed_residuals_are_seen_through():
    f = lambda x, w: quantized_dot_general(  # noqa: E731
        x, w, (((1,), (0,)), ((), ())), recipe=recipes.get("nvidia_nvfp4"), key=jax.random.key(0), residuals="packed"
    ).sum()
    assert proof.count_dots(jax.grad(f, (0, 1)), jnp.ones((64, 128)), jnp.ones((128, 32))) == {"grid × grid": 3}
