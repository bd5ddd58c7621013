"""Flax NNX adapter: `nnx.Linear(..., dot_general=QuantizedDotGeneral(recipe, path="attn/q", rngs=rngs))`.

The adapter is a module that holds what the random bits depend on, a key and the optimizer step. `set_step(model, step)` once
per step keeps redrawn signs and stochastic rounding in time; the draws then do not depend on mesh, remat or microbatching.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from fp4jax import bits, dot
from fp4jax.ops import matmul
from fp4jax.recipe import Recipe


class NumericsState(nnx.Variable):
    """Key and step of an adapter: no parameter, so optimizers and `nnx.grad` leave it alone."""


class QuantizedDotGeneral(nnx.Module):
    """A `lax.dot_general` that follows `recipe`; path: name of the layer, which enters its random bits.

    rngs: a key is taken from the stream "fp4" (or "default"), needed when the recipe draws random bits. Raises ValueError for
    delayed scaling, whose history has no place here, and where a key is needed and missing.
    """

    def __init__(self, recipe: Recipe, *, path: str = "", rngs: nnx.Rngs | None = None, impl: str = "auto"):
        if recipe.needs_history:
            raise ValueError("delayed scaling needs a history, which the NNX adapter does not hold: use current scaling")
        if recipe.needs_key and rngs is None:
            raise ValueError("the recipe draws random bits (stochastic rounding or redrawn signs): pass rngs=")
        matmul.check_impl(impl)
        self.recipe, self.path, self.impl = recipe, path, impl
        words = bits.as_key(rngs.fp4()).words if recipe.needs_key and rngs is not None else jnp.zeros(2, jnp.uint32)
        self.key, self.step = NumericsState(words), NumericsState(jnp.zeros((), jnp.uint32))

    def __call__(
        self, lhs, rhs, dimension_numbers, precision=None, preferred_element_type=None, *, out_sharding=None
    ) -> jax.Array:
        if out_sharding is not None:
            raise ValueError("out_sharding= does not apply to a quantized dot: constrain its result instead")
        key = None
        if self.recipe.needs_key:
            place = bits.fold_in(bits.Key(self.key[...]), bits.path_word(self.path))
            key = bits.fold_in(place, self.step[...])._replace(place=place.words)
        return dot.quantized_dot_general(
            lhs, rhs, dimension_numbers, precision, preferred_element_type, recipe=self.recipe, key=key, impl=self.impl
        )


def set_step(model: nnx.Module, step: jax.Array | int) -> None:
    """Set the optimizer step of every adapter in `model`."""
    for _, node in nnx.iter_graph(model):
        if isinstance(node, QuantizedDotGeneral):
            node.step[...] = jnp.asarray(step, jnp.uint32)
