"""The optimizer: schedule, clipping, and which parameters decay, against numpy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import settings, write_corpus

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


def test_schedule_without_warmup_starts_at_the_peak():
    schedule = optimizer.learning_rate(dataclasses.replace(CONFIG, warmup_steps=0))
    assert float(schedule(0)) == pytest.approx(0.1)


@pytest.mark.parametrize("scanned", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_decay_applies_to_matrices_only(scanned, tied):
    config = llama.LlamaConfig(16, 8, 2, 2, 2, 8, scan_layers=scanned, tie_embeddings=tied)
    params = llama.Llama(config).init(jax.random.key(0), jnp.zeros((1, 4), jnp.int32))["params"]
    marks = {jax.tree_util.keystr(p): bool(m) for p, m in jax.tree_util.tree_leaves_with_path(optimizer.is_matrix(params))}
    assert {path for path, mark in marks.items() if not mark} == {path for path in marks if "norm" in path}
    if scanned:
        assert params["layers"]["attn_norm"]["scale"].ndim == 2


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


@pytest.mark.parametrize(
    "change",
    [{"peak_lr": float("nan")}, {"peak_lr": 0.0}, {"peak_lr": 1e39}, {"end_lr": 0.2}, {"b2": 1.0}, {"b1": -0.1}, {"eps": 0.0},
     {"weight_decay": float("inf")}, {"warmup_steps": -1}, {"warmup_steps": 1.5}, {"clip_norm": "1"}],
)  # fmt: skip
def test_bad_values_are_named(change):
    (name,) = change
    with pytest.raises(InputError, match=f"optimizer.{name}="):
        dataclasses.replace(CONFIG, **change)


def test_decay_ends_with_the_run_unless_said(tmp_path):
    corpus = write_corpus(tmp_path)
    assert settings(corpus, train__steps=7).optimizer.decay_steps == 7
    assert settings(corpus, train__steps=7, optimizer__decay_steps=9).optimizer.decay_steps == 9
