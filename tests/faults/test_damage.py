"""Damaged files of a workdir: from a checkpoint a run goes back to the one before, the rest is refused, mended or dropped."""

import asyncio
import dataclasses
import errno
import gc
import json
import re
import shutil

import jax
import numpy as np
import pytest
from helpers import leaves, restore, rows, snapshot, train
from orbax.checkpoint._src import asyncio_utils

from train import checkpoint, config, loop
from train.errors import InputError

pytestmark = pytest.mark.usefixtures("shared_programs")


# ---- Checkpoints ----


def biggest(directory):
    return max((p for p in directory.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path, bit):
    content = bytearray(path.read_bytes())
    content[bit // 8 % len(content)] ^= 1 << bit % 8
    path.write_bytes(content)


def edit_run(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


DAMAGE = {
    "state missing": lambda d: shutil.rmtree(d / "state"),
    "run missing": lambda d: shutil.rmtree(d / "run"),
    "run cut": lambda d: cut(d / "run" / "metadata"),
    "run garbage": lambda d: (d / "run" / "metadata").write_bytes(b"\x00garbage" * 9),
    "run of another program": lambda d: (d / "run" / "metadata").write_text('{"step": 2}'),
    "run a list": lambda d: (d / "run" / "metadata").write_text("[2]"),
    "run edited": lambda d: edit_run(d / "run" / "metadata", iterator={"next_index": 5}),
    "step of another": lambda d: shutil.copy(d.parent / "1" / "run" / "metadata", d / "run" / "metadata"),
    "state of another": lambda d: (shutil.rmtree(d / "state"), shutil.copytree(d.parent / "1" / "state", d / "state")),
    "tree missing": lambda d: (d / "state" / "_METADATA").unlink(),
    "tree cut": lambda d: cut(d / "state" / "_METADATA"),
    "manifest missing": lambda d: (d / "state" / "manifest.ocdbt").unlink(),
    "manifest cut": lambda d: cut(d / "state" / "manifest.ocdbt"),
    "arrays missing": lambda d: biggest(d).unlink(),
    "arrays cut": lambda d: cut(biggest(d)),
    "arrays garbage": lambda d: biggest(d).write_bytes(b"\x00garbage" * 9),
    **{f"arrays bit {n}": lambda d, n=n: flip(biggest(d), n * 99_991) for n in range(8)},
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_from_a_damaged_checkpoint_a_run_goes_back_to_the_one_before(saved, tmp_path, damage, caplog):
    s, workdir = saved
    copy = tmp_path / "run"
    shutil.copytree(workdir, copy)
    damage(copy / "checkpoints" / "2")
    damaged = snapshot(copy / "checkpoints" / "2")
    assert train(s, copy).step == 2
    gc.collect()  # a read that was dropped would be a warning here, so an error
    assert rows(copy) == rows(workdir)
    (message,) = [r.getMessage() for r in caplog.records if "going back to step 1" in r.getMessage()]
    assert re.search(r"checkpoints/2 (cannot be read|is damaged)", message)
    assert snapshot(copy / "damaged" / "2") == damaged
    jax.tree.map(np.testing.assert_array_equal, *(leaves(restore(s, w)[0]) for w in (copy, workdir)))


STALE = ValueError("ABORTED: Error reading local file: Stale file handle [os_error_code='116']")


@pytest.mark.parametrize(
    "error", [OSError(errno.ESTALE, "Stale file handle"), STALE, MemoryError(), ValueError("UNAVAILABLE: later")]
)
def test_a_checkpoint_that_cannot_be_read_just_now_stays_where_it_is(saved, tmp_path, monkeypatch, error):
    s, workdir = saved
    copy = tmp_path / "run"
    shutil.copytree(workdir, copy)
    before = snapshot(copy / "checkpoints")

    def fail(*_, **__):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.ocp.StandardCheckpointHandler, "restore", fail)
        with pytest.raises(InputError, match=r"checkpoints/2 cannot be read"):
            train(s, copy)
    assert snapshot(copy / "checkpoints") == before
    assert not (copy / "damaged").exists()
    assert train(s, copy).step == 2


def test_where_every_checkpoint_is_damaged_the_run_is_refused_and_nothing_is_moved(saved, tmp_path):
    s, workdir = saved
    copy = tmp_path / "run"
    shutil.copytree(workdir, copy)
    for at in ("1", "2"):
        cut(biggest(copy / "checkpoints" / at))
    before = snapshot(copy)
    with pytest.raises(InputError, match=r"checkpoints/2 (cannot be read|is damaged)"):
        train(dataclasses.replace(s, train=dataclasses.replace(s.train, eval_every=7)), copy)
    assert snapshot(copy) == before


def test_reads_that_failed_late_are_awaited():
    ended = []

    async def fail(seconds):
        try:
            await asyncio.sleep(seconds)
        finally:
            ended.append(seconds)
            raise OSError(seconds)

    async def both():
        await asyncio.gather(fail(0.0), fail(0.02))

    factory = asyncio.new_event_loop
    with checkpoint.drained_loops(), pytest.raises(OSError, match=r"^0\.0$"):
        asyncio_utils.run_sync(both())
    assert ended == [0.0, 0.02]
    assert asyncio.new_event_loop is factory


@pytest.mark.parametrize("step", [2, 9])
def test_what_a_save_that_was_killed_left_is_no_checkpoint_and_is_removed(saved, tmp_path, step):
    s, workdir = saved
    copy = tmp_path / "run"
    shutil.copytree(workdir, copy)
    left = copy / "checkpoints" / f"{step}.orbax-checkpoint-tmp"
    shutil.copytree(copy / "checkpoints" / "2", left)
    shutil.rmtree(copy / "checkpoints" / "2")
    checkpoints = checkpoint.Checkpoints(copy)  # as an evaluation opens them, beside a run that may be saving
    assert checkpoints.steps() == [1]
    checkpoints.close()
    assert left.exists()
    train(s, copy)
    assert rows(copy) == rows(workdir)
    assert sorted(path.name for path in (copy / "checkpoints").iterdir()) == ["1", "2"]


# ---- The other files ----


FLIPS = 40


def test_a_damaged_config_json_is_refused_and_stays(saved, tmp_path):
    s, workdir = saved
    whole = (workdir / "config.json").read_bytes()
    path = tmp_path / "config.json"
    for length in (0, 1, len(whole) // 2, len(whole) - 2):
        path.write_bytes(whole[:length])
        with pytest.raises(InputError, match=r"config\.json cannot be read"):
            loop.prepare(s, tmp_path)
        assert path.read_bytes() == whole[:length]
    draw = np.random.default_rng(0)
    for position, bit in zip(draw.integers(len(whole), size=FLIPS), draw.integers(8, size=FLIPS), strict=True):
        path.write_bytes(whole)
        flip(path, 8 * int(position) + int(bit))
        flipped = path.read_bytes()
        try:
            same = config.from_json_dict(json.loads(flipped)) == s  # white space, and what may change in a run
        except (InputError, ValueError):
            same = False
        if not same:
            with pytest.raises(InputError, match=re.escape(str(tmp_path))):
                loop.prepare(s, tmp_path)
            assert path.read_bytes() == flipped


@pytest.mark.parametrize("name", ["config.json.tmp", "census.json", "census.json.tmp", "lock"])
def test_what_no_run_depends_on_may_be_damaged(saved, tmp_path, name):
    s, workdir = saved
    copy = tmp_path / "run"
    shutil.copytree(workdir, copy)
    (copy / name).write_bytes(b'{"model": {"d_m\x00')
    assert train(s, copy).step == 2
    assert rows(copy) == rows(workdir)
    assert (copy / "census.json").read_bytes() == (workdir / "census.json").read_bytes()


def test_a_start_that_was_killed_while_it_wrote_config_json_is_started_anew(saved, tmp_path):
    s, workdir = saved
    (tmp_path / "lock").touch()
    (tmp_path / "config.json.tmp").write_bytes((workdir / "config.json").read_bytes()[:100])
    train(s, tmp_path)
    assert (rows(tmp_path), (tmp_path / "config.json").read_bytes()) == (rows(workdir), (workdir / "config.json").read_bytes())


LINES = {
    "broken": (
        lambda t: t.replace('{"step": 1,', '{"st" 1,'),
        ["dropped a broken line", "no rows of 1 of 2 steps"],
    ),
    "cut": (lambda t: t[: len(t) // 4], ["dropped a broken line", "no rows of 2 of 2 steps"]),
    "empty": (lambda _: "", ["no rows of 2 of 2 steps"]),
    "missing": (None, ["no rows of 2 of 2 steps"]),
}


@pytest.mark.parametrize(("change", "messages"), LINES.values(), ids=LINES)
def test_lost_rows_are_said_and_the_others_stay(saved, tmp_path, caplog, change, messages):
    s, workdir = saved
    copy = tmp_path / "run"
    shutil.copytree(workdir, copy)
    path = copy / "metrics.jsonl"
    whole = path.read_text()
    if change is None:
        path.unlink()
    else:
        path.write_text(change(whole))
    assert train(s, copy).step == 2
    assert [r.getMessage() for r in caplog.records if r.levelname == "WARNING"] == [f"{path}: {said}" for said in messages]
    assert set(path.read_text().splitlines()) <= set(whole.splitlines())
