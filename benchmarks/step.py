"""Cost of a whole optimizer step on this device:  python -m benchmarks.step [--rounds=15] [--scan]

A 5 M-parameter float32 Llama (d 256, 4 layers, 4/2 heads, FFN 704, sequence 256, batch 16, vocabulary 4096, AdamW). Base:
the same arithmetic written by hand in plain JAX, with the same linears and the same loop over layers. Limit: 6·N FLOPs per
token in the linears; everything else should hide behind them.
"""

import argparse
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import timing
from models import llama
from train import config, sharding, step

RECIPES = {"none": 1.05, "fp8_current": None, "mxfp4": 1.20, "mxfp4_sr": None, "mxfp4_h16": 1.35}


def settings_for(recipe: str, *, scan: bool) -> config.Settings:
    c: Any = config.default_config()
    c.quant.recipe = recipe
    c.model.update(vocab_size=4096, d_model=256, n_layers=4, n_heads=4, n_kv_heads=2, d_ff=704, scan_layers=scan)
    c.data.seq_len, c.train.batch_size = 256, 16
    return config.resolve(c)


def our_step(recipe: str, tokens: jax.Array, *, scan: bool):
    """Return a function that runs one step of fp4jax's trainer on its own state."""
    settings = settings_for(recipe, scan=scan)
    mesh = sharding.make_mesh(sharding.MeshConfig(fsdp=1))
    train_step = step.make_train_step(settings, mesh)
    state = [step.init_state(settings, mesh)]

    def run():
        state[0], metrics = train_step(state[0], tokens)
        return metrics

    return run


def minimal_step(tokens: jax.Array, *, scan: bool):
    """Return the hand-written base: no Flax, no optax, no hooks; forward, loss, backward, clip and AdamW in one jit."""
    settings = settings_for("none", scan=scan)
    c, o = settings.model, settings.optimizer
    init = llama.Llama(c).init(jax.random.key(0), tokens[:, :-1])["params"]
    heads = functools.partial(jnp.reshape)
    freq = np.asarray(llama.rope_frequencies(c), np.float32)

    def norm(x, scale):
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + c.norm_eps) * scale[None, None]

    def rope(x):
        angle = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None] * freq[None]
        cos, sin = jnp.cos(angle)[None, :, None], jnp.sin(angle)[None, :, None]
        a, b = jnp.split(x, 2, -1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def block(x, p):
        batch, length, _ = x.shape
        h = norm(x, p["attn_norm"]["scale"])
        q, k, v = (heads(h @ p["attn"][n]["kernel"], (batch, length, -1, c.head_size)) for n in "qkv")
        out = jax.nn.dot_product_attention(rope(q), rope(k), v, is_causal=True)
        x = x + out.reshape(batch, length, -1) @ p["attn"]["o"]["kernel"]
        h = norm(x, p["mlp_norm"]["scale"])
        mlp = p["mlp"]
        return x + (jax.nn.silu(h @ mlp["gate"]["kernel"]) * (h @ mlp["up"]["kernel"])) @ mlp["down"]["kernel"]

    def loss_fn(p, tokens):
        x = p["embed"]["embedding"][tokens[:, :-1]]
        if scan:
            x = jax.lax.scan(lambda x, layer: (block(x, layer), None), x, p["layers"])[0]
        else:
            for i in range(c.n_layers):
                x = block(x, p[f"layers_{i}"])
        logits = norm(x, p["final_norm"]["scale"]) @ p["lm_head"]["kernel"]
        picked = jnp.take_along_axis(logits, tokens[:, 1:, None], -1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits, -1) - picked)

    @functools.partial(jax.jit, donate_argnums=(0, 1, 2))
    def update(p, mu, nu, count, tokens):
        loss, g = jax.value_and_grad(loss_fn)(p, tokens)
        norm2 = jnp.sqrt(sum(jnp.sum(x * x) for x in jax.tree.leaves(g)))
        g = jax.tree.map(lambda x: x * jnp.minimum(1.0, o.clip_norm / norm2), g)
        mu = jax.tree.map(lambda m, x: o.b1 * m + (1 - o.b1) * x, mu, g)
        nu = jax.tree.map(lambda n, x: o.b2 * n + (1 - o.b2) * x * x, nu, g)
        count = count + 1
        scale1, scale2 = 1 / (1 - o.b1**count), 1 / (1 - o.b2**count)
        lr = jnp.minimum(o.peak_lr * count / o.warmup_steps, o.peak_lr)

        def apply(w, m, n):
            decay = o.weight_decay * w if w.ndim >= 2 else 0.0
            return w - lr * (m * scale1 / (jnp.sqrt(n * scale2) + o.eps) + decay)

        return jax.tree.map(apply, p, mu, nu), mu, nu, count, loss

    zeros = lambda: jax.tree.map(jnp.zeros_like, init)  # noqa: E731
    state = [init, zeros(), zeros(), jnp.zeros((), jnp.float32)]

    def run():
        *state[:], loss = update(*state, tokens)
        return loss

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--scan", action="store_true", help="scan over layers, in the base as well")
    args = parser.parse_args()
    tokens = jax.random.randint(jax.random.key(1), (16, 257), 0, 4096)
    timing.print_header(args.rounds)
    functions = {"minimal": minimal_step(tokens, scan=args.scan)}
    functions |= {name: our_step(name, tokens, scan=args.scan) for name in RECIPES}
    seconds = timing.interleave(functions, rounds=args.rounds)
    rows = [(name, "minimal" if name in ("minimal", "none") else "none", RECIPES.get(name)) for name in functions]
    timing.print_ratios(seconds, rows)


if __name__ == "__main__":
    main()
