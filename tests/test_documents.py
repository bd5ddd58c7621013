"""Documents in one row that do not see each other: attention, positions, which tokens are predicted, and the mean."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import settings, write_corpus

from fp4jax import bits
from models import llama
from train import sharding, step
from train.errors import InputError

END = 9
CONFIG = llama.LlamaConfig(
    vocab_size=64, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=64, max_seq_len=64, document_end=END
)
HOW = {
    "dot_product": {},
    "blockwise": {"attention": "blockwise", "attention_block": 8},
    "chunked": {"loss_chunk": 4, "remat": "full"},
    "linear scaling": {"rope_scaling": "linear", "rope_factor": 2.0},
}


def documents(*lengths, seed=0):
    """Return a row of documents, each of so many ids, the last of them END; and where each begins."""
    rng = np.random.default_rng(seed)
    parts = [np.append(rng.integers(10, 64, n - 1), END) for n in lengths]
    return np.concatenate(parts).astype(np.int32)[None], np.cumsum([0, *lengths])


@pytest.fixture(scope="module")
def params():
    return jax.jit(llama.Llama(CONFIG).init)(jax.random.key(0), jnp.zeros((1, 8), jnp.int32))["params"]


@functools.cache
def program(config):
    return jax.jit(lambda p, t: llama.Llama(config).apply({"params": p}, t[:, :-1], t[:, 1:], method="token_losses"))


def losses(params, tokens_BT1, config=CONFIG):
    return np.asarray(program(config)(params, jnp.asarray(tokens_BT1)))


@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
def test_each_document_has_the_losses_it_has_alone(params, how):
    """Of unequal lengths, across the blocks of attention and chunks of the loss, the last one cut."""
    config = dataclasses.replace(CONFIG, **how)
    row, begins = documents(5, 1, 11, 2, 14)
    nll = losses(params, row, config)[0]
    alone = dataclasses.replace(CONFIG, **{k: v for k, v in how.items() if k.startswith("rope")}, document_end=-1)
    for begin, end in itertools.pairwise(begins):
        first = np.pad(row[:, begin:end], ((0, 0), (0, row.shape[1] - (end - begin))))  # nothing sees what comes after it
        np.testing.assert_allclose(nll[begin : end - 1], losses(params, first, alone)[0, : end - begin - 1], rtol=2e-5)
    ends = begins[1:-1] - 1
    assert (nll[ends] == 0).all()  # the first token of the next document is not predicted
    together = losses(params, row, dataclasses.replace(config, document_end=-1))[0]
    assert np.abs(together - nll)[begins[1] + 1 :].max() > 0.01  # else nothing was separated


@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
def test_what_one_document_says_does_not_reach_another(params, how):
    config = dataclasses.replace(CONFIG, **how)
    (row, begins), (other, _) = documents(7, 9, 17), documents(7, 9, 17, seed=1)
    mixed = row.copy()
    mixed[:, begins[1] : begins[2]] = other[:, begins[1] : begins[2]]
    a, b = losses(params, row, config)[0], losses(params, mixed, config)[0]
    np.testing.assert_array_equal(a[: begins[1]], b[: begins[1]])
    np.testing.assert_array_equal(a[begins[2] :], b[begins[2] :])
    assert (a[begins[1] : begins[2] - 1] != b[begins[1] : begins[2] - 1]).all()

    def last(embedded):  # the loss of the last document, as a function of what the row's tokens are looked up as
        p = {**params, "embed": {"embedding": embedded}}
        nll = llama.Llama(config).apply({"params": p}, row[:, :-1], row[:, 1:], method="token_losses")
        return jnp.sum(jnp.where(jnp.arange(row.shape[1] - 1)[None] >= begins[2], nll, 0.0))

    moved = np.abs(jax.grad(last)(params["embed"]["embedding"])).max(axis=1)
    assert set(np.flatnonzero(moved)) == set(row[0, begins[2] : -1])


def test_the_loss_is_the_mean_over_all_predicted_tokens_however_it_is_split(tmp_path):
    """Rows of one long document beside rows of many short ones: 1 and 4 microbatches, 1 and 4 devices; and validation."""
    corpus = write_corpus(tmp_path)
    tokens = np.concatenate(
        [documents(*lengths, seed=i)[0] for i, lengths in enumerate([[33], [3] * 11, [1] * 33, [30, 3]] * 2)]
    )
    found = []
    for changes in ({}, {"train__accumulation": 4}, {"mesh__data": 2, "mesh__fsdp": 2, "train__accumulation": 2}):
        s = settings(corpus, quant__recipe="none", model__document_end=END, **changes)
        mesh = sharding.make_mesh(s.mesh)
        params = step.init_state(s, mesh).params
        gradient = jax.jit(step.make_gradient(s, mesh))
        loss, (grads, _, _) = gradient(params, {}, {}, sharding.put_batch(mesh, tokens), bits.step_key(0, 0))
        found.append((float(loss), jax.tree.map(np.asarray, grads)))
        config = dataclasses.replace(s.model, document_end=END)
        nll, predicted = losses(params, tokens, config), tokens[:, :-1] != END
        assert predicted.sum() == 2 * (32 + 11 * 2 + 0 + 29 + 2)
        assert abs(float(loss) - nll.sum() / predicted.sum()) < 1e-5
        state = step.init_state(s, mesh)
        batches = [{"tokens": tokens, "mask": np.ones(predicted.shape, np.float32) * predicted}]
        validated = step.validation_loss(step.make_eval_step(s, mesh), mesh, state, batches)
        assert abs(validated - nll.sum() / predicted.sum()) < 1e-5
    for loss, grads in found[1:]:
        assert abs(loss - found[0][0]) < 1e-6
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), grads, found[0][1])


def test_a_batch_that_predicts_nothing_is_no_nan(tmp_path):
    s = settings(write_corpus(tmp_path), quant__recipe="none", model__document_end=END)
    mesh = sharding.make_mesh(s.mesh)
    tokens = np.full((8, 33), END, np.int32)
    loss, _ = jax.jit(step.make_gradient(s, mesh))(step.init_state(s, mesh).params, {}, {}, tokens, bits.step_key(0, 0))
    assert float(loss) == 0


def test_documents_are_not_separated_over_a_context_axis(tmp_path):
    s = settings(write_corpus(tmp_path), model__document_end=END, mesh__context=2)
    with pytest.raises(InputError, match=r"model\.document_end=9: documents are not separated on a context axis \(2\)"):
        sharding.check(sharding.make_mesh(s.mesh), s.model, s.numerics, microbatch=8, seq_len=32)
    for wrong in (-2, 64, 1.0):
        with pytest.raises(ValueError, match="document_end"):
            dataclasses.replace(CONFIG, document_end=wrong)
