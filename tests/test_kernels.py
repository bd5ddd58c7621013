"""Kernels where there is no GPU: refused on a CPU run, interpreted in a process of their own, lowered for the GPUs.

The interpreter has to be chosen before triton is imported: tests/kernels_*.py run in processes started here.
"""

import dataclasses
import hashlib
import importlib.metadata
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import ROOT, environment
from jax.sharding import AbstractMesh, AxisType

from configs import llama3
from fp4jax import GemmSpec, OperandSpec, Recipe, Rotation, quantized_dot_general, recipes
from fp4jax.numerics import Numerics
from fp4jax.ops import matmul, triton_call
from fp4jax.recipe import GEMMS
from train import config, sharding, step
from train.errors import InputError

DN = (((1,), (0,)), ((), ()))


@pytest.mark.parametrize("name", ["quantize", "matmul", "dot"])
def test_in_the_interpreter(name):
    command = [sys.executable, "-m", "pytest", "--numprocesses=0", "-p", "no:cacheprovider", f"tests/kernels_{name}.py"]
    env = {**environment(), "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-10_000:]
    assert " passed" in done.stdout


def python(code, **env):
    """Run code in a new process; return (exit code, stdout, stderr)."""
    env = {**environment(), "PYTHONPATH": str(ROOT), **env}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


def test_a_cpu_run_imports_no_kernel():
    code, _, stderr = python(
        "import sys, jax.numpy as jnp; from train import loop; from fp4jax import quantized_dot_general, recipes\n"
        f"x = jnp.ones((32, 32)); quantized_dot_general(x, x, {DN}, recipe=recipes.get('mxfp4'))\n"
        "assert not {'triton', 'jax_triton'} & set(sys.modules), sys.modules"
    )
    assert code == 0, stderr


def test_kernels_on_a_cpu_are_one_clear_sentence(tmp_path):
    x = jnp.ones((32, 32))
    with pytest.raises(ValueError, match=r"impl='triton' needs a GPU .* choose 'reference' or 'xla'"):
        quantized_dot_general(x, x, DN, recipe=recipes.get("mxfp4"), impl="triton")
    arguments = ["--config=configs/tiny_cpu.py", "--config.quant.impl=triton", f"--workdir={tmp_path / 'run'}"]
    done = subprocess.run(
        [sys.executable, "-m", "train.main", *arguments],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert done.stderr.splitlines()[-1].count("impl='triton' needs a GPU") == 1
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("versions", "message"), [(("0.4.2", "3.9.0"), "not supported"), (("0.4.1", "3.6.0"), "3.8 or 3.9")])
def test_untested_versions_are_refused(monkeypatch, versions, message):
    installed = dict(zip(("jax-triton", "triton"), versions, strict=True))
    monkeypatch.setattr(importlib.metadata, "version", installed.__getitem__)
    with pytest.raises(RuntimeError, match=message):
        triton_call.load.__wrapped__()


def operands(m=64, k=128, n=96, seed=0):
    rng = np.random.default_rng(seed)
    return tuple(jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((m, k), (k, n), (m, n)))


def runs_on_xla(recipe):
    try:
        return [matmul.choose("xla", getattr(recipe, gemm))[0] for gemm in GEMMS].count("xla") > 0
    except ValueError:
        return False


@pytest.mark.parametrize("name", [name for name in recipes.names() if runs_on_xla(recipes.get(name))])
def test_xla_gives_the_reference_up_to_summation_order(name):
    recipe, (x, w, dy) = recipes.get(name), operands(m=128, n=128)
    key = jax.random.key(0) if recipe.needs_key else None
    history = jnp.zeros((3, 2, 4)).at[..., 0].set(3.0) if recipe.needs_history else None

    def run(impl):
        dot = lambda x, w: quantized_dot_general(x, w, DN, recipe=recipe, key=key, history=history, impl=impl)  # noqa: E731
        y, vjp = jax.vjp(dot, x, w)
        return y, *vjp(dy)

    for got, wanted in zip(run("xla"), run("reference"), strict=True):
        assert np.linalg.norm(got - wanted) < 1e-6 * np.linalg.norm(wanted)


MX, NV, E4M3, BF16 = (OperandSpec(name) for name in ("mxfp4", "nvfp4", "fp8_e4m3", "bf16"))
BLOCK_FP8 = OperandSpec("fp8_e4m3", block=128)


@pytest.mark.parametrize(
    ("spec", "cpu", "gfx950", "sm_100"),
    [
        (GemmSpec(), "lax", "lax", "lax"),
        (GemmSpec(MX, MX), "reference", "triton", "triton"),
        (GemmSpec(NV, NV), "reference", "xla", "triton"),
        (GemmSpec(E4M3, E4M3), "reference", "xla", "xla"),
        (GemmSpec(BF16, BF16), "reference", "xla", "xla"),
        (GemmSpec(BLOCK_FP8, BLOCK_FP8), "reference", "reference", "reference"),
        (GemmSpec(MX, E4M3), "reference", "reference", "reference"),
    ],
    ids=str,
)
def test_auto_chooses_by_platform_and_format_and_says_why(spec, cpu, gfx950, sm_100):
    assert matmul.choose("auto", spec)[0] == cpu
    for arch, expected in (("gfx950", gfx950), ("sm_100", sm_100)):
        with triton_call.assume_target(arch):
            chosen, why = matmul.choose("auto", spec)
            assert chosen == expected
            assert spec.is_plain or why.startswith("auto: ")
    assert spec.is_plain or matmul.choose("auto", spec)[1] == "auto: no GPU"


def test_a_named_implementation_works_or_raises():
    with pytest.raises(ValueError, match=r"impl='xla' does not apply .* no product of these two formats"):
        matmul.choose("xla", GemmSpec(MX, E4M3))
    with triton_call.assume_target("gfx950"):
        assert matmul.choose("triton", GemmSpec(E4M3, E4M3)) == ("xla", "triton: there are kernels for MXFP4 and NVFP4 only")
        with pytest.raises(ValueError, match="gfx950 has no NVFP4 matrix instruction"):
            matmul.choose("triton", GemmSpec(NV, NV))
        with pytest.raises(ValueError, match="does not apply"):
            matmul.choose("triton", GemmSpec(BLOCK_FP8, BLOCK_FP8))
    with triton_call.assume_target("gfx942"), pytest.raises(ValueError, match="no kernels for gfx942, only for gfx950"):
        matmul.choose("triton", GemmSpec(MX, MX))


def test_ragged_lengths_are_padded_by_xla_where_auto_may_choose_and_refused_to_kernels():
    padded = Recipe(*[GemmSpec(MX, MX, pad=True)] * 3)
    large = GemmSpec(MX, MX, Rotation(256))
    x, w = jnp.ones((64, 40)), jnp.ones((40, 96))
    run = lambda impl: quantized_dot_general(x, w, DN, recipe=padded, impl=impl)  # noqa: E731
    with triton_call.assume_target("gfx950"):
        assert matmul.choose("auto", padded.fprop, ragged=True) == ("xla", "auto: kernels do not pad ragged lengths")
        np.testing.assert_array_equal(run("auto"), run("reference"))
        with pytest.raises(ValueError, match="kernels do not pad ragged lengths"):
            run("triton")
        with pytest.raises(ValueError, match="kernels rotate by at most 128 elements"):
            matmul.choose("triton", large)


def lowered_llama3_8b(recipe="mxfp4_h16", arch="gfx950"):
    """Return the text of the whole train step of llama3_8b for a mesh of 8, and its census."""
    c = llama3.get_config(f"8b,{recipe}")
    with c.unlocked():
        c.quant.impl, c.quant.residuals = "triton", "packed"
    settings = config.resolve(c)
    mesh = AbstractMesh((1, 4, 1, 2), sharding.AXES, axis_types=(AxisType.Auto,) * 4)
    with triton_call.assume_target(arch):
        rows = step.census_rows(settings)
        tokens = jax.ShapeDtypeStruct((settings.train.batch_size, settings.data.seq_len + 1), jnp.int32)
        traced = step.make_train_step(settings, mesh).trace(step.abstract_state(settings, mesh), tokens)
        platform = "rocm" if arch.startswith("gfx") else "cuda"
        return traced.lower(lowering_platforms=(platform,)).as_text(), rows


CALLS = 4 + 7 + 7, 4 + 7 + 6, 7 + 14  # forward; again under remat, without the last product; backward


def test_the_train_step_of_llama3_8b_lowers_for_rocm_with_its_kernels_and_is_the_same_in_two_processes():
    code = (
        "import hashlib, sys; sys.path.insert(0, 'tests'); import test_kernels\n"
        "print(hashlib.sha256(test_kernels.lowered_llama3_8b()[0].encode()).hexdigest())"
    )
    env = {**environment(), "PYTHONPATH": str(ROOT)}
    other = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True)
    text, rows = lowered_llama3_8b()
    assert text.count("@triton_kernel_call_ffi") == sum(CALLS)
    linear = [row for row in rows if row["module"].startswith("layers/") and row["lhs"].startswith("mxfp4")]
    assert len(linear) == 21
    assert {row["impl"] for row in linear} == {"triton"}
    gathers = [line for line in text.splitlines() if "stablehlo.all_gather" in line]
    assert gathers, "fully sharded weights are gathered"
    assert all("xui8>) -> " in line for line in gathers), "as codes and scales"
    assert text.count("stablehlo.reduce_scatter") == 7  # one weight gradient each
    out, _ = other.communicate()
    assert out.strip() == hashlib.sha256(text.encode()).hexdigest()


def test_float8_operands_are_never_upcast_on_a_gpu():
    x, w, dy = operands(m=128, n=128)
    recipe = recipes.get("fp8_current")

    def loss(x, w):
        return jnp.sum(quantized_dot_general(x, w, DN, recipe=recipe, impl="xla") * dy)

    text = jax.jit(jax.grad(loss, (0, 1))).trace(x, w).lower(lowering_platforms=("rocm",)).as_text()
    products = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    assert len(products) == 2  # the forward product is not needed
    assert all(line.count("xf8E") == 2 and line.rstrip().endswith("xf32>") for line in products)


def test_the_same_kernel_for_two_platforms_in_one_process():
    """The compiled kernel is found by its target too, whatever was lowered before."""
    x, w, _ = operands()

    def lower(arch, platform):
        with triton_call.assume_target(arch):
            dot = lambda x, w: quantized_dot_general(x, w, DN, recipe=recipes.get("mxfp4"), impl="triton")  # noqa: E731
            return jax.jit(dot).trace(x, w).lower(lowering_platforms=(platform,)).as_text()

    first, second, again = lower("gfx950", "rocm"), lower("sm_100", "cuda"), lower("gfx950", "rocm")
    assert first == again
    assert first != second
    assert first.count("@triton_kernel_call_ffi") == second.count("@triton_kernel_call_ffi") == 3


def test_arrays_below_2_gib_get_buffer_loads_through_jax_triton(tmp_path):
    code, _, stderr = python(
        "import jax, jax.numpy as jnp; from fp4jax.ops import triton_call; from fp4jax import quantized_dot_general, recipes\n"
        "x = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16)\n"
        f"dot = lambda a, b: quantized_dot_general(a, b, {DN}, recipe=recipes.get('mxfp4'), impl='triton')\n"
        "with triton_call.assume_target('gfx950'): jax.jit(dot).trace(x, x).lower(lowering_platforms=('rocm',))",
        JAX_TRITON_DUMP_DIR=str(tmp_path),
    )
    assert code == 0, stderr
    programs = [path.read_text() for path in tmp_path.glob("*/*.llir")]
    assert len(programs) == 3
    assert all("raw.ptr.buffer.load" in program for program in programs)


def test_every_linear_layer_knows_its_mesh_axes_and_a_missing_entry_raises():
    of = sharding.partition(sharding.make_mesh(sharding.MeshConfig(fsdp=4, tensor=2)))
    for path, (k, n) in {"attn/q": ("fsdp", "tensor"), "mlp/down": ("tensor", "fsdp")}.items():
        assert of(path).stored == (k, n)
    replicated = sharding.partition(sharding.make_mesh(sharding.MeshConfig(data=4, fsdp=1, tensor=2)))
    assert replicated("attn/o").stored == ("tensor", None)
    with pytest.raises(InputError, match="attn/new has no entry"):
        of("attn/new")
    assert sharding.partition(sharding.make_mesh(sharding.MeshConfig(fsdp=1))) is None


def test_weights_that_blocks_would_straddle_at_rest_are_refused_before_any_compile():
    c = llama3.get_config("1m,mxfp4")
    with c.unlocked():
        c.quant.impl = "triton"
    settings = config.resolve(c)
    mesh = AbstractMesh((1, 8, 1, 1), sharding.AXES, axis_types=(AxisType.Auto,) * 4)
    with (
        triton_call.assume_target("gfx950"),
        pytest.raises(InputError, match="there its contraction length 16 is not a multiple"),
    ):
        sharding.check(mesh, settings.model, settings.numerics, microbatch=16, seq_len=128)


def test_kernels_that_would_draw_for_pieces_of_a_sequence_are_refused():
    c = llama3.get_config("1m,mxfp4_sr")
    with c.unlocked():
        c.quant.impl = "triton"
    settings = config.resolve(c)
    mesh = AbstractMesh((1, 1, 2, 1), sharding.AXES, axis_types=(AxisType.Auto,) * 4)
    with (
        triton_call.assume_target("gfx950"),
        pytest.raises(InputError, match="kernels do not round stochastically on a context"),
    ):
        sharding.check(mesh, settings.model, settings.numerics, microbatch=16, seq_len=128)


def test_census_names_what_runs():
    numerics = Numerics(Recipe(GemmSpec(MX, MX), GemmSpec(MX, MX), GemmSpec(BF16, BF16)), exempt=(), impl="triton")
    rows = []
    x, w, _ = operands()
    with triton_call.assume_target("gfx950"):
        dot = dataclasses.replace(numerics, observe=rows.append).dot("attn/q", 0)
        jax.eval_shape(lambda: dot(x, w, DN))
    assert [row["impl"] for row in rows] == ["triton", "triton", "xla"]
    assert [row["why"] for row in rows] == ["", "", "triton: there are kernels for MXFP4 and NVFP4 only"]


def test_the_cache_directory_of_triton_survives():
    code, out, stderr = python(
        "import os; from fp4jax.ops import triton_call; triton_call.load(); print(os.environ['TRITON_CACHE_DIR'])",
        TRITON_CACHE_DIR="/tmp/somewhere",
        PYTHONWARNINGS="error::ResourceWarning",
    )
    assert (code, out.strip()) == (0, "/tmp/somewhere")
    assert "ResourceWarning" not in stderr
