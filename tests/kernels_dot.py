"""The quantized dot on kernels, in Triton's interpreter, against the reference. Run by tests/test_kernels.py."""

import functools

import helpers
import interpreter
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from fp4jax import GemmSpec, OperandSpec, Recipe, bits, quantized_dot_general, recipes
from fp4jax.ops import kernels
from fp4jax.ops.kernels import Partition
from fp4jax.recipe import GEMMS
from train import sharding, step

DN = (((1,), (0,)), ((), ()))
KEY = bits.step_key(1, 2)
M, K, N = 128, 128, 256


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch):
    with interpreter.installed(monkeypatch):
        yield


def runs_on_kernels(name):
    specs = [getattr(recipes.get(name), gemm) for gemm in GEMMS]
    return any({s.lhs.format, s.rhs.format} in ({"mxfp4"}, {"nvfp4"}) for s in specs)


def operands(seed=0, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in ((M, K), (K, N), (M, N))]


def value_and_grads(x, w, dy, *, recipe, key=KEY, **how):
    key = key if recipe.needs_key else None

    @jax.jit
    def run(x, w, dy):
        y, vjp = jax.vjp(lambda x, w: quantized_dot_general(x, w, DN, recipe=recipe, key=key, **how), x, w)
        return y, *vjp(dy)

    return run(x, w, dy)


CASES = [(name, "operands") for name in recipes.names() if runs_on_kernels(name)]
CASES += [(name, "packed") for name in ("mxfp4_h16", "mxfp4_sr", "nvidia_nvfp4", "tetrajet")]


@pytest.mark.parametrize(("name", "residuals"), CASES)
def test_every_recipe_with_fp4_gives_the_reference_up_to_summation_order(name, residuals):
    recipe = recipes.get(name)
    run = functools.partial(value_and_grads, *operands(), recipe=recipe, residuals=residuals)
    rotated = any(getattr(recipe, gemm).rotation.size for gemm in GEMMS)  # next to a decision point a code may differ
    for got, wanted in zip(run(impl="triton"), run(impl="reference"), strict=True):
        assert np.linalg.norm(got - wanted) < (2e-3 if rotated else 1e-6) * np.linalg.norm(wanted)


def test_dots_of_one_input_are_quantized_in_one_launch(monkeypatch):
    launches = []
    original = kernels.quantize
    monkeypatch.setattr(kernels, "quantize", lambda *args: launches.append(args[0].shape) or original(*args))
    x, w, _ = operands()
    shared = {}
    for _ in range(3):
        quantized_dot_general(x, w, DN, recipe=recipes.get("mxfp4_h16"), impl="triton", residuals="packed", shared=shared)
    assert launches.count(x.shape) == 1
    assert launches.count(w.shape) == 3


COLUMN = ("data", None, "model")  # axes of M, K, N
ROW = ("data", "model", None)
PARTITIONS = {
    "data": (8, 1, ("data", None, None), (None, None)),
    "fsdp": (4, 1, ("data", None, None), ("data", None)),
    "column": (2, 4, COLUMN, (None, "model")),
    "row": (2, 4, ROW, ("model", None)),
    "column, fsdp": (2, 2, COLUMN, ("data", "model")),
    "row, fsdp": (2, 2, ROW, ("model", "data")),
}
SHARDED = [(where, "mxfp4_h16") for where in PARTITIONS]
SHARDED += [(where, name) for where in ("data", "column, fsdp", "row, fsdp") for name in ("nvidia_nvfp4", "mxfp4_sr")]


@functools.cache
def unsharded(name, repeats):
    """Return x, w, dy, with so many times the tokens, and (y, dx, dw) on one device."""
    x, w, dy = operands()
    x, dy = (jnp.tile(a, (repeats, 1)) for a in (x, dy))
    return x, w, dy, value_and_grads(x, w, dy, recipe=recipes.get(name), impl="triton", residuals="packed")


@pytest.mark.parametrize(("where", "name"), SHARDED)
def test_every_partition_gives_the_unsharded_result(where, name):
    """The same casts to the bit, sums in another order; a missing psum or a doubled one is off by the axis size."""
    data, model, axes, stored = PARTITIONS[where]
    mesh = interpreter.mesh(data, model)
    x, w, dy, wanted = unsharded(name, 2 if where == "data" else 1)  # 32 tokens on each of eight devices
    run = functools.partial(value_and_grads, recipe=recipes.get(name), impl="triton", residuals="packed")
    place = lambda a, *axes: jax.device_put(a, NamedSharding(mesh, PartitionSpec(*axes)))  # noqa: E731
    sharded = (place(x, axes[0], axes[1]), place(w, *stored), place(dy, axes[0], axes[2]))
    got = run(*sharded, partition=Partition(mesh, *axes, stored))
    for a, b in zip(got, wanted, strict=True):
        assert np.linalg.norm(a - b) < 1e-5 * np.linalg.norm(b)
    assert got[2].sharding.is_equivalent_to(NamedSharding(mesh, PartitionSpec(*stored)), 2)


@pytest.mark.parametrize("where", ["data", "column, fsdp"])
def test_a_gradient_is_summed_over_devices_in_the_dtype_that_was_asked_for(where):
    """Rounded to bfloat16 by each device: off by 2^-9 at most, and by more than nothing; x's gradient is not touched."""
    data, model, axes, stored = PARTITIONS[where]
    mesh, recipe = interpreter.mesh(data, model), recipes.get("mxfp4_h16")
    x, w, dy = operands()
    if where == "data":
        x, dy = (jnp.tile(a, (2, 1)) for a in (x, dy))
    run = functools.partial(value_and_grads, x, w, dy, recipe=recipe, impl="triton", residuals="packed")
    auto, in32, in16 = (run(partition=Partition(mesh, *axes, stored, reduce=dtype)) for dtype in kernels.REDUCE)
    for a, b in zip(auto, in32, strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(in16[1], auto[1])
    assert 2**-11 < np.linalg.norm(in16[2] - auto[2]) / np.linalg.norm(auto[2]) < 2**-8


@pytest.mark.parametrize("how", ["batch axes", "vmap"])
def test_every_batch_element_has_its_own_draws_the_reference_s(how):
    x, w = (jnp.broadcast_to(a, (2, *a.shape)) for a in (jnp.ones((32, 32)) * 0.7, jnp.ones((32, 32)) * 0.9))
    x = x * jnp.linspace(0.1, 1, 32).reshape(1, 1, 32)
    recipe = recipes.get("mxfp4_sr")
    results = []
    for impl in ("triton", "reference"):
        dot = functools.partial(quantized_dot_general, recipe=recipe, key=KEY, impl=impl)
        if how == "vmap":
            run = jax.vmap(lambda x, w, dot=dot: dot(x, w, DN))
        else:
            run = lambda x, w, dot=dot: dot(x, w, (((2,), (1,)), ((0,), (0,))))  # noqa: E731
        results.append(jax.jit(run)(x, w))
    np.testing.assert_allclose(*results, rtol=1e-6)
    assert not np.array_equal(results[0][0], results[0][1])


def test_what_the_reference_refuses_kernels_refuse_too():
    run = functools.partial(quantized_dot_general, recipe=recipes.get("mxfp4"), impl="triton")
    with pytest.raises(ValueError, match="cannot quantize int32"):
        run(jnp.ones((32, 32), jnp.int32), jnp.ones((32, 32)), DN)
    half = run(jnp.ones((32, 32), jnp.float16), jnp.ones((32, 32), jnp.float16), DN)
    assert (half.dtype, float(half[0, 0])) == (jnp.float16, 32.0)
    square = Recipe(GemmSpec(OperandSpec("mxfp4"), OperandSpec("mxfp4", across=32)))
    mesh = interpreter.mesh(2, 2)
    part = Partition(mesh, "data", None, "model", (None, "model"))
    with pytest.raises(ValueError, match="length 16 across square blocks is not a multiple of 32"):
        quantized_dot_general(jnp.ones((64, 64)), jnp.ones((64, 32)), DN, recipe=square, impl="triton", partition=part)


@pytest.mark.parametrize(
    ("m", "stored"), [(("data", "model"), ("data", None)), (("data", "model"), (None, None)), ("data", (None, "data"))]
)
def test_a_gradient_is_summed_over_all_that_its_tokens_are_split_over(m, stored):
    mesh, recipe = interpreter.mesh(2, 2), recipes.get("mxfp4")
    x, w, dy = operands()
    wanted = value_and_grads(x, w, dy, recipe=recipe, impl="triton")
    got = value_and_grads(x, w, dy, recipe=recipe, impl="triton", partition=Partition(mesh, m, None, None, stored))
    for a, b in zip(got, wanted, strict=True):
        assert np.linalg.norm(a - b) < 1e-5 * np.linalg.norm(b)
    part = Partition(mesh, "data", None, None, ("model", None))
    with pytest.raises(ValueError, match="cannot be scattered"):
        value_and_grads(x, w, dy, recipe=recipe, impl="triton", partition=part)


@pytest.mark.parametrize(("where", "fault"), [("row", "missing"), ("fsdp", "doubled")])
def test_a_sum_over_devices_that_is_missing_or_doubled_is_seen(monkeypatch, where, fault):
    """The comparison above has teeth: dw is always summed over tokens, y over a split input and dx over a split output."""
    data, model, axes, stored = PARTITIONS[where]
    mesh = interpreter.mesh(data, model)
    x, w, dy = operands()
    run = functools.partial(value_and_grads, x, w, dy, recipe=recipes.get("mxfp4"), impl="triton")
    wanted = run()
    helpers.break_sums(monkeypatch, fault)
    y, dx, dw = (
        np.linalg.norm(a - b) / np.linalg.norm(b)
        for a, b in zip(run(partition=Partition(mesh, *axes, stored)), wanted, strict=True)
    )
    off = {"y": where == "row", "dx": where == "column", "dw": True}
    for name, error in {"y": y, "dx": dx, "dw": dw}.items():
        assert (error > 0.5) if off[name] else (error < 1e-5), (name, error)


def test_shards_that_blocks_would_straddle_raise():
    mesh = interpreter.mesh(8, 1)
    x, w, _ = operands()  # 16 tokens on each of eight devices
    with pytest.raises(ValueError, match="contraction length 16 is not a multiple of 32"):
        quantized_dot_general(
            *(x, w, DN),
            recipe=recipes.get("mxfp4"),
            impl="triton",
            residuals="packed",
            partition=Partition(mesh, "data", None, None, (None, None)),
        )


@pytest.mark.parametrize(("name", "axis"), [("mxfp4", "tensor"), ("nvidia_nvfp4", "tensor"), ("mxfp4", "context")])
def test_a_train_step_on_a_mesh_agrees_with_the_reference_on_one_device(tmp_path, name, axis):
    """Scan, packed residuals and their remat, accumulation, fully sharded and tensor-parallel weights, pieces of sequences;
    evaluation."""
    corpus = helpers.write_corpus(tmp_path)
    changes = {"quant__recipe": name, "quant__residuals": "packed", "model__remat": "packed", "train__accumulation": 2}
    changes |= {"model__n_layers": 1, "train__batch_size": 4, "data__seq_len": 64 if axis == "context" else 32}
    changes |= {"quant__exempt": ("lm_head", "attn/[kvo]", "mlp/gate", "mlp/up")}  # leaves a column- and a row-parallel layer
    results = []
    for impl, axes in (("reference", {}), ("triton", {"mesh__fsdp": 2, f"mesh__{axis}": 2})):
        settings = helpers.settings(corpus, **changes, quant__impl=impl, **axes)
        mesh = sharding.make_mesh(settings.mesh)
        tokens = np.random.default_rng(0).integers(0, 256, (4, settings.data.seq_len + 1)).astype(np.int32)
        state = step.init_state(settings, mesh)
        nll = step.make_eval_step(settings, mesh)(state.params, jnp.asarray(tokens), np.uint32(0), state.step, state.seed)
        state, metrics = step.make_train_step(settings, mesh)(state, jnp.asarray(tokens))
        results.append((np.asarray(nll), float(metrics["train_loss"]), float(metrics["grad_norm"])))
    (nll, loss, norm), (kernel_nll, kernel_loss, kernel_norm) = results
    np.testing.assert_allclose(kernel_nll, nll, rtol=1e-4)
    assert abs(kernel_loss - loss) < 1e-5 * loss
    assert abs(kernel_norm - norm) < 1e-2 * norm  # a flipped code moves a gradient by a grid step
