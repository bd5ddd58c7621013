"""Sharding: where every array lives, what does not divide is refused, and a mesh trains like one device.

One flipped FP4 code moves an element by a whole grid step, so FP4 runs on two meshes part after the first step, as do two runs
whose weights differ by 1e-7: the mesh's drift is judged against that. `python tests/test_sharding.py` prints both.
"""

import dataclasses
import functools
import pathlib
import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

if __name__ == "__main__":
    sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
    jax.config.update("jax_num_cpu_devices", 8)

from helpers import initial_state, leaves, settings, tokens, write_corpus

from fp4jax import recipes
from fp4jax.numerics import Numerics
from models import llama
from train import data, sharding, step
from train.errors import InputError

STEPS = 20
MESH = sharding.MeshConfig(data=4, model=2)
ONE = sharding.MeshConfig(data=1, model=1)
WHOLE = dataclasses.replace(MESH, fsdp=False)
# Enough tokens and speed that codes flip within the first steps; with few, the first flip's moment is all that is measured.
LONGER = {"train__batch_size": 16, "data__seq_len": 64, "optimizer__peak_lr": 3e-2}


def tiny(corpus, recipe="none", mesh=ONE, **changes):
    s = settings(corpus, quant__recipe=recipe, train__steps=STEPS, **changes)
    return dataclasses.replace(s, mesh=mesh)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


# ---- Placement ----

EXPECTED = {  # without and with the leading layer axis of scanned blocks
    "['embed']['embedding']": P("model", "data"),
    "['final_norm']['scale']": P(None),
    "['layers']['attn']['q']['kernel']": P(None, "data", "model"),
    "['layers']['attn']['k']['kernel']": P(None, "data", "model"),
    "['layers']['attn']['v']['kernel']": P(None, "data", "model"),
    "['layers']['attn']['o']['kernel']": P(None, "model", "data"),
    "['layers']['mlp']['gate']['kernel']": P(None, "data", "model"),
    "['layers']['mlp']['up']['kernel']": P(None, "data", "model"),
    "['layers']['mlp']['down']['kernel']": P(None, "model", "data"),
    "['layers']['attn_norm']['scale']": P(None, None),
    "['layers']['mlp_norm']['scale']": P(None, None),
    "['lm_head']['kernel']": P("data", "model"),
}


def specs(tree):
    return {jax.tree_util.keystr(path): x.sharding.spec for path, x in jax.tree_util.tree_leaves_with_path(tree)}


def without_data(spec):
    return P(*(None if axis == "data" else axis for axis in spec))


@pytest.mark.parametrize("fsdp", [True, False])
def test_every_array_is_where_the_table_says(corpus, fsdp):
    s = tiny(corpus, mesh=dataclasses.replace(MESH, fsdp=fsdp))
    expected = EXPECTED if fsdp else {path: without_data(spec) for path, spec in EXPECTED.items()}
    state = initial_state(s, sharding.make_mesh(s.mesh))
    assert specs(state.params) == expected
    assert specs(state.opt_state[1].mu) == specs(state.opt_state[1].nu) == expected
    assert state.step.sharding.spec == state.opt_state[1].count.sharding.spec == P()
    kernel = state.params["layers"]["mlp"]["down"]["kernel"]
    assert kernel.addressable_shards[0].data.shape == (2, 128 // 2, 64 // 4 if fsdp else 64)


def test_unrolled_layers_have_the_same_axes_without_the_leading_one(corpus):
    s = tiny(corpus, mesh=MESH, model__scan_layers=False)
    found = specs(step.abstract_state(s, sharding.make_mesh(s.mesh)).params)
    for path, spec in EXPECTED.items():
        for i in range(2) if "layers" in path else (0,):
            assert found[path.replace("layers", f"layers_{i}")] == (P(*spec[1:]) if "layers" in path else spec)


def test_a_parameter_that_the_table_does_not_know_raises():
    mesh = sharding.make_mesh(MESH)
    with pytest.raises(KeyError, match="gate/bias"):
        sharding.state_shardings(mesh, {"mlp": {"gate": {"bias": jax.ShapeDtypeStruct((8,), jnp.float32)}}})


def test_the_mesh_is_as_asked():
    assert sharding.make_mesh(sharding.MeshConfig()).shape == {"data": 8, "model": 1}
    assert sharding.make_mesh(sharding.MeshConfig(model=2)).shape == {"data": 4, "model": 2}
    assert sharding.make_mesh(sharding.MeshConfig(data=1)).shape == {"data": 1, "model": 1}
    with pytest.raises(InputError, match=r"data=5 × model=2.*8 devices"):
        sharding.make_mesh(sharding.MeshConfig(data=5, model=2))
    with pytest.raises(InputError, match=r"model=9.*8 devices"):
        sharding.make_mesh(sharding.MeshConfig(model=9))


MODEL = llama.LlamaConfig(256, 64, 2, 4, 2, 128, head_dim=32)


@pytest.mark.parametrize(
    ("mesh", "model", "recipe", "message"),
    [
        (MESH, {}, "mxfp4_h16", ""),
        (MESH, {"n_kv_heads": 1}, "none", r"n_kv_heads=1 is not a multiple of .*\(2\)"),
        (MESH, {"vocab_size": 257}, "none", r"vocab_size=257 is not a multiple of .*\(2\)"),
        (MESH, {"d_ff": 129}, "none", r"d_ff=129 is not a multiple of .*\(2\)"),
        (MESH, {"d_model": 66, "head_dim": 32}, "none", r"d_model=66 is not a multiple of .*\(4\)"),
        (MESH, {"d_ff": 96}, "mxfp4", r"d_ff per device = 48 is not a multiple of 32"),
        (MESH, {"d_ff": 96}, "mxfp4_fprop", r"fprop: d_ff per device = 48 is not a multiple of 32"),
        (MESH, {"d_ff": 96}, "fp8_current", ""),
        (MESH, {"head_dim": 16}, "mxfp4", r"n_kv_heads · head size per device = 16 is not a multiple of 32"),
        (MESH, {"head_dim": 16}, "mxfp4_fprop", ""),
        (ONE, {"head_dim": 16}, "mxfp4", ""),
        (WHOLE, {"d_model": 66, "head_dim": 32}, "none", ""),
    ],
)
def test_blocks_and_dimensions_must_divide_per_device(mesh, model, recipe, message):
    def check():
        changed = dataclasses.replace(MODEL, **model)
        sharding.check(
            sharding.make_mesh(mesh), changed, Numerics(recipes.get(recipe)), microbatch=8, seq_len=32, fsdp=mesh.fsdp
        )

    if not message:
        return check()
    with pytest.raises(InputError, match=message):
        check()
    return None


@pytest.mark.parametrize(
    ("microbatch", "seq_len", "recipe", "ok"),
    [(6, 32, "none", False), (8, 16, "mxfp4", True), (4, 16, "mxfp4", False), (4, 16, "mxfp4_fprop_dgrad", True)],
)
def test_tokens_must_divide_per_device(microbatch, seq_len, recipe, ok):
    arguments = {"microbatch": microbatch, "seq_len": seq_len}
    if ok:
        sharding.check(sharding.make_mesh(MESH), MODEL, Numerics(recipes.get(recipe)), **arguments)
        return
    with pytest.raises(InputError, match=r"microbatch of 6.*\(4\)|tokens per device = 16 is not a multiple of 32"):
        sharding.check(sharding.make_mesh(MESH), MODEL, Numerics(recipes.get(recipe)), **arguments)


# ---- Training ----


@functools.cache
def program(s):
    mesh = sharding.make_mesh(s.mesh)
    return mesh, step.make_train_step(s, mesh)


def losses(s, *, steps=STEPS, perturb=None):
    """Train for some steps; perturb: a seed of a relative noise of 1e-7 on the initial weights. Return the losses."""
    mesh, train_step = program(s)
    state = initial_state(s, mesh)
    if perturb is not None:
        rng = np.random.default_rng(perturb)
        noise = jax.tree.map(lambda x: (1 + 1e-7 * rng.normal(size=x.shape)).astype(np.float32), leaves(state.params))
        flat, tree = jax.tree.flatten(state.params)
        moved = [jax.device_put(x * n, x.sharding) for x, n in zip(flat, noise.values(), strict=True)]
        state = state._replace(params=jax.tree.unflatten(tree, moved))
    iterator = data.train_iterator(data.load(s.data), seq_len=s.data.seq_len, batch_size=s.train.batch_size, seed=0)
    result = []
    for _ in range(steps):
        batch = jax.device_put(next(iterator)["tokens"], sharding.batch_sharding(mesh))
        state, figures = train_step(state, batch)
        result.append(float(figures["train_loss"]))
    return np.array(result)


def relative(a, b):
    return float(np.max(np.abs(a - b) / np.abs(b)))


def drifting_runs(corpus, recipe, *, seeds):
    """Return the losses of one device, of the mesh, and of one device with perturbed weights, one run per seed."""
    s = tiny(corpus, recipe, **LONGER)
    return losses(s), losses(dataclasses.replace(s, mesh=MESH)), [losses(s, perturb=seed) for seed in range(seeds)]


def test_initial_weights_do_not_depend_on_the_mesh(corpus):
    a, b = (leaves(initial_state(tiny(corpus, mesh=m), sharding.make_mesh(m))) for m in (ONE, MESH))
    close = lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6)  # the same draws; erf⁻¹ may differ by an ulp  # noqa: E731
    jax.tree.map(close, a, b)


@pytest.mark.parametrize("fsdp", [True, False])
def test_without_quantization_a_mesh_trains_like_one_device(corpus, fsdp):
    one = losses(tiny(corpus))
    assert relative(losses(tiny(corpus, mesh=dataclasses.replace(MESH, fsdp=fsdp))), one) < 1e-5
    assert one[-1] < 0.8 * one[0]


@pytest.mark.parametrize("recipe", ["mxfp4_sr", "nvidia_nvfp4", "fp8_delayed"])
def test_the_first_step_agrees_with_random_bits_global_scales_kept_blocks_and_history(corpus, recipe):
    one, on_mesh = (losses(tiny(corpus, recipe, mesh), steps=1) for mesh in (ONE, MESH))
    assert relative(on_mesh, one) < 1e-5


def test_the_history_of_delayed_scaling_is_global(corpus):
    histories = []
    for mesh_config in (ONE, MESH):
        s = tiny(corpus, "fp8_delayed", mesh_config)
        mesh, train_step = program(s)
        state, _ = train_step(initial_state(s, mesh), jax.device_put(tokens(s), sharding.batch_sharding(mesh)))
        histories.append(jax.tree.map(np.asarray, state.history))
    for path, one in histories[0].items():
        assert (one[..., 0] > 0).all()
        np.testing.assert_allclose(histories[1][path], one, rtol=0.2)
        np.testing.assert_array_equal(histories[1][path][:, 0, 1], one[:, 0, 1])  # of the weights, exactly


def test_in_fp4_the_first_step_agrees_and_later_ones_drift_no_more_than_rounding_does(corpus):
    one, on_mesh, perturbed = drifting_runs(corpus, "mxfp4_h16", seeds=3)
    assert relative(on_mesh[:1], one[:1]) < 1e-5
    bound = max(relative(run, one) for run in perturbed)
    assert bound > 1e-4, "the perturbation flipped next to no code, so it bounds nothing"
    assert relative(on_mesh, one) <= 2 * bound


def main():
    with tempfile.TemporaryDirectory() as directory:
        path = write_corpus(directory)
        print(f"largest relative difference in training loss over {STEPS} steps")
        for recipe in ("none", "fp8_current", "mxfp4", "mxfp4_h16", "mxfp4_rht16", "mxfp4_sr"):
            one, on_mesh, perturbed = drifting_runs(path, recipe, seeds=5)
            drift, bound = relative(on_mesh, one), max(relative(run, one) for run in perturbed)
            print(
                f"{recipe:12s}  4 x 2 mesh {drift:.1e}   weights moved by 1e-7 {bound:.1e}   ratio {drift / bound:.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
