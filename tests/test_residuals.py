"""Packed residuals: the same gradients bit for bit, fewer bytes, one copy of a shared input, refusals."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same

from fp4jax import dot, quantized_dot_general, recipes
from fp4jax.numerics import Numerics
from fp4jax.recipe import override
from models import llama

DN = (((1,), (0,)), ((), ()))
KEY = jax.random.key(7)
X, W, DY = (
    np.random.default_rng(i).normal(size=s).astype(np.float32) for i, s in enumerate(((256, 128), (128, 384), (256, 384)))
)
PACKABLE = [n for n in recipes.names() if n not in ("fp8_delayed", "quartet", "mxfp4_mean_split")]


def pull_of(name, residuals, dtype=jnp.float32, shared=None, x=X, w=W):
    recipe = recipes.get(name)
    key = KEY if recipe.needs_key else None
    f = lambda x, w: quantized_dot_general(x, w, DN, recipe=recipe, key=key, residuals=residuals, shared=shared)  # noqa: E731
    return jax.vjp(f, jnp.asarray(x, dtype), jnp.asarray(w, dtype))


def held_bytes(pull):
    return sum({id(x): x.nbytes for x in jax.tree.leaves(pull)}.values())


@functools.partial(jax.jit, static_argnums=(0, 1))
def run(name, residuals, x, w, dy):
    y, pull = pull_of(name, residuals, x=x, w=w)
    return y, *pull(dy)


@pytest.mark.parametrize("name", PACKABLE)
def test_one_linear_has_the_same_gradients_bit_for_bit(name):
    for a, b in zip(run(name, "operands", X, W, DY), run(name, "packed", X, W, DY), strict=True):
        assert_same(a, b)


LIMITS = {"mxfp4": 0.54, "mxfp4_h16": 0.54, "mxfp4_sr": 0.54, "nvidia_nvfp4": 0.57, "fp4_all_the_way": 0.57}


@pytest.mark.parametrize(("name", "limit"), LIMITS.items())
def test_bytes_per_element(name, limit):
    packed, whole = (held_bytes(pull_of(name, r, jnp.bfloat16)[1]) / (X.size + W.size) for r in ("packed", "operands"))
    assert 0.5 < packed <= limit
    assert whole >= 2


def test_dots_of_one_input_keep_one_copy():
    shared = {}
    pulls = [pull_of("mxfp4_h16", "packed", shared=shared)[1] for _ in range(3)]  # three different arrays: nothing to share
    apart = held_bytes(pulls)
    x, w = jnp.asarray(X), jnp.asarray(W)

    def three(x, w, shared):
        options = {"recipe": recipes.get("mxfp4_h16"), "residuals": "packed", "shared": shared}
        return sum(quantized_dot_general(x, w, DN, **options) for _ in range(3))

    together, separate = (held_bytes(jax.vjp(lambda x, w, s=s: three(x, w, s), x, w)[1]) for s in ({}, None))
    one_copy = X.size * (0.5 + 1 / 32)
    assert separate - together == 2 * one_copy
    assert apart >= separate
    a, b = (jax.grad(lambda x, w, s=s: (three(x, w, s) ** 2).sum(), (0, 1))(x, w) for s in ({}, None))
    jax.tree.map(assert_same, a, b)


def test_dots_that_contract_one_input_differently_share_nothing():
    x, options = jnp.asarray(X[:128]), {"recipe": recipes.get("mxfp4"), "residuals": "packed"}

    def both(w, shared):
        other = quantized_dot_general(x, w, (((0,), (0,)), ((), ())), shared=shared, **options)
        return quantized_dot_general(x, w, DN, shared=shared, **options) + 2 * other

    a, b = (jax.grad(lambda w, s=s: (both(w, s) ** 2).sum())(jnp.asarray(W)) for s in ({}, None))
    assert_same(a, b)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fprop.lhs.scale_rule": "quest"}, "quest"),
        ({"wgrad.split": "mean"}, "split"),
        ({"fprop.lhs.format": "fp8_e4m3", "fprop.lhs.scale_rule": "delayed"}, "delayed"),
    ],
)
def test_what_needs_the_operands_is_refused(changes, message):
    recipe = override(recipes.get("mxfp4"), changes)
    with pytest.raises(ValueError, match=f"residuals='packed'.*{message}"):
        quantized_dot_general(X, W, DN, recipe=recipe, history=jnp.zeros((3, 2, 4)), residuals="packed")
    with pytest.raises(ValueError, match="residuals='nope'"):
        quantized_dot_general(X, W, DN, recipe=recipes.get("mxfp4"), residuals="nope")
    with pytest.raises(ValueError, match="residuals='nope'"):
        Numerics(recipes.get("mxfp4"), residuals="nope")


def test_a_model_under_scan_and_remat_has_the_same_gradients():
    """To 1e-5 for bfloat16-free float32 blocks: what a fusion computes again may differ in its last bit, a code hardly ever."""
    tokens = jnp.asarray(np.random.default_rng(3).integers(0, 256, (2, 64)))
    shape = {"vocab_size": 256, "d_model": 64, "n_layers": 2, "n_heads": 2, "n_kv_heads": 1, "d_ff": 128}
    plain = llama.Llama(llama.LlamaConfig(**shape))
    params = plain.init(jax.random.key(0), tokens)

    def gradient(residuals, remat):
        numerics = Numerics(recipes.get("mxfp4_h16"), n_layers=2, residuals=residuals)
        model = llama.Llama(llama.LlamaConfig(**shape, remat=remat), numerics.dot)
        loss = lambda p: model.apply(p, tokens, tokens, method="token_losses").mean()  # noqa: E731
        return jax.jit(jax.grad(loss))(params), jax.make_jaxpr(jax.grad(loss))(params)

    expected, _ = gradient("operands", "none")
    packed = [gradient("packed", remat) for remat in ("none", "packed")]
    for got, jaxpr in packed:
        assert "fp4_residual" in str(jaxpr)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            assert np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(b)


def test_the_model_and_the_dot_agree_on_the_name():
    assert llama.PACKED_NAME == dot.RESIDUAL_NAME
