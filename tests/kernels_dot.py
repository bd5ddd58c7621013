"""The quantized dot on kernels, in Triton's interpreter, against the reference. Run by tests/test_kernels.py."""

import functools

import interpreter
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from fp4jax import GemmSpec, OperandSpec, Recipe, bits, quantized_dot_general, recipes
from fp4jax.ops import matmul
from fp4jax.ops.kernels import Partition
from fp4jax.recipe import GEMMS

DN = (((1,), (0,)), ((), ()))
KEY = bits.step_key(1, 2)
M, K, N = 128, 256, 384


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch):
    with interpreter.installed(monkeypatch):
        yield


def runs_on_kernels(name):
    specs = [getattr(recipes.get(name), gemm) for gemm in GEMMS]
    return any({s.lhs.format, s.rhs.format} in ({"mxfp4"}, {"nvfp4"}) for s in specs)


def operands(seed=0, dtype=jnp.float32):
    """Integers that are lossless in every format and rotation of size 16 or less, times a power of two per row and column."""
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in ((M, K), (K, N), (M, N))]


def value_and_grads(x, w, dy, *, recipe, key=KEY, **how):
    key = key if recipe.needs_key else None
    y, vjp = jax.vjp(lambda x, w: quantized_dot_general(x, w, DN, recipe=recipe, key=key, **how), x, w)
    return y, *vjp(dy)


def bound(a, b):
    """√K · 2⁻²⁴ · (|A|·|B|), doubled: both sides sum in FP32, each in its own order."""
    return 2 * np.sqrt(a.shape[1]) * 2.0**-24 * (np.abs(a) @ np.abs(b))


@pytest.mark.parametrize("residuals", ["operands", "packed"])
@pytest.mark.parametrize("name", [n for n in recipes.names() if runs_on_kernels(n)])
def test_every_recipe_with_fp4_gives_the_reference_up_to_summation_order(name, residuals):
    recipe = recipes.get(name)
    specs = [spec for g in GEMMS for spec in (getattr(recipe, g).lhs, getattr(recipe, g).rhs)]
    if residuals == "packed" and (any(s.scale_rule == "quest" for s in specs) or recipe.fprop.split != "none"):
        pytest.skip("residuals='packed' does not apply")
    x, w, dy = operands()
    run = functools.partial(value_and_grads, x, w, dy, recipe=recipe, residuals=residuals)
    for got, wanted in zip(run(impl="triton"), run(impl="reference"), strict=True):
        error = np.linalg.norm(got - wanted) / np.linalg.norm(wanted)
        assert error < (1e-5 if not any(getattr(recipe, g).rotation.size for g in GEMMS) else 2e-3), (name, error)
