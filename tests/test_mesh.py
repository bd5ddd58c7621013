"""One layer on a mesh: its casts bit for bit, its products up to the order of summation, and faults in its sums are seen.

What benchmarks/mesh.py tabulates, for a tiny model. tests/test_sharding.py trains on meshes.
"""

import functools
import math

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from benchmarks import mesh_cell as benchmark
from fp4jax import bits, quantized_dot_general, recipes
from fp4jax.ops import kernels
from fp4jax.ops.kernels import Partition
from train import sharding

CELLS = [
    ("mxfp4_h16", {"fsdp": 8}),
    ("nvidia_nvfp4", {"fsdp": 2, "tensor": 2}),
    ("mxfp4_sr", {"data": 2, "fsdp": 2, "tensor": 2}),
    ("mxfp4_rht16", {"fsdp": 2, "context": 2, "tensor": 2}),
]


def tiny(recipe, **mesh):
    """Return settings of 512 tokens; every device has a block of each dimension."""
    sizes = {"data__seq_len": 64, "model__n_heads": 2, "model__n_kv_heads": 2, "model__d_model": 256}
    axes = {f"mesh__{axis}": size for axis, size in ({"fsdp": 1} | mesh).items()}
    return helpers.settings("unread", **sizes, quant__recipe=recipe, **axes)


KINDS = ("attn/q", "mlp/down")  # column- and row-parallel


@pytest.mark.parametrize(("recipe", "mesh"), CELLS)
def test_casts_of_the_same_input_are_the_same_bits(recipe, mesh):
    expected, found = (benchmark.casts(s, kinds=KINDS) for s in (tiny(recipe), tiny(recipe, **mesh)))
    assert len(expected) >= 2 * 6 * 2  # kinds of layers, casts of each, codes and scales
    for name, wanted in expected.items():
        np.testing.assert_array_equal(found[name], wanted, err_msg=name)


def test_a_layer_of_a_piece_of_a_sequence_agrees_up_to_summation_order():
    recipe, mesh = CELLS[-1]
    one, on_mesh = (benchmark.layers_alone(s, kinds=KINDS) for s in (tiny(recipe), tiny(recipe, **mesh)))
    assert len(one) == 2 * 3
    error, where = benchmark.worst(on_mesh, one)
    assert error < 1e-6, where


def test_casts_that_forget_where_a_shard_lies_or_which_step_it_is_are_seen(monkeypatch):
    s = tiny("mxfp4_sr", fsdp=2, context=2, tensor=2)
    expected = benchmark.casts(s, kinds=KINDS)
    drawn = {name for name in expected if name.endswith(" 0")}  # codes

    def other(found):
        return {name for name, wanted in expected.items() if not np.array_equal(found[name], wanted)}

    assert other(benchmark.casts(s, kinds=KINDS, step_number=1)) == drawn
    time_first = benchmark.dot._time_first
    monkeypatch.setattr(benchmark.dot, "_time_first", lambda x, n, recipe, key: (time_first(x, n, recipe, key)[0], key))
    assert other(benchmark.casts(s, kinds=KINDS)) == {name for name in drawn if not name.endswith(" w 0")}


def test_no_activation_travels_to_be_cast(monkeypatch):
    """Where dw is split over fsdp, XLA would rather move x and dy to its features than sum it: 28 all-to-alls more."""

    def collectives(recipe):
        return benchmark.Program(tiny(recipe, fsdp=8)).collectives

    none = collectives("none")
    assert benchmark.difference(collectives("mxfp4_h16"), none) == {}
    monkeypatch.setattr(kernels, "stay", lambda cast, *_: cast)
    assert benchmark.difference(collectives("mxfp4_h16"), none)["all-to-all f32"] == 28


DN = (((1,), (0,)), ((), ()))
M, K, N = 256, 128, 64
PARTITIONS = {  # shape of the mesh; axes of M, K, N; of the stored weight
    "data": ((8, 1), ("data", None, None), (None, None)),
    "fsdp": ((4, 1), ("data", None, None), ("data", None)),
    "column, fsdp": ((2, 2), ("data", None, "model"), ("data", "model")),
    "row, fsdp": ((2, 2), ("data", "model", None), ("model", "data")),
}


def gradient(recipe, partition=None):
    """Return dw; partition: the mesh it is computed on, with operands split as it says."""
    rng = np.random.default_rng(0)
    operands = [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((M, K), (K, N), (M, N))]
    if partition is not None:
        axes = [PartitionSpec(*partition.of(name)) for name in ("x", "w", "dy")]
        operands = [jax.device_put(a, NamedSharding(partition.mesh, spec)) for a, spec in zip(operands, axes, strict=True)]
    key = bits.step_key(0, 0) if recipe.needs_key else None
    dot = functools.partial(quantized_dot_general, recipe=recipe, key=key, partition=partition)
    return np.asarray(jax.jit(lambda x, w, dy: jax.vjp(lambda w: dot(x, w, DN), w)[1](dy)[0])(*operands))


@functools.cache
def unsharded(name):
    return gradient(recipes.get(name))


@pytest.mark.parametrize("name", ["none", "mxfp4_sr"])
@pytest.mark.parametrize("where", PARTITIONS)
def test_dw_is_the_unsharded_one_and_a_missing_or_doubled_sum_is_seen(monkeypatch, where, name):
    shape, axes, stored = PARTITIONS[where]
    devices = np.array(jax.devices()[: math.prod(shape)]).reshape(shape)
    mesh = jax.sharding.Mesh(devices, ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    def off(reduce):
        dw, one = gradient(recipes.get(name), Partition(mesh, *axes, stored, reduce=reduce)), unsharded(name)
        return np.linalg.norm(dw - one) / np.linalg.norm(one)

    assert off("auto") < 1e-6
    assert off("float32") < 1e-6
    for fault in ("missing", "doubled"):
        with monkeypatch.context() as patch:
            helpers.break_sums(patch, fault)
            assert off("float32") > 0.5


def test_the_check_of_casts_covers_each_way_a_layer_is_split():
    ways = {tuple(axis is not None for axis in axes) for axes in sharding.LINEAR_AXES.values()}
    for kinds in (KINDS, benchmark.KINDS):
        assert {tuple(axis is not None for axis in sharding.LINEAR_AXES[path]) for path in kinds} == ways
