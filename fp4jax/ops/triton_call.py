"""The one door to jax-triton: everything that a kernel launch needs beyond the kernel itself.

Nothing here or behind it is imported on a CPU run. Supported: jax-triton 0.4.1 with triton 3.8 or 3.9, and, on machines that
carry triton 3.6, jax-triton 0.3.1 (CUDA only).
"""

import atexit
import contextlib
import dataclasses
import functools
import hashlib
import importlib
import importlib.metadata
import os
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import core

_TESTED = {"0.4.1": ("3.8", "3.9"), "0.3.1": ("3.6",)}  # jax-triton: triton
KERNEL_TARGETS = ("gfx950", "sm_100", "sm_90")  # sm_90 has no FP4 unit: emulated, for development
_HSACO_FD = 255  # see _stable_hsaco_path
_LIMIT_32 = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Target:
    """A GPU that kernels are compiled for. platform: "rocm" or "cuda". arch: "gfx950", "sm_100", …"""

    platform: str
    arch: str

    @property
    def has_fp4(self) -> bool:
        """Whether there are FP4 matrix units; elsewhere kernels multiply decoded values."""
        return self.arch != "sm_90"

    def why_not(self, fmt: str) -> str:
        """Return why this GPU cannot multiply `fmt` ("mxfp4" or "nvfp4") with the project's kernels, "" when it can."""
        if self.arch not in KERNEL_TARGETS:
            return f"there are no kernels for {self.arch}, only for {', '.join(KERNEL_TARGETS)}"
        if fmt == "nvfp4" and self.platform == "rocm":
            return f"{self.arch} has no NVFP4 matrix instruction"
        return ""

    @property
    def compute_capability(self) -> int | None:
        return int(self.arch.removeprefix("sm_")) if self.platform == "cuda" else None


_assumed = jax.make_user_context(default_value=None)  # a context that jit's caches know of


def assume_target(arch: str) -> contextlib.AbstractContextManager[None]:
    """Trace and lower for `arch` ("gfx950", "sm_100", …) on a machine without that GPU, within this context."""
    return _assumed(Target("rocm" if arch.startswith("gfx") else "cuda", arch))


def is_assumed() -> bool:
    """Return whether the target is an assumed one, on whose device nothing can run."""
    return _assumed.value is not None


def current_target() -> Target | None:
    """Return the GPU to compile for: the assumed one, or that of JAX's first device; None on a CPU."""
    assumed = _assumed.value
    if assumed is not None:
        return assumed
    device = jax.devices()[0]
    if device.platform not in ("gpu", "rocm", "cuda"):
        return None
    capability = str(device.compute_capability)
    if capability.startswith("gfx"):
        return Target("rocm", capability.split(":")[0])
    return Target("cuda", "sm_" + capability.replace(".", ""))


def call(
    kernel, *arrays: jax.Array, out_type: Any, grid: tuple[int, ...], options: Mapping[str, Any] | None = None, **constants
):
    """Launch a Triton kernel: pointers to `arrays`, then to the leaves of `out_type`, then `constants` by name.

    out_type: a pytree of jax.ShapeDtypeStruct, whose structure the result has. grid: up to three sizes. options: num_warps,
    num_stages and what else the target's compiler takes (waves_per_eu, matrix_instr_nonkdim, …). Products are never fused
    into additions, so that a kernel computes what its reference computes. Under vmap the launches follow one another.
    Raises RuntimeError on a CPU and for versions that were not tested together.
    """
    target = current_target()
    if target is None:
        raise RuntimeError("Triton kernels need a GPU (AMD or NVIDIA); on a CPU choose impl='reference' or 'xla'")
    jax_triton = load()
    options = {"enable_fp_fusion": False, **(options or {})}
    if jax_triton.__version__.startswith("0.3."):
        known = ("num_warps", "num_stages", "num_ctas", "enable_fp_fusion")
        launch = {name: value for name, value in options.items() if name in known}
        out = {"out_shape": out_type}
    else:
        launch, out = {"backend_options": options}, {"out_type": out_type}

    @jax.custom_batching.sequential_vmap
    def run(*arrays):
        capability = target.compute_capability
        return jax_triton.triton_call(
            *arrays, kernel=kernel, grid=grid, compute_capability=capability, **out, **launch, **constants
        )

    return run(*arrays)


@functools.cache
def load():
    """Import jax-triton, refuse untested versions, and mend it; return the module."""
    try:
        versions = {name: importlib.metadata.version(name) for name in ("jax-triton", "triton")}
    except importlib.metadata.PackageNotFoundError as error:
        raise RuntimeError(f"Triton kernels need the package {error.name}: install fp4jax[kernels]") from None
    allowed = _TESTED.get(versions["jax-triton"], ())
    if not versions["triton"].startswith(allowed):
        tested = "; ".join(f"jax-triton {a} with triton {' or '.join(b)}" for a, b in _TESTED.items())
        raise RuntimeError(f"jax-triton {versions['jax-triton']} with triton {versions['triton']} is not supported: {tested}")
    cache_dir = os.environ.get("TRITON_CACHE_DIR")
    jax_triton: Any = importlib.import_module("jax_triton")
    if cache_dir is not None:  # jax-triton 0.4.1 deletes it, 0.3.1 empties it; delete when it leaves it alone
        os.environ["TRITON_CACHE_DIR"] = cache_dir
    if versions["jax-triton"] == "0.4.1":
        _mend_0_4_1(jax_triton.triton_lib)
    return jax_triton


def _mend_0_4_1(lib) -> None:
    """Mend jax-triton 0.4.1 on ROCm; delete each part when a version that does it itself is the oldest supported."""
    atexit.register(lib._HSACO_TMPDIR.cleanup)  # or the directory is cleaned up with a ResourceWarning

    # Fault: it starts triton's HIP backend (3.7 and later) with empty metadata → KeyError 'num_ctas'.
    make_llir = lib.hb.HIPBackend.make_llir

    def make_llir_with_num_ctas(source, metadata, options):
        metadata.setdefault("num_ctas", options.num_ctas)
        return make_llir(source, metadata, options)

    lib.hb.HIPBackend.make_llir = staticmethod(make_llir_with_num_ctas)

    # Fault: the target of a ROCm kernel is always that of the machine's first GPU, so nothing lowers without one.
    arch_of_device = lib.triton_kernel_call_lib.get_arch_details

    def get_arch_details(device):
        assumed = _assumed.value
        return arch_of_device(device) if assumed is None else assumed.arch

    lib.triton_kernel_call_lib.get_arch_details = get_arch_details

    # Fault: triton is not told that an array lies within 2 GiB, without which gfx950 gets no buffer loads.
    build = lib.KernelSpecialization.build.__func__

    def build_with_pointer_range(cls, arg_names, args, arg_dtypes, in_tree, objpaths, metaparams, backend):
        spec = build(cls, arg_names, args, arg_dtypes, in_tree, objpaths, metaparams, backend)
        if isinstance(backend, lib.hb.HIPBackend):
            for i, arg in enumerate(args):
                if isinstance(arg, core.ShapedArray) and arg.size * jnp.dtype(arg.dtype).itemsize <= _LIMIT_32:
                    spec.attrs[objpaths[i]] = [*spec.attrs[objpaths[i]], ["tt.pointer_range", 32]]
                    spec.specialization[i] = (*spec.specialization[i], "within 2 GiB")
        return spec

    lib.KernelSpecialization.build = classmethod(build_with_pointer_range)

    # Fault: the code object travels in the program as a random path, so that two processes never have the same program.
    compile_to_hsaco = lib.compile_ttir_to_hsaco_inplace

    def compile_to_stable_path(ttir, hip_backend, hip_options):
        result = compile_to_hsaco(ttir, hip_backend, hip_options)
        result.binary = _stable_hsaco_path(result.binary, lib._HSACO_TMPDIR.name)
        return result

    lib.compile_ttir_to_hsaco_inplace = compile_to_stable_path


def _stable_hsaco_path(path: str, directory: str) -> str:
    """Rename a code object after its content and return a path that is the same in every process, yet its own.

    The loader deletes the file that it has read, so processes must not share one: the path goes through a file descriptor of
    fixed number, open on this process's own directory.
    """
    with open(path, "rb") as file:
        name = hashlib.sha256(file.read()).hexdigest() + ".hsaco"
    os.replace(path, os.path.join(directory, name))
    link = f"/proc/self/fd/{_HSACO_FD}"
    if not (os.path.exists(link) and os.path.samefile(link, directory)):
        if os.path.exists(link):
            raise RuntimeError(f"file descriptor {_HSACO_FD} is taken, which names the directory of compiled kernels")
        opened = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        os.dup2(opened, _HSACO_FD, inheritable=False)
        os.close(opened)
    return f"{link}/{name}"
