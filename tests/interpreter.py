"""Run Triton kernels without a GPU: Triton's interpreter, over numpy arrays, behind `fp4jax.ops.triton_call.call`.

TRITON_INTERPRET=1 must be set before triton is first imported, and a process that interprets cannot compile: the tests in
this folder run in a process of their own (tests/test_kernels.py).
"""

import contextlib
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp4jax.ops import triton_call

_LOCK = threading.Lock()  # the interpreter keeps its grid position in a global
_patched: set[int] = set()  # the modules of the language that this launch has patched
_TRITON_TYPES = {"float32": "fp32", "bfloat16": "bf16", "uint8": "u8", "uint32": "u32", "int32": "i32", "float16": "fp16"}


class Buffer:
    """A numpy array that looks like the torch tensor which Triton's launcher expects: pointer, dtype, storage."""

    def __init__(self, array: np.ndarray):
        self.array = np.ascontiguousarray(array)
        self.dtype = _TRITON_TYPES[str(array.dtype)]

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def untyped_storage(self) -> "Buffer":
        return self

    def cpu(self) -> "Buffer":
        return self

    def new_empty(self, *_, **__) -> "Buffer":
        return self

    def set_(self, *_) -> "Buffer":
        return self

    def copy_(self, _) -> None: ...

    def storage_offset(self) -> int:
        return 0

    def size(self) -> tuple[int, ...]:
        return self.array.shape

    def stride(self) -> tuple[int, ...]:
        return ()


def launch(kernel, arrays, outputs, grid, constants) -> tuple[np.ndarray, ...]:
    """Run `kernel` over `grid` on numpy arrays; outputs: (shape, dtype) pairs. Returns the filled outputs.

    Outputs start out as 0xAA bytes, so that an element which no program writes is seen.
    """
    inputs = [Buffer(np.array(a)) for a in arrays]
    results = []
    for shape, dtype in outputs:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        results.append(Buffer(np.full(size, 0xAA, np.uint8).view(dtype).reshape(shape)))
    with _LOCK, np.errstate(all="ignore"):
        _patched.clear()
        kernel[grid](*inputs, *results, **constants)
    return tuple(result.array for result in results)


def call(kernel, *arrays, out_type, grid, options=None, **constants):
    """Do what `fp4jax.ops.triton_call.call` does, through the interpreter; works eagerly and under jit."""
    flat, tree = jax.tree.flatten(out_type)
    outputs = [(leaf.shape, jnp.dtype(leaf.dtype)) for leaf in flat]

    def run(*args):
        return list(launch(kernel, args, outputs, grid, constants))

    shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in outputs]
    return jax.tree.unflatten(tree, jax.pure_callback(run, shapes, *arrays, vmap_method="sequential"))


def _mend_bfloat16(monkeypatch) -> None:
    """Triton 3.9's interpreter holds bfloat16 as 16-bit words, multiplies these words, and truncates float32 to them."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    create_dot, cast = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl

    def values(handle):
        if handle.dtype != tl.bfloat16:
            return handle
        return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def rounding_cast(builder, source, dst_type):
        if source.dtype.scalar == tl.float32 and dst_type.scalar == tl.bfloat16:
            return TensorHandle(source.data.astype(jnp.bfloat16).view(np.uint16), tl.bfloat16)
        return cast(builder, source, dst_type)

    monkeypatch.setattr(
        InterpreterBuilder, "create_dot", lambda builder, a, b, *rest: create_dot(builder, values(a), values(b), *rest)
    )
    monkeypatch.setattr(InterpreterBuilder, "cast_impl", rounding_cast)


def _patch_once(monkeypatch) -> None:
    """Triton 3.9's interpreter patches its language again for every function that a kernel calls: 40 % of a launch's time."""
    import triton.language as tl
    from triton.runtime import interpreter

    patch = interpreter._patch_lang

    def first_only(fn):
        modules = {id(value) for value in fn.__globals__.values() if value is tl or value is tl.core}
        if modules <= _patched:
            return interpreter._LangPatchScope()
        _patched.update(modules)
        return patch(fn)

    monkeypatch.setattr(interpreter, "_patch_lang", first_only)


@contextlib.contextmanager
def installed(monkeypatch):
    """Let every kernel call go through the interpreter, as if on a GPU without FP4 units; on a GPU, leave it alone."""
    if jax.default_backend() == "gpu":
        yield
        return
    monkeypatch.setattr(triton_call, "call", call)
    _mend_bfloat16(monkeypatch)
    _patch_once(monkeypatch)
    with triton_call.assume_target("sm_90"):
        yield


def mesh(data: int, model: int) -> jax.sharding.Mesh:
    """Return a mesh of data × model devices; skips the test where there are fewer."""
    if jax.device_count() < data * model:
        pytest.skip(f"needs {data * model} devices")
    return jax.make_mesh((data, model), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
