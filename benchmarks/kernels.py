"""The kernels against the hardware's limits:  python -m benchmarks.kernels [--rounds=20]

On a GPU: times, bandwidth and TFLOP/s, next to BF16 `jnp.dot` and `lax.scaled_dot`. Without one: what the machine code for
each GPU says, which is no speed (`benchmarks.asm` has the GEMM's layouts one by one).

Limits. Quantize, both orientations: 2 bytes read and 2 · (1/2 + 1/32) written per element, 3.06 bytes. GEMM: 2·M·N·K
operations at the matrix units' rate, or its operands and result moved once, whichever takes longer.
"""

import argparse
import functools
import itertools

import jax
import jax.numpy as jnp

from benchmarks import asm, timing
from fp4jax import OperandSpec
from fp4jax.ops import kernels, matmul, matmul_triton, quantize, quantize_triton, triton_call

# Dense peaks by the vendors' data sheets, sparsity not counted: bytes/s of HBM, FLOP/s of BF16 and of FP4 (Hopper: none).
PEAKS = {"gfx950": (8.0e12, 2.5e15, 10.1e15), "sm_100": (8.0e12, 2.25e15, 9.0e15), "sm_90": (4.8e12, 0.989e15, 0.989e15)}
SHAPES = (
    (8192, 4096, 4096),
    (8192, 14336, 4096),
    (8192, 4096, 14336),
    (8192, 8192, 8192),
)  # M, N, K: Llama 3.1 8B's and a square
CASTS = {"no rotation": 0, "H16": 16}


def print_quantize_times(rounds: int, target: triton_call.Target) -> None:
    """Time the quantizer on bfloat16 [8192, 8192]."""
    x = jax.random.normal(jax.random.key(0), (8192, 8192), jnp.bfloat16)
    functions = {"copy": functools.partial(jax.jit(lambda x: x * jnp.bfloat16(1.01)), x)}
    moved = {"copy": 4.0}
    for (name, size), (row, col) in itertools.product(CASTS.items(), ((1, 0), (0, 1), (1, 1))):
        cast = kernels.Cast(OperandSpec("mxfp4"), size=size)
        casts = (cast if row else None, cast if col else None)
        run = jax.jit(lambda x, casts=casts: kernels.quantize(x, casts[0], casts[1], (None, None), None))
        label = f"{name}, {'both' if row and col else 'rows' if row else 'columns'}"
        functions[label], moved[label] = functools.partial(run, x), 2 + (row + col) * (1 / 2 + 1 / 32)
    seconds = timing.interleave(functions, rounds=rounds)
    timing.print_ratios(seconds, [(name, "copy", None) for name in functions])
    for name in functions:
        rate = moved[name] * x.size / float(jnp.median(jnp.asarray(seconds[name])))
        print(f"  {name:26} {moved[name]:.2f} B/element  {rate / 1e12:6.2f} TB/s  {rate / PEAKS[target.arch][0]:6.1%} of HBM")


def print_matmul_times(rounds: int, target: triton_call.Target) -> None:
    """Time the FP4 GEMM next to XLA's scaled dot and the BF16 one."""
    spec, peak = OperandSpec("mxfp4"), PEAKS[target.arch]
    for m, n, k in SHAPES:
        a, b = (jax.random.normal(jax.random.key(i), shape, jnp.bfloat16) for i, shape in enumerate(((m, k), (n, k))))
        qa, qb = (quantize.quantize(x, spec, 1) for x in (a, b))
        triton = jax.jit(lambda a, b: kernels.matmul(a, b, None, (None, None, None), alpha=1.0, out_dtype=jnp.bfloat16))
        xla = jax.jit(lambda a, b: matmul.xla_dot(a, b, (((1,), (1,)), ((), ()))).astype(jnp.bfloat16))
        plain = jax.jit(lambda a, b: jnp.dot(a, b.T))
        calls = {"bf16": (plain, a, b), "mxfp4 triton": (triton, qa, qb), "mxfp4 xla": (xla, qa, qb)}
        seconds = timing.interleave({name: functools.partial(*call) for name, call in calls.items()}, rounds=rounds)
        print(f"M {m}  N {n}  K {k}  {matmul_triton.choose_config(target.arch, m, n, k)}")
        timing.print_ratios(seconds, [(name, "bf16", None) for name in calls])
        for name in calls:
            rate = 2 * m * n * k / float(jnp.median(jnp.asarray(seconds[name])))
            flops = peak[1] if name == "bf16" else peak[2]
            print(f"  {name:26} {rate / 1e12:8.1f} TFLOP/s  {rate / flops:6.1%} of {flops / 1e12:.0f}")


def print_machine_code() -> None:
    """Print what the quantizer's and the GEMM's machine code says for every GPU."""
    print(f"quantize, bfloat16 {list(asm.QUANTIZED)}  target  path      VGPRs  spills     LDS  vector instructions per element")
    for size, native, rows, columns in itertools.product(CASTS.values(), (True, False), (True, False), (True, False)):
        cast = kernels.Cast(OperandSpec("mxfp4"), size=size)
        if not (rows or columns):
            continue
        casts = (cast if rows else None, cast if columns else None)
        compiled = asm.compile_quantize("gfx950", *casts, native=native)
        found, (plan, _, options) = (
            asm.metrics(compiled.asm["amdgcn"]),
            quantize_triton.launch_plan(asm.QUANTIZED, casts, "gfx950", native=native),
        )
        elements = plan["BR"] * plan["BC"] / (64 * options["num_warps"])
        name = f"{'H16' if size else 'no rotation'}, {'both' if rows and columns else 'rows' if rows else 'columns'}"
        row = f"{found.vgprs:6} {found.spills:7} {compiled.shared_bytes:7} {found.vector_instructions / elements:8.1f}"
        print(f"{name:32}  gfx950  {'native' if native else 'portable':8} {row}", flush=True)
    print("\nGEMM, contraction last  target  tile          VGPRs  spills     LDS  others per matrix cycle")
    for config in matmul_triton.CONFIGS["gfx950"]:
        compiled = asm.compile_matmul("gfx950", config, asm.EVEN)
        found = asm.metrics(compiled.asm["amdgcn"])
        tile = f"{config.tile_m}x{config.tile_n}x{config.tile_k}"
        row = f"{found.vgprs:6} {found.spills:7} {compiled.shared_bytes:7}"
        print(f"{'mxfp4':23} gfx950  {tile:12} {row}  {found.others_per_matrix_cycle:.3f}", flush=True)
    for target in ("sm_100", "sm_90"):
        for config in matmul_triton.CONFIGS[target]:
            compiled = asm.compile_matmul(target, config, asm.EVEN)
            kind = asm.matrix_instruction(compiled.asm["ptx"])
            tile = f"{config.tile_m}x{config.tile_n}x{config.tile_k}"
            print(f"{'mxfp4':23} {target:7} {tile:12} {'':14} {compiled.shared_bytes:7}  {kind}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    timing.print_header(rounds)
    target = triton_call.current_target()
    if target is None:
        print("no GPU: static counts of the machine code, no speeds\n")
        print_machine_code()
        return
    emulated = "" if target.has_fp4 else ": FP4 is emulated here, a GEMM of decoded values"
    print(f"target {target.arch}{emulated}")
    print_quantize_times(rounds, target)
    print_matmul_times(rounds, target)


if __name__ == "__main__":
    main()
