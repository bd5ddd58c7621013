"""Linen adapter: Dense and DenseGeneral under scan and remat, draws from the rng stream "fp4", gradients of the direct call."""

import flax.errors
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp4jax import dot, quantized_dot_general, recipes
from fp4jax.linen import QuantizedDotGeneral, dot_general_cls

B, T, D, HEADS = 2, 32, 64, 4
X = np.random.default_rng(0).normal(size=(B, T, D)).astype(np.float32)
DY = np.random.default_rng(1).normal(size=(B, T, D)).astype(np.float32)
RNGS = {"fp4": jax.random.key(3)}


class Block(nn.Module):
    recipe: str

    @nn.compact
    def __call__(self, x, _=None):
        options = {"use_bias": False, "dot_general_cls": dot_general_cls(recipes.get(self.recipe))}
        h = nn.DenseGeneral((HEADS, D // HEADS), **options)(x)
        return x + nn.DenseGeneral(D, axis=(-2, -1), **options)(jnp.tanh(h)), None


class Stack(nn.Module):
    recipe: str
    remat: bool = False
    depth: int = 2

    @nn.compact
    def __call__(self, x):
        block = nn.remat(Block) if self.remat else Block
        split = {"params": True, "fp4": True}
        blocks = nn.scan(block, variable_axes={"params": 0}, split_rngs=split, length=self.depth)
        return blocks(self.recipe, name="blocks")(x, None)[0]


def value_and_grad(model, params, rngs):
    loss = lambda p: (model.apply(p, X, rngs=rngs) * DY).sum()  # noqa: E731
    return jax.jit(jax.value_and_grad(loss))(params)


@pytest.mark.parametrize("name", ["mxfp4", "mxfp4_sr", "mxfp4_rht16"])
def test_scanned_stack_trains_and_remat_draws_the_same_bits(name):
    rngs = RNGS if recipes.get(name).needs_key else {}
    plain, remat = Stack(name), Stack(name, remat=True)
    params = plain.init({"params": jax.random.key(0), **RNGS}, X)
    loss, grads = value_and_grad(plain, params, rngs)
    assert all(np.isfinite(g).all() and np.abs(g).max() > 0 for g in jax.tree.leaves(grads))
    again_loss, again = value_and_grad(remat, params, rngs)
    np.testing.assert_allclose(loss, again_loss, rtol=1e-6)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(again), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(a).max())
    exact = value_and_grad(Stack("none"), params, {})[1]
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(exact), strict=True):
        assert 0.01 < np.linalg.norm(a - b) / np.linalg.norm(b) < 0.7
    if rngs:
        other = value_and_grad(plain, params, {"fp4": jax.random.key(4)})[1]
        assert all((a != b).mean() > 0.9 for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(other), strict=True))


@pytest.mark.parametrize("name", ["mxfp4", "mxfp4_h16", "mxfp4_sr"])
@pytest.mark.parametrize("general", [False, True])
def test_gradients_equal_the_direct_call(name, general, monkeypatch):
    recipe = recipes.get(name)
    options = {"use_bias": False, "dot_general_cls": dot_general_cls(recipe)}
    layer = nn.DenseGeneral(D, axis=(-2, -1), **options) if general else nn.Dense(D, **options)
    x = X.reshape(B, T, HEADS, D // HEADS) if general else X
    dn = (((2, 3), (0, 1)), ((), ())) if general else (((2,), (0,)), ((), ()))
    params = layer.init({"params": jax.random.key(0), **RNGS}, x)
    kernel = params["params"]["kernel"]
    seen = []
    original = dot.quantized_dot_general

    def spy(*args, key, **kwargs):
        seen.append((args[2], key))
        return original(*args, key=key, **kwargs)

    monkeypatch.setattr(dot, "quantized_dot_general", spy)
    rngs = RNGS if recipe.needs_key else {}
    y, pull = jax.vjp(lambda k, x: layer.apply({"params": {"kernel": k}}, x, rngs=rngs), kernel, x)
    ((_, key),) = seen
    assert (key is None) == (not recipe.needs_key)
    w = kernel.reshape(HEADS, D // HEADS, D) if general else kernel
    want, direct = jax.vjp(lambda w, x: quantized_dot_general(x, w, dn, recipe=recipe, key=key), w, x)
    np.testing.assert_array_equal(y, want)
    for a, b in zip(pull(DY), direct(DY), strict=True):
        np.testing.assert_array_equal(a.ravel(), b.ravel())


def test_the_stream_is_needed_only_for_draws_and_every_call_draws_anew():
    params = nn.Dense(D, dot_general_cls=dot_general_cls(recipes.get("mxfp4_sr"))).init(
        {"params": jax.random.key(0), **RNGS}, X
    )
    layer = nn.Dense(D, dot_general_cls=dot_general_cls(recipes.get("mxfp4_sr")))
    with pytest.raises(flax.errors.InvalidRngError, match="fp4"):
        layer.apply(params, X)
    a, b = (layer.apply(params, X, rngs={"fp4": jax.random.key(s)}) for s in (0, 0))
    np.testing.assert_array_equal(a, b)
    assert (a != layer.apply(params, X, rngs={"fp4": jax.random.key(1)})).mean() > 0.9
    nn.Dense(D, dot_general_cls=dot_general_cls(recipes.get("mxfp4_h16"))).apply(params, X)

    class Twice(nn.Module):
        @nn.compact
        def __call__(self, x, w):
            product = QuantizedDotGeneral(recipes.get("mxfp4_sr"))
            dn = (((2,), (0,)), ((), ()))
            return product(x, w, dn), product(x, w, dn)

    first, second = Twice().apply({}, X, params["params"]["kernel"], rngs=RNGS)
    assert (first != second).mean() > 0.9


def test_the_none_recipe_is_the_program_of_plain_dense_and_impl_is_passed_on():
    x = jnp.asarray(X)
    plain, hooked = nn.Dense(D), nn.Dense(D, dot_general_cls=dot_general_cls(recipes.get("none")))
    params = plain.init(jax.random.key(0), x)
    lower = lambda m: jax.jit(lambda p, x: m.apply(p, x)).lower(params, x).as_text()  # noqa: E731
    assert lower(plain) == lower(hooked)
    with pytest.raises(ValueError, match="impl='cuda'"):
        nn.Dense(D, dot_general_cls=dot_general_cls(recipes.get("mxfp4"), impl="cuda")).apply(params, x)
