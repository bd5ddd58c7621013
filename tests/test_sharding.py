"""Sharding: where every array lives, what does not divide is refused, and a mesh trains like one device.

One flipped FP4 code moves an element by a whole grid step, so FP4 runs on two meshes part after the first step, as do two runs
whose weights differ by 1e-7: the mesh's drift is judged against that. `python tests/test_sharding.py` prints both.
"""

import collections
import dataclasses
import functools
import pathlib
import re
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

from benchmarks import mesh_cell as benchmark
from fp4jax import bits, recipes
from fp4jax.numerics import Numerics
from fp4jax.ops import kernels
from models import llama
from train import data, sharding, step
from train.errors import InputError

STEPS = 20
MESH = sharding.MeshConfig(fsdp=4, tensor=2)
ONE = sharding.MeshConfig(fsdp=1)
WHOLE = sharding.MeshConfig(data=4, fsdp=1, tensor=2)
EVERY_AXIS = sharding.MeshConfig(fsdp=2, context=2, tensor=2)
MESHES = {
    "fsdp 4 × tensor 2": MESH,
    "data 4 × tensor 2": WHOLE,
    "data 2 × fsdp 2 × context 2": sharding.MeshConfig(data=2, fsdp=2, context=2),
    "fsdp 2 × context 2 × tensor 2": EVERY_AXIS,
}
# Enough tokens and speed that codes flip within the first steps; with few, the first flip's moment is all that is measured.
LONGER = {"train__batch_size": 16, "data__seq_len": 64, "optimizer__peak_lr": 3e-2}
# Leaves attn/q and mlp/down, column- and row-parallel: half the time to compile.
TWO = {"quant__exempt": ("lm_head", "attn/k", "attn/v", "attn/o", "mlp/gate", "mlp/up")}


def tiny(corpus, recipe="none", mesh=ONE, **changes):
    s = settings(corpus, quant__recipe=recipe, train__steps=STEPS, **changes)
    return dataclasses.replace(s, mesh=mesh)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


# ---- Placement ----

EXPECTED = {  # without and with the leading layer axis of scanned blocks
    "['embed']['embedding']": P("tensor", "fsdp"),
    "['final_norm']['scale']": P(None),
    "['layers']['attn']['q']['kernel']": P(None, "fsdp", "tensor"),
    "['layers']['attn']['k']['kernel']": P(None, "fsdp", "tensor"),
    "['layers']['attn']['v']['kernel']": P(None, "fsdp", "tensor"),
    "['layers']['attn']['o']['kernel']": P(None, "tensor", "fsdp"),
    "['layers']['mlp']['gate']['kernel']": P(None, "fsdp", "tensor"),
    "['layers']['mlp']['up']['kernel']": P(None, "fsdp", "tensor"),
    "['layers']['mlp']['down']['kernel']": P(None, "tensor", "fsdp"),
    "['layers']['attn_norm']['scale']": P(None, None),
    "['layers']['mlp_norm']['scale']": P(None, None),
    "['lm_head']['kernel']": P("fsdp", "tensor"),
}


def specs(tree):
    return {jax.tree_util.keystr(path): x.sharding.spec for path, x in jax.tree_util.tree_leaves_with_path(tree)}


def without_fsdp(spec):
    return P(*(None if axis == "fsdp" else axis for axis in spec))


@pytest.mark.parametrize("mesh", [MESH, WHOLE])
def test_every_array_is_where_the_table_says(corpus, mesh):
    s, fsdp = tiny(corpus, mesh=mesh), mesh == MESH
    expected = EXPECTED if fsdp else {path: without_fsdp(spec) for path, spec in EXPECTED.items()}
    state = initial_state(s, sharding.make_mesh(s.mesh))
    assert specs(state.params) == expected
    assert specs(state.opt_state[1].mu) == specs(state.opt_state[1].nu) == expected
    assert state.step.sharding.spec == state.opt_state[1].count.sharding.spec == P()
    kernel = state.params["layers"]["mlp"]["down"]["kernel"]
    assert kernel.addressable_shards[0].data.shape == (2, 128 // 2, 64 // 4 if fsdp else 64)


def test_muon_s_momentum_and_the_average_lie_where_their_weights_do(corpus):
    s = tiny(corpus, mesh=MESH, optimizer__name="muon", optimizer__ema_decay=0.9)
    state = initial_state(s, sharding.make_mesh(s.mesh))
    assert specs(state.ema) == EXPECTED
    of = state.opt_state[1].inner_states
    muon, adam = specs(of["muon"].inner_state[0].mu), specs(of["adam"].inner_state.mu)
    assert {**muon, **adam} == EXPECTED
    assert muon.keys() == {path for path in EXPECTED if "attn'" in path or "mlp'" in path}
    assert of["muon"].inner_state[0].ns_coeffs.sharding.spec == P()


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
    def shape(**axes):
        return tuple(sharding.make_mesh(sharding.MeshConfig(**axes)).shape.items())

    assert shape() == (("data", 1), ("fsdp", 8), ("context", 1), ("tensor", 1))
    assert shape(tensor=2, data=2) == (("data", 2), ("fsdp", 2), ("context", 1), ("tensor", 2))
    assert shape(context=2, fsdp=1) == (("data", 1), ("fsdp", 1), ("context", 2), ("tensor", 1))
    with pytest.raises(InputError, match=r"fsdp=5 × tensor=2 needs more than the 8 devices"):
        shape(fsdp=5, tensor=2)
    with pytest.raises(InputError, match=r"tensor=9.*8 devices"):
        shape(tensor=9)


@pytest.mark.parametrize(("mesh", "batch", "tokens"), [
    (MESH, "fsdp", "fsdp"),
    (WHOLE, "data", "data"),
    (MESHES["data 2 × fsdp 2 × context 2"], ("data", "fsdp"), ("context", "data", "fsdp")),
    (EVERY_AXIS, "fsdp", ("context", "fsdp")),
])  # fmt: skip
def test_the_axes_of_activations_and_of_a_layer_s_tokens(mesh, batch, tokens):
    on = sharding.make_mesh(mesh)
    assert sharding.batch_sharding(on).spec == P(batch)
    assert sharding.spec(on, *sharding.ACTIVATION_AXES["x_BTD"])[0] == batch
    partition = sharding.partition(on)
    assert partition is not None
    assert partition("mlp/down").m == tokens
    assert partition("mlp/down").pieces == mesh.context


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
        (EVERY_AXIS, {}, "none", ""),
        (EVERY_AXIS, {}, "mxfp4", r"wgrad: positions per device = 16 is not a multiple of 32"),
        (EVERY_AXIS, {}, "quartet2", r"wgrad: positions per device = 16 is not a multiple of 128"),  # no padding in pieces
        (EVERY_AXIS, {"attention": "blockwise", "attention_block": 32}, "none", r"seq_len=32.*\(2\) times attention_block=32"),
        (EVERY_AXIS, {"loss_chunk": 32}, "none", r"seq_len=32.*\(2\).*loss_chunk=32"),
    ],
)
def test_blocks_and_dimensions_must_divide_per_device(mesh, model, recipe, message):
    def check():
        changed = dataclasses.replace(MODEL, **model)
        sharding.check(sharding.make_mesh(mesh), changed, Numerics(recipes.get(recipe)), microbatch=8, seq_len=32)

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


@pytest.mark.parametrize("where", MESHES)
def test_without_quantization_a_mesh_trains_like_one_device(corpus, where):
    one = losses(tiny(corpus))
    assert relative(losses(tiny(corpus, mesh=MESHES[where])), one) < 1e-5
    assert one[-1] < 0.8 * one[0]


def test_muon_orthogonalizes_matrices_that_are_split_as_whole_ones(corpus):
    one, on_mesh = (losses(tiny(corpus, mesh=mesh, optimizer__name="muon"), steps=6) for mesh in (ONE, MESH))
    assert relative(on_mesh, one) < 1e-5
    assert one[-1] < 0.9 * one[0]
    adam = losses(tiny(corpus), steps=6)
    assert relative(adam, one) > 1e-3


@pytest.mark.parametrize("recipe", ["none", "mxfp4_sr"])
def test_pieces_of_a_sequence_with_blockwise_attention_and_a_chunked_loss(corpus, recipe):
    changes = {"data__seq_len": 64, "model__attention": "blockwise", "model__attention_block": 16, "model__loss_chunk": 8}
    changes |= TWO
    one, on_mesh = (losses(tiny(corpus, recipe, mesh, **changes), steps=1) for mesh in (ONE, EVERY_AXIS))
    assert relative(on_mesh, one) < 1e-5


@pytest.mark.parametrize("recipe", ["none", "mxfp4_sr", "nvidia_nvfp4"])
def test_validation_on_every_axis_is_that_of_one_device_with_random_bits_and_scales_per_sequence(corpus, recipe):
    tokens_BT1 = np.random.default_rng(0).integers(0, 256, (8, 33)).astype(np.int32)
    of = []
    for mesh_config in (ONE, EVERY_AXIS):
        s = tiny(corpus, recipe, mesh_config, model__loss_chunk=16, **TWO)
        mesh = sharding.make_mesh(s.mesh)
        state, eval_step = initial_state(s, mesh), step.make_eval_step(s, mesh, stochastic=True)
        nll = eval_step(state.params, sharding.put_batch(mesh, tokens_BT1), np.uint32(3), state.step, state.seed)
        of.append(np.asarray(nll))
    assert np.abs(of[1] / of[0] - 1).max() < 1e-6


def test_a_chunked_head_is_not_quantized_in_pieces(corpus):
    s = tiny(corpus, "mxfp4", EVERY_AXIS, model__loss_chunk=16, quant__exempt=(), data__seq_len=64)
    lengths = {"microbatch": 8, "seq_len": 64}
    with pytest.raises(InputError, match=r"loss_chunk=16 on a context axis \(2\): .* quantized lm_head"):
        sharding.check(sharding.make_mesh(s.mesh), s.model, s.numerics, **lengths)
    whole = dataclasses.replace(s.model, loss_chunk=0)
    sharding.check(sharding.make_mesh(s.mesh), whole, s.numerics, **lengths)


@functools.cache
def first_gradient(s):
    """Return (loss, gradients of step 0, the collectives of the program that computed them)."""
    mesh = sharding.make_mesh(s.mesh)
    state = initial_state(s, mesh)
    arguments = state.params, state.history, {}, tokens(s), bits.step_key(state.seed, state.step)
    gradient = jax.jit(step.make_gradient(s, mesh)).lower(*arguments).compile()
    loss, (grads, _, _) = gradient(*arguments)
    return float(loss), leaves(grads), benchmark.collectives(gradient.as_text())


@pytest.mark.parametrize(("recipe", "where"), [
    *((recipe, "fsdp 2 × context 2 × tensor 2") for recipe in ("none", "mxfp4_h16", "mxfp4_sr", "nvidia_nvfp4", "fp8_delayed")),
    *((recipe, "fsdp 4 × tensor 2") for recipe in ("mxfp4_h16", "fp8_delayed")),
])  # fmt: skip
def test_the_first_gradient_agrees_with_random_bits_global_scales_and_history(corpus, recipe, where):
    """A missing or doubled sum over an axis is off by its size, other draws by 0.1 to 0.6; a code that flips by 1e-3 at most.

    Without kept blocks: BF16 operands round otherwise after any change of summation order, and NVFP4 codes follow (LOG.md).
    """
    s = tiny(corpus, recipe, data__seq_len=64, quant__keep_last=0, **TWO)
    (one, expected, none), (loss, grads, _) = first_gradient(s), first_gradient(dataclasses.replace(s, mesh=MESHES[where]))
    assert not none
    assert abs(loss - one) < 1e-5 * one
    for path, dw in expected.items():
        assert np.linalg.norm(grads[path] - dw) < (1e-5 if recipe == "none" else 1e-3) * np.linalg.norm(dw), path


STRADDLING = {"all-reduce s32": 2}  # maxima of the blocks of 32 of weights that lie in pieces of 16 rows, one per kind of layer


@pytest.mark.parametrize(("recipe", "where", "more"), [
    ("mxfp4_h16", "fsdp 2 × context 2 × tensor 2", {}),
    ("nvidia_nvfp4", "fsdp 2 × context 2 × tensor 2", {}),
    ("mxfp4_h16", "fsdp 4 × tensor 2", STRADDLING),
    ("fp8_delayed", "fsdp 4 × tensor 2", {}),
])  # fmt: skip
def test_a_recipe_sends_what_none_does_and_scalars_for_its_tensor_scales(corpus, recipe, where, more):
    s, none = (tiny(corpus, name, MESHES[where], data__seq_len=64, quant__keep_last=0, **TWO) for name in (recipe, "none"))
    (_, _, found), (_, _, plain) = first_gradient(s), first_gradient(none)
    assert plain
    assert benchmark.unexpected(s, found, plain) == more
    assert found.get(benchmark.MAXIMUM, 0) == benchmark.tensor_maxima(s)


# ---- The sum of the weights' gradients over devices ----

TOKENS_SPLIT = sharding.MeshConfig(data=2, fsdp=2, tensor=2)
N_LINEAR = 8  # scanned blocks are one program


def written_sums(s):
    """Return the element types of the sums over devices that the train step asks for by itself, before XLA adds its own."""
    mesh = sharding.make_mesh(s.mesh)
    shape = (s.train.batch_size, s.data.seq_len + 1)
    args = step.abstract_state(s, mesh), jax.ShapeDtypeStruct(shape, jnp.int32)
    text = step.make_train_step(s, mesh).lower(*args).as_text()
    sums = re.findall(r'"stablehlo\.(all_reduce|reduce_scatter)".*?\}\) : \(tensor<(?:\d+x)*(\w+)>\)', text, re.DOTALL)
    return collections.Counter(sums)


@pytest.mark.parametrize("recipe", ["none", "mxfp4_h16"])
def test_the_program_sums_gradients_in_the_dtype_that_was_asked_for(corpus, recipe):
    """With a bfloat16 model XLA would add the products of a plain layer in bfloat16, those of a quantized one in float32."""
    for asked, found in (("auto", None), ("float32", "f32"), ("bfloat16", "bf16")):
        changes = {"data__seq_len": 64, "model__dtype": "bfloat16", "train__grad_reduce_dtype": asked}
        kinds = ("reduce_scatter", "all_reduce")  # over fsdp, where the device keeps its piece, then over data
        expected = {(kind, found): N_LINEAR for kind in kinds} if found else {}
        assert written_sums(tiny(corpus, recipe, TOKENS_SPLIT, **changes)) == expected


@pytest.mark.parametrize(("recipe", "impl", "mesh"), [
    ("none", "auto", TOKENS_SPLIT),
    ("mxfp4_h16", "reference", EVERY_AXIS),
    ("nvidia_nvfp4", "xla", TOKENS_SPLIT),
])  # fmt: skip
def test_gradients_summed_in_float32_agree_and_in_bfloat16_are_off_by_its_rounding(corpus, recipe, impl, mesh):
    """Each device rounds to 8 bits, by 2^-9 at most, and so does each of the two sums; measured 0.0025 (LOG.md)."""
    changes = {"data__seq_len": 64, "quant__keep_last": 0, "quant__impl": impl, **TWO}
    auto, in32, in16 = (
        first_gradient(tiny(corpus, recipe, mesh, **changes, train__grad_reduce_dtype=dtype))[1] for dtype in kernels.REDUCE
    )
    for path, dw in auto.items():
        off32, off16 = (np.linalg.norm(other[path] - dw) / np.linalg.norm(dw) for other in (in32, in16))
        assert off32 < 1e-5, path
        assert (2**-11 < off16 < 2**-8) if "kernel" in path else off16 < 1e-5, path


def test_on_one_device_there_is_nothing_to_sum(corpus):
    one, other = (tiny(corpus, "mxfp4_h16", train__grad_reduce_dtype=dtype) for dtype in ("auto", "bfloat16"))
    args = step.abstract_state(one, sharding.make_mesh(ONE)), jax.ShapeDtypeStruct((8, 33), jnp.int32)
    texts = {step.make_train_step(s, sharding.make_mesh(ONE)).lower(*args).as_text() for s in (one, other)}
    assert len(texts) == 1


def test_tokens_that_wgrad_would_pad_are_not_summed_by_the_devices_themselves():
    mxfp4, arguments = recipes.get("mxfp4"), {"microbatch": 8, "seq_len": 24}
    numerics = Numerics(dataclasses.replace(mxfp4, wgrad=dataclasses.replace(mxfp4.wgrad, pad=True)))
    mesh = sharding.make_mesh(sharding.MeshConfig(fsdp=4))
    sharding.check(mesh, MODEL, numerics, **arguments)
    with pytest.raises(InputError, match="tokens per device = 48 is not a multiple of 32"):
        sharding.check(mesh, MODEL, numerics, **arguments, reduce="bfloat16")


def test_the_first_step_agrees_with_kept_blocks(corpus):
    one, on_mesh = (losses(tiny(corpus, "nvidia_nvfp4", mesh, **TWO), steps=1) for mesh in (ONE, MESH))
    assert relative(on_mesh, one) < 1e-5


def test_the_history_of_delayed_scaling_is_global(corpus):
    histories = []
    for mesh_config in (ONE, MESH):
        s = tiny(corpus, "fp8_delayed", mesh_config, **TWO)
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
