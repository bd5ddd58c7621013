"""What each scale rule does to data, from the code itself:  python -m benchmarks.scale_rules > docs/scale_rules.md

SQNR = 10·log10(Σx² / Σ(q − x)²), gain = Σq·x / Σx², clipped = share of blocks whose maximum lies above the largest value that
their scale can represent, zeroed = share of nonzero elements that become zero. q: the values a GEMM uses, with the rule's known
gain taken out. Gaussian: N(0, 1). Log-uniform: N(0, 1) times a power of two per block, its exponent uniform over ±8 binades.
"""

import jax
import jax.numpy as jnp
import numpy as np

from fp4jax import OperandSpec, bits, formats, quantize
from fp4jax.ops.quantize import fake_quantize


def specs() -> list[OperandSpec]:
    """Return every format, block, scale rule and rounding that can be told apart on one tensor."""
    return [
        OperandSpec(name, block, rule, rounding)
        for name, fmt in formats.FORMATS.items()
        for block in fmt.blocks
        for rule, roundings in fmt.rules.items()
        for rounding in roundings
        if fmt.element and rule != "delayed"
    ]


def data() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2048, 2048))
    spread = np.exp2(rng.uniform(-8, 8, (2048, 2048 // 32))).repeat(32, axis=1)
    return {"Gaussian": x.astype(np.float32), "log-uniform": (x * spread).astype(np.float32)}


def figures(x: np.ndarray, spec: OperandSpec) -> tuple[float, float, float, float]:
    """Return (SQNR in dB, gain, share of clipped blocks, share of zeroed elements)."""
    key = bits.step_key(0, 0) if spec.draws else None
    q = np.asarray(jax.jit(fake_quantize, static_argnums=(1, 2))(x, spec, 1, key), np.float64) / spec.gain
    exact = x.astype(np.float64)
    block = spec.block or x.size
    assert spec.element is not None
    held = quantize(jnp.asarray(x), spec, 1, key=key)
    scale = np.asarray(held.scale.astype(jnp.float32), np.float64)
    if held.tensor_scale is not None:
        scale = scale * float(held.tensor_scale[0, 0])
    top = np.abs(exact).reshape(-1, block).max(-1) * spec.gain
    clipped = (top > spec.element.max * scale.reshape(-1) * (1 + 1e-6)).mean()
    noise = ((q - exact) ** 2).sum()
    power = (exact**2).sum()
    return 10 * np.log10(power / noise), (q * exact).sum() / power, clipped, ((q == 0) & (exact != 0)).mean()


def main() -> None:
    print("# Scale rules and roundings, measured\n")
    print("Made by `python -m benchmarks.scale_rules > docs/scale_rules.md` from the casts themselves; the definitions are in")
    print("`fp4jax/scales.py` and `fp4jax/rounding.py`. [2048, 2048] float32, seed 0. Columns: SQNR in dB, gain, share of")
    print("clipped blocks, share of elements set to zero; first on N(0, 1), then with block sizes over ±8 binades.\n")
    print("Stochastic rounding is unbiased only where a rule never clips; `eden` is unbiased over random rotations only.\n")
    print("| format, block, rule, rounding | SQNR | gain | clipped | zeroed | SQNR | gain | clipped | zeroed | unbiased SR |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    inputs = data()
    for spec in specs():
        cells = []
        for x in inputs.values():
            sqnr, gain, clipped, zeroed = figures(x, spec)
            cells += [f"{sqnr:.2f}", f"{gain:.4f}", f"{clipped:.1%}", f"{zeroed:.1%}"]
        verdict = "–" if spec.rounding != "sr" else "yes" if spec.scale_rule in formats.NEVER_CLIPS else "no"
        print(f"| `{spec}` | {' | '.join(cells)} | {verdict} |", flush=True)


if __name__ == "__main__":
    main()
