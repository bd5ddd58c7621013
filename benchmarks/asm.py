"""Count what matters in a kernel's gfx950 machine code, without a GPU:  python -m benchmarks.asm

Prints every tile configuration of the FP4 GEMM in every layout (contraction axes of A and B). All counts are static and per
wave: instructions, not latencies or stalls. A SIMD issues at most one instruction of a wave per cycle while its matrix core
runs, so the loop is bound by the matrix core only where the other instructions per matrix cycle stay well below 1, and closer
to its peak the lower they are.
"""

import argparse
import itertools
import re
from collections import Counter
from typing import NamedTuple

from fp4jax.ops import aot, matmul_triton, quantize_triton
from fp4jax.ops.kernels import Cast

QUANTIZED = (8192, 4096)
EVEN, RAGGED = (4096, 4096, 4096), (4112, 4080, 4128)  # M, N, K that every tile divides, and none

# Cycles of one matrix instruction with FP4 operands by shape: AMD, "Matrix Core Programming on CDNA3 and CDNA4" (ROCm blog).
MATRIX_CYCLES = {"32x32x64": 32, "16x16x128": 16}
_INSTRUCTION = re.compile(r"(?:v|s|ds|buffer|global|flat|scratch)_\w+")
_LABEL = re.compile(r"([.\w$]+):")


class Metrics(NamedTuple):
    """vgprs: vector registers of a wave. spills: of them to memory. loop: instructions of the inner loop by name."""

    vgprs: int
    spills: int
    program: Counter[str]
    loop: Counter[str]

    @property
    def vector_instructions(self) -> int:
        """Vector instructions of the whole program, those of the matrix core aside."""
        return sum(n for name, n in self.program.items() if name.startswith("v_") and not name.startswith("v_mfma"))

    @property
    def others_per_matrix_cycle(self) -> float:
        """Instructions of the inner loop that are not matrix instructions, per cycle of those that are; inf without any."""
        cycles = sum(n * MATRIX_CYCLES[shape_of(name)] for name, n in self.loop.items() if is_fp4_mfma(name))
        others = sum(n for name, n in self.loop.items() if not name.startswith("v_mfma"))
        return others / cycles if cycles else float("inf")


def metrics(amdgcn: str) -> Metrics:
    """Count the instructions of an amdgcn program; its inner loop is the shortest one with a matrix instruction in it."""
    instructions, labels, loops = [], {}, []
    for line in amdgcn.splitlines():
        line = line.split(";")[0].strip()
        if label := _LABEL.match(line):
            labels[label[1]] = len(instructions)
        elif _INSTRUCTION.match(line):
            name, *operands = line.split()
            instructions.append(name)
            if name.startswith(("s_branch", "s_cbranch")) and operands[-1] in labels:
                loops.append(instructions[labels[operands[-1]] :])
    inner = min((body for body in loops if any(name.startswith("v_mfma") for name in body)), key=len, default=[])
    return Metrics(_field(amdgcn, "vgpr_count"), _field(amdgcn, "vgpr_spill_count"), Counter(instructions), Counter(inner))


def is_fp4_mfma(name: str) -> bool:
    """Whether an instruction multiplies block-scaled operands natively."""
    return name.startswith("v_mfma_scale_f32_")


def shape_of(name: str) -> str:
    """Return the shape of a matrix instruction, "16x16x128"."""
    return name.split("_")[4]


def faults(amdgcn: str, shared_bytes: int) -> list[str]:
    """Return what disqualifies an FP4 GEMM on gfx950, in words; empty for a sound one."""
    found = metrics(amdgcn)
    emulated = [name for name in found.program if name.startswith("v_mfma") and not is_fp4_mfma(name)]
    checks = {
        "no native FP4 matrix instruction": not any(is_fp4_mfma(name) for name in found.program),
        f"emulates with {', '.join(emulated)}": emulated,
        f"spills {found.spills} vector registers": found.spills,
        f"needs {shared_bytes} bytes of LDS, a workgroup has 163840": shared_bytes > 160 * 1024,
        "no buffer loads in the inner loop": not any(name.startswith("buffer_load") for name in found.loop),
        "global loads in the inner loop": any(name.startswith(("global_load", "flat_load")) for name in found.loop),
    }
    return [message for message, applies in checks.items() if applies]


def _field(amdgcn: str, name: str) -> int:
    match = re.search(rf"\.{name}:\s+(\d+)", amdgcn)
    if match is None:
        raise ValueError(f"the program states no {name}: not amdgcn text")
    return int(match[1])


def compile_matmul(
    target: str, config, shape: tuple[int, int, int], *, a_axis=1, b_axis=1, block=32, out="*bf16"
) -> aot.Compiled:
    """Compile the FP4 GEMM of shape (M, N, K) for `target` with a TileConfig; out: Triton's type of C."""
    pointers = {"a_ptr": "*u8", "a_scale_ptr": "*u8", "b_ptr": "*u8", "b_scale_ptr": "*u8", "factor_ptr": "*fp32", "c_ptr": out}
    constants = matmul_triton.kernel_constants(config, *shape, a_axis=a_axis, b_axis=b_axis, block=block, target=target)
    large = ("c_ptr",) if 4 * config.split_k * shape[0] * shape[1] >= 2**31 else ()
    options = config.options(target)
    return aot.compile_kernel(matmul_triton.scaled_matmul_kernel, pointers, constants, target, options, large=large)


def compile_quantize(
    target: str, row: Cast | None, col: Cast | None, *, shape=QUANTIZED, native=True, dtype="bf16", tile=None
) -> aot.Compiled:
    """Compile the quantize kernel for `target` as `quantize_triton.quantize` launches it; dtype: Triton's name of x's type."""
    floats = ("x_ptr", "row_matrix_ptr", "col_matrix_ptr")
    words = {"row_key_ptr": "*u32", "col_key_ptr": "*u32", "row_tensor_ptr": "*fp32", "col_tensor_ptr": "*fp32"}
    outputs = ("row_data_ptr", "row_scale_ptr", "col_data_ptr", "col_scale_ptr")
    pointers = {**dict.fromkeys(floats, f"*{dtype}"), **words, **dict.fromkeys(outputs, "*u8")}
    constants, _, options = quantize_triton.launch_plan(shape, (row, col), target, native=native, tile=tile)
    return aot.compile_kernel(quantize_triton.quantize_kernel, pointers, constants, target, options)


def matrix_instruction(ptx: str) -> str:
    """Return the kind of matrix instruction in a PTX program, "" without one."""
    match = re.search(r"tcgen05\.mma\S*|wgmma\.mma_async\S*|mma\.sync\S*", ptx)
    return match[0] if match else ""


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print("tile         axes  K       VGPRs  spills     LDS  others per matrix cycle")
    configs = matmul_triton.CONFIGS["gfx950"]
    for config, axes, shape in itertools.product(configs, itertools.product((1, 0), repeat=2), (EVEN, RAGGED)):
        compiled = compile_matmul("gfx950", config, shape, a_axis=axes[0], b_axis=axes[1])
        found = metrics(compiled.asm["amdgcn"])
        tile = f"{config.tile_m}x{config.tile_n}x{config.tile_k}"
        row = f"{found.vgprs:7}{found.spills:8}{compiled.shared_bytes:8}{found.others_per_matrix_cycle:25.3f}"
        print(f"{tile:<13}{axes[0]} {axes[1]}   {'even' if shape == EVEN else 'ragged'}{row}", flush=True)


if __name__ == "__main__":
    main()
