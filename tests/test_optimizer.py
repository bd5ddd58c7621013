"""The optimizer: schedule, clipping, which parameters decay and by what they are moved, the average: against numpy."""

import dataclasses
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import leaves, rows, settings, share_programs, train, unrolled, write_corpus

from models import llama
from train import optimizer
from train.errors import InputError

CONFIG = optimizer.OptimizerConfig(peak_lr=0.1, end_lr=0.01, warmup_steps=10, decay_steps=110)


@pytest.mark.parametrize(
    ("step", "expected"),
    [(0, 0.01), (4, 0.05), (9, 0.1), (10, 0.1), (60, 0.055), (110, 0.01), (1000, 0.01)],
)
def test_schedule_values(step, expected):
    schedule = optimizer.learning_rate(CONFIG)
    assert float(schedule(step)) == pytest.approx(expected, rel=1e-6)
    assert float(jax.jit(schedule)(jnp.int32(step))) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("step", "expected"),
    [(0, 0.01), (9, 0.1), (10, 0.1), (60, 0.1), (90, 0.1), (100, 0.055), (110, 0.01), (1000, 0.01)],
)
def test_wsd_stays_at_the_peak_and_falls_at_the_end(step, expected):
    schedule = optimizer.learning_rate(dataclasses.replace(CONFIG, schedule="wsd", cooldown_steps=20))
    assert float(schedule(step)) == pytest.approx(expected, rel=1e-6)


def test_wsd_needs_a_cooldown_that_fits_and_cosine_has_none(tmp_path):
    for changes in ({"schedule": "wsd"}, {"cooldown_steps": 5}, {"schedule": "linear"}):
        with pytest.raises(InputError, match=f"optimizer.schedule='{changes.get('schedule', 'cosine')}'"):
            dataclasses.replace(CONFIG, **changes)
    corpus, wsd = write_corpus(tmp_path), {"optimizer__schedule": "wsd", "train__steps": 12, "optimizer__warmup_steps": 2}
    assert settings(corpus, **wsd, optimizer__cooldown_steps=10).optimizer.cooldown_steps == 10
    with pytest.raises(InputError, match=r"warmup_steps=2 and cooldown_steps=11 do not end before the decay's end \(12\)"):
        settings(corpus, **wsd, optimizer__cooldown_steps=11)


def test_the_end_of_wsd_may_move_until_the_rate_has_begun_to_fall(tmp_path, monkeypatch):
    """Steps 1 to 4 at the peak, then the last 2 of 6, or of 8, fall; the longer run is that of one which always had 8."""
    share_programs(monkeypatch)
    corpus = write_corpus(tmp_path)
    fixed = {"optimizer__schedule": "wsd", "optimizer__cooldown_steps": 2, "optimizer__warmup_steps": 1, "train__eval_every": 0}
    short, long = (settings(corpus, **fixed, train__steps=n, train__checkpoint_every=4, quant__recipe="none") for n in (6, 8))
    train(short, tmp_path / "run")
    train(long, tmp_path / "whole")
    was = "the cool-down was from step 4 to 6 and would now be from"
    gentler = settings(corpus, **{**fixed, "optimizer__cooldown_steps": 4}, train__steps=8, quant__recipe="none")
    for other, to in ((long, "6 to 8"), (gentler, "4 to 8")):
        with pytest.raises(InputError, match=f"{was} {to}, the newest checkpoint is of step 6"):
            train(other, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "6")
    train(long, tmp_path / "run")
    assert rows(tmp_path / "run") == rows(tmp_path / "whole")
    with pytest.raises(InputError, match="belongs to another run"):
        train(settings(corpus, train__steps=8, quant__recipe="none", optimizer__decay_steps=9), tmp_path / "run")


def test_schedule_without_warmup_starts_at_the_peak():
    schedule = optimizer.learning_rate(dataclasses.replace(CONFIG, warmup_steps=0))
    assert float(schedule(0)) == pytest.approx(0.1)


def random_params(*, scanned, tied=False, seed=0):
    """Return normal parameters of a Llama of two blocks, no matrix of which is square but those of attention."""
    config = llama.LlamaConfig(16, 8, 2, 2, 2, 12, head_dim=6, scan_layers=scanned, tie_embeddings=tied)
    params = llama.Llama(config).init(jax.random.key(0), jnp.zeros((1, 4), jnp.int32))["params"]
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32), params)


@pytest.mark.parametrize("name", optimizer.NAMES)
@pytest.mark.parametrize("scanned", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_decay_applies_to_matrices_only(scanned, tied, name):
    """With gradients of zero nothing moves but what decays."""
    params = random_params(scanned=scanned, tied=tied)
    tx = optimizer.make_optimizer(dataclasses.replace(CONFIG, name=name))
    updates, _ = tx.update(jax.tree.map(jnp.zeros_like, params), tx.init(params), params)
    before, moved = leaves(params), leaves(updates)
    assert {path for path, update in moved.items() if not update.any()} == {path for path in moved if "norm" in path}
    for path, update in moved.items():
        if "norm" not in path:
            np.testing.assert_allclose(update, -0.01 * CONFIG.weight_decay * before[path], rtol=1e-6)
    if scanned:
        assert before["['layers']['attn_norm']['scale']"].ndim == 2


def adamw(config, grads, params, lr):
    """One AdamW step from zero moments, in float64."""
    norm = np.sqrt(sum((g**2).sum() for g in grads.values()))
    factor = min(1.0, config.clip_norm / norm) if config.clip_norm else 1.0
    result = {}
    for name, p in params.items():
        g = grads[name] * factor
        direction = g / (np.abs(g) + config.eps) + (config.weight_decay * p if name != "scale" else 0)
        result[name] = p - lr * direction
    return result


@pytest.mark.parametrize("clip_norm", [0.0, 1.0, 100.0])
def test_one_update_is_adamw(clip_norm):
    config = dataclasses.replace(CONFIG, clip_norm=clip_norm, eps=0.1)
    rng = np.random.default_rng(0)
    params, grads = (
        {n: rng.normal(size=s) for n, s in {"kernel": (3, 4), "embedding": (5, 2), "scale": (4,)}.items()} for _ in "pg"
    )
    tx = optimizer.make_optimizer(config)
    as32 = {n: jnp.asarray(p, jnp.float32) for n, p in params.items()}
    updates, _ = tx.update({n: jnp.asarray(g, jnp.float32) for n, g in grads.items()}, tx.init(as32), as32)
    new, expected = optax.apply_updates(as32, updates), adamw(config, grads, params, lr=0.01)
    for name in params:
        np.testing.assert_allclose(new[name], expected[name], rtol=2e-6)


# ---- Muon ----

MUON = dataclasses.replace(CONFIG, name="muon", clip_norm=0.0)


def newton_schulz(g):
    """Return g with singular values of about 1, by Jordan's quintic, in float64."""
    x = g / np.linalg.norm(g)
    x = x.T if g.shape[0] > g.shape[1] else x
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.T if g.shape[0] > g.shape[1] else x


def muon(w, grads, *, rates):
    """Return a matrix after some steps of Muon with Nesterov momentum 0.95, in float64."""
    w, momentum, b = w.astype(np.float64), 0.0, 0.95
    for n, (g, rate) in enumerate(zip(grads, rates, strict=True), start=1):
        momentum = b * momentum + (1 - b) * g.astype(np.float64)
        ahead = b * momentum / (1 - b ** (n + 1)) + (1 - b) * g / (1 - b**n)
        w = w - rate * (0.2 * np.sqrt(max(w.shape)) * newton_schulz(ahead) + MUON.weight_decay * w)
    return w


def run_steps(config, params, grads):
    tx = optimizer.make_optimizer(config)
    state, update = tx.init(params), jax.jit(tx.update)
    for g in grads:
        updates, state = update(g, state, params)
        params = optax.apply_updates(params, updates)
    return params


@pytest.mark.parametrize("scanned", [True, False])
def test_muon_moves_each_matrix_of_each_layer_by_itself_and_adam_the_rest(scanned):
    params, *grads = (random_params(scanned=scanned, seed=seed) for seed in range(4))
    new, adam = (run_steps(dataclasses.replace(MUON, name=name), params, grads) for name in ("muon", "adamw"))
    flat = unrolled if scanned else lambda tree: tree
    before, after, adam, *grads = (leaves(flat(tree)) for tree in (params, new, adam, *grads))
    hidden = {path for path in before if "kernel" in path and "lm_head" not in path}
    assert len(hidden) == 2 * 7
    assert {path for path in before if np.array_equal(after[path], adam[path])} == before.keys() - hidden
    for path in hidden:
        expected = muon(before[path], [g[path] for g in grads], rates=(0.01, 0.02, 0.03))
        np.testing.assert_allclose(after[path], expected, atol=2e-5)


def test_a_stack_is_not_one_matrix():
    """What the test above would compare, were the layer axis taken for rows: it is off by far more than its bound."""
    grads = np.random.default_rng(0).normal(size=(2, 8, 12))
    stacked = newton_schulz(grads.reshape(16, 12)).reshape(grads.shape)
    assert np.abs(stacked - np.stack([newton_schulz(g) for g in grads])).max() > 0.1


def test_an_update_of_muon_has_the_size_of_adam_s():
    params, grads = (random_params(scanned=True, seed=seed) for seed in range(2))
    config = dataclasses.replace(MUON, weight_decay=0.0, warmup_steps=0, peak_lr=1.0, end_lr=0.0)
    for rms in (0.2, 0.4):
        moved = run_steps(dataclasses.replace(config, muon_rms=rms), params, [grads])
        update = leaves(jax.tree.map(jnp.subtract, moved, params))["['layers']['mlp']['up']['kernel']"]
        assert np.sqrt((update**2).mean()) == pytest.approx(rms, rel=0.3)


@pytest.mark.parametrize("change", [{"muon_momentum": 0.9}, {"muon_steps": 6}, {"muon_rms": 0.1}])
def test_what_only_muon_has_raises_for_adamw(change):
    (name,) = change
    assert getattr(dataclasses.replace(MUON, **change), name) == change[name]
    with pytest.raises(InputError, match=f"optimizer.{name}=.* does not apply to optimizer.name='adamw'"):
        dataclasses.replace(CONFIG, **change)
    with pytest.raises(InputError, match=f"optimizer.{name}="):
        dataclasses.replace(MUON, **{name: 1.0 if name == "muon_momentum" else type(change[name])(0)})


# ---- The average ----


@pytest.mark.parametrize("decay", [0.5, 0.999])
def test_the_average_is_the_weighted_mean_of_the_weights_so_far(decay):
    weights = np.random.default_rng(0).normal(size=(20, 3, 4))
    ema = {"kernel": jnp.full((3, 4), 5.0)}  # what it starts at does not count
    for n in range(1, 21):
        ema = optimizer.average(ema, {"kernel": jnp.asarray(weights[n - 1], jnp.float32)}, jnp.int32(n), decay)
        shares = decay ** np.arange(n - 1, -1, -1)
        expected = np.tensordot(shares / shares.sum(), weights[:n], 1)
        np.testing.assert_allclose(ema["kernel"], expected, atol=2e-6)


@pytest.mark.parametrize(
    "change",
    [{"peak_lr": float("nan")}, {"peak_lr": 0.0}, {"peak_lr": 1e39}, {"end_lr": 0.2}, {"b2": 1.0}, {"b1": -0.1}, {"eps": 0.0},
     {"weight_decay": float("inf")}, {"warmup_steps": -1}, {"warmup_steps": 1.5}, {"clip_norm": "1"},
     {"name": "lion"}, {"ema_decay": 1.0}, {"ema_decay": -0.1}],
)  # fmt: skip
def test_bad_values_are_named(change):
    (name,) = change
    with pytest.raises(InputError, match=f"optimizer.{name}="):
        dataclasses.replace(CONFIG, **change)


def test_decay_ends_with_the_run_unless_said(tmp_path):
    corpus = write_corpus(tmp_path)
    assert settings(corpus, train__steps=7).optimizer.decay_steps == 7
    assert settings(corpus, train__steps=7, optimizer__decay_steps=9).optimizer.decay_steps == 9
