"""Plans: bytes against what XLA allocates, FLOPs against the products of the traced step, refusals, the entry point.

Compiled with optimizations: XLA's own buffers are what is compared.
"""

import collections
import functools
import json
import math
import re

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
LONG = {"data__seq_len": 96, "train__batch_size": 4}
SHARDED = {**SMALL, "mesh__fsdp": 2, "mesh__data": 2, "mesh__tensor": 2, "train__batch_size": 8}


def small(recipe="none", remat="none", **changes):
    return settings("corpus.txt", **{**SMALL, "quant__recipe": recipe, "model__remat": remat, **changes})


# (settings, the moment at which the temporaries are fullest)
TEMPORARIES = {
    **{f"none {remat}": (small("none", remat), "block") for remat in ("none", "full", "dots")},
    "bf16": (small("bf16"), "block"),
    **{f"bf16 {remat} bfloat16": (small("bf16", remat, model__dtype="bfloat16"), "block") for remat in ("none", "dots")},
    "in chunks": (small("bf16", "full", model__vocab_size=8192, model__loss_chunk=16), "head"),
    "wide": (small(remat="full", **WIDE), "update"),
    "blockwise": (small("bf16", **BLOCKWISE), "block"),
    "unclipped": (small(remat="full", **WIDE, optimizer__clip_norm=0.0), "update"),
    "muon": (small(remat="full", **WIDE, optimizer__name="muon"), "update"),
    "muon on a mesh": (small(remat="full", **{**WIDE, "train__batch_size": 4}, optimizer__name="muon", mesh__fsdp=4), "update"),
    "muon unrolled": (small(remat="full", **WIDE, optimizer__name="muon", model__scan_layers=False), "update"),
    "muon on tensor": (small(remat="full", **WIDE, optimizer__name="muon", mesh__tensor=2, mesh__fsdp=1), "update"),
    "averaged": (small(remat="full", **WIDE, optimizer__ema_decay=0.9), "update"),
    "spikes": (small(remat="full", **WIDE, train__skip_spikes=6.0), "update"),
    "microbatches": (small("bf16", **WIDE, train__accumulation=2), "block"),
    "on a mesh": (small(remat="full", **SHARDED), "block"),
    "a kept block": (small("mxfp4", quant__keep_last=1, data__seq_len=32), "block"),
}
EXACT = {
    **{name: of for name, (of, _) in TEMPORARIES.items()},
    "tied on 8": small(**{**SMALL, "train__batch_size": 8}, mesh__fsdp=8, model__tie_embeddings=True),
    "delayed on 8": small("fp8_delayed", **{**SHARDED, "data__seq_len": 32}, train__accumulation=2),
    "all that a state may hold": small(
        mesh__fsdp=2, data__seq_len=32, optimizer__name="muon", optimizer__ema_decay=0.9, train__skip_spikes=6.0
    ),
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
    lines = memory.state_lines(EXACT[name], mesh)
    of = {line.name: line.value for line in lines}
    if EXACT[name].optimizer.name == "adamw":
        assert of["moments"] == 2 * of["parameters"]
    else:
        assert of["parameters"] < of["moments"] < 2 * of["parameters"]
    assert of.get("averaged weights", 0) == (of["parameters"] if EXACT[name].optimizer.ema_decay else 0)
    assert memory.total(lines) == analysis.argument_size_in_bytes
    assert memory.output_bytes(EXACT[name], mesh) == analysis.output_size_in_bytes


@pytest.mark.parametrize("name", TEMPORARIES)
def test_temporaries_are_within_30_percent_of_the_compiled_step(name):
    s, fullest = TEMPORARIES[name]
    mesh, analysis = compiled(s)
    planned = memory.temporaries(s, mesh)
    assert planned.fullest == fullest
    assert abs(planned.bytes / analysis.temp_size_in_bytes - 1) < 0.3


EVALUATED = {
    **{name: (TEMPORARIES[name][0], "attention") for name in ("none none", "bf16", "bf16 none bfloat16", "wide", "blockwise")},
    "in chunks": (TEMPORARIES["in chunks"][0], "head"),
    "a large vocabulary": (small(**{**SMALL, "model__vocab_size": 8192}), "head"),
    "in bfloat16": (small("bf16", **{**WIDE, **LONG}, model__dtype="bfloat16"), "attention"),
    "blocks of attention": (small(**{**WIDE, **LONG, **BLOCKWISE}), "attention"),
    "unrolled": (small("bf16", **{**WIDE, **LONG}, model__scan_layers=False), "MLP"),
    "fsdp": (small("bf16", **{**WIDE, **LONG, "train__batch_size": 4}, mesh__fsdp=4), "attention"),
    "tensor": (small("bf16", **{**WIDE, **LONG}, mesh__tensor=2, mesh__fsdp=1), "attention"),
    "context": (small("bf16", **{**WIDE, **LONG}, mesh__context=2, mesh__fsdp=1), "attention"),
    "its own batch": (small("bf16", **{**WIDE, **LONG}, train__eval_batch_size=8), "attention"),
}


@pytest.mark.parametrize("name", EVALUATED)
def test_validation_is_planned_within_30_percent_of_what_is_compiled(name):
    s, fullest = EVALUATED[name]
    mesh, (state, _) = abstract_arguments(s)
    size = s.train.eval_batch_size or s.train.microbatch
    tokens = jax.ShapeDtypeStruct((size, s.data.seq_len + 1), jnp.int32, sharding=sharding.batch_sharding(mesh))
    traced = step.make_eval_step(s, mesh).lower(state.params, tokens, jnp.uint32(0), state.step, state.seed)
    of = {moment: memory.total(lines) for moment, lines in memory.evaluation(s, mesh).items()}
    assert max(of, key=lambda moment: of[moment]) == f"evaluation: {fullest}"
    assert abs(max(of.values()) / traced.compile().memory_analysis().temp_size_in_bytes - 1) < 0.3
    assert memory.temporaries(s, mesh).moments.items() >= memory.evaluation(s, mesh).items()


def test_validation_that_does_not_fit_is_refused():
    s = small(train__eval_batch_size=64)
    with pytest.raises(InputError, match=r"an evaluation: attention needs"):
        memory.check_fits(s, sharding.make_mesh(s.mesh), 1000)


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


def collected(hlo):
    """Return {kind: bytes of the results} of the collectives of a compiled program, loops run to their end."""
    name, bodies = "", {}
    for line in hlo.splitlines():
        if head := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{", line):
            name = "entry" if head.group(1) else head.group(2)
        bodies.setdefault(name, []).append(line)
    total = collections.Counter()

    def add(body, times):
        for line in bodies[body]:
            if found := re.search(r"= (.*?) (all-gather|all-reduce|all-to-all)(-start)?\(", line):
                shapes = re.findall(r"f32\[([\d,]*)\]", found.group(1))
                total[found.group(2)] += times * sum(4 * math.prod(map(int, shape.split(","))) for shape in shapes if shape)
            if loop := re.search(r' while\(.*body=%?([\w.\-]+).*known_trip_count":\{"n":"(\d+)"', line):
                add(loop.group(1), times * int(loop.group(2)))

    add("entry", 1)
    return total


@pytest.mark.parametrize("axis", ["fsdp", "data", "tensor"])
def test_collectives_are_those_of_the_compiled_step(axis):
    """XLA for CPUs sums a whole gradient where XLA for GPUs scatters it. Norms are left out of the plan: 0.3 % here."""
    s = small(**{f"mesh__{axis}": 2}, data__seq_len=32, **({} if axis == "fsdp" else {"mesh__fsdp": 1}))
    mesh, arguments = abstract_arguments(s)
    found = collected(step.make_train_step(s, mesh).lower(*arguments).compile().as_text())
    planned = collections.Counter()
    for line in estimate.collectives(s, mesh, fp4_kernels=True):
        kind = line.name.split()[0]
        planned["all-reduce" if kind == "reduce-scatter" else kind] += line.value * (1 if kind == "all-reduce" else 2)
    assert planned.keys() == found.keys()
    for kind, size in found.items():
        assert planned[kind] == pytest.approx(size, rel=0.01), kind


def test_gradients_travel_in_the_dtype_that_they_are_summed_in():
    """In that of the product, or one's own choice; embedding and norms in float32."""
    of = {}
    for recipe, reduce in (("none", "auto"), ("mxfp4", "auto"), ("none", "float32"), ("mxfp4", "bfloat16")):
        s = small(recipe, mesh__fsdp=2, mesh__data=2, model__dtype="bfloat16", train__grad_reduce_dtype=reduce)
        mesh = sharding.abstract_mesh(s.mesh, 4)
        of[recipe, reduce] = {line.name.split()[0]: line.value for line in estimate.collectives(s, mesh, fp4_kernels=False)}
    blocks, head = 3 * memory.local(s, mesh).W, 64 * 320
    assert memory.local(s, mesh).fsdp == 2
    scattered = {how: sizes["reduce-scatter"] / (1 / 2) for how, sizes in of.items()}
    assert scattered["none", "auto"] == scattered["mxfp4", "bfloat16"] == 2 * (blocks + head)
    assert scattered["mxfp4", "auto"] == 4 * blocks + 2 * head
    assert scattered["none", "float32"] == 4 * (blocks + head)
    saved = of["none", "float32"]["all-reduce"] - of["none", "auto"]["all-reduce"]
    assert saved == 2 * (blocks + head) / 2


def test_weights_of_kernels_travel_as_codes():
    assert estimate.collectives(small(), sharding.abstract_mesh(small().mesh, 1), fp4_kernels=True) == []
    s = small("mxfp4", "full", mesh__fsdp=4)
    mesh = sharding.abstract_mesh(s.mesh, 4)
    local = memory.local(s, mesh)
    codes, values = (estimate.collectives(s, mesh, fp4_kernels=kernels)[0].value for kernels in (True, False))
    again = local.W - 160 * 64  # not down
    assert values == 3 / 4 * 4 * (3 * 2 * local.W + 64 * 320)
    assert codes == 3 / 4 * (3 * (2 * local.W + again) * 17 / 32 + 4 * 64 * 320)


def test_time_adds_up_kernels_and_hides_the_links():
    device = devices.Device("test", "sm_100", {"bf16": 1e12, "fp8": 2e12, "fp4": 4e12}, 1e9, 1e30, 1e6)
    one = {recipe: small(recipe) for recipe in ("mxfp4", "fp8_current", "bf16")}
    mesh = sharding.abstract_mesh(one["bf16"].mesh, 1)
    times = {name: estimate.time(s, mesh, device, 0.5).chip for name, s in one.items()}
    flops = estimate.flops(one["mxfp4"], mesh)
    assert times["mxfp4"] == pytest.approx(flops["fp4"] / 2e12 + flops["bf16"] / 0.5e12)
    assert times["fp8_current"] - times["mxfp4"] == pytest.approx(flops["fp4"] / 2e12)
    without = devices.Device("old", "sm_90", {"bf16": 1e12}, 1e9, 1e30, 1e6)
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
    with pytest.raises(InputError, match=r"1,000 bytes"):
        loop.prepare(s, tmp_path / "run")
    assert not (tmp_path / "run").exists()


TINY = "--config=configs/tiny_cpu.py"


def test_a_config_s_own_rules_are_a_row_of_their_own():
    changes = ["--config.quant.keep_last=1", "--config.quant.rules=(('mlp/down','bf16'),)"]
    code, out, err = run("train.plan", TINY, *changes, "--device=b200", "--devices=2", "--recipe=mxfp4_h16")
    assert code == 0, err
    recipes = json.loads(out[-1])["recipes"]
    assert set(recipes) == {"mxfp4_h16, this config", "mxfp4_h16", "fp8_current"}
    assert recipes["mxfp4_h16, this config"]["flops"]["bf16"] > recipes["mxfp4_h16"]["flops"]["bf16"]


def test_a_recipe_nobody_named_is_left_out_where_it_cannot_run():
    plain = [TINY, "--config.model.d_ff=80", "--config.quant.recipe=none", "--device=b200", "--devices=2"]
    code, out, err = run("train.plan", *plain)
    assert code == 0, err
    assert set(json.loads(out[-1])["recipes"]) == {"none", "fp8_current", "bf16"}
    assert err[0].startswith("not compared: mxfp4: mlp/gate dgrad: d_ff per device = 80 is not a multiple of 32")
    code, _, err = run("train.plan", *plain, "--recipe=mxfp4")
    assert (code, len(err)) == (2, 1)


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
        "norms",
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
        ([TINY, "--device=b200", "--devices=2", "--memory_gib=inf"], "error: --devices=2 and --memory_gib=inf must be"),
        (
            [TINY, "--device=mi355x", "--devices=2", "--config.mesh.context=2", "--config.quant.recipe=mxfp4_sr"],
            "error: mxfp4_sr: attn/q fprop: kernels do not round stochastically on a context axis",
        ),
        (
            [TINY, "--device=mi300x", "--devices=2", "--config.quant.impl=triton"],
            "error: mxfp4_h16: quant: attn/q fprop: impl='triton' does not apply to",
        ),
        (
            [
                *(TINY, "--device=b200", "--devices=2", "--config.train.grad_reduce_dtype=float32"),
                *("--config.data.seq_len=56", "--config.quant.wgrad.pad=True", "--config.train.batch_size=2"),
            ],
            "error: mxfp4_h16*: attn/q wgrad: tokens per device = 56 is not a multiple of 32",
        ),
    ],
)
def test_the_entry_point_refuses_with_one_line(arguments, message):
    code, out, err = run("train.plan", *arguments)
    assert (code, out, len(err)) == (2, [], 1)
    assert err[0].startswith(message)
