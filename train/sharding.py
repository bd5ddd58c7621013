"""The device mesh, and where every array of the train state lives on it.

Dimensions have logical names, and one table says which mesh axes split which: "data" and "fsdp" the batch, "fsdp" also the
parameters and moments, "tensor" attention heads, the FFN and the vocabulary, "context" the positions of a sequence. Any
product of the four is one mesh. Parameters are placed by the last two parts of their path.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from fp4jax import dot
from fp4jax.numerics import OUTSIDE_BLOCKS, Numerics
from fp4jax.ops import matmul
from fp4jax.ops.kernels import AxisName, Partition
from fp4jax.recipe import GEMMS
from models import llama
from models.llama import LINEAR_PATHS, LlamaConfig
from train.errors import InputError, check_types

AXES = ("data", "fsdp", "context", "tensor")
AnyMesh = Mesh | AbstractMesh  # on one of shapes only, everything is checked and placed, and nothing allocated
# Logical axis of a dimension → mesh axes that split it, outermost first.
RULES = {
    "batch": ("data", "fsdp"),
    "time": ("context",),
    "tokens": ("context", "data", "fsdp"),  # time and batch in one, as `Partition.pieces` orders it
    "rows": ("data",),  # the batch while tokens are looked up: fsdp splits the embedding's columns then
    "embed": ("fsdp",),
    "heads": ("tensor",),
    "ffn": ("tensor",),
    "vocab": ("tensor",),
}
# Logical axes of a parameter's own dimensions; a leading layer axis (scan) is never split.
PARAM_AXES = {
    "embed/embedding": ("vocab", "embed"),
    "q/kernel": ("embed", "heads"),
    "k/kernel": ("embed", "heads"),
    "v/kernel": ("embed", "heads"),
    "o/kernel": ("heads", "embed"),
    "gate/kernel": ("embed", "ffn"),
    "up/kernel": ("embed", "ffn"),
    "down/kernel": ("ffn", "embed"),
    "lm_head/kernel": ("embed", "vocab"),
    "attn_norm/scale": (None,),
    "mlp_norm/scale": (None,),
    "final_norm/scale": (None,),
}
# Logical axes of a linear layer's input and output features in its GEMMs: the output is split (column-parallel) or the input.
LINEAR_AXES = {
    **dict.fromkeys(("attn/q", "attn/k", "attn/v"), (None, "heads")),
    **dict.fromkeys(("mlp/gate", "mlp/up"), (None, "ffn")),
    "lm_head": (None, "vocab"),
    "attn/o": ("heads", None),
    "mlp/down": ("ffn", None),
}
ACTIVATION_AXES = {
    "tokens_BT": ("rows", "time"),
    "embedded_BTD": ("rows", "time", "embed"),
    "x_BTD": ("batch", "time", None),
    "logits_BTV": ("batch", "time", "vocab"),
}
_Q_AXES, _KV_AXES = ("batch", "time", "heads", None), ("batch", None, "heads", None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Devices along each axis of the mesh; fsdp=0: all that the others leave."""

    data: int = 1
    fsdp: int = 0
    context: int = 1
    tensor: int = 1

    def __post_init__(self):
        check_types("mesh", self)
        for name, size in dataclasses.asdict(self).items():
            if size < (name != "fsdp"):
                raise InputError(f"mesh.{name}={size} is out of range")


def mesh_shape(config: MeshConfig, devices: int) -> tuple[int, ...]:
    """Return the devices along each of `AXES`, fsdp taking all that the others leave; raises InputError for too few devices."""
    others = config.data * config.context * config.tensor
    sizes = {**dataclasses.asdict(config), "fsdp": config.fsdp or max(devices // others, 1)}
    shape = tuple(sizes[name] for name in AXES)
    if math.prod(shape) > devices:
        asked = " × ".join(f"{name}={size}" for name, size in zip(AXES, shape, strict=True) if size > 1)
        raise InputError(f"mesh {asked} needs more than the {devices} devices here")
    return shape


def over_all_devices(model: LlamaConfig) -> MeshConfig:
    """Return a mesh of all devices here, whatever their number, to look at a model."""
    devices = len(jax.devices())
    return MeshConfig() if model.d_model % devices == 0 else MeshConfig(data=devices, fsdp=1)


def make_mesh(config: MeshConfig) -> Mesh:
    """Return the mesh over the first data × fsdp × context × tensor devices."""
    devices = jax.devices()
    shape = mesh_shape(config, len(devices))
    if jax.process_count() > 1 and math.prod(shape) < len(devices):
        raise InputError(
            f"a mesh of {math.prod(shape)} leaves some of the {len(devices)} devices of {jax.process_count()} processes"
        )
    grid = np.array(devices[: math.prod(shape)]).reshape(shape)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def abstract_mesh(config: MeshConfig, devices: int) -> AbstractMesh:
    """Return the mesh over so many devices without having them; raises InputError when it leaves some of them out."""
    shape = mesh_shape(config, devices)
    if math.prod(shape) != devices:
        asked = " × ".join(f"{name} {size}" for name, size in zip(AXES, shape, strict=True))
        raise InputError(f"mesh {asked} uses {math.prod(shape)} of {devices} devices: set --config.mesh.data or another axis")
    return AbstractMesh(shape, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def spec(mesh: AnyMesh, *names: str | None) -> PartitionSpec:
    """Return the PartitionSpec of dimensions with these logical names."""
    return PartitionSpec(*(_mesh_axes(mesh, name) for name in names))


def _mesh_axes(mesh: AnyMesh, name: str | None) -> AxisName:
    """Return the mesh axes that split a logical axis, without those of size 1."""
    axes = tuple(axis for axis in RULES[name] if mesh.shape[axis] > 1) if name else ()
    return axes if len(axes) > 1 else axes[0] if axes else None


def split(mesh: AnyMesh, name: str) -> int:
    """Return into how many parts the mesh splits a logical axis."""
    return math.prod(mesh.shape[axis] for axis in RULES[name])


def partition(mesh: Mesh, reduce: str = "auto") -> Callable[[str], Partition] | None:
    """Return how dots find their layer on the mesh: path → Partition; None for a mesh of one device.

    reduce: the dtype in which the gradients of the weights are summed over devices (train.grad_reduce_dtype).
    """
    if mesh.size == 1:
        return None

    def of(path: str) -> Partition:
        if path not in LINEAR_AXES:
            raise InputError(f"{path} has no entry in train.sharding.LINEAR_AXES: a kernel needs to know its mesh axes")
        stored = PARAM_AXES[f"{path.split('/')[-1]}/kernel"]
        m, k, n, *at_rest = (_mesh_axes(mesh, name) for name in ("tokens", *LINEAR_AXES[path], *stored))
        return Partition(mesh, m, k, n, (at_rest[0], at_rest[1]), split(mesh, "time"), reduce)

    return of


def model_hooks(mesh: Mesh, model: LlamaConfig) -> dict[str, Any]:
    """Return what `models.llama.Llama` is told of the mesh: constrain, attend, pieces."""

    def constrain(name: str, x: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec(mesh, *ACTIVATION_AXES[name])))

    def local(q_BTNH, k_BUKH, v_BUKH):
        first = jax.lax.axis_index("context") * q_BTNH.shape[1]
        return llama.attention(model, q_BTNH, k_BUKH, v_BUKH, first)

    q, kv = spec(mesh, *_Q_AXES), spec(mesh, *_KV_AXES)
    attend = jax.shard_map(local, mesh=mesh, in_specs=(q, kv, kv), out_specs=q, check_vma=False)
    pieces = split(mesh, "time")
    return {"constrain": constrain, "attend": attend if pieces > 1 else None, "pieces": pieces}


def check(
    mesh: AnyMesh, model: LlamaConfig, numerics: Numerics, *, microbatch: int, seq_len: int, reduce: str = "auto"
) -> None:
    """Raise InputError when a dimension does not divide over the mesh, or a block or rotation would straddle shards.

    Where devices sum the gradients of weights in a dtype of their own choice (reduce), wgrad cannot pad the tokens.
    """
    fsdp, tensor, context = (mesh.shape[name] for name in ("fsdp", "tensor", "context"))
    sizes = {"n_heads": model.n_heads, "n_kv_heads": model.n_kv_heads, "d_ff": model.d_ff, "vocab_size": model.vocab_size}
    for name, size in sizes.items():
        if size % tensor:
            raise InputError(f"model.{name}={size} is not a multiple of the mesh's tensor axis ({tensor})")
    if model.document_end >= 0 and context > 1:
        raise InputError(f"model.document_end={model.document_end}: documents are not separated on a context axis ({context})")
    head = [getattr(numerics.recipe_for("lm_head", None)[0], gemm) for gemm in GEMMS]
    quantized = any(operand.element is not None for how in head for operand in (how.lhs, how.rhs))
    if model.loss_chunk and context > 1 and quantized:
        what = f"model.loss_chunk={model.loss_chunk} on a context axis ({context})"
        raise InputError(f"{what}: blocks, scales and random bits of a quantized lm_head would be those of other tokens")
    if model.d_model % fsdp:
        raise InputError(f"model.d_model={model.d_model} is not a multiple of the mesh's fsdp axis ({fsdp})")
    if microbatch % (rows := split(mesh, "batch")):
        raise InputError(f"a microbatch of {microbatch} sequences is not a multiple of the mesh's data × fsdp axes ({rows})")
    if seq_len % (context * (model.attention_block or 1)) or seq_len % (context * (model.loss_chunk or 1)):
        what = f"context axis ({context}) times attention_block={model.attention_block} and loss_chunk={model.loss_chunk}"
        raise InputError(f"data.seq_len={seq_len} is not a multiple of the mesh's {what}")
    local_tokens = context > 1 or reduce != "auto"
    if not numerics.strict and not local_tokens:
        return
    d_model = ("d_model", model.d_model)
    q = ("n_heads · head size per device", model.n_heads * model.head_size // tensor)
    kv = ("n_kv_heads · head size per device", model.n_kv_heads * model.head_size // tensor)
    d_ff, vocab = ("d_ff per device", model.d_ff // tensor), ("vocab_size per device", model.vocab_size // tensor)
    ends = {"q": (d_model, q), "k": (d_model, kv), "v": (d_model, kv), "o": (q, d_model)}
    ends |= {"gate": (d_model, d_ff), "up": (d_model, d_ff), "down": (d_ff, d_model), "lm_head": (d_model, vocab)}
    for path in LINEAR_PATHS:
        inputs, outputs = ends[path.split("/")[-1]]
        tokens = ("tokens per device", microbatch // rows * seq_len)
        if context > 1:  # every device has a piece of each of its sequences
            tokens = ("positions per device", seq_len // context)
        contraction = {"fprop": inputs, "dgrad": outputs, "wgrad": tokens}
        stored = zip(PARAM_AXES[f"{path.split('/')[-1]}/kernel"], (inputs, outputs), strict=True)
        at_rest = [length // (fsdp if axis == "embed" else 1) for axis, (_, length) in stored]
        for recipe, _, _ in numerics.recipes_of(path, None if path in OUTSIDE_BLOCKS else ...):
            for gemm, (what, length) in contraction.items():
                how = getattr(recipe, gemm)
                pads = (how.pad or not numerics.strict) and (gemm != "wgrad" or not local_tokens)
                if length % how.multiple and not pads:
                    raise InputError(f"{path} {gemm}: {what} = {length} is not a multiple of {how.multiple} ({how})")
                try:
                    impl, _ = matmul.choose(numerics.impl, how)
                except ValueError as error:
                    raise InputError(f"quant: {path} {gemm}: {error}") from None
                if impl == "triton" and context > 1 and how.draws:
                    raise InputError(f"{path} {gemm}: kernels do not round stochastically on a context axis, impl=xla does")
                if impl == "triton":  # casts on each device what lies there, weights too
                    lengths = {name: length for name, (_, length) in contraction.items()}
                    lengths |= {} if gemm == "wgrad" else {"fprop": at_rest[0], "dgrad": at_rest[1]}
                    reason = dot.misfit(recipe, gemm, lengths)
                    if dot.ragged(recipe, gemm, lengths):
                        reason = f"lengths {lengths} do not divide, and kernels do not pad"
                    if reason:
                        raise InputError(
                            f"{path} {gemm}: a kernel casts what lies on one device, and there its {reason} ({how}): "
                            "choose quant.impl=reference or xla, or another mesh"
                        )


def state_shardings(mesh: AnyMesh, state: Any) -> Any:
    """Return the NamedSharding of every leaf of a train state (or of its shapes).

    Scalars, history, seed, recent and the coefficients that Muon keeps in its state are replicated.
    """

    def place(path, leaf):
        keys = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
        if leaf.ndim == 0 or keys[0] in ("history", "seed", "recent") or keys[-1] == "ns_coeffs":
            return NamedSharding(mesh, PartitionSpec())
        axes = PARAM_AXES["/".join(keys[-2:])]
        return NamedSharding(mesh, spec(mesh, *(None,) * (leaf.ndim - len(axes)), *axes))

    return jax.tree_util.tree_map_with_path(place, state)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Return the sharding of tokens_BT1; their length T + 1 is not split over the context axis."""
    return NamedSharding(mesh, spec(mesh, "batch"))


def process_rows(mesh: Mesh, batch_size: int) -> tuple[int, int]:
    """Return (p, n): this process's devices hold the p-th of n equal blocks of a batch's rows, maybe as others do."""
    indices = batch_sharding(mesh).addressable_devices_indices_map((batch_size, 1)).values()
    blocks = {index[0].indices(batch_size)[:2] for index in indices if index}
    first, last = min(start for start, _ in blocks), max(stop for _, stop in blocks)
    rows = sum(stop - start for start, stop in blocks)
    if last - first != rows or first % rows or batch_size % rows:
        raise InputError(f"process {jax.process_index()} has rows {sorted(blocks)} of {batch_size}: choose another mesh")
    return first // rows, batch_size // rows


def put_rows(mesh: Mesh, rows_BT1: np.ndarray, batch_size: int) -> jax.Array:
    """Return the global batch of which every process gives the rows that `process_rows` says."""
    return jax.make_array_from_process_local_data(batch_sharding(mesh), rows_BT1, (batch_size, *rows_BT1.shape[1:]))


def put_batch(mesh: Mesh, batch_BT1: np.ndarray) -> jax.Array:
    """Return the global batch that every process has as a whole."""
    return jax.make_array_from_callback(batch_BT1.shape, batch_sharding(mesh), lambda index: batch_BT1[index])
