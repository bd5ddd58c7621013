"""NNX adapter: values and gradients of the direct call, draws per path and step, under jit; refusals. A foreign Linen model."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fp4jax import bits, proof, quantized_dot_general, recipes
from fp4jax.linen import dot_general_cls
from fp4jax.nnx import QuantizedDotGeneral, set_step
from fp4jax.recipe import GEMMS

X = np.random.default_rng(0).normal(size=(4, 32, 64)).astype(np.float32)
DN = (((2,), (0,)), ((), ()))


class MLP(nnx.Module):
    def __init__(self, recipe, rngs):
        def linear(name, n_in, n_out):
            return nnx.Linear(n_in, n_out, dot_general=QuantizedDotGeneral(recipe, path=name, rngs=rngs), rngs=rngs)

        self.up, self.down = linear("up", 64, 128), linear("down", 128, 64)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


def loss(model, x):
    return (model(x) ** 2).mean()


def test_equals_the_direct_call():
    recipe = recipes.get("mxfp4_sr")
    linear = nnx.Linear(
        64, 96, use_bias=False, rngs=nnx.Rngs(0), dot_general=QuantizedDotGeneral(recipe, path="q", rngs=nnx.Rngs(7))
    )
    set_step(linear, 5)
    key = bits.fold_in(bits.as_key(nnx.Rngs(7).fp4()), bits.path_word("q"), 5)
    expected = quantized_dot_general(X, linear.kernel[...], DN, recipe=recipe, key=key)
    np.testing.assert_array_equal(linear(jnp.asarray(X)), expected)


@pytest.mark.parametrize("name", ["mxfp4_h16", "mxfp4_sr", "mxfp4_rht16", "nvidia_nvfp4"])
def test_trains_under_jit_with_new_draws_each_step(name):
    model = MLP(recipes.get(name), nnx.Rngs(0, fp4=3))
    grad = nnx.jit(nnx.grad(loss))
    first, again = grad(model, X), grad(model, X)
    set_step(model, 1)
    later = grad(model, X)
    assert set(nnx.to_flat_state(first).paths) == {(m, p) for m in ("up", "down") for p in ("kernel", "bias")}
    a, b, c = (np.asarray(g["up"]["kernel"][...]) for g in (first, again, later))
    np.testing.assert_array_equal(a, b)
    assert np.array_equal(a, c) == (not recipes.get(name).needs_key)
    plain = np.asarray(nnx.grad(loss)(MLP(recipes.get("none"), nnx.Rngs(0, fp4=3)), X)["up"]["kernel"][...])
    assert 0.01 < np.linalg.norm(a - plain) / np.linalg.norm(plain) < 0.5


def test_layers_of_equal_shape_draw_differently():
    rngs = nnx.Rngs(0)
    adapters = [QuantizedDotGeneral(recipes.get("mxfp4_sr"), path=p, rngs=rngs) for p in ("q", "q", "k")]
    w = np.random.default_rng(1).normal(size=(64, 64)).astype(np.float32)
    results = [np.asarray(a(X, w, DN)) for a in adapters]
    assert not any(np.array_equal(results[i], results[j]) for i, j in ((0, 1), (0, 2), (1, 2)))


def test_signs_per_layer_stay_the_same_at_every_step():
    recipe = recipes.parse("mxfp4_rht16:" + ",".join(f"{gemm}.rotation.signs=per_layer" for gemm in GEMMS))
    rngs = nnx.Rngs(0)
    one, other = (QuantizedDotGeneral(recipe, path="q", rngs=rngs) for _ in range(2))
    w = np.random.default_rng(1).normal(size=(64, 64)).astype(np.float32)
    first = np.asarray(one(X, w, DN))
    one.step[...] = jnp.uint32(1)
    np.testing.assert_array_equal(one(X, w, DN), first)
    assert not np.array_equal(other(X, w, DN), first)


def test_refusals():
    with pytest.raises(ValueError, match="rngs="):
        QuantizedDotGeneral(recipes.get("mxfp4_sr"))
    with pytest.raises(ValueError, match="delayed scaling"):
        QuantizedDotGeneral(recipes.get("fp8_delayed"))
    with pytest.raises(ValueError, match="impl='nope'"):
        QuantizedDotGeneral(recipes.get("mxfp4"), impl="nope")
    with pytest.raises(ValueError, match="out_sharding"):
        QuantizedDotGeneral(recipes.get("mxfp4"))(X, jnp.ones((64, 64)), DN, out_sharding=1)


class SomeoneElses(nn.Module):
    """A Linen model that knows nothing of fp4jax but that Dense takes a dot_general_cls."""

    dense_cls: object

    @nn.compact
    def __call__(self, x):
        h = nn.DenseGeneral((4, 16), name="heads", dot_general_cls=self.dense_cls)(nn.LayerNorm()(x))
        scores = nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", h, h))
        mixed = jnp.einsum("bhqk,bkhd->bqhd", scores, h)
        return x + nn.DenseGeneral(x.shape[-1], axis=(-2, -1), name="out", dot_general_cls=self.dense_cls)(mixed)


@pytest.mark.parametrize("name", ["mxfp4_h16", "nvidia_nvfp4", "quartet"])
def test_a_foreign_linen_model_is_quantized_by_dot_general_cls_alone(name):
    recipe = recipes.get(name)
    model, plain = SomeoneElses(dot_general_cls(recipe)), SomeoneElses(None)
    params = plain.init(jax.random.key(0), X)
    rngs = {"fp4": jax.random.key(1)} if recipe.needs_key else {}
    f = lambda m: lambda p: (m.apply(p, X, rngs=rngs) ** 2).mean()  # noqa: E731
    dots = proof.count_dots(jax.make_jaxpr(jax.grad(f(model)))(params))
    assert dots["grid × grid"] == 6
    assert dots["plain × plain"] == proof.count_dots(jax.make_jaxpr(jax.grad(f(plain)))(params))["plain × plain"] - 6
    a, b = (jax.grad(f(m))(params) for m in (model, plain))
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert np.linalg.norm(x - y) < 0.7 * np.linalg.norm(y)
