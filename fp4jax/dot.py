"""The quantized dot: `lax.dot_general` of a linear layer whose fprop, dgrad and wgrad each follow a `GemmSpec`.

    fprop  y_MN  = Q(x_MK·H_K) · Q(H_K·w_KN)
    dgrad  dx_MK = Q(dy_MN·H_N) · Q(H_N·w_KNᵀ)
    wgrad  dw_KN = Q(H_M·x_MK)ᵀ · Q(H_M·dy_MN)

Every cast starts from the high-precision tensor, along the contraction axis of the GEMM that consumes it; nothing is
quantized twice. Products are summed in FP32. Only first derivatives are defined.

Any dimension numbers are brought to this 2-D form: several contracting axes are flattened into K, several free axes of lhs
into M and of rhs into N, in the order lax.dot_general returns them; batch axes are mapped (each with its own draws).
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from fp4jax import bits, rotation
from fp4jax.ops import quantize
from fp4jax.recipe import GEMMS, OPERANDS, GemmSpec, Recipe

IMPLS = ("auto", "reference")
_SIGNS_WORD = 2  # after the operands' 0 and 1
TOKEN_OPERANDS = ("x", "dy")  # their rows are tokens: they take the key's row offset


def resolve_impl(impl: str) -> str:
    """Return the implementation that runs: "reference" dequantises and multiplies in FP32; "auto" chooses it."""
    if impl not in IMPLS:
        raise ValueError(f"unknown {impl=}: choose from {list(IMPLS)}")
    return "reference"


def quantized_dot_general(
    lhs: jax.Array,
    rhs: jax.Array,
    dimension_numbers,
    precision=None,
    preferred_element_type=None,
    *,
    recipe: Recipe,
    key=None,
    impl: str = "auto",
) -> jax.Array:
    """Return lax.dot_general(lhs, rhs, dimension_numbers) with the forward and both backward GEMMs following `recipe`.

    lhs: activations x, rhs: weights w; float32, bfloat16 or float16. The result has the operands' promoted dtype, or
    preferred_element_type; the gradients have the dtypes of lhs and rhs. precision applies to GEMMs that the recipe leaves
    plain; a quantized GEMM always accumulates in FP32. key: as in `quantize`, needed when recipe.needs_key. A recipe that
    is plain everywhere is lax.dot_general itself. Raises ValueError when a contraction length is not a multiple of the
    GEMM's blocks and rotation and the GEMM does not pad, when the key is missing, or when `impl` is unknown.
    """
    resolve_impl(impl)
    if recipe.is_plain:
        return lax.dot_general(lhs, rhs, dimension_numbers, precision, preferred_element_type)
    if recipe.needs_key and key is None:
        raise ValueError("the recipe draws random bits (stochastic rounding or redrawn signs): pass key=")
    key = None if key is None else bits.as_key(key)
    jax.eval_shape(lambda a, b: lax.dot_general(a, b, dimension_numbers), lhs, rhs)  # refuses what lax refuses
    out_dtype = preferred_element_type or jnp.promote_types(lhs.dtype, rhs.dtype)
    check_gemms(recipe, contraction_lengths(lhs, rhs, dimension_numbers))
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dimension_numbers
    lhs_free, rhs_free = _free_axes(lhs, rhs, dimension_numbers)
    batch = tuple(lhs.shape[a] for a in lhs_batch)
    k = _size(lhs, lhs_contract)
    x = lhs.transpose(*lhs_batch, *lhs_free, *lhs_contract).reshape(*batch, _size(lhs, lhs_free), k)
    w = rhs.transpose(*rhs_batch, *rhs_contract, *rhs_free).reshape(*batch, k, _size(rhs, rhs_free))
    dot = functools.partial(_dot_2d, recipe=recipe, precision=precision, out_dtype=jnp.dtype(out_dtype))
    for _ in batch:
        dot = jax.vmap(dot, in_axes=(0, 0, None))
    y = dot(x, w, key)
    return y.reshape(*batch, *(lhs.shape[a] for a in lhs_free), *(rhs.shape[a] for a in rhs_free))


def _free_axes(lhs, rhs, dimension_numbers) -> tuple[list[int], list[int]]:
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dimension_numbers
    lhs_free = [a for a in range(lhs.ndim) if a not in (*lhs_contract, *lhs_batch)]
    rhs_free = [a for a in range(rhs.ndim) if a not in (*rhs_contract, *rhs_batch)]
    return lhs_free, rhs_free


def _size(x, axes) -> int:
    return math.prod(x.shape[a] for a in axes)


def contraction_lengths(lhs, rhs, dimension_numbers) -> dict[str, int]:
    """Return the contraction length of each GEMM: K for fprop, N for dgrad, M for wgrad."""
    lhs_free, rhs_free = _free_axes(lhs, rhs, dimension_numbers)
    k = _size(lhs, dimension_numbers[0][0])
    return {"fprop": k, "dgrad": _size(rhs, rhs_free), "wgrad": _size(lhs, lhs_free)}


def check_gemms(recipe: Recipe, lengths: dict[str, int]) -> None:
    """Raise ValueError when the contraction length of one of the GEMMs does not divide and the GEMM does not pad."""
    for gemm, length in lengths.items():
        spec: GemmSpec = getattr(recipe, gemm)
        if length % spec.multiple and not spec.pad:
            raise ValueError(
                f"{gemm}: contraction length {length} is not a multiple of {spec.multiple} "
                f"({spec}); set {gemm}.pad=True to pad it with zeros"
            )


def _dot_2d(x, w, key, *, recipe, precision, out_dtype):
    """The custom_vjp dot of x_MK and w_KN."""

    @jax.custom_vjp
    def dot(x_MK, w_KN, key):
        return _gemm("fprop", recipe, (x_MK, 1), (w_KN, 0), key, precision, out_dtype)

    def forward(x_MK, w_KN, key):
        return dot(x_MK, w_KN, key), (x_MK, w_KN, key)

    def backward(residuals, dy_MN):
        x_MK, w_KN, key = residuals
        dx_MK = _gemm("dgrad", recipe, (dy_MN, 1), (w_KN, 1), key, precision, x_MK.dtype)
        dw_KN = _gemm("wgrad", recipe, (x_MK, 0), (dy_MN, 0), key, precision, w_KN.dtype)
        return _first_derivative_only(dx_MK), _first_derivative_only(dw_KN), None

    dot.defvjp(forward, backward)
    return dot(x, w, key)


@jax.custom_jvp
def _first_derivative_only(x):
    """Return x; differentiating it raises, where the derivative of a rounded gradient would silently be zero."""
    return x


@_first_derivative_only.defjvp
def _raise_second_derivative(primals, tangents):
    raise NotImplementedError("second derivatives of a quantized dot are not defined")


def _gemm(gemm, recipe, lhs_and_axis, rhs_and_axis, key, precision, out_dtype):
    """One GEMM through its spec; each operand comes with its contraction axis."""
    spec: GemmSpec = getattr(recipe, gemm)
    (lhs, lhs_axis), (rhs, rhs_axis) = lhs_and_axis, rhs_and_axis
    dimension_numbers = (((lhs_axis,), (rhs_axis,)), ((), ()))
    if spec.is_plain:
        return lax.dot_general(lhs, rhs, dimension_numbers, precision, out_dtype)
    gemm_key = None if key is None else bits.fold_in(key, GEMMS.index(gemm))
    signs = None
    if spec.rotation.size:
        signs_key = None if gemm_key is None else bits.fold_in(gemm_key, _SIGNS_WORD)
        signs = rotation.rotation_signs(spec.rotation, signs_key)

    def cast(index, operand, axis):
        operand_spec = (spec.lhs, spec.rhs)[index]
        if spec.pad:
            operand = _pad(operand, axis, spec.multiple)
        if spec.rotation.size:
            operand = rotation.hadamard(operand, spec.rotation.size, axis, signs)
        operand_key = None
        if operand_spec.rounding == "sr" and gemm_key is not None:
            operand_key = bits.fold_in(gemm_key, index)
            if OPERANDS[gemm][index] not in TOKEN_OPERANDS:
                operand_key = operand_key._replace(row_offset=0)
        quantize.check_operand(operand, operand_spec, axis, operand_key)
        return quantize.fake_quantize(operand, operand_spec, axis, operand_key)

    product = lax.dot_general(
        cast(0, lhs, lhs_axis),
        cast(1, rhs, rhs_axis),
        dimension_numbers,
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    return product.astype(out_dtype)


def _pad(x: jax.Array, axis: int, multiple: int) -> jax.Array:
    """Append zeros along `axis` up to the next multiple."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, -x.shape[axis] % multiple)
    return jnp.pad(x, widths)
