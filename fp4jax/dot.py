"""The quantized dot: `lax.dot_general` of a linear layer whose fprop, dgrad and wgrad each follow a `GemmSpec`.

    fprop  y_MN  = Q(x_MK·H_K) · Q(H_K·w_KN)
    dgrad  dx_MK = Q(dy_MN·H_N) · Q(H_N·w_KNᵀ)
    wgrad  dw_KN = Q(H_M·x_MK)ᵀ · Q(H_M·dy_MN)

Every cast starts from the high-precision tensor, along the contraction axis of the GEMM that consumes it; nothing is
quantized twice, unless a recipe asks for exactly that: with source="fprop" the backward GEMM casts Q(x·H_K) or Q(H_K·w), its
product is then rotated back along K. Under a clipping rule ("quest") the gradient of a clipped element is zero, in the rotated
space. Products are summed in FP32. Only first derivatives are defined.

Any dimension numbers are brought to this 2-D form: several contracting axes are flattened into K, several free axes of lhs
into M and of rhs into N, in the order lax.dot_general returns them; batch axes are mapped (each with its own draws).
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from fp4jax import bits, rotation, rounding, stats
from fp4jax.ops import kernels, matmul, qtensor, quantize
from fp4jax.recipe import GEMMS, OPERANDS, GemmSpec, Recipe

RESIDUALS = ("operands", "packed")
RESIDUAL_NAME = "fp4_residual"
_SIGNS_WORD = 2  # after the operands' 0 and 1
TOKEN_OPERANDS = ("x", "dy")  # their rows are tokens: they take the key's row offset


def quantized_dot_general(
    lhs: jax.Array,
    rhs: jax.Array,
    dimension_numbers,
    precision=None,
    preferred_element_type=None,
    *,
    recipe: Recipe,
    key=None,
    history=None,
    impl: str = "auto",
    residuals: str = "operands",
    shared: dict[Any, Any] | None = None,
    partition: kernels.Partition | None = None,
    sums: stats.Sums | None = None,
) -> jax.Array:
    """Return lax.dot_general(lhs, rhs, dimension_numbers) with the forward and both backward GEMMs following `recipe`.

    lhs: activations x, rhs: weights w; float32, bfloat16 or float16. The result has the operands' promoted dtype, or
    preferred_element_type; the gradients have the dtypes of lhs and rhs. precision applies to GEMMs that the recipe leaves
    plain; a quantized GEMM always accumulates in FP32. key: as in `quantize`, needed when recipe.needs_key. history: float32
    [3, 2, H], needed when recipe.needs_history (delayed scaling): the maxima of earlier steps per GEMM and operand, newest
    first; a "delayed" scale is made from the newest, or from the operand itself where that is 0. Its cotangent is no
    gradient: it holds this call's maxima in [:, :, 0] and zeros elsewhere (see `roll_history`). A recipe that is plain
    everywhere is lax.dot_general itself, unless partition.reduce is set. impl: see `ops.matmul.choose`, which says for each
    GEMM what runs. residuals: what the backward keeps of x and w, "operands" as they are, or "packed": the codes and scales
    that wgrad and dgrad multiply, where these are quantized, named "fp4_residual" for remat policies. shared: a dict that
    several dots of the same lhs are given, so that they keep one packed copy of it (where no random bits are drawn for it).
    partition: how a mesh splits the layer, needed by kernels on several devices, by all where time is split, and to sum dw in a
    dtype of its own; otherwise XLA partitions what is no kernel. sums: `stats.zeros()`, to measure: its cotangent holds what
    the casts and GEMMs of this call did. Without it nothing is computed for that.

    Raises ValueError when a contraction length is not a multiple of the GEMM's blocks and rotation and the GEMM does not pad,
    when key or history are missing, when `impl` is unknown or cannot run a GEMM here, or when residuals="packed" meets delayed
    scaling, a split, a clipping rule, or sums, which need the operands themselves.
    """
    matmul.check_impl(impl)
    if not isinstance(recipe, Recipe):
        raise ValueError(f"{recipe=} is not a Recipe: fp4jax.recipes.get(name) returns one")
    if recipe.is_plain and (partition is None or partition.reduce == "auto"):
        return lax.dot_general(lhs, rhs, dimension_numbers, precision, preferred_element_type)
    if recipe.needs_key and key is None:
        raise ValueError("the recipe draws random bits (stochastic rounding or redrawn signs): pass key=")
    if recipe.needs_history and history is None:
        raise ValueError("the recipe takes scales from earlier steps (delayed scaling): pass history=")
    if not recipe.needs_history:
        history = None
    if residuals not in RESIDUALS:
        raise ValueError(f"unknown {residuals=}: choose from {list(RESIDUALS)}")
    if residuals == "packed":
        _check_packable(recipe)
        if sums is not None:
            raise ValueError("residuals='packed' does not apply where sums are taken: these need the operands")
    key = None if key is None else bits.as_key(key)
    jax.eval_shape(lambda a, b: lax.dot_general(a, b, dimension_numbers), lhs, rhs)  # refuses what lax refuses
    out_dtype = preferred_element_type or jnp.promote_types(lhs.dtype, rhs.dtype)
    lengths = contraction_lengths(lhs, rhs, dimension_numbers)
    check_gemms(recipe, lengths)
    if recipe.needs_history and dimension_numbers[1][0]:
        raise ValueError("delayed scaling does not apply to a dot with batch axes")
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dimension_numbers
    lhs_free, rhs_free = _free_axes(lhs, rhs, dimension_numbers)
    batch = tuple(lhs.shape[a] for a in lhs_batch)
    k = _size(lhs, lhs_contract)
    x = lhs.transpose(*lhs_batch, *lhs_free, *lhs_contract).reshape(*batch, *(lhs.shape[a] for a in lhs_free), k)
    pieces = 1 if partition is None or len(lhs_free) == 1 else partition.pieces
    if pieces > 1:
        x, key = _time_first(x, pieces, recipe, key)
    x = x.reshape(*batch, _size(lhs, lhs_free), k)
    w = rhs.transpose(*rhs_batch, *rhs_contract, *rhs_free).reshape(*batch, k, _size(rhs, rhs_free))

    impls = {gemm: matmul.choose(impl, getattr(recipe, gemm), ragged=ragged(recipe, gemm, lengths))[0] for gemm in GEMMS}
    if partition is not None and batch and ("triton" in impls.values() or partition.reduce != "auto"):
        raise ValueError("a partition does not apply to a dot with batch axes")
    how = _How(recipe, impls, precision, jnp.dtype(out_dtype), residuals, partition)
    name = None if batch or shared is None else (shared, lhs, tuple(lhs_contract))

    def dot(x_MK, w_KN, key, history, sums):
        ready = _quantize_early(how, x_MK, w_KN, key, name)
        return _dot_2d(how, x_MK, w_KN, key, history, ready, sums)

    for _ in batch:
        dot = jax.vmap(dot, in_axes=(0, 0, None, None, None))
    y = dot(x, w, key, history, sums)
    if pieces > 1:
        time = lhs.shape[lhs_free[-1]]
        y = y.reshape(pieces, -1, time // pieces, y.shape[-1]).swapaxes(0, 1)
    return y.reshape(*batch, *(lhs.shape[a] for a in lhs_free), *(rhs.shape[a] for a in rhs_free))


def _time_first(x, pieces: int, recipe: Recipe, key: bits.Key | None):
    """Return x [.., T, K] as [pieces, .., T / pieces, K], and the key whose rows are still those of [.., T].

    Where a mesh splits T, this order alone keeps every device's tokens together once they are flattened. T / pieces must be a
    multiple of wgrad's blocks, so that each holds the same tokens as before.
    """
    *_, time, k = x.shape
    multiples = [recipe.wgrad.multiple, recipe.fprop.lhs.across or 1, recipe.dgrad.lhs.across or 1]
    if x.ndim < 3 or time % (pieces * max(multiples)):
        raise ValueError(f"tokens {list(x.shape[:-1])} in {pieces} pieces: a piece of time is no multiple of {max(multiples)}")
    x = x.reshape(-1, pieces, time // pieces, k).swapaxes(0, 1)
    if key is not None:
        local = jnp.arange(x.size // k, dtype=jnp.uint32)
        rows = local.reshape(-1, pieces, time // pieces).swapaxes(0, 1).reshape(-1)
        key = key._replace(row_offset=key.row_offset + rows - local)
    return x, key


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
    """Raise ValueError when a length does not divide and the GEMM does not pad."""
    for gemm in GEMMS:
        reason = misfit(recipe, gemm, lengths)
        if reason:
            raise ValueError(f"{gemm}: {reason} ({getattr(recipe, gemm)}); set {gemm}.pad=True to pad it with zeros")


def ragged(recipe: Recipe, gemm: str, lengths: dict[str, int]) -> bool:
    """Return whether a GEMM has to pad these lengths."""
    spec: GemmSpec = getattr(recipe, gemm)
    return spec.pad and bool(misfit(dataclasses.replace(recipe, **{gemm: dataclasses.replace(spec, pad=False)}), gemm, lengths))


def misfit(recipe: Recipe, gemm: str, lengths: dict[str, int]) -> str:
    """Return why a GEMM cannot run on these `contraction_lengths`, "" when it can: its own, and those across square blocks."""
    spec: GemmSpec = getattr(recipe, gemm)
    if spec.pad:
        return ""
    if lengths[gemm] % spec.multiple:
        return f"contraction length {lengths[gemm]} is not a multiple of {spec.multiple}"
    for operand, free in zip((spec.lhs, spec.rhs), FREE_LENGTH_OF[gemm], strict=True):
        if lengths[free] % (operand.across or 1):
            return f"length {lengths[free]} across square blocks is not a multiple of {operand.across}"
    return ""


# The free length of lhs and rhs of each GEMM, named by the GEMM that contracts it: M of x, N of w, and so on.
FREE_LENGTH_OF = {"fprop": ("wgrad", "dgrad"), "dgrad": ("wgrad", "fprop"), "wgrad": ("fprop", "dgrad")}


def _check_packable(recipe: Recipe) -> None:
    specs = [spec for g in GEMMS for spec in (getattr(recipe, g).lhs, getattr(recipe, g).rhs)]
    if recipe.needs_history or any(getattr(recipe, g).split != "none" for g in GEMMS):
        raise ValueError("residuals='packed' does not apply to delayed scaling or a split: their backward needs the operands")
    if any(spec.scale_rule == "quest" for spec in specs):
        raise ValueError("residuals='packed' does not apply to scale_rule='quest': its clip mask needs the operands")


class _How(NamedTuple):
    """What is fixed about one dot. impls: what runs each GEMM."""

    recipe: Recipe
    impls: dict[str, str]
    precision: Any
    out_dtype: Any
    residuals: str
    partition: kernels.Partition | None

    def spec(self, gemm: str) -> GemmSpec:
        return getattr(self.recipe, gemm)

    def cast_by_kernel(self, gemm: str, index: int) -> bool:
        """Return whether a kernel casts this operand straight from the matrix in memory."""
        spec = self.spec(gemm)
        return self.impls[gemm] == "triton" and spec.split == "none" and (spec.lhs, spec.rhs)[index].source == "input"


# The GEMMs that contract a matrix along its columns (so that its rows are cast) and along its rows.
_ROW_GEMM = {"x": "fprop", "w": "dgrad", "dy": "dgrad"}
_COL_GEMM = {"x": "wgrad", "w": "fprop", "dy": "wgrad"}
_Ready = dict[tuple[str, int], qtensor.QTensor]  # by GEMM and operand


def _quantize_early(how: _How, x_MK, w_KN, key: bits.Key | None, name: tuple | None) -> _Ready:
    """Return what is quantized of x and w before the forward GEMM: its operands for a kernel, and the packed residuals.

    name: (dict shared by the dots of one input, lhs, contracted axes), None where nothing is shared. Dots that contract the
    very same lhs alike keep one copy of its codes, unless these are drawn for each dot.
    """
    ready = _quantize_by_kernel(how, "x", x_MK, key, name) | _quantize_by_kernel(how, "w", w_KN, key, None)
    if how.residuals == "packed":
        if how.impls["wgrad"] != "triton" and how.spec("wgrad").lhs.element is not None:
            spec = how.spec("wgrad")
            alike = spec.lhs.source == "input" and not _draws(spec, 0)
            what = (spec.lhs, spec.rotation, spec.pad)
            ready[("wgrad", 0)] = _once(lambda: _pack(how, "wgrad", x_MK, key), name if alike else None, what)
        if how.impls["dgrad"] != "triton" and how.spec("dgrad").rhs.element is not None:
            ready[("dgrad", 1)] = _pack(how, "dgrad", w_KN, key)
    return ready


def _once(make, name, what):
    """Return make(), or what an earlier dot of the same lhs made of it for the same `what`; name None shares nothing."""
    if name is None:
        return make()
    shared, lhs, contract = name
    if (what, contract) not in shared or shared[what, contract][0] is not lhs:
        shared[what, contract] = lhs, make()
    return shared[what, contract][1]


def _draws(spec: GemmSpec, index: int) -> bool:
    return (spec.lhs, spec.rhs)[index].draws or spec.rotation.draws


def _quantize_by_kernel(how: _How, operand: str, matrix, key: bits.Key | None, name, gemms=None) -> _Ready:
    """Return both casts of x, w or dy, or those that `gemms` need, made in one launch."""
    if gemms is None:
        gemms = GEMMS if how.residuals == "packed" else ("fprop",)
    casts, where = [], []
    for gemm in (_ROW_GEMM[operand], _COL_GEMM[operand]):
        index = OPERANDS[gemm].index(operand)
        wanted = gemm in gemms and how.cast_by_kernel(gemm, index)
        casts.append(_kernel_cast(how.spec(gemm), index, _gemm_key(key, gemm), operand) if wanted else None)
        where.append((gemm, index))
    if casts == [None, None]:
        return {}
    pairs = list(zip(casts, where, strict=True))
    alike = not any(cast is not None and _draws(how.spec(gemm), i) for cast, (gemm, i) in pairs)
    what = tuple((gemm, None if cast is None else (cast.spec, how.spec(gemm).rotation)) for cast, (gemm, _) in pairs)
    both = _once(lambda: _launch(how, operand, matrix, *casts), name if alike else None, what)
    ready = {place: q for place, q in zip(where, both, strict=True) if q is not None}
    return {place: q if place[0] == "fprop" else _named(q) for place, q in ready.items()}


def _launch(how: _How, operand: str, matrix, row, col):
    for cast, axis in ((row, 1), (col, 0)):
        if cast is not None:
            quantize.check_operand(matrix, cast.spec, axis, cast.key)
    axes, mesh = ((None, None), None) if how.partition is None else (how.partition.of(operand), how.partition.mesh)
    return kernels.quantize(lax.stop_gradient(matrix), row, col, axes, mesh)


def _launch_one(how: _How, operand: str, matrix, axis: int, cast: kernels.Cast) -> qtensor.QTensor:
    """Return one cast of a matrix along `axis`."""
    row, col = _launch(how, operand, matrix, *((None, cast) if axis == 0 else (cast, None)))
    one = col if axis == 0 else row
    assert one is not None
    return one


def _named(packed: qtensor.QTensor) -> qtensor.QTensor:
    """Return what a backward GEMM multiplies under the name that remat policies know."""
    return jax.tree.map(lambda leaf: checkpoint_name(leaf, RESIDUAL_NAME), packed)


def _kernel_cast(spec: GemmSpec, index: int, gemm_key: bits.Key | None, operand: str) -> kernels.Cast:
    key = _operand_key(spec, index, gemm_key, operand)
    return kernels.Cast((spec.lhs, spec.rhs)[index], spec.rotation.size, _signs(spec, gemm_key), key)


def _pack(how: _How, gemm: str, operand: jax.Array, key: bits.Key | None) -> qtensor.QTensor:
    """Return what the backward `gemm` multiplies of its forward operand (x of wgrad, w of dgrad)."""
    index, axis = (0, 0) if gemm == "wgrad" else (1, 1)
    spec, fprop = how.spec(gemm), how.spec("fprop")
    operand_spec = (spec.lhs, spec.rhs)[index]
    if operand_spec.source == "fprop":
        fprop_key = _gemm_key(key, "fprop")
        operand = _fake(index, fprop, (operand, 1 - axis), fprop_key, _signs(fprop, fprop_key), OPERANDS[gemm][index])
    gemm_key = _gemm_key(key, gemm)
    operand, operand_key, _ = _prepare(index, spec, (operand, axis), gemm_key, _signs(spec, gemm_key), OPERANDS[gemm][index])
    packed = quantize.quantize(lax.stop_gradient(operand), operand_spec, axis, key=operand_key)
    return _named(_stay(how, packed, OPERANDS[gemm][index]))


def _stay(how: _How, cast, operand: str):
    return cast if how.partition is None else kernels.stay(cast, how.partition, operand)


def _dot_2d(how: _How, x, w, key, history, ready, sums):
    """The custom_vjp dot of x_MK and w_KN; ready: what is quantized of them already."""
    recipe = how.recipe
    like_x, like_w = (jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (x, w))

    @jax.custom_vjp
    def dot(x_MK, w_KN, key, history, ready, sums):
        return _gemm(how, "fprop", (x_MK, 1), (w_KN, 0), key, history, ready, how.out_dtype)[0]

    def forward(x_MK, w_KN, key, history, ready, sums):
        y_MN, maxima = _gemm(how, "fprop", (x_MK, 1), (w_KN, 0), key, history, ready, how.out_dtype)
        if sums is not None:
            sums = [_measure(how, "fprop", (x_MK, 1), (w_KN, 0), (x_MK, w_KN), key, history, y_MN)]
        kept = (None if ("wgrad", 0) in ready else x_MK, None if ("dgrad", 1) in ready else w_KN)
        packed = {place: q for place, q in ready.items() if place[0] != "fprop"}
        return y_MN, (kept, key, history, packed, maxima, sums)

    def backward(residuals, dy_MN):
        (x_MK, w_KN), key, history, ready, maxima, sums = residuals
        reuse_w, reuse_x = recipe.dgrad.rhs.source == "fprop", recipe.wgrad.lhs.source == "fprop"
        fprop_key = _gemm_key(key, "fprop")
        signs = _signs(recipe.fprop, fprop_key) if reuse_w or reuse_x else None
        ready = ready | _quantize_by_kernel(how, "dy", dy_MN, key, None, GEMMS)
        x, w = x_MK, w_KN
        if x is not None and ("wgrad", 0) not in ready:
            ready = ready | _quantize_by_kernel(how, "x", x, key, None, ("wgrad",))
            x = _fake(0, recipe.fprop, (x, 1), fprop_key, signs, "x") if reuse_x else x
        if w is not None and ("dgrad", 1) not in ready:
            ready = ready | _quantize_by_kernel(how, "w", w, key, None, ("dgrad",))
            w = _fake(1, recipe.fprop, (w, 0), fprop_key, signs, "w") if reuse_w else w
        dx_dtype, dw_dtype = (jnp.float32 if again else like.dtype for again, like in ((reuse_w, like_x), (reuse_x, like_w)))
        dx_MK, dgrad_maxima = _gemm(how, "dgrad", (dy_MN, 1), (w, 1), key, history, ready, dx_dtype)
        dw_KN, wgrad_maxima = _gemm(how, "wgrad", (x, 0), (dy_MN, 0), key, history, ready, dw_dtype)
        dx_MK = _to_input(dx_MK, 0, (like_x if x_MK is None else x_MK, 1), recipe, key, rotated=reuse_w)
        dw_KN = _to_input(dw_KN, 1, (like_w if w_KN is None else w_KN, 0), recipe, key, rotated=reuse_x)
        if sums is not None:
            dgrad = _measure(how, "dgrad", (dy_MN, 1), (w, 1), (dy_MN, w_KN), key, history, dx_MK)
            wgrad = _measure(how, "wgrad", (x, 0), (dy_MN, 0), (x_MK, dy_MN), key, history, dw_KN)
            sums = jax.tree.map(lambda *of_gemms: jnp.stack(of_gemms), *sums, dgrad, wgrad)
        if history is not None:
            measured = jnp.stack([jnp.stack(pair) for pair in (maxima, dgrad_maxima, wgrad_maxima)])
            history = jnp.zeros_like(history).at[..., 0].set(measured)
        depends_on = (x_MK, w_KN, dy_MN)
        gradients = (_first_derivative_only(g, depends_on) for g in (dx_MK, dw_KN))
        return *gradients, None, history, None, sums

    dot.defvjp(forward, backward)
    return dot(x, w, key, history, ready, sums)


def _measure(how: _How, gemm, lhs_and_axis, rhs_and_axis, exact_operands, key, history, product) -> stats.Sums:
    """Return the sums of one GEMM, given what `_gemm` was given, the operands before fprop's casts, and the product."""
    spec, gemm_key = how.spec(gemm), _gemm_key(key, gemm)
    operands, axes = zip(lhs_and_axis, rhs_and_axis, strict=True)
    if spec.is_plain:
        return jax.tree.map(lambda leaf: leaf[0], stats.zeros())
    exact_lhs, exact_rhs = (x.astype(jnp.float32) for x in exact_operands)
    exact = matmul.reference_dot(exact_lhs, exact_rhs, (((axes[0],), (axes[1],)), ((), ())))
    if spec.split == "mean":
        operands, _ = _split_mean(gemm, operands, axes)
    signs, casts, length = _signs(spec, gemm_key), [], 0
    for i, (operand, axis) in enumerate(zip(operands, axes, strict=True)):
        operand_spec = (spec.lhs, spec.rhs)[i]
        amax = None if history is None else history[GEMMS.index(gemm), i, 0]
        rotated, operand_key, _ = _prepare(i, spec, (operand, axis), gemm_key, signs, OPERANDS[gemm][i])
        cast = stats.operand_sums(rotated, operand_spec, axis, operand_key, amax, rotation=spec.rotation.size)
        plain = jax.tree.map(jnp.zeros_like, cast)
        if spec.rotation.size:
            unrotated, _, _ = _prepare(i, spec, (operand, axis), gemm_key, signs, OPERANDS[gemm][i], rotate=False)
            plain = stats.operand_sums(unrotated, operand_spec, axis, operand_key, amax)
        casts.append((cast, plain))
        length = rotated.shape[axis]  # the same for both
    of_gemm = stats.gemm_sums(product, exact, casts[0][0], casts[1][0], length)
    (lhs, rhs) = (jax.tree.map(lambda *leaves: jnp.stack(leaves), *pair) for pair in casts)
    return stats.Sums(jax.tree.map(lambda *leaves: jnp.stack(leaves), lhs, rhs), of_gemm)


def weight_codes(recipe: Recipe, w_KN: jax.Array, key: bits.Key | None) -> jax.Array | None:
    """Return the codes (uint8, shape of w, −0 as 0) that fprop multiplies for a weight, None where it has none.

    key: as `quantized_dot_general` takes it. A ragged weight is padded; codes of the padding are left out.
    """
    spec, gemm_key = recipe.fprop, _gemm_key(key, "fprop")
    element = spec.rhs.element
    if element is None:
        return None
    w, operand_key, _ = _prepare(1, spec, (w_KN, 0), gemm_key, _signs(spec, gemm_key), "w")
    codes = quantize.quantize(w, spec.rhs, 0, key=operand_key).codes[: w_KN.shape[0], : w_KN.shape[1]]
    return jnp.where(codes == 1 << (element.bits - 1), jnp.uint8(0), codes)


def roll_history(history: jax.Array, measured: jax.Array) -> jax.Array:
    """Return the history after one optimizer step: float32 [..., H], newest first; measured: its cotangent."""
    return jnp.concatenate([measured[..., :1], history[..., :-1]], axis=-1)


def _to_input(gradient, index, operand_and_axis, recipe, key, *, rotated):
    """Return the gradient of one operand of fprop: clipped elements set to zero, rotated back to the operand's own space.

    gradient: of Q(operand·H), along its padded axis, if `rotated`, otherwise of the operand.
    """
    (operand, axis), spec = operand_and_axis, recipe.fprop
    operand_spec = (spec.lhs, spec.rhs)[index]
    clips = operand_spec.scale_rule == "quest"
    if not (clips or rotated):
        return lax.slice_in_dim(gradient, 0, operand.shape[axis], axis=axis)
    signs = _signs(spec, _gemm_key(key, "fprop"))

    def rotate(x):
        x = _pad(x, axis, spec.multiple) if spec.pad else x
        return rotation.hadamard(x, spec.rotation.size, axis, signs) if spec.rotation.size else x

    if clips:
        inside = quantize.inside_clip(rotate(operand), operand_spec, axis)
        gradient = jnp.where(inside, gradient if rotated else rotate(gradient), 0.0)
    if spec.rotation.size:
        gradient = rotation.hadamard(gradient, spec.rotation.size, axis)
        if signs is not None:
            gradient = rotation.multiply_signs(gradient, signs, axis)
    return lax.slice_in_dim(gradient, 0, operand.shape[axis], axis=axis).astype(operand.dtype)


@jax.custom_jvp
def _first_derivative_only(gradient, depends_on):
    """Return the gradient; differentiating it, or what it depends on, raises: a rounded gradient's would silently be zero."""
    del depends_on
    return gradient


@_first_derivative_only.defjvp
def _raise_second_derivative(primals, tangents):
    raise NotImplementedError("second derivatives of a quantized dot are not defined")


def _gemm_key(key: bits.Key | None, gemm: str) -> bits.Key | None:
    return None if key is None else bits.fold_in(key, GEMMS.index(gemm))


def _signs(spec: GemmSpec, gemm_key: bits.Key | None) -> jax.Array | None:
    if not spec.rotation.size:
        return None
    return rotation.rotation_signs(spec.rotation, None if gemm_key is None else bits.fold_in(gemm_key, _SIGNS_WORD))


def _prepare(index, spec: GemmSpec, operand_and_axis, gemm_key, signs, name, *, rotate=True):
    """Pad and rotate one operand; return (what is to be quantized, the key for it, what `split` took out)."""
    (operand, axis), operand_spec = operand_and_axis, (spec.lhs, spec.rhs)[index]
    if spec.pad:
        operand = _pad(operand, axis, spec.multiple)
        operand = _pad(operand, 1 - axis, operand_spec.across or 1)
    if spec.rotation.size and rotate:
        operand = rotation.hadamard(operand, spec.rotation.size, axis, signs)
    first = None
    if spec.split == "first" and rotate:
        operand, first = rotation.split_first(operand, spec.rotation.size, axis)
    operand_key = _operand_key(spec, index, gemm_key, name)
    quantize.check_operand(operand, operand_spec, axis, operand_key)
    return operand, operand_key, first


def _operand_key(spec: GemmSpec, index: int, gemm_key: bits.Key | None, name: str) -> bits.Key | None:
    if gemm_key is None or not (spec.lhs, spec.rhs)[index].draws:
        return None
    key = bits.fold_in(gemm_key, index)
    return key if name in TOKEN_OPERANDS else key._replace(row_offset=0)


def _fake(index, spec: GemmSpec, operand_and_axis, gemm_key, signs, name) -> jax.Array:
    """Return the FP32 values of one operand of fprop, padded and rotated along its axis: what a backward GEMM casts again."""
    operand, axis = operand_and_axis
    free_length = operand.shape[1 - axis]
    operand, operand_key, _ = _prepare(index, spec, operand_and_axis, gemm_key, signs, name)
    values = quantize.fake_quantize(operand, (spec.lhs, spec.rhs)[index], axis, operand_key)
    return lax.slice_in_dim(values, 0, free_length, axis=1 - axis)


def _cast_operand(how: _How, gemm, index, operand_and_axis, gemm_key, signs, amax):
    """Quantize one operand for the GEMM's implementation.

    Returns (its values in FP32 for "reference", a QTensor or BF16 array for "xla", a QTensor with the contraction last for
    "triton"; its maximum or 0; what `split` took out).
    """
    spec, impl, name = how.spec(gemm), how.impls[gemm], OPERANDS[gemm][index]
    (operand, axis), operand_spec = operand_and_axis, (spec.lhs, spec.rhs)[index]
    if impl == "triton" and spec.split != "first":
        return _launch_one(how, name, operand, axis, _kernel_cast(spec, index, gemm_key, name)), jnp.float32(0), None
    operand, operand_key, first = _prepare(index, spec, operand_and_axis, gemm_key, signs, name)
    measured = jnp.float32(0)
    if operand_spec.scale_rule == "delayed":
        measured = rounding.max_magnitude(operand.astype(jnp.float32)).reshape(())
    if impl == "triton":
        cast = _launch_one(how, name, operand, axis, kernels.Cast(operand_spec, key=operand_key))
    elif impl == "reference":
        cast = quantize.fake_quantize(operand, operand_spec, axis, operand_key, amax)
    elif operand_spec.element is None:
        cast = operand.astype(jnp.bfloat16)
    else:
        cast = quantize.quantize(operand, operand_spec, axis, key=operand_key, amax=amax)
    if impl != "triton":
        cast = _stay(how, cast, name)
    return cast, measured, first


def _gemm(how: _How, gemm, lhs_and_axis, rhs_and_axis, key, history, ready, out_dtype):
    """One GEMM through its spec, each operand with its contraction axis; return (product, both maxima for the history)."""
    spec, impl = how.spec(gemm), how.impls[gemm]
    operands, axes = zip(lhs_and_axis, rhs_and_axis, strict=True)
    dimension_numbers = (((axes[0],), (axes[1],)), ((), ()))
    if spec.is_plain:
        product_dtype = jnp.float32 if _sums_by_itself(how, gemm) else out_dtype
        product = _multiply(
            how, gemm, lambda a, b: lax.dot_general(a, b, dimension_numbers, how.precision, product_dtype), operands
        )
        return product.astype(out_dtype), (jnp.float32(0),) * 2
    gemm_key, rank_one = _gemm_key(key, gemm), None
    if spec.split == "mean":
        operands, rank_one = _split_mean(gemm, operands, axes)
    signs = _signs(spec, gemm_key)

    def cast(i):
        if (gemm, i) in ready:
            q = ready[gemm, i]
            return q.dequantize() if impl == "reference" else q, jnp.float32(0), None
        amax = None if history is None else history[GEMMS.index(gemm), i, 0]
        return _cast_operand(how, gemm, i, (operands[i], axes[i]), gemm_key, signs, amax)

    (lhs, lhs_max, lhs_first), (rhs, rhs_max, rhs_first) = cast(0), cast(1)
    gain = 1 / (spec.lhs.gain * spec.rhs.gain)
    if impl == "triton":
        product_dtype = out_dtype if spec.split == "none" else jnp.float32
        product = _kernel_matmul(how, gemm, lhs, rhs, gain, product_dtype)
    else:
        dot = matmul.reference_dot if impl == "reference" else matmul.xla_dot
        product = _multiply(how, gemm, lambda a, b: dot(a, b, dimension_numbers), (lhs, rhs))
        if gain != 1:
            product = product * jnp.float32(gain)
    if lhs_first is not None and rhs_first is not None:
        firsts = (rounding.to_bfloat16(lhs_first), rounding.to_bfloat16(rhs_first))
        product = product + _multiply(how, gemm, lambda a, b: matmul.reference_dot(a, b, dimension_numbers), firsts)
    for side, (operand, axis) in enumerate(zip(operands, axes, strict=True)):  # without what was padded across square blocks
        if operand is not None and product.shape[side] != operand.shape[1 - axis]:
            product = lax.slice_in_dim(product, 0, operand.shape[1 - axis], axis=side)
    if rank_one is not None:
        product = product + rank_one
    return product.astype(out_dtype), (lhs_max, rhs_max)


def _sums_by_itself(how: _How, gemm: str) -> bool:
    """Return whether the sum over devices is written out, in a dtype of its own, for a product that XLA could partition."""
    return gemm == "wgrad" and how.partition is not None and how.partition.reduce != "auto"


def _multiply(how: _How, gemm: str, dot, operands) -> jax.Array:
    if not _sums_by_itself(how, gemm):
        return dot(*operands)
    assert how.partition is not None
    x, dy = operands
    return kernels.wgrad(dot, x, dy, how.partition)


def _kernel_matmul(how: _How, gemm: str, lhs, rhs, alpha: float, out_dtype) -> jax.Array:
    part = how.partition
    if part is None:
        return kernels.matmul(lhs, rhs, None, (None, None, None), alpha=alpha, out_dtype=out_dtype)
    k, n = part.stored
    axes = {"fprop": (part.m, part.n, part.k), "dgrad": (part.m, part.k, part.n), "wgrad": (part.k, part.n, part.m)}[gemm]
    at_rest = {"fprop": (n, k), "dgrad": (k, n), "wgrad": None}[gemm]
    scatter, sum_dtype = ((k, n), part.reduce_dtype) if gemm == "wgrad" else (None, jnp.float32)
    where: dict[str, Any] = {"at_rest": at_rest, "scatter": scatter, "sum_dtype": sum_dtype}
    return kernels.matmul(lhs, rhs, part.mesh, axes, **where, alpha=alpha, out_dtype=out_dtype)


def _split_mean(gemm, operands, axes):
    """Return (the operands less their means over tokens, the FP32 product that these means stand for).

    fprop, dgrad: (x̃ + 1·μᵀ)·w = x̃·w + 1·(μᵀw). wgrad: (x̃ + 1·μᵀ)ᵀ(dỹ + 1·νᵀ) = x̃ᵀdỹ + M·μνᵀ, as x̃ and dỹ sum to zero.
    """
    lhs, rhs = (x.astype(jnp.float32) for x in operands)
    dimension_numbers = (((axes[0],), (axes[1],)), ((), ()))
    lhs_mean = jnp.mean(lhs, axis=0, keepdims=True)
    if gemm != "wgrad":
        return (lhs - lhs_mean, rhs), matmul.reference_dot(lhs_mean, rhs, dimension_numbers)
    rhs_mean = jnp.mean(rhs, axis=0, keepdims=True)
    return (lhs - lhs_mean, rhs - rhs_mean), matmul.reference_dot(lhs_mean, rhs_mean, dimension_numbers) * lhs.shape[0]


def _pad(x: jax.Array, axis: int, multiple: int) -> jax.Array:
    """Append zeros along `axis` up to the next multiple."""
    if x.shape[axis] % multiple == 0:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, -x.shape[axis] % multiple)
    return jnp.pad(x, widths)
