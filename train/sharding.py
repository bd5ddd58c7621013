"""The device mesh, and where every array of the train state lives on it.

Axes: "data" splits the batch and, with fsdp, the parameters and moments; "model" splits attention heads, the FFN and the
vocabulary (tensor parallelism). Parameters are placed by the table below, from the last two parts of their path.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from fp4jax import dot
from fp4jax.numerics import OUTSIDE_BLOCKS, Numerics
from fp4jax.ops import matmul
from fp4jax.ops.kernels import Partition
from models.llama import LINEAR_PATHS, LlamaConfig
from train.errors import InputError, check_types

# Mesh axes of a parameter's own dimensions; a leading layer axis (scan) is never split.
PARAM_AXES = {
    "embed/embedding": ("model", "data"),
    "q/kernel": ("data", "model"),
    "k/kernel": ("data", "model"),
    "v/kernel": ("data", "model"),
    "o/kernel": ("model", "data"),
    "gate/kernel": ("data", "model"),
    "up/kernel": ("data", "model"),
    "down/kernel": ("model", "data"),
    "lm_head/kernel": ("data", "model"),
    "attn_norm/scale": (None,),
    "mlp_norm/scale": (None,),
    "final_norm/scale": (None,),
}
# Mesh axes of a linear layer's tokens, input and output features in its GEMMs: the output split (column-parallel) or the input.
_COLUMN, _ROW = ("data", None, "model"), ("data", "model", None)
LINEAR_AXES = {
    **dict.fromkeys(("attn/q", "attn/k", "attn/v", "mlp/gate", "mlp/up", "lm_head"), _COLUMN),
    **dict.fromkeys(("attn/o", "mlp/down"), _ROW),
}
ACTIVATION_AXES = {"x_BTD": ("data", None, None), "logits_BTV": ("data", None, "model")}


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Mesh shape. data=0: all devices not used by `model`. fsdp: whether "data" also splits parameters and moments."""

    data: int = 0
    model: int = 1
    fsdp: bool = True

    def __post_init__(self):
        check_types("mesh", self)
        if self.data < 0 or self.model < 1:
            raise InputError(f"mesh.data={self.data} must not be negative and mesh.model={self.model} must be positive")


def make_mesh(config: MeshConfig) -> Mesh:
    """Return the mesh over the first data × model devices."""
    devices = jax.devices()
    data = config.data or max(len(devices) // config.model, 1)
    if data * config.model > len(devices):
        raise InputError(f"mesh data={data} × model={config.model} needs more than the {len(devices)} devices here")
    grid = np.array(devices[: data * config.model]).reshape(data, config.model)
    return Mesh(grid, ("data", "model"), axis_types=(AxisType.Auto, AxisType.Auto))


def _stored(name: str, fsdp: bool) -> tuple[str | None, ...]:
    """Return the mesh axes of a parameter at rest; name: the last two parts of its path."""
    return tuple(None if axis == "data" and not fsdp else axis for axis in PARAM_AXES[name])


def partition(mesh: Mesh, *, fsdp: bool = True) -> Callable[[str], Partition] | None:
    """Return how kernels find their layer on the mesh: path → Partition; None for a mesh of one device."""
    if mesh.size == 1:
        return None

    def of(path: str) -> Partition:
        if path not in LINEAR_AXES:
            raise InputError(f"{path} has no entry in train.sharding.LINEAR_AXES: a kernel needs to know its mesh axes")
        k, n = _stored(f"{path.split('/')[-1]}/kernel", fsdp)
        m_axis, k_axis, n_axis = LINEAR_AXES[path]
        return Partition(mesh, m_axis, k_axis, n_axis, (k, n))

    return of


def check(mesh: Mesh, model: LlamaConfig, numerics: Numerics, *, microbatch: int, seq_len: int, fsdp: bool = True) -> None:
    """Raise InputError when a dimension does not divide over the mesh, or a block or rotation would straddle shards."""
    data, tensor = mesh.shape["data"], mesh.shape["model"]
    sizes = {"n_heads": model.n_heads, "n_kv_heads": model.n_kv_heads, "d_ff": model.d_ff, "vocab_size": model.vocab_size}
    for name, size in sizes.items():
        if size % tensor:
            raise InputError(f"model.{name}={size} is not a multiple of the mesh's model axis ({tensor})")
    if fsdp and model.d_model % data:
        raise InputError(f"model.d_model={model.d_model} is not a multiple of the mesh's data axis ({data})")
    if microbatch % data:
        raise InputError(f"a microbatch of {microbatch} sequences is not a multiple of the mesh's data axis ({data})")
    if not numerics.strict:
        return
    d_model = ("d_model", model.d_model)
    q = ("n_heads · head size per device", model.n_heads * model.head_size // tensor)
    kv = ("n_kv_heads · head size per device", model.n_kv_heads * model.head_size // tensor)
    d_ff, vocab = ("d_ff per device", model.d_ff // tensor), ("vocab_size per device", model.vocab_size // tensor)
    ends = {"q": (d_model, q), "k": (d_model, kv), "v": (d_model, kv), "o": (q, d_model)}
    ends |= {"gate": (d_model, d_ff), "up": (d_model, d_ff), "down": (d_ff, d_model), "lm_head": (d_model, vocab)}
    for path in LINEAR_PATHS:
        inputs, outputs = ends[path.split("/")[-1]]
        contraction = {"fprop": inputs, "dgrad": outputs, "wgrad": ("tokens per device", microbatch // data * seq_len)}
        at_rest = [length // data if _stored(f"{path.split('/')[-1]}/kernel", fsdp)[i] == "data" else length
                   for i, (_, length) in enumerate((inputs, outputs))]  # fmt: skip
        for recipe, _, _ in numerics.recipes_of(path, None if path in OUTSIDE_BLOCKS else ...):
            for gemm, (what, length) in contraction.items():
                spec = getattr(recipe, gemm)
                if length % spec.multiple and not spec.pad:
                    raise InputError(f"{path} {gemm}: {what} = {length} is not a multiple of {spec.multiple} ({spec})")
                try:
                    impl, _ = matmul.choose(numerics.impl, spec)
                except ValueError as error:
                    raise InputError(f"quant: {path} {gemm}: {error}") from None
                if impl == "triton":  # casts on each device what lies there, weights too
                    lengths = {name: length for name, (_, length) in contraction.items()}
                    lengths |= {} if gemm == "wgrad" else {"fprop": at_rest[0], "dgrad": at_rest[1]}
                    reason = dot.misfit(recipe, gemm, lengths)
                    if dot.ragged(recipe, gemm, lengths):
                        reason = f"lengths {lengths} do not divide, and kernels do not pad"
                    if reason:
                        raise InputError(
                            f"{path} {gemm}: a kernel casts what lies on one device, and there its {reason} ({spec}): "
                            "choose quant.impl=reference or xla, or another mesh"
                        )


def state_shardings(mesh: Mesh, state: Any, *, fsdp: bool = True) -> Any:
    """Return the NamedSharding of every leaf of a train state (or of its shapes); scalars, history and seed are replicated."""

    def place(path, leaf):
        keys = [str(getattr(p, "key", getattr(p, "name", getattr(p, "idx", p)))) for p in path]
        if leaf.ndim == 0 or keys[0] in ("history", "seed"):
            return NamedSharding(mesh, PartitionSpec())
        axes = _stored("/".join(keys[-2:]), fsdp)
        return NamedSharding(mesh, PartitionSpec(*(None,) * (leaf.ndim - len(axes)), *axes))

    return jax.tree_util.tree_map_with_path(place, state)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec("data"))


def constrain(mesh: Mesh):
    """Return the model's activation hook: (name, x) → x with the sharding of `ACTIVATION_AXES`."""

    def apply(name: str, x: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*ACTIVATION_AXES[name])))

    return apply
