"""Which implementation multiplies two quantized operands, and the two that are plain JAX.

reference  dequantize, multiply in FP32: the specification; runs anywhere
xla        the codes themselves through `lax.scaled_dot` (MX, NVFP4) or a float8 `lax.dot_general` (FP8), which XLA hands
           to the vendor's libraries on a GPU; BF16 operands multiply in BF16
triton     this project's kernels for MXFP4 and NVFP4 (`ops.kernels`), "xla" for the other formats
"""

import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fp4jax import formats
from fp4jax.ops import qtensor, triton_call
from fp4jax.recipe import GemmSpec

IMPLS = ("auto", "reference", "xla", "triton")
LARGEST_ROTATION = 128  # a larger one spills registers, or needs more shared memory than there is
_VALUE_TYPES = {"e2m1": jnp.float4_e2m1fn, "e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2}


def check_impl(impl: str) -> None:
    """Raise ValueError for an unknown implementation."""
    if impl not in IMPLS:
        raise ValueError(f"unknown {impl=}: choose from {list(IMPLS)}")


def choose(impl: str, spec: GemmSpec, *, ragged: bool = False) -> tuple[str, str]:
    """Return (what runs one GEMM: "lax", "reference", "xla" or "triton"; why, where it is not what was named).

    ragged: whether its lengths have to be padded, which kernels do not do. A GEMM that the recipe leaves plain is a
    `lax.dot_general`. "auto" takes the reference on a CPU, and on a GPU the first of triton, xla and reference that can. Raises
    ValueError when the named implementation cannot run the GEMM here.
    """
    check_impl(impl)
    if spec.is_plain:
        return "lax", ""
    if impl == "reference":
        return "reference", ""
    target = triton_call.current_target()
    if impl == "triton" and target is None:
        raise ValueError("impl='triton' needs a GPU (AMD or NVIDIA) and there is none here: choose 'reference' or 'xla'")
    if impl == "auto" and target is None:
        return "reference", "auto: no GPU"
    no_xla, no_triton = _why_not_xla(spec), _why_not_triton(spec, target, ragged)
    if impl == "triton" and not no_triton:
        return "triton", ""
    if impl in ("xla", "triton") and not no_xla and spec.lhs.format not in ("mxfp4", "nvfp4"):
        return "xla", "" if impl == "xla" else f"triton: {no_triton}"
    if impl == "xla" and not no_xla:
        return "xla", ""
    if impl != "auto":
        raise ValueError(f"impl={impl!r} does not apply to {spec}: {no_xla if impl == 'xla' else no_triton}")
    missing = "" if importlib.util.find_spec("jax_triton") else "jax-triton is not installed"
    if not (no_triton or missing):
        return "triton", "auto: a kernel of its own"
    if not no_xla:
        return "xla", f"auto: {no_triton or missing}"
    return "reference", f"auto: {no_xla}"


def _why_not_xla(spec: GemmSpec) -> str:
    lhs, rhs = spec.lhs, spec.rhs
    if lhs.format == rhs.format == "bf16":
        return ""
    if lhs.element is None or rhs.element is None or lhs.scale != rhs.scale or lhs.block != rhs.block:
        return "XLA has no product of these two formats"
    if lhs.scale == "float32" and lhs.block:
        return "XLA has no product with float32 block scales"
    return ""


def _why_not_triton(spec: GemmSpec, target: triton_call.Target | None, ragged: bool) -> str:
    if ragged:
        return "kernels do not pad ragged lengths"
    if spec.rotation.size > LARGEST_ROTATION:
        return f"kernels rotate by at most {LARGEST_ROTATION} elements"
    formats_of = {spec.lhs.format, spec.rhs.format}
    if formats_of not in ({"mxfp4"}, {"nvfp4"}):
        return "there are kernels for MXFP4 and NVFP4 only"
    return "there is no GPU" if target is None else target.why_not(formats_of.pop())


def reference_dot(lhs: Any, rhs: Any, dimension_numbers) -> jax.Array:
    """Return the FP32 product of dequantized operands."""
    return lax.dot_general(lhs, rhs, dimension_numbers, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def xla_dot(lhs: qtensor.QTensor | jax.Array, rhs: qtensor.QTensor | jax.Array, dimension_numbers) -> jax.Array:
    """Return the FP32 product of two QTensors of one scale format, contracted along their axes, or of two BF16 arrays."""
    if isinstance(lhs, jax.Array) and isinstance(rhs, jax.Array):
        return lax.dot_general(lhs, rhs, dimension_numbers, preferred_element_type=jnp.float32)
    assert isinstance(lhs, qtensor.QTensor)
    assert isinstance(rhs, qtensor.QTensor)
    if lhs.spec.scale == "float32":
        product = lax.dot_general(_values(lhs), _values(rhs), dimension_numbers, preferred_element_type=jnp.float32)
        return product * (lhs.scale * rhs.scale)
    product = lax.scaled_dot(
        _values(lhs),
        _values(rhs),
        lhs_scale=_scales(lhs),
        rhs_scale=_scales(rhs),
        dimension_numbers=dimension_numbers,
        preferred_element_type=jnp.float32,
    )
    if lhs.tensor_scale is not None and rhs.tensor_scale is not None:
        product = product * (lhs.tensor_scale * rhs.tensor_scale)
    return product


def _values(q: qtensor.QTensor) -> jax.Array:
    """Return the elements as an array of their own float type."""
    element = q.spec.element
    assert element is not None
    codes = q.codes.astype(jnp.uint4) if element is formats.E2M1 else q.codes
    return lax.bitcast_convert_type(codes, _VALUE_TYPES[element.name])


def _scales(q: qtensor.QTensor) -> jax.Array:
    """Return the block scales, those of square blocks repeated for every row."""
    for axis, length in enumerate(q.shape):
        if axis != q.axis and q.scale.shape[axis] != length:
            repeated = jnp.repeat(q.scale_bytes, length // q.scale.shape[axis], axis=axis)
            return lax.bitcast_convert_type(repeated, q.scale.dtype)
    return q.scale
