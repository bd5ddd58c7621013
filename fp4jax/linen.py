"""Flax Linen adapter: `nn.Dense(..., dot_general_cls=dot_general_cls(recipe))` in any Linen model.

A model that knows its layer index should use `fp4jax.numerics.Numerics.dot` instead: there the random bits are the same
for scanned and unrolled blocks. Here they come from Linen's own rng stream "fp4" (`rngs={"fp4": key}` in apply), which
gives scanned and unrolled layers different draws.
"""

import functools
from collections.abc import Callable

import flax.linen as nn
import jax

from fp4jax import dot
from fp4jax.recipe import Recipe


class QuantizedDotGeneral(nn.Module):
    """A `lax.dot_general` that follows `recipe`; draws from the rng stream "fp4" when the recipe needs random bits."""

    recipe: Recipe
    impl: str = "auto"

    @nn.compact
    def __call__(self, lhs, rhs, dimension_numbers, precision=None, preferred_element_type=None) -> jax.Array:
        key = self.make_rng("fp4") if self.recipe.needs_key else None
        return dot.quantized_dot_general(
            lhs, rhs, dimension_numbers, precision, preferred_element_type, recipe=self.recipe, key=key, impl=self.impl
        )


def dot_general_cls(recipe: Recipe, impl: str = "auto") -> Callable[[], nn.Module]:
    """Return what `nn.Dense` and `nn.DenseGeneral` take as `dot_general_cls`."""
    return functools.partial(QuantizedDotGeneral, recipe=recipe, impl=impl)
