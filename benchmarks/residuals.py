"""Bytes that the backward pass of one block keeps:  python -m benchmarks.residuals

A Llama block (d 512, 8/4 heads, FFN 1408, batch 4, sequence 256, bfloat16, blockwise attention so that no score matrix counts),
its residuals counted once each, parameters excluded. Limit for one linear in MXFP4: 4 bits + 1/32 byte = 0.531 bytes per
element of x and w; NVFP4: 4 bits + 1/16 byte = 0.5625, less where w has square blocks.
"""

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import timing
from fp4jax import bits, quantized_dot_general, recipes
from fp4jax.numerics import Numerics
from models import llama

CONFIG = {
    "vocab_size": 256, "d_model": 512, "n_layers": 1, "n_heads": 8, "n_kv_heads": 4, "d_ff": 1408, "dtype": "bfloat16",
    "scan_layers": False, "attention": "blockwise", "attention_block": 64,
}  # fmt: skip
RECIPES = ("none", "fp8_current", "mxfp4", "mxfp4_h16", "nvidia_nvfp4")


def kept_bytes(pull, but: list[jax.Array]) -> int:
    """Return the bytes that a vjp function holds, every array once, those in `but` left out."""
    known = {id(x) for x in but}
    held = {id(x): x.nbytes for x in jax.tree.leaves(pull) if isinstance(x, jax.Array) and id(x) not in known}
    return sum(held.values())


def block_bytes(recipe: str, residuals: str, remat: str) -> int:
    config = llama.LlamaConfig(**CONFIG, remat=remat)  # pyright: ignore[reportArgumentType]
    numerics = Numerics(recipes.get(recipe), n_layers=1, residuals=residuals)
    block = llama._remat_block(config)(config, numerics.dot)  # pyright: ignore[reportPrivateUsage]
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 256, 512)), jnp.bfloat16)
    rope, key = llama.rope_tables(config, jnp.zeros((1, 256), jnp.int32)), bits.step_key(0, 0)
    params = llama.Block(config).init(jax.random.key(0), x, 0, None, rope)
    pull = jax.vjp(lambda p, x: block.apply(p, x, 0, key, rope)[0], params, x)[1]
    return kept_bytes(pull, [*jax.tree.leaves(params), *jax.tree.leaves(rope)])


def linear_bytes(recipe: str) -> float:
    """Return bytes per element of x and w that one linear keeps when packed."""
    spec = recipes.get(recipe)
    x, w = jnp.ones((1024, 512), jnp.bfloat16), jnp.ones((512, 512), jnp.bfloat16)
    f = lambda x, w: quantized_dot_general(  # noqa: E731
        x, w, (((1,), (0,)), ((), ())), recipe=spec, key=bits.step_key(0, 0), residuals="packed"
    )
    return kept_bytes(jax.vjp(f, x, w)[1], []) / (x.size + w.size)


def main() -> None:
    timing.print_header(1)
    tokens, base = 4 * 256, block_bytes("none", "operands", "none")
    print(f"{'recipe':14} {'linear':>7}   bytes per token and block, and share of `none` in BF16 without remat")
    print(f"{'':24}" + "".join(f"{f'{r}, remat {m}':>28}" for r, m in CASES))
    for recipe in RECIPES:
        cells = []
        for residuals, remat in CASES:
            held = block_bytes(recipe, residuals, remat)
            cells.append(f"{held / tokens:16,.0f} ({held / base:7.1%})")
        packed = linear_bytes(recipe) if recipe != "none" else 2.0
        print(f"{recipe:14} {packed:7.3f}  " + "".join(f"{c:>28}" for c in cells), flush=True)


CASES = (("operands", "none"), ("packed", "none"), ("packed", "packed"), ("operands", "full"))

if __name__ == "__main__":
    main()
