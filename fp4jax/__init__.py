"""fp4jax: 4-bit floating-point training numerics for JAX.

    quantize(x, spec, axis, *, key=None)     one operand -> QTensor (codes, scale, dequantize())
    quantized_dot_general(...)               lax.dot_general whose three GEMMs follow a Recipe
    Recipe, GemmSpec, OperandSpec, Rotation  the typed recipe;  recipes.get(name) returns a published one
    hadamard(x, size, axis, signs=None)      block Hadamard rotation

All work eagerly and under jit, on plain arrays. `fp4jax.linen` adapts them to Flax Linen.
"""

from fp4jax import recipes
from fp4jax.dot import quantized_dot_general
from fp4jax.ops.qtensor import QTensor
from fp4jax.ops.quantize import quantize
from fp4jax.recipe import GemmSpec, OperandSpec, Recipe, Rotation
from fp4jax.rotation import hadamard

__all__ = [
    "GemmSpec",
    "OperandSpec",
    "QTensor",
    "Recipe",
    "Rotation",
    "hadamard",
    "quantize",
    "quantized_dot_general",
    "recipes",
]
