"""Cost of the casts on this device:  python -m benchmarks.quantize [--rounds=15]

Limit: quantize-dequantize and Hadamard read and write each element once from memory, as a copy does; a ratio near 1 is
bandwidth-bound. The linear layer is forward and backward with three GEMMs, against the plain one.
"""

import argparse
import functools

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks import timing
from fp4jax import OperandSpec, bits, hadamard, quantized_dot_general, recipes
from fp4jax.ops.quantize import fake_quantize

SIZE = 4096
LINEAR_MKN = (4096, 1024, 1024)


def casts() -> dict:
    """Casts of a float32 [4096, 4096] along both axes."""
    x = jax.random.normal(jax.random.key(0), (SIZE, SIZE))
    rne, sr = OperandSpec("mxfp4"), OperandSpec("mxfp4", rounding="sr")
    key = bits.step_key(0, 0)
    functions = {"copy": lambda x: x * jnp.float32(1.0000001)}
    for axis in (0, 1):
        functions |= {
            f"mxfp4 axis {axis}": lambda x, axis=axis: fake_quantize(x, rne, axis),
            f"mxfp4 sr axis {axis}": lambda x, axis=axis: fake_quantize(x, sr, axis, key),
            f"H16 axis {axis}": lambda x, axis=axis: hadamard(x, 16, axis),
            f"H16 + mxfp4 axis {axis}": lambda x, axis=axis: fake_quantize(hadamard(x, 16, axis), rne, axis),
        }
    return {name: functools.partial(jax.jit(f), x) for name, f in functions.items()}


def linears() -> dict:
    """One linear layer, y, dx and dw, plain and by recipe."""
    m, k, n = LINEAR_MKN
    x, w, dy = (jax.random.normal(jax.random.key(i), s) for i, s in enumerate([(m, k), (k, n), (m, n)]))

    def make(dot):
        def forward_backward(x, w, dy):
            y, pullback = jax.vjp(dot, x, w)
            return y, pullback(dy)

        return functools.partial(jax.jit(forward_backward), x, w, dy)

    dims = (((1,), (0,)), ((), ()))
    functions = {"linear plain": make(lambda x, w: lax.dot_general(x, w, dims))}
    for name in ("fp8_current", "mxfp4", "mxfp4_sr", "mxfp4_h16"):
        recipe = recipes.get(name)
        key = jax.random.key(0) if recipe.needs_key else None
        dot = lambda x, w, recipe=recipe, key=key: quantized_dot_general(x, w, dims, recipe=recipe, key=key)  # noqa: E731
        functions[f"linear {name}"] = make(dot)
    return functions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    timing.print_header(rounds)
    seconds = timing.interleave(casts(), rounds=rounds)
    limits = {"mxfp4 axis": 1.4, "H16 + mxfp4 axis": 2.2}
    timing.print_ratios(seconds, [(name, "copy", limits.get(name[:-2])) for name in seconds])
    seconds = timing.interleave(linears(), rounds=rounds)
    timing.print_ratios(seconds, [(n, "linear plain", 1.25 if n == "linear mxfp4" else None) for n in seconds])


if __name__ == "__main__":
    main()
