"""Resume: a run that was stopped gives the rows of one that was not, bit for bit; faults/test_kills.py kills it."""

import json
import shutil

import numpy as np
import pytest
from helpers import NoStop, rows, settings, share_programs, train, write_corpus

from train import sharding


def test_a_longer_run_cuts_the_rows_after_its_checkpoint(tmp_path, monkeypatch):
    """Rows of steps that no checkpoint holds are written again, once."""
    share_programs(monkeypatch)
    corpus = write_corpus(tmp_path)
    s = settings(corpus, quant__recipe="none", train__steps=5, train__checkpoint_every=2, train__eval_every=2)
    train(s, tmp_path / "run")
    whole = rows(tmp_path / "run")
    path = tmp_path / "run" / "metrics.jsonl"
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "5")
    path.write_text(path.read_text() + json.dumps({"step": 9, "tokens": 1, "train_loss": 1.0}) + '\n{"step": 10, "tok')
    train(s, tmp_path / "run")
    assert rows(tmp_path / "run") == whole


def test_a_schedule_switches_at_its_steps_whether_resumed_there_or_not(tmp_path, monkeypatch):
    """Stopped at every step in turn: before, at, and after a switch, with a history that is carried through a phase without."""
    share_programs(monkeypatch)
    corpus = write_corpus(tmp_path)
    schedule = ((2, "mxfp4_sr"), (4, ":fprop=bf16"))
    s = settings(corpus, quant__recipe="fp8_delayed", quant__schedule=schedule, train__steps=6, train__eval_every=2)
    train(s, tmp_path / "whole")
    whole = rows(tmp_path / "whole")
    for step in range(1, 6):
        path = tmp_path / "run" / "metrics.jsonl"
        reached = lambda n=step, p=path: p.exists() and len([r for r in rows(p.parent) if "train_loss" in r]) >= n  # noqa: E731
        train(s, tmp_path / "run", NoStop(reached))
    train(s, tmp_path / "run")
    assert rows(tmp_path / "run") == whole
    names = [p.name for p in (tmp_path / "run").iterdir() if p.name.startswith("census")]
    assert sorted(names) == ["census.json", "census_from_step_2.json", "census_from_step_4.json"]
    ends = settings(corpus, quant__recipe="fp8_delayed", quant__schedule=((3, "none"),), train__steps=4, train__eval_every=0)
    train(ends, tmp_path / "ends", NoStop(lambda: reached(2, tmp_path / "ends" / "metrics.jsonl")))
    train(ends, tmp_path / "ends")  # the last phase has no history of its own, the state has
    assert [row["step"] for row in rows(tmp_path / "ends") if "train_loss" in row] == [1, 2, 3, 4]
    plain = settings(corpus, quant__recipe="fp8_delayed", train__steps=6, train__eval_every=2)
    train(plain, tmp_path / "plain")
    same = [a == b for a, b in zip(rows(tmp_path / "plain"), whole, strict=True) if "train_loss" in a]
    assert same == [True, True, False, False, False, False]


def test_muon_and_an_average_of_the_weights_continue_bit_for_bit(tmp_path, monkeypatch):
    share_programs(monkeypatch)
    changes = {"optimizer__name": "muon", "optimizer__ema_decay": 0.9, "train__steps": 5, "train__eval_every": 5}
    s = settings(write_corpus(tmp_path), quant__recipe="none", train__checkpoint_every=0, **changes)
    train(s, tmp_path / "whole")
    path = tmp_path / "run" / "metrics.jsonl"
    assert train(s, tmp_path / "run", NoStop(lambda: path.exists() and len(rows(path.parent)) >= 2)).step < 5
    train(s, tmp_path / "run")
    assert rows(tmp_path / "run") == rows(tmp_path / "whole")
    last = rows(tmp_path / "run")[-1]
    assert last.keys() == {"step", "tokens", "val_loss", "val_loss_ema"}
    assert last["val_loss_ema"] != last["val_loss"]


@pytest.mark.parametrize("meshes", [((1, 8), (2, 2), (1, 1)), ((4, 2), (2, 1), (1, 4))], ids=["8 4 1", "8 2 4"])
def test_a_run_moves_from_mesh_to_mesh_and_takes_every_example_once(tmp_path, monkeypatch, meshes):
    """Meshes are data × fsdp; against a run on one device from beginning to end."""
    share_programs(monkeypatch)
    corpus, taken = write_corpus(tmp_path), []
    changes = {"quant__recipe": "none", "train__checkpoint_every": 2, "train__eval_every": 3, "optimizer__decay_steps": 7}
    real = sharding.put_rows

    def put(mesh, rows_BT1, size):
        taken.append(np.asarray(rows_BT1).tobytes())
        return real(mesh, rows_BT1, size)

    monkeypatch.setattr(sharding, "put_rows", put)
    train(settings(corpus, train__steps=7, **changes), tmp_path / "whole")
    whole, expected = rows(tmp_path / "whole"), list(taken)
    taken.clear()
    for steps, (data, fsdp) in zip((3, 5, 7), meshes, strict=True):
        train(settings(corpus, train__steps=steps, mesh__data=data, mesh__fsdp=fsdp, **changes), tmp_path / "run")
    assert len(set(expected)) == len(expected)
    assert taken == expected
    found = [row for row in rows(tmp_path / "run") if "train_loss" in row]
    for row, want in zip(found, [row for row in whole if "train_loss" in row], strict=True):
        assert row["train_loss"] == pytest.approx(want["train_loss"], rel=1e-5)
        assert row["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-4)
