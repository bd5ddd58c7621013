"""The kernels on a mesh: quantize a matrix for both of its GEMMs, multiply two quantized matrices.

A kernel call is opaque to the partitioner, so each runs in a `shard_map` of its own, whose collectives are written out: the
sum over a contracted axis, the maximum of a tensor scale, the random bits' global rows and columns. Nothing is differentiated
through them (`fp4jax.dot` has the derivative). The weights of a fully sharded layer are quantized where they lie and travel as
codes and scales.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from fp4jax import bits, rounding
from fp4jax.ops import qtensor, triton_call
from fp4jax.recipe import OperandSpec

AxisName = str | tuple[str, ...] | None


class Partition(NamedTuple):
    """The mesh axes of one linear layer: of tokens (m), input (k) and output features (n), and of the weight as it is stored.

    stored: the axes of w's K and N at rest, more than (k, n) where parameters are fully sharded.
    """

    mesh: Mesh
    m: AxisName
    k: AxisName
    n: AxisName
    stored: tuple[AxisName, AxisName]

    def of(self, operand: str) -> tuple[AxisName, AxisName]:
        """Return the axes of the rows and columns of x, w or dy."""
        return {"x": (self.m, self.k), "w": self.stored, "dy": (self.m, self.n)}[operand]


class Cast(NamedTuple):
    """One of the two casts of a matrix: spec (mxfp4 or nvfp4), rotation along the contraction, and the bits it draws.

    size: of the rotation, 0 for none. signs: its ±1 diagonal or None. key: for a spec that draws, else None.
    """

    spec: OperandSpec
    size: int = 0
    signs: jax.Array | None = None
    key: bits.Key | None = None


def quantize(
    x: jax.Array, row: Cast | None, col: Cast | None, axes: tuple[AxisName, AxisName], mesh: Mesh | None
) -> tuple[qtensor.QTensor | None, qtensor.QTensor | None]:
    """Quantize x [R, C] along C by `row` and along R by `col`, in one launch; see `quantize_triton.quantize`.

    axes: the mesh axes of R and C, for mesh None of no meaning. The results are sharded as x is; that of `col` is of xᵀ.
    Raises ValueError when a shard does not divide into the blocks.
    """
    from fp4jax.ops import quantize_triton

    if mesh is None:
        return quantize_triton.quantize(x, row, col)
    arrays = {}
    for name, cast in (("row", row), ("col", col)):
        if cast is not None:
            arrays[name] = (cast.signs, cast.key)

    def local(x, arrays):
        casts = []
        for name, cast in (("row", row), ("col", col)):
            if cast is not None:
                signs, key = arrays[name]
                cast = cast._replace(signs=signs, key=_at_shard(key, axes, x.shape))
            casts.append(cast)
        return quantize_triton.quantize(x, *casts, reduce_amax=lambda amax: _pmax(amax, axes))

    def specs(cast, a, b):
        if cast is None:
            return None
        scale = None if cast.spec.format != "nvfp4" else PartitionSpec()
        return qtensor.QTensor(PartitionSpec(a, b), PartitionSpec(a, b), scale, cast.spec, 1)  # pyright: ignore

    out = (specs(row, *axes), specs(col, *axes[::-1]))
    replicated = jax.tree.map(lambda _: PartitionSpec(), arrays)
    run = jax.shard_map(local, mesh=mesh, in_specs=(PartitionSpec(*axes), replicated), out_specs=out, check_vma=False)
    return run(x, arrays)


def matmul(
    lhs: qtensor.QTensor,
    rhs: qtensor.QTensor,
    mesh: Mesh | None,
    axes: tuple[AxisName, AxisName, AxisName],
    *,
    at_rest: tuple[AxisName, AxisName] | None = None,
    scatter: tuple[AxisName, AxisName] | None = None,
    alpha: float,
    out_dtype,
) -> jax.Array:
    """Return lhs [M, K] · rhs [N, K]ᵀ · alpha; axes: the mesh axes of M, N and K.

    at_rest: the axes of rhs's rows and columns, where these are more than (N's, K's): its codes and scales are gathered, not
    the values. scatter: the axes of the result's rows and columns, where these are more than (M's, N's): each device then
    keeps its piece of the sum only. Sums over K's axis are taken in float32.
    """
    from fp4jax.ops import matmul_triton

    target = triton_call.current_target()
    assert target is not None
    m, n, k = axes
    partial = jnp.float32 if mesh is not None and k is not None else out_dtype

    def local(a_data, a_scale, b_data, b_scale, tensors):
        for dimension, (now, wanted) in enumerate(zip(at_rest or (n, k), (n, k), strict=True)):
            if now != wanted:
                gather = functools.partial(lax.all_gather, axis_name=now, axis=dimension, tiled=True)
                b_data, b_scale = gather(b_data), gather(b_scale)
        product = matmul_triton.scaled_matmul(
            a_data,
            a_scale,
            b_data,
            b_scale,
            a_axis=1,
            b_axis=1,
            target=target.arch,
            a_tensor_scale=tensors[0],
            b_tensor_scale=tensors[1],
            alpha=alpha,
            out_dtype=partial,
        )
        if mesh is None or k is None:
            return product
        for dimension, (now, wanted) in enumerate(zip((m, n), scatter or (m, n), strict=True)):
            if now != wanted:
                product = lax.psum_scatter(product, wanted, scatter_dimension=dimension, tiled=True)
                return product.astype(out_dtype)
        return lax.psum(product, k).astype(out_dtype)

    tensors = (lhs.tensor_scale, rhs.tensor_scale)
    operands = (lhs.data, lhs.scale_bytes, rhs.data, rhs.scale_bytes, tensors)
    if mesh is None:
        return local(*operands)
    row, col = PartitionSpec(m, k), PartitionSpec(*(at_rest or (n, k)))
    in_specs = (row, row, col, col, jax.tree.map(lambda _: PartitionSpec(), tensors))
    out_specs = PartitionSpec(*(scatter or (m, n)))
    return jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)(*operands)


def _at_shard(key: bits.Key | None, axes: tuple[AxisName, AxisName], shape: tuple[int, ...]) -> bits.Key | None:
    """Return the key with the global row and column of this shard's first element."""
    if key is None:
        return None
    offsets = []
    for old, axis, length in zip((key.row_offset, key.col_offset), axes, shape, strict=True):
        index = jnp.uint32(0) if axis is None else lax.axis_index(axis).astype(jnp.uint32)
        offsets.append(jnp.asarray(old).astype(jnp.uint32) + index * jnp.uint32(length))
    return bits.Key(key.words, *offsets)


def _pmax(amax: jax.Array, axes: tuple[AxisName, AxisName]) -> jax.Array:
    """Return the maximum over all shards; on the bits, whose order has NaN on top."""
    for axis in axes:
        if axis is not None:
            amax = rounding.from_bits(lax.pmax(rounding.to_bits(amax), axis))
    return amax
