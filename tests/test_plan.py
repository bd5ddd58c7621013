"""Plans: bytes against what XLA allocates, FLOPs against the products of the traced step, refusals, the entry point.

Compiled with optimizations: XLA's own buffers are what is compared.
"""

import collections
import functools
import json
import math

import jax
import jax.numpy as jnp
import pytest
from helpers import parse, run, settings
from jax.extend import core

from train import config, devices, estimate, loop, memory, sharding, step
from train.errors import InputError

SMALL = {
    "train__batch_size": 4,
    "data__seq_len": 96,
    "model__max_seq_len": 128,
    "model__d_model": 64,
    "model__d_ff": 160,
    "model__n_layers": 3,
    "model__vocab_size": 320,
}
WIDE = {**SMALL, "model__d_model": 256, "model__d_ff": 704, "train__batch_size": 2, "data__seq_len": 32, "model__head_dim": 64}
BLOCKWISE = {"model__attention": "blockwise", "model__attention_block": 32}
SHARDED = {**SMALL, "mesh__fsdp": 2, "mesh__data": 2, "mesh__tensor": 2, "train__batch_size": 8}


def small(recipe="none", remat="none", **changes):
    return settings("corpus.txt", **{**SMALL, "quant__recipe": recipe, "model__remat": remat, **changes})


# (settings, the moment at which the temporaries are fullest)
TEMPORARIES = {
    **{
        f"{recipe} {remat}": (small(recipe, remat), "block")
        for recipe in ("none", "bf16")
        for remat in ("none", "full", "dots")
    },
    **{f"bf16 {remat} bfloat16": (small("bf16", remat, model__dtype="bfloat16"), "block") for remat in ("none", "dots")},
    "large vocabulary": (small(remat="full", model__vocab_size=8192), "head"),
    "in chunks": (small("bf16", "full", model__vocab_size=8192, model__loss_chunk=16), "head"),
    "wide": (small(remat="full", **WIDE), "update"),
    "blockwise": (small("bf16", **BLOCKWISE), "block"),
    "microbatches": (small("bf16", **WIDE, train__accumulation=2), "block"),
    "on a mesh": (small(remat="full", **SHARDED), "block"),
    "context": (small("bf16", mesh__fsdp=2, mesh__context=2), "block"),
}
EXACT = {
    **{name: of for name, (of, _) in TEMPORARIES.items()},
    "tied on 8": small(**{**SMALL, "train__batch_size": 8}, mesh__fsdp=8, model__tie_embeddings=True),
    "delayed on 8": small("fp8_delayed", **{**SHARDED, "data__seq_len": 32}, train__accumulation=2),
    "unrolled": small(model__scan_layers=False, optimizer__clip_norm=0.0, data__seq_len=32),
}


def abstract_arguments(s):
    mesh = sharding.make_mesh(s.mesh)
    shape = (s.train.batch_size, s.data.seq_len + 1)
    return mesh, (
        step.abstract_state(s, mesh),
        jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding.batch_sharding(mesh)),
    )


@functools.cache
def compiled(s):
    """Return (mesh, what XLA says of the memory of the compiled step)."""
    mesh, arguments = abstract_arguments(s)
    return mesh, step.make_train_step(s, mesh).lower(*arguments).compile().memory_analysis()


@pytest.mark.parametrize("name", EXACT)
def test_arguments_and_results_are_those_of_the_compiled_step(name):
    mesh, analysis = compiled(EXACT[name])
    assert memory.total(memory.state_lines(EXACT[name], mesh)) == analysis.argument_size_in_bytes
    assert memory.output_bytes(EXACT[name], mesh) == analysis.output_size_in_bytes


@pytest.mark.parametrize("name", TEMPORARIES)
def test_temporaries_are_within_30_percent_of_the_compiled_step(name):
    s, fullest = TEMPORARIES[name]
    mesh, analysis = compiled(s)
    planned = memory.temporaries(s, mesh)
    assert planned.fullest == fullest
    assert abs(planned.bytes / analysis.temp_size_in_bytes - 1) < 0.3


def test_a_mesh_without_devices_plans_the_same():
    for s in (small(remat="full", **SHARDED), small()):
        real, planned = sharding.make_mesh(s.mesh), sharding.abstract_mesh(s.mesh, math.prod(sharding.mesh_shape(s.mesh, 8)))
        for of in (memory.state_lines, memory.output_bytes, memory.temporaries, estimate.kernels):
            assert of(s, planned) == of(s, real)


def test_512_devices_are_planned_without_having_them():
    s = config.resolve(parse("--config=configs/llama3_8b_mlperf.py", "--config.mesh.data=64", "--config.train.batch_size=512"))
    mesh = sharding.abstract_mesh(s.mesh, 512)
    parameters = memory.state_lines(s, mesh)[0].value
    assert parameters * 8 == pytest.approx(4 * 8.03e9, rel=1e-3)
    with pytest.raises(InputError, match=r"uses 512 of 1024 devices"):
        sharding.abstract_mesh(s.mesh, 1024)


def dot_flops(jaxpr, times=1):
    """Return the FLOPs of every dot_general, scans run to their end and the dearest branch of every switch."""
    total = 0
    for eqn in jaxpr.eqns:
        inner = [j for value in eqn.params.values() for j in (value if isinstance(value, tuple | list) else (value,))]
        inner = [getattr(j, "jaxpr", j) for j in inner if isinstance(j, core.ClosedJaxpr | core.Jaxpr)]
        if eqn.primitive.name == "dot_general":
            (lhs_contract, _), _ = eqn.params["dimension_numbers"]
            k = math.prod(eqn.invars[0].aval.shape[axis] for axis in lhs_contract)
            total += times * 2 * k * math.prod(eqn.outvars[0].aval.shape)
        elif eqn.primitive.name == "cond":
            total += max(dot_flops(j, times) for j in inner)
        else:
            total += sum(dot_flops(j, times * eqn.params.get("length", 1)) for j in inner)
    return total


@pytest.mark.parametrize("remat", ["none", "full", "dots", "packed"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model__loss_chunk": 32, "model__tie_embeddings": True},
        {"train__accumulation": 2, "model__scan_layers": False},
        BLOCKWISE,
    ],
)
def test_flops_are_those_of_the_traced_step(remat, changes):
    """An FP4 recipe without a rotation, which would be a product of its own. A traced switch does not know the diagonal."""
    s = small("mxfp4", remat, quant__residuals="packed" if remat == "packed" else "operands", **changes)
    mesh, arguments = abstract_arguments(s)
    traced = dot_flops(jax.make_jaxpr(step.make_train_step(s, mesh))(*arguments).jaxpr)
    computed = {kernel.name: kernel.flops for kernel in estimate.kernels(s, mesh)}
    if changes == BLOCKWISE:
        computed["attention"] *= 6 / 4  # 2 of 3 key blocks in the mean
    assert sum(computed.values()) == pytest.approx(traced, rel=1e-12)


def test_flops_by_format_follow_the_recipe_of_each_block():
    s = small("mxfp4_fprop", quant__keep_last=1)
    mesh = sharding.make_mesh(s.mesh)
    flops, linear = estimate.flops(s, mesh), 2 * 4 * 96 * memory.local(s, mesh).W
    assert (flops["fp4"], flops["fp8"]) == (2 * linear, 2 * 2 * linear)
    assert flops["bf16"] > 3 * linear


def test_collectives_on_small_meshes():
    s = small()
    assert estimate.collectives(s, sharding.abstract_mesh(s.mesh, 1), fp4_kernels=True) == []
    s = small(mesh__fsdp=4)
    mesh = sharding.abstract_mesh(s.mesh, 4)
    gather, scatter = estimate.collectives(s, mesh, fp4_kernels=True)
    weights, head = 3 * memory.local(s, mesh).W, 64 * 320
    assert gather.value == 3 / 4 * 4 * (2 * weights + 2 * head + head)
    norms = 3 / 4 * 4 * (2 * 3 + 1) * 64 * 4  # replicated, so counted as if each device had a quarter of four times as many
    assert scatter.value == 3 / 4 * 4 * (weights + 2 * head) + norms
    s = small(mesh__data=2)
    (reduce,) = estimate.collectives(s, sharding.abstract_mesh(s.mesh, 2), fp4_kernels=True)
    assert reduce.value == memory.state_lines(s, sharding.abstract_mesh(s.mesh, 2))[0].value
    mxfp4 = small("mxfp4", mesh__fsdp=4)
    codes, values = (estimate.collectives(mxfp4, mesh, fp4_kernels=kernels)[0].value for kernels in (True, False))
    assert values - codes == 3 / 4 * 2 * weights * (4 - 17 / 32)


def test_time_adds_up_kernels_and_hides_the_links():
    device = devices.Device("test", {"bf16": 1e12, "fp8": 2e12, "fp4": 4e12}, 1e9, 1e30, 1e6)
    one = {recipe: small(recipe) for recipe in ("mxfp4", "fp8_current", "bf16")}
    mesh = sharding.abstract_mesh(one["bf16"].mesh, 1)
    times = {name: estimate.time(s, mesh, device, 0.5).chip for name, s in one.items()}
    flops = estimate.flops(one["mxfp4"], mesh)
    assert times["mxfp4"] == pytest.approx(flops["fp4"] / 2e12 + flops["bf16"] / 0.5e12)
    assert times["fp8_current"] - times["mxfp4"] == pytest.approx(flops["fp4"] / 2e12)
    without = devices.Device("old", {"bf16": 1e12}, 1e9, 1e30, 1e6)
    assert estimate.time(one["mxfp4"], mesh, without, 0.5).chip == pytest.approx(times["bf16"])
    sharded = small("mxfp4", mesh__fsdp=4)
    time = estimate.time(sharded, sharding.abstract_mesh(sharded.mesh, 4), device, 1.0)
    assert time.seconds == time.links > time.chip > 0


def test_casts_read_once_and_fp8_twice():
    """Per element of x: MXFP4 4 read, two casts of 17/32; per-tensor FP8 8 read and one byte; the baseline nothing."""
    moved = {}
    for recipe in ("mxfp4", "fp8_current", "bf16"):
        s = small(recipe)
        casts = [k.bytes for k in estimate.kernels(s, sharding.make_mesh(s.mesh)) if k.name.endswith("casts")]
        moved[recipe] = sum(casts)
    s = memory.local(small(), sharding.make_mesh(small().mesh))
    q = s.N * s.H
    x, dy = s.M * (2 * s.D + q + s.F), s.M * sum(n for _, n in s.linears.values())
    assert moved["mxfp4"] == s.L * (x + s.W + dy) * (4 + 2 * 17 / 32)
    assert moved["fp8_current"] == s.L * (x + s.W + dy) * (8 + 1)
    assert moved["bf16"] == 0


def test_what_does_not_fit_is_refused_in_one_line(tmp_path, monkeypatch):
    s = small()
    mesh = sharding.make_mesh(s.mesh)
    needed = memory.total(memory.state_lines(s, mesh)) + memory.temporaries(s, mesh).bytes
    memory.check_fits(s, mesh, needed)
    memory.check_fits(s, mesh, None)
    with pytest.raises(InputError, match=rf"{needed:,} bytes.*{needed - 1:,} bytes.*most of it: \w+"):
        memory.check_fits(s, mesh, needed - 1)
    monkeypatch.setattr(memory, "bytes_limit", lambda: 1000)
    with pytest.raises(InputError, match="1000 B|1,000 bytes"):
        loop.prepare(s, tmp_path / "run")
    assert not (tmp_path / "run").exists()


TINY = "--config=configs/tiny_cpu.py"


def test_the_entry_point_prints_tables_and_one_object():
    code, out, err = run("train.plan", TINY, "--device=h200", "--devices=2", "--recipe=mxfp4_h16")
    result = json.loads(out[-1])
    assert (code, len(out)) == (0, 1)
    assert result["needed_bytes"] == result["argument_bytes"] + result["temporary_bytes"]
    assert set(result["recipes"]) == {"mxfp4_h16", "fp8_current"}
    assert result["recipes"]["fp8_current"]["ratio"]["0.5"] == 1
    text = "\n".join(err)
    for expected in (
        "h200 has no FP4 unit",
        "block input",
        "attn/q wgrad",
        "all-gather weights",
        "6·parameters·tokens",
        "1.20",
    ):
        assert expected in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([TINY, "--device=mi355", "--devices=2"], "error: --device=mi355 is not one of mi355x, mi300x, b200, h100, h200"),
        ([TINY, "--device=b200", "--devices=1", "--memory_gib=0.01"], "error: a train step needs"),
        (
            [TINY, "--device=b200", "--devices=3"],
            "error: mxfp4_h16: model.d_model=128 is not a multiple of the mesh's fsdp axis (3)",
        ),
    ],
)
def test_the_entry_point_refuses_with_one_line(arguments, message):
    code, out, err = run("train.plan", *arguments)
    assert (code, out, len(err)) == (2, [], 1)
    assert err[0].startswith(message)
