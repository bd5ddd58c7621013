"""The train step: accumulation, donation, draws, precision, scan, remat, and the plain recipe's program.

SR: mxfp4_sr rounds stochastically, so that a test sees which bits were drawn; `none` is exact enough to compare gradients.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import compiled_step, initial_state, leaves, one_step, settings, tokens, unrolled, write_corpus

from fp4jax import bits
from models import llama
from train import sharding, step


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Return a function that makes settings over one corpus; raw gradients can be read off its optimizer state."""
    corpus = write_corpus(tmp_path_factory.mktemp("corpus"))
    return functools.partial(settings, corpus, optimizer__b1=0.0, optimizer__clip_norm=0.0)


def assert_gradients_equal(a, b, tolerance):
    """Compare two gradient dicts: in every leaf, the difference's norm is at most `tolerance` of the leaf's norm."""
    assert a.keys() == b.keys()
    for path in a:
        assert np.linalg.norm(a[path] - b[path]) <= tolerance * np.linalg.norm(a[path]), path


# ---- Loss and accumulation ----


def test_the_loss_is_the_mean_over_tokens(tiny):
    s = tiny(quant__recipe="none")
    mesh, batch = sharding.make_mesh(s.mesh), tokens(s)
    params = initial_state(s, mesh).params
    logits = llama.Llama(s.model).apply({"params": params}, batch[:, :-1])
    log_p = np.asarray(jax.nn.log_softmax(np.asarray(logits)), np.float64)
    expected = -np.mean(np.take_along_axis(log_p, np.asarray(batch[:, 1:, None]), axis=-1))
    assert one_step(s)[0] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("accumulation", [2, 4])
def test_accumulation_changes_neither_loss_nor_gradients(tiny, accumulation):
    whole, parts = (one_step(tiny(quant__recipe="none", train__accumulation=a)) for a in (1, accumulation))
    assert parts[0] == pytest.approx(whole[0], rel=1e-6)
    assert_gradients_equal(whole[1], parts[1], 1e-5)


def test_accumulation_draws_the_same_bits(tiny):
    whole, parts = (one_step(tiny(quant__recipe="mxfp4_sr", train__accumulation=a)) for a in (1, 4))
    assert parts[0] == pytest.approx(whole[0], rel=1e-5)
    # Another draw moves the loss by more than that (test_step_and_seed_choose_the_draws), the gradients by half their norm.
    assert_gradients_equal(whole[1], parts[1], 0.02)


# ---- Delayed scaling ----


def run_step(s, state=None):
    mesh, train_step = compiled_step(s)
    return train_step(state or initial_state(s, mesh), tokens(s))


def test_delayed_scaling_starts_from_current_maxima_and_then_from_the_history(tiny):
    delayed, current = tiny(quant__recipe="fp8_delayed"), tiny(quant__recipe="fp8_current")
    assert initial_state(current, sharding.make_mesh(current.mesh)).history == {}
    (a, first), (b, other) = run_step(delayed), run_step(current)
    assert (float(first["train_loss"]), float(first["grad_norm"])) == (float(other["train_loss"]), float(other["grad_norm"]))
    jax.tree.map(np.testing.assert_array_equal, a.params, b.params)
    for path, history in a.history.items():
        assert (np.asarray(history[..., 0]) > 0).all(), path
        assert not np.asarray(history[..., 1:]).any(), path
    old = jax.tree.map(np.asarray, a.history)
    kernels = jax.tree.map(np.asarray, a.params["layers"])
    c, second = run_step(delayed, a)
    _, plain = run_step(current, b)
    assert float(second["train_loss"]) != float(plain["train_loss"])
    for path, history in c.history.items():
        np.testing.assert_array_equal(history[..., 1:], old[path][..., :-1])
        part, name = path.split("/")
        np.testing.assert_array_equal(history[:, 0, 1, 0], np.abs(kernels[part][name]["kernel"]).max((1, 2)))


def test_accumulation_takes_the_larger_maximum_of_all_microbatches(tiny):
    whole, parts = (run_step(tiny(quant__recipe="fp8_delayed", train__accumulation=a))[0].history for a in (1, 2))
    np.testing.assert_array_equal(whole["attn/q"][0, 0, :, 0], parts["attn/q"][0, 0, :, 0])  # before any cast
    for path in whole:
        np.testing.assert_allclose(whole[path][..., 0], parts[path][..., 0], rtol=0.3)


# ---- State ----


def test_the_second_call_compiles_nothing_and_the_state_is_donated(tiny):
    s = tiny(quant__recipe="mxfp4_sr")
    mesh, train_step = compiled_step(s)
    state = initial_state(s, mesh)
    seen = []
    for _ in range(3):
        old = jax.tree.leaves(state)
        state, metrics = train_step(state, tokens(s))
        assert all(x.is_deleted() for x in old)
        seen.append(float(metrics["train_loss"]))
    assert train_step._cache_size() == 1
    assert int(state.step) == 3
    assert len(set(seen)) == 3
    assert set(metrics) == {"train_loss", "grad_norm", "lr"}
    assert {(x.dtype, x.shape) for x in metrics.values()} == {(jnp.dtype("float32"), ())}


def test_abstract_state_is_the_shape_of_the_initial_state(tiny):
    s = tiny()
    mesh = sharding.make_mesh(s.mesh)
    state, abstract = step.init_state(s, mesh), step.abstract_state(s, mesh)
    jax.tree.map(
        lambda x, y: (x.shape, x.dtype, x.sharding) == (y.shape, y.dtype, y.sharding) or pytest.fail(str(y)), state, abstract
    )


def test_master_weights_stay_float32_under_bfloat16_compute(tiny):
    s = tiny(quant__recipe="mxfp4_sr", model__dtype="bfloat16", optimizer__peak_lr=1e-6, optimizer__end_lr=1e-7)
    mesh, train_step = compiled_step(s)
    before = np.asarray(initial_state(s, mesh).params["lm_head"]["kernel"])
    state, metrics = train_step(initial_state(s, mesh), tokens(s))
    assert {x.dtype for x in jax.tree.leaves((state.params, state.opt_state))} == {jnp.dtype("float32"), jnp.dtype("int32")}
    loss32, _ = one_step(tiny(quant__recipe="mxfp4_sr"))
    assert float(metrics["train_loss"]) == pytest.approx(loss32, rel=1e-2)
    assert float(metrics["train_loss"]) != loss32
    # Updates below a bfloat16 step of the weights reach them all the same.
    after = np.asarray(state.params["lm_head"]["kernel"])
    assert (after.astype(jnp.bfloat16).astype(np.float32) != after).mean() > 0.9
    assert (before != after).mean() > 0.9
    assert (before.astype(jnp.bfloat16) == after.astype(jnp.bfloat16)).mean() > 0.9


def test_grad_norm_is_that_before_clipping(tiny):
    clipped, free = (tiny(quant__recipe="none", optimizer__clip_norm=c, optimizer__b1=0.0) for c in (1e-3, 0.0))
    mesh = sharding.make_mesh(free.mesh)
    _, grads = one_step(free)
    expected = np.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in grads.values()))
    state, metrics = step.make_train_step(clipped, mesh)(initial_state(clipped, mesh), tokens(clipped))
    assert float(metrics["grad_norm"]) == pytest.approx(expected, rel=1e-5)
    mean = leaves(state.opt_state[1].mu)
    assert np.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in mean.values())) == pytest.approx(1e-3, rel=1e-5)


def test_is_finite_sees_one_bad_weight_and_one_bad_moment(tiny):
    s = tiny()
    state = initial_state(s, sharding.make_mesh(s.mesh))
    assert step.is_finite(state)
    for bad in (jnp.nan, jnp.inf):
        broken = jax.tree.map(lambda x: x, state.params)
        broken["embed"]["embedding"] = broken["embed"]["embedding"].at[3, 5].set(bad)
        assert not step.is_finite(state._replace(params=broken))
        mu = state.opt_state[1]._replace(mu=broken)
        assert not step.is_finite(state._replace(opt_state=(state.opt_state[0], mu, *state.opt_state[2:])))


def test_checksum_sees_one_bit_and_a_swap(tiny):
    s = tiny()
    state = initial_state(s, sharding.make_mesh(s.mesh))
    reference = int(step.checksum(state))
    kernel = np.asarray(state.params["lm_head"]["kernel"])

    def with_kernel(words):
        params = {**state.params, "lm_head": {"kernel": jnp.asarray(words.view(np.float32))}}
        return int(step.checksum(state._replace(params=params)))

    assert with_kernel(kernel.view(np.uint32).copy()) == reference
    for bit in (0, 1, 15, 31):
        flipped = kernel.view(np.uint32).copy()
        flipped[7, 11] ^= np.uint32(1 << bit)
        assert with_kernel(flipped) != reference
    swapped = kernel.copy()
    swapped[[0, 1]] = swapped[[1, 0]]
    assert with_kernel(swapped) != reference
    assert int(step.checksum(state._replace(step=state.step + 1))) != reference


# ---- The average of the weights ----


def test_the_state_carries_the_average_and_a_skipped_step_leaves_it(tiny):
    s = tiny(quant__recipe="none", optimizer__ema_decay=0.75, train__skip_nonfinite=1)
    mesh, train_step = compiled_step(s)
    state = initial_state(s, mesh)
    seen, batch = [], tokens(s)
    for _ in range(4):
        state, _ = train_step(state, batch)
        seen.append(leaves(state.params))
    found, shares = leaves(state.ema), 0.75 ** np.arange(3, -1, -1)
    for path, ema in found.items():
        expected = np.tensordot(shares / shares.sum(), np.stack([params[path] for params in seen]), 1)
        np.testing.assert_allclose(ema, expected, rtol=1e-5, atol=1e-6)
    state, figures = train_step(state._replace(params=jax.tree.map(lambda x: x * 1e30, state.params)), batch)
    assert not np.isfinite(float(figures["grad_norm"]))
    jax.tree.map(np.testing.assert_array_equal, leaves(state.ema), found)


def test_the_average_changes_nothing_that_is_trained(tiny):
    (mesh, with_ema), (_, without) = (compiled_step(tiny(quant__recipe="none", optimizer__ema_decay=d)) for d in (0.9, 0.0))
    results = []
    for s, train_step in ((tiny(optimizer__ema_decay=0.9), with_ema), (tiny(), without)):
        state = initial_state(s, mesh)
        for _ in range(2):
            state, _ = train_step(state, tokens(s))
        results.append(state)
    assert results[1].ema == {}
    jax.tree.map(np.testing.assert_array_equal, leaves(results[0].params), leaves(results[1].params))


# ---- Draws ----


@pytest.fixture(scope="module")
def draw(tiny):
    """Return draw(seed, step): the loss of the same weights and tokens under that key."""
    s = tiny(quant__recipe="mxfp4_sr")
    mesh, train_step = compiled_step(s)

    def loss(seed, at):
        state = initial_state(s, mesh)
        state = state._replace(step=state.step + at, seed=jnp.asarray(bits.seed_words(seed)))
        return float(train_step(state, tokens(s))[1]["train_loss"])

    return loss


def test_step_and_seed_choose_the_draws(draw):
    assert draw(0, 0) == draw(0, 0)
    losses = [draw(0, 0), draw(0, 1), draw(1, 0), draw(1, 1)]
    assert min(abs(a - b) for a, b in itertools.combinations(losses, 2)) > 2e-5 * losses[0]


# ---- Scan and remat ----


def loss_and_grads(s):
    """Return the jitted params → (mean loss, gradients) of step 0, of the model alone."""
    model, batch = llama.Llama(s.model, s.numerics.dot), tokens(s)

    def loss(params):
        arguments = batch[:, :-1], batch[:, 1:], bits.step_key(0, 0)
        return model.apply({"params": params}, *arguments, method="token_losses").mean()

    return jax.jit(jax.value_and_grad(loss))


def test_scanned_and_unrolled_layers_draw_the_same_bits(tiny):
    s = tiny(quant__recipe="mxfp4_sr")
    flat = dataclasses.replace(s, model=dataclasses.replace(s.model, scan_layers=False))
    params = initial_state(s, sharding.make_mesh(s.mesh)).params
    run_flat = loss_and_grads(flat)
    (scanned, scanned_grads), (loss, grads) = loss_and_grads(s)(params), run_flat(unrolled(params))
    assert float(loss) == pytest.approx(float(scanned), rel=1e-5)
    assert_gradients_equal(leaves(unrolled(scanned_grads)), leaves(grads), 0.02)
    # The bound is tight enough to see the draws of another layer.
    params = unrolled(params)
    swapped, _ = run_flat({**params, "layers_0": params["layers_1"], "layers_1": params["layers_0"]})
    assert float(swapped) != pytest.approx(float(scanned), rel=1e-5)


def test_remat_draws_the_same_bits(tiny):
    plain, full = (tiny(quant__recipe="mxfp4_sr", model__remat=r) for r in ("none", "full"))
    (loss_a, grads_a), (loss_b, grads_b) = one_step(plain), one_step(full)
    assert loss_b == pytest.approx(loss_a, rel=1e-6)
    assert_gradients_equal(grads_a, grads_b, 1e-6)


# ---- The plain recipe ----


def test_the_plain_recipe_lowers_to_the_program_of_plain_dense(tiny, monkeypatch):
    s = tiny(quant__recipe="none", train__accumulation=2)
    mesh = sharding.make_mesh(s.mesh)

    def program():
        args = step.abstract_state(s, mesh), jax.ShapeDtypeStruct((8, 33), jnp.int32)
        return step.make_train_step(s, mesh).lower(*args).as_text()

    with_hook = program()
    plain = llama.Llama
    monkeypatch.setattr(llama, "Llama", lambda config, linear_dot=None, **hooks: plain(config, None, **hooks))
    assert program() == with_hook
    assert "dot_general" in with_hook


def test_another_recipe_lowers_to_another_program(tiny):
    texts = set()
    for recipe in ("none", "bf16"):
        s = tiny(quant__recipe=recipe)
        mesh = sharding.make_mesh(s.mesh)
        args = step.abstract_state(s, mesh), jax.ShapeDtypeStruct((8, 33), jnp.int32)
        texts.add(step.make_train_step(s, mesh).lower(*args).as_text())
    assert len(texts) == 2


# ---- Census ----


def test_census_lists_every_gemm_once(tiny):
    s = tiny(quant__recipe="mxfp4_h16")
    rows = step.census_rows(s)
    assert all(set(row) == {"module", "gemm", "lhs", "rhs", "rotation", "impl", "why", "exempt"} for row in rows)
    quantized = {f"layers/*/{path}" for path in llama.LINEAR_PATHS if path != "lm_head"}
    modules = {row["module"] for row in rows if row["impl"] == "reference"}
    assert modules == quantized
    assert len(rows) == len({(r["module"], r["gemm"]) for r in rows}) == 3 * (len(llama.LINEAR_PATHS) + 2)
    assert all(row["exempt"] for row in rows if row["module"] not in quantized)
