"""Strict switches for every test: rank promotion raises, eight CPU devices, tracer leaks of dtype are errors."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(scope="module", autouse=True)
def _forget_programs():
    """Drop what a test module has compiled. Every XLA:CPU program holds memory maps, and a process may have 65 530 of them."""
    yield
    jax.clear_caches()


@pytest.fixture(scope="module")
def shared_programs():
    """Let the runs of one test module share what they compile."""
    from helpers import share_programs  # imports jax's users, so only once the switches above are set

    with pytest.MonkeyPatch.context() as monkeypatch:
        share_programs(monkeypatch)
        yield
