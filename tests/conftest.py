"""Strict switches for every test: rank promotion raises, eight CPU devices, tracer leaks of dtype are errors.

Programs are compiled without most of LLVM's optimizations, which saves a quarter of the time, except in the modules below: they
compare casts bit for bit, and the bits must survive what a user's compiler does. What one process has compiled the others load.
"""

import os
import tempfile

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")
# The files that take longest come first, so that the workers end together.
LONG = [
    "test_sharding", "test_kernels", "test_mesh", "test_diagnosis", "test_plan", "test_step", "test_recipe", "test_dot",
    "test_ablate", "test_residuals", "test_llama", "test_stats", "test_kills", "test_processes", "test_evaluate", "test_resume",
    "test_numerics", "test_optimizer", "test_quantize", "test_lost_process", "test_exit_codes", "test_config",
]  # fmt: skip
OPTIMIZED = ("test_bits", "test_plan", "test_quantize", "test_rotation", "test_rounding", "test_scales")


def pytest_configure(config):
    if "FP4JAX_TEST_CACHE" not in os.environ:  # the workers and the processes that tests start inherit it
        cache = tempfile.TemporaryDirectory(prefix="fp4jax_test_cache_", ignore_cleanup_errors=True)
        config.add_cleanup(cache.cleanup)
        os.environ["FP4JAX_TEST_CACHE"] = cache.name
        if os.environ.pop("PYTHONDONTWRITEBYTECODE", ""):  # else each process compiles JAX's sources again: most of its start
            os.environ["PYTHONPYCACHEPREFIX"] = f"{cache.name}/bytecode"
    jax.config.update("jax_compilation_cache_dir", os.environ["FP4JAX_TEST_CACHE"])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: LONG.index(item.module.__name__) if item.module.__name__ in LONG else len(LONG))


@pytest.fixture(scope="module", autouse=True)
def _programs(request):
    """Choose how programs are compiled; drop those of a finished module: XLA:CPU maps memory for each, at most 65 530 times."""
    jax.config.update("jax_disable_most_optimizations", request.module.__name__ not in OPTIMIZED)
    yield
    jax.clear_caches()


@pytest.fixture(scope="module")
def shared_programs():
    """Let the runs of one test module share what they compile."""
    from helpers import share_programs  # imports jax's users, so only once the switches above are set

    with pytest.MonkeyPatch.context() as monkeypatch:
        share_programs(monkeypatch)
        yield


@pytest.fixture(scope="module")
def saved(tmp_path_factory, shared_programs):
    """A finished run of two steps, both saved: (settings, workdir)."""
    import helpers

    directory = tmp_path_factory.mktemp("saved")
    changes = {"train__steps": 2, "train__checkpoint_every": 1, "optimizer__warmup_steps": 1}
    s = helpers.settings(helpers.write_corpus(directory), quant__recipe="none", **changes)
    helpers.train(s, directory / "run")
    return s, directory / "run"


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run of the entry point: (corpus, workdir, stdout lines, stderr lines)."""
    import helpers

    directory = tmp_path_factory.mktemp("finished")
    corpus = helpers.write_corpus(directory)
    code, out, err = helpers.run("train.main", *helpers.argv(corpus, directory / "run", **helpers.FINISHED))
    assert code == 0, err
    return corpus, directory / "run", out, err
