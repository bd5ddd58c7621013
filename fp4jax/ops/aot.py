"""Compile Triton kernels ahead of time, for GPUs that this machine does not have: for tests and benchmarks of the machine code.

Works in a process that does not interpret (TRITON_INTERPRET unset). The code is what a launch on the GPU compiles: arrays are
aligned to 16 bytes, and those that stay below 2 GiB are marked so, without which gfx950 gets no buffer loads.
"""

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


class Compiled(NamedTuple):
    """asm: the program's text by stage ("ttgir", "llir", "amdgcn" or "ptx", …). shared_bytes: LDS or shared memory."""

    asm: dict[str, str]
    shared_bytes: int


def compile_kernel(
    kernel: triton.JITFunction,
    pointers: Mapping[str, str],
    constants: Mapping[str, Any],
    target: str,
    options: Mapping[str, Any] | None = None,
    *,
    large: Collection[str] = (),
) -> Compiled:
    """Compile `kernel` for `target` ("gfx950", "sm_100", …).

    pointers: the kernel's array arguments and their types, such as {"a_ptr": "*u8"}, in the kernel's order; constants: all its
    others. options: num_warps, num_stages and what else the compiler takes; products are not fused into additions. large: the
    arrays that may exceed 2 GiB.
    """
    names = kernel.arg_names
    signature = {name: pointers.get(name, "constexpr") for name in names}
    attributes = {
        (names.index(name),): [["tt.divisibility", 16], *([] if name in large else [["tt.pointer_range", 32]])]
        for name in pointers
    }
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()}, attributes)
    compiled = triton.compile(source, target=_gpu_target(target), options={"enable_fp_fusion": False, **(options or {})})
    asm = {stage: text for stage, text in compiled.asm.items() if isinstance(text, str)}
    return Compiled(asm, compiled.metadata.shared)


def _gpu_target(target: str) -> GPUTarget:
    if target.startswith("gfx"):
        return GPUTarget("hip", target, 64)
    return GPUTarget("cuda", int(target.removeprefix("sm_")), 32)
