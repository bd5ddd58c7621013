"""The kernels on a mesh: quantize a matrix for both of its GEMMs, multiply two quantized matrices; and other wgrads' sums.

A kernel call is opaque to the partitioner, so each runs in a `shard_map` of its own, whose collectives are written out: the
sum over a contracted axis, the maximum of a tensor scale, the random bits' global rows and columns. Nothing is differentiated
through them (`fp4jax.dot` has the derivative). The weights of a fully sharded layer are quantized where they lie and travel as
codes and scales.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fp4jax import bits, rounding
from fp4jax.ops import qtensor, triton_call
from fp4jax.recipe import OperandSpec

AxisName = str | tuple[str, ...] | None
REDUCE = ("auto", "float32", "bfloat16")


class Partition(NamedTuple):
    """The mesh axes of one linear layer: of tokens (m), input (k) and output features (n), and of the weight as it is stored.

    stored: the axes of w's K and N at rest, more than (k, n) where parameters are fully sharded. pieces: into how many pieces
    the last axis of the tokens, time, is split; m then names the axis that splits time first. reduce: the dtype in which dw is
    summed over the devices that split the tokens; "auto": in that of the product, float32 where it is quantized.
    """

    mesh: Mesh
    m: AxisName
    k: AxisName
    n: AxisName
    stored: tuple[AxisName, AxisName]
    pieces: int = 1
    reduce: str = "auto"

    @property
    def reduce_dtype(self) -> jnp.dtype:
        return jnp.dtype(jnp.float32 if self.reduce == "auto" else self.reduce)

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

    named = {name: cast for name, cast in (("row", row), ("col", col)) if cast is not None}
    words = {name: cast.key.words for name, cast in named.items() if cast.key is not None}
    rest = {name: (cast.signs, cast.key and (cast.key.row_offset, cast.key.col_offset)) for name, cast in named.items()}

    def local(x, words, rest):
        casts: dict[str, Cast | None] = {"row": None, "col": None}
        for name, cast in named.items():
            signs, offsets = rest[name]
            key = None if offsets is None else _at_shard(bits.Key(words[name], *offsets), axes, x.shape)
            casts[name] = cast._replace(signs=signs, key=key)
        return quantize_triton.quantize(x, casts["row"], casts["col"], reduce_amax=lambda amax: _pmax(amax, axes))

    if mesh is None:
        axes = (None, None)
        return _distinct_under_vmap(local)(x, words, rest) if words else local(x, words, rest)

    def specs(cast, a, b):
        if cast is None:
            return None
        scale = None if cast.spec.format != "nvfp4" else PartitionSpec()
        return qtensor.QTensor(PartitionSpec(a, b), PartitionSpec(a, b), scale, cast.spec, 1)  # pyright: ignore

    out = (specs(row, *axes), specs(col, *axes[::-1]))
    replicated = jax.tree.map(lambda _: PartitionSpec(), (words, rest))
    in_specs = (PartitionSpec(*axes), *replicated)
    return jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out, check_vma=False)(x, words, rest)


def _distinct_under_vmap(run):
    """Return run(x, words, rest) with a batching rule: where x is batched and words are not, the batch index enters these."""
    custom = jax.custom_batching.custom_vmap(run)

    @custom.def_vmap
    def rule(axis_size, in_batched, x, words, rest):
        if in_batched[0] and not any(jax.tree.leaves(in_batched[1])):
            words = {name: bits.distinct_words(key_words, axis_size) for name, key_words in words.items()}
            in_batched = [True, dict.fromkeys(words, True), in_batched[2]]
        in_axes = jax.tree.map(lambda batched: 0 if batched else None, tuple(in_batched))
        batched = jax.vmap(run, in_axes=in_axes, axis_size=axis_size)
        out = _distinct_under_vmap(batched)(x, words, rest)
        return out, jax.tree.map(lambda _: True, out)

    return custom


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
    sum_dtype: Any = jnp.float32,
) -> jax.Array:
    """Return lhs [M, K] · rhs [N, K]ᵀ · alpha; axes: the mesh axes of M, N and K.

    at_rest: the axes of rhs's rows and columns, where these are more than (N's, K's): its codes and scales are gathered, not
    the values. scatter: the axes of the result's rows and columns, where these are more than (M's, N's): each device then
    keeps its piece of the sum only. Sums over K's axis are taken in sum_dtype, to which each device rounds its product.
    """
    from fp4jax.ops import matmul_triton

    target = triton_call.current_target()
    assert target is not None
    m, n, k = axes
    gathers = [_more(now, wanted) for now, wanted in zip(at_rest or (n, k), (n, k), strict=True)]
    add = _sum_over(axes, scatter or (m, n), sum_dtype)
    kernel_dtype = out_dtype if not _names(k) and out_dtype in (jnp.float32, jnp.bfloat16) else jnp.float32

    def local(a_data, a_scale, b_data, b_scale, tensors):
        for dimension, names in enumerate(gathers):
            if names:
                gather = functools.partial(lax.all_gather, axis_name=names, axis=dimension, tiled=True)
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
            out_dtype=kernel_dtype,
        )
        return add(product).astype(out_dtype)

    tensors = (lhs.tensor_scale, rhs.tensor_scale)
    operands = (lhs.data, lhs.scale_bytes, rhs.data, rhs.scale_bytes, tensors)
    if mesh is None:
        return local(*operands)
    row, col = PartitionSpec(m, k), PartitionSpec(*(at_rest or (n, k)))
    in_specs = (row, row, col, col, jax.tree.map(lambda _: PartitionSpec(), tensors))
    out_specs = PartitionSpec(*(scatter or (m, n)))
    return jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)(*operands)


def stay(cast: Any, partition: Partition, operand: str) -> Any:
    """Return a cast of x, w or dy, array or QTensor, pinned to where the operand lies: each device casts its own part of it.

    Without this XLA is free to move an operand of wgrad from tokens to features before the cast, so as to save the sum of
    dw: it then sends every activation around, once for each of its casts. Where blocks straddle the shards of a weight, XLA
    adds a maximum over devices. A dimension that does not divide is left whole.
    """
    axes = partition.of(operand)

    def pin(leaf):  # a scale that is one for the whole tensor has length 1
        lengths = zip(axes, leaf.shape, strict=True)
        spec = PartitionSpec(*(a if n > 1 and n % _size(a, partition.mesh) == 0 else None for a, n in lengths))
        return lax.with_sharding_constraint(leaf, NamedSharding(partition.mesh, spec))

    return jax.tree.map(pin, cast)


def wgrad(dot: Callable[[Any, Any], jax.Array], x: Any, dy: Any, partition: Partition) -> jax.Array:
    """Return dot(x, dy), float32 [K, N], of x [M, K] and dy [M, N], arrays or QTensors, summed over the devices' tokens.

    For a dot that XLA would partition by itself: it then adds in the dtype of the product. Here each device rounds its product
    to partition.reduce_dtype, they are added in that, and each device keeps its piece of the weight.
    """
    part = partition
    add = _sum_over((part.k, part.n, part.m), part.stored, part.reduce_dtype)

    def specs(operand, axes):  # a scale that is one for the whole tensor has length 1 and is everywhere
        of = lambda leaf: PartitionSpec(*(a if n > 1 else None for a, n in zip(axes, leaf.shape, strict=True)))  # noqa: E731
        return jax.tree.map(of, operand)

    in_specs = (specs(x, part.of("x")), specs(dy, part.of("dy")))
    out_specs = PartitionSpec(*part.stored)
    local = lambda x, dy: add(dot(x, dy)).astype(jnp.float32)  # noqa: E731
    return jax.shard_map(local, mesh=part.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)(x, dy)


def _sum_over(
    axes: tuple[AxisName, AxisName, AxisName], scatter: tuple[AxisName, AxisName], dtype: Any
) -> Callable[[jax.Array], jax.Array]:
    """Return what sums the local products [M, N] over the axis of K, in dtype; axes, scatter: as in `matmul`."""
    m, n, k = axes
    scatters = [_more(now, wanted) for now, wanted in zip(scatter, (m, n), strict=True)]
    if not set(scatters[0] + scatters[1]) <= set(_names(k)):
        raise ValueError(f"a product summed over {k!r} cannot be scattered to {scatter}")
    left = tuple(name for name in _names(k) if name not in scatters[0] + scatters[1])

    def add(product: jax.Array) -> jax.Array:
        product = product.astype(dtype) if _names(k) else product
        for dimension, names in enumerate(scatters):
            if names:
                product = lax.psum_scatter(product, names, scatter_dimension=dimension, tiled=True)
        return lax.psum(product, left) if left else product

    return add


def _names(axis: AxisName) -> tuple[str, ...]:
    return () if axis is None else (axis,) if isinstance(axis, str) else tuple(axis)


def _size(axis: AxisName, mesh: Mesh) -> int:
    return math.prod(mesh.shape[name] for name in _names(axis))


def _more(now: AxisName, wanted: AxisName) -> tuple[str, ...]:
    """Return the mesh axes that split a dimension beyond those that should; raises ValueError unless these come first."""
    outer = _names(wanted)
    if _names(now)[: len(outer)] != outer:
        raise ValueError(f"a dimension split over {now!r} does not come from one split over {wanted!r}")
    return _names(now)[len(outer) :]


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
