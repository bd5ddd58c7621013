"""Checkpoints: exact round trips, also to another mesh; what they say and how many stay. Damage is in faults/test_damage.py."""

import dataclasses
import re
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from helpers import leaves, restore, train

from train import checkpoint, sharding, step
from train.errors import InputError

pytestmark = pytest.mark.usefixtures("shared_programs")


def test_what_a_checkpoint_says(saved):
    s, workdir = saved
    state, run = restore(s, workdir, 1)
    assert int(state.step) == run["step"] == 1
    assert run["tokens"] == 8 * 32
    assert (run["recipe"], run["recipe_digest"]) == ("none", s.numerics.recipe.digest())
    assert set(run["versions"]) == set(checkpoint.VERSIONS)


@pytest.mark.parametrize("mesh", [{"fsdp": 4, "tensor": 2}, {"data": 8, "fsdp": 1}, {"fsdp": 2, "context": 2, "tensor": 2}])
def test_another_mesh_restores_the_same_bits(saved, mesh):
    s, workdir = saved
    here, _ = restore(s, workdir)
    other = dataclasses.replace(s, mesh=sharding.MeshConfig(**mesh))
    there, _ = restore(other, workdir)
    jax.tree.map(np.testing.assert_array_equal, leaves(here), leaves(there))
    wanted = jax.tree.leaves(step.abstract_state(other, sharding.make_mesh(other.mesh)))
    assert [x.sharding for x in jax.tree.leaves(there)] == [x.sharding for x in wanted]


def test_arrays_of_another_dtype_or_shape_are_refused_and_neither_cast_nor_cut(saved, tmp_path, monkeypatch):
    s, workdir = saved
    state, run = restore(s, workdir)
    kernel = state.params["lm_head"]["kernel"]
    changes = {"bfloat16 (64, 256)": kernel.astype("bfloat16"), "float32 (64, 128)": kernel[:, :128]}
    for i, (name, changed) in enumerate(changes.items()):
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint, "checksum", lambda _: run["state_checksum"])
            checkpoints = checkpoint.Checkpoints(tmp_path / str(i))
            checkpoints.save(run["step"], state._replace(params={**state.params, "lm_head": {"kernel": changed}}), run)
            checkpoints.close()
            with pytest.raises(InputError, match=rf"params/lm_head/kernel is {re.escape(name)} there and float32 \(64, 256\)"):
                restore(s, tmp_path / str(i))


def test_a_step_that_is_not_there(saved):
    with pytest.raises(InputError, match=r"no checkpoint of step 7.*\[1, 2\]"):
        restore(*saved, at=7)


def test_keep_checkpoints(saved, tmp_path):
    s, _ = saved
    train(dataclasses.replace(s, train=dataclasses.replace(s.train, keep_checkpoints=1)), tmp_path / "run")
    checkpoints = checkpoint.Checkpoints(tmp_path / "run")
    assert checkpoints.steps() == [2]
    checkpoints.close()
    every_second = dataclasses.replace(s.train, steps=5, keep_checkpoints=1, keep_every=2)
    train(dataclasses.replace(s, train=every_second), tmp_path / "every")
    checkpoints = checkpoint.Checkpoints(tmp_path / "every")
    assert checkpoints.steps() == [2, 4, 5]
    checkpoints.close()


class StateBefore(NamedTuple):
    """What a version without averaged weights stored."""

    params: Any
    opt_state: Any
    step: Any
    history: Any
    seed: Any


def test_a_state_of_a_version_without_averages_is_restored(saved, tmp_path, monkeypatch):
    s, workdir = saved
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_item", lambda state: StateBefore(*state[:5]))
        train(s, tmp_path / "run")
    jax.tree.map(np.testing.assert_array_equal, leaves(restore(s, tmp_path / "run")[0]), leaves(restore(s, workdir)[0]))
