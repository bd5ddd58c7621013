"""What the tests of the training layer share: a tiny corpus, a tiny config, and ways to run it here and in a subprocess."""

import functools
import hashlib
import json
import os
import pathlib
import random
import socket
import subprocess
import sys
import time
import unittest.mock
import warnings

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from ml_collections import config_flags

from fp4jax import dot
from fp4jax.ops import kernels
from models.llama import LINEAR_PATHS
from train import checkpoint, cli, config, loop, sharding, step

ROOT = pathlib.Path(__file__).parent.parent
TINY = {
    "data.source": "files",
    "data.seq_len": 32,
    "data.max_val_sequences": 11,  # not a multiple of the batch: the last one is padded
    "model.d_model": 64,
    "model.n_layers": 2,
    "model.head_dim": 32,  # on a model axis of 2, k and v still have a block of 32 outputs per device
    "model.d_ff": 128,
    "model.max_seq_len": 64,
    "train.batch_size": 8,
    "train.steps": 12,
    "train.eval_every": 4,
    "train.checkpoint_every": 3,
    "train.keep_checkpoints": 0,
    "optimizer.warmup_steps": 2,
    "optimizer.peak_lr": 1e-2,
    "optimizer.end_lr": 1e-3,
    "mesh.fsdp": 1,
}
FINISHED = {"quant__recipe": "none", "train__steps": 6}  # the run of the fixture of this name


def write_corpus(directory, *, seed=0):
    """Write 40 kB of random words from a small vocabulary; return the file's path."""
    draw = random.Random(seed)
    words = ["".join(draw.choices("abcdefghij", k=draw.randint(2, 7))) for _ in range(200)]
    path = pathlib.Path(directory) / "corpus.txt"
    path.write_text("\n".join(" ".join(draw.choices(words, k=12)) for _ in range(600)))
    return path


def raw_config(corpus, **changes):
    """Return the tiny ConfigDict; changes: dotted keys with __ for the dot, such as train__steps=3."""
    result = config.default_config()
    leaves = {**TINY, "data.files": str(corpus), **{k.replace("__", "."): v for k, v in changes.items()}}
    result.update_from_flattened_dict(leaves)
    return result


def settings(corpus, **changes):
    return config.resolve(raw_config(corpus, **changes))


def argv(corpus, workdir, **changes):
    """Return the flags that say what `raw_config` says, on top of configs/tiny_cpu.py."""
    leaves = {**TINY, "data.files": corpus, **{k.replace("__", "."): v for k, v in changes.items()}}
    return ["--config=configs/tiny_cpu.py", f"--workdir={workdir}", *(f"--config.{k}={v}" for k, v in leaves.items())]


def parse(*arguments):
    """Parse the flags of an entry point in this process and return the config."""
    values = flags.FlagValues()
    holder = config_flags.DEFINE_config_file("config", None, flag_values=values, lock_config=True)
    sys.modules.pop("config_config", None)  # the last config file, which would show through the next
    with unittest.mock.patch.object(sys, "argv", ["program", *arguments]), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # ml_collections 1.1.0 loads config files by load_module
        cli.parse_flags(values, sys.argv)
    return holder.value


def command(module, *arguments):
    return [sys.executable, "-m", module, *map(str, arguments)]


def environment(*, devices=1):
    """Return the environment of a subprocess: its own device count, programs compiled quickly and shared among the tests."""
    cache = os.environ.get("FP4JAX_TEST_CACHE", "")
    cached = {"JAX_COMPILATION_CACHE_DIR": cache, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"} if cache else {}
    cached["JAX_DISABLE_MOST_OPTIMIZATIONS"] = os.environ.get("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    force = f"--xla_force_host_platform_device_count={devices}"
    here = {name: value for name, value in os.environ.items() if name != "TF_CPP_MIN_LOG_LEVEL"}  # jax sets it when imported
    return {**here, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": force, **cached}


def run(module, *arguments, devices=1, timeout=300):
    """Run an entry point to its end; return (exit code, stdout lines, stderr lines)."""
    done = subprocess.run(
        command(module, *arguments),
        cwd=ROOT,
        env=environment(devices=devices),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    return done.returncode, done.stdout.splitlines(), done.stderr.splitlines()


class NoStop:
    """A stop request that `after` steps, counted by how often it is looked at, turns true; never by default."""

    def __init__(self, when=lambda: False):
        self._when = when

    @property
    def signal(self):
        return 15 if self._when() else None


def train(run_settings, workdir, stop=None):
    """Run the loop in this process; return its result."""
    dataset, mesh, _ = loop.prepare(run_settings, pathlib.Path(workdir))
    training = loop.Run(run_settings, pathlib.Path(workdir), dataset, mesh)
    try:
        return training.train(stop or NoStop())
    finally:
        training.close()


class Processes:
    """`count` processes of one run, with 4 / count devices each; extra: further flags of single processes."""

    def __init__(self, arguments, count, *, extra=None):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        self._all = [
            subprocess.Popen(
                command("train.main", *arguments, f"--coordinator={address}", f"--processes={count}", f"--process={i}")
                + list((extra or {}).get(i, ())),
                cwd=ROOT,
                env=environment(devices=4 // count),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for i in range(count)
        ]

    def send(self, process, number):
        self._all[process].send_signal(number)

    def wait(self, timeout=300):
        """Return (exit codes, stdouts without Gloo's lines, stderrs); all are killed at the time-out."""
        deadline = time.monotonic() + timeout
        try:
            done = [process.communicate(timeout=max(deadline - time.monotonic(), 1)) for process in self._all]
        finally:
            for process in self._all:
                process.kill()
        outs = ["".join(line for line in out.splitlines(True) if "[Gloo]" not in line) for out, _ in done]
        return [process.returncode for process in self._all], outs, [err for _, err in done]


def wait_for_step(workdir, step):
    path, deadline = workdir / "metrics.jsonl", time.monotonic() + 200
    while not (path.exists() and len([row for row in rows(workdir) if "train_loss" in row]) >= step):
        assert time.monotonic() < deadline, f"no step {step} in {path}"
        time.sleep(0.05)


def restore(run_settings, workdir, at=None):
    """Return (state, run) of a checkpoint, the newest by default."""
    checkpoints = checkpoint.Checkpoints(pathlib.Path(workdir))
    try:
        at = checkpoints.latest() if at is None else at
        return checkpoints.restore(at, step.abstract_state(run_settings, sharding.make_mesh(run_settings.mesh)))
    finally:
        checkpoints.close()


def steps_saved(workdir):
    checkpoints = checkpoint.Checkpoints(pathlib.Path(workdir))
    checkpoints.close()
    return checkpoints.steps()


def rows(workdir):
    """Return the rows of metrics.jsonl without the one figure that may differ between two equal runs."""
    lines = (pathlib.Path(workdir) / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "tokens_per_s"} for line in lines]


def snapshot(directory):
    """Return {relative path: content hash} of everything below a directory; {} when there is none."""
    root = pathlib.Path(directory)
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "directory"
        for path in sorted(root.rglob("*"))
    }


def patterns(x):
    """Return the bit patterns of float32 values, every NaN being the same."""
    x = np.asarray(x, np.float32)
    return np.where(np.isnan(x), np.int32(0x7FC00000), x.view(np.int32))


def assert_same(got, expected):
    np.testing.assert_array_equal(patterns(got), patterns(expected))


def tokens(run_settings, *, seed=0):
    """Return random tokens_BT1 for one step, on the settings' mesh."""
    shape = (run_settings.train.batch_size, run_settings.data.seq_len + 1)
    spread = sharding.batch_sharding(sharding.make_mesh(run_settings.mesh))
    return jax.device_put(np.random.default_rng(seed).integers(97, 107, shape).astype(np.int32), spread)


def leaves(tree):
    """Return {path: numpy array}."""
    return {jax.tree_util.keystr(path): np.asarray(x) for path, x in jax.tree_util.tree_leaves_with_path(tree)}


def unrolled(params):
    """Return the parameters of a scanned model in the form of the unrolled one."""
    rest = {k: v for k, v in params.items() if k != "layers"}
    count = params["layers"]["attn_norm"]["scale"].shape[0]
    return {**rest, **{f"layers_{i}": jax.tree.map(lambda x, i=i: x[i], params["layers"]) for i in range(count)}}


_real_init, _real_step, _real_eval = step.init_state, step.make_train_step, step.make_eval_step
_states = {}
_programs = {}


def histories(run_settings):
    """Return the paths whose history the state of a run has, for any of its phases."""
    return tuple(sorted({path for phase in run_settings.phases() for path in phase.numerics.init_history(LINEAR_PATHS)}))


def initial_state(run_settings, mesh):
    """Return a fresh copy of the initial state, which may be donated; it is computed once per kind of state, seed and mesh."""
    window = run_settings.train.skip_spikes and run_settings.train.spike_window
    kind = run_settings.optimizer.name, run_settings.optimizer.ema_decay > 0, window
    key = run_settings.model, run_settings.train.seed, mesh, histories(run_settings), kind
    if key not in _states:
        _states[key] = _real_init(run_settings, mesh)
    return jax.tree.map(jax.numpy.copy, _states[key])


def share_programs(monkeypatch):
    """Let the runs of one test module share what they compile: all that differ only in lengths, paths and intervals."""

    def shared(real):
        def make(s, mesh, **options):
            key = (
                real,
                s.model,
                s.optimizer,
                s.numerics,
                histories(s),
                s.train.seed,
                s.train.accumulation,
                s.train.grad_reduce_dtype,
                s.train.skip_spikes,
                s.train.spike_window,
                mesh,
                *options.items(),
            )
            if key not in _programs:
                _programs[key] = real(s, mesh, **options)
            return _programs[key]

        return make

    monkeypatch.setattr(step, "init_state", initial_state)
    monkeypatch.setattr(step, "make_train_step", shared(_real_step))
    monkeypatch.setattr(step, "make_eval_step", shared(_real_eval))


@functools.cache
def compiled_step(run_settings):
    """Return (mesh, train step): tests that share settings share the compiled program."""
    mesh = sharding.make_mesh(run_settings.mesh)
    return mesh, step.make_train_step(run_settings, mesh)


@functools.cache
def one_step(run_settings):
    """Return (loss, gradients) of step 0, read off the optimizer's state: with b1 = 0 Adam's mean is the gradient."""
    assert (run_settings.optimizer.b1, run_settings.optimizer.clip_norm) == (0, 0)
    mesh, train_step = compiled_step(run_settings)
    state, metrics = train_step(initial_state(run_settings, mesh), tokens(run_settings))
    return float(metrics["train_loss"]), leaves(state.opt_state[1].mu)


def unpair_rotations(monkeypatch):
    """Rotate the right operand of every GEMM with some signs turned, which no Recipe can say."""
    prepare = dot._prepare

    def unpaired(index, spec, operand_and_axis, gemm_key, signs, name, **rest):
        if index == 1 and spec.rotation.size:
            turned = jnp.where(jnp.arange(spec.rotation.size) % 3 == 0, -1.0, 1.0)
            signs = turned if signs is None else signs * turned
        return prepare(index, spec, operand_and_axis, gemm_key, signs, name, **rest)

    monkeypatch.setattr(dot, "_prepare", unpaired)


def break_sums(monkeypatch, fault):
    """Let every sum over devices that is written out be "missing", so that one device's share is all, or be "doubled"."""
    real = kernels._sum_over

    def broken(axes, scatter, dtype):
        add, names = real(axes, scatter, dtype), kernels._names(axes[2])
        if not names:
            return add
        alone = lambda product: jnp.where(jax.lax.axis_index(names) == 0, product, 0)  # noqa: E731
        return lambda product: add(alone(product) if fault == "missing" else jax.lax.psum(product, names))

    monkeypatch.setattr(kernels, "_sum_over", broken)
