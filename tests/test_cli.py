"""The entry point's contract: stdout, workdir, exit codes, and one line on stderr for bad input (most in test_config.py)."""

import json
import shutil

import pytest
from helpers import FINISHED, argv, rows, run, snapshot

from fp4jax.recipe import GEMMS
from train import cli
from train.errors import InputError

TRAIN_ROW = {"step", "tokens", "train_loss", "grad_norm", "lr", "tokens_per_s"}


def test_stdout_is_one_json_object(finished):
    _, workdir, out, err = finished
    assert len(out) == 1
    result = json.loads(out[0])
    assert set(result) == {"step", "val_loss", "perplexity", "tokens", "recipe"}
    assert (result["step"], result["tokens"], result["recipe"]) == (6, 6 * 8 * 32, "none")
    assert result["perplexity"] == pytest.approx(2.718281828459045 ** result["val_loss"])
    assert rows(workdir)[-1] == {"step": 6, "tokens": 6 * 8 * 32, "val_loss": result["val_loss"]}
    assert any(line.startswith("recipe") for line in err)
    assert any("validation loss" in line for line in err)
    assert not any("Warning" in line or "Traceback" in line for line in err), err


def test_metrics_rows(finished):
    lines = [json.loads(line) for line in (finished[1] / "metrics.jsonl").read_text().splitlines()]
    training, validation = ([r for r in lines if key in r] for key in ("train_loss", "val_loss"))
    assert len(training) + len(validation) == len(lines)
    assert all(set(row) == TRAIN_ROW for row in training)
    assert all(set(row) == {"step", "tokens", "val_loss"} for row in validation)
    assert [row["step"] for row in training] == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in validation] == [4, 6]
    assert all(row["tokens"] == row["step"] * 8 * 32 for row in lines)
    assert training[0]["lr"] == pytest.approx(5e-3)
    assert training[1]["lr"] == pytest.approx(1e-2)


def test_workdir(finished):
    _, workdir, _, _ = finished
    names = {path.name for path in workdir.iterdir()}
    assert {name for name in names if not name.startswith("events.out.tfevents")} == {
        "config.json", "census.json", "tokenizer.json", "tokenizer_config.json", "metrics.jsonl", "checkpoints", "lock",
    }  # fmt: skip
    assert any(name.startswith("events.out.tfevents") for name in names)
    census = json.loads((workdir / "census.json").read_text())
    assert all(set(row) == {"module", "gemm", "lhs", "rhs", "rotation", "impl", "why", "exempt"} for row in census)
    assert {row["gemm"] for row in census} == set(GEMMS)
    stored = json.loads((workdir / "config.json").read_text())
    assert set(stored) == {"model", "data", "optimizer", "train", "mesh", "diagnose", "quant", "run"}
    assert sorted(int(p.name) for p in (workdir / "checkpoints").iterdir()) == [3, 6]


def test_the_same_command_again_has_nothing_left_to_do(finished):
    corpus, workdir, out, _ = finished
    before = {k: v for k, v in snapshot(workdir).items() if "tfevents" not in k}
    code, again, err = run("train.main", *argv(corpus, workdir, **FINISHED))
    assert (code, again) == (cli.DONE, out)
    assert any("nothing left to train" in line for line in err)
    assert {k: v for k, v in snapshot(workdir).items() if "tfevents" not in k} == before


def copy_with(finished, directory, change):
    """Copy the finished workdir, and change the copy."""
    shutil.copytree(finished[1], directory / "run")
    change(directory / "run")
    return directory / "run"


def cut_manifest(workdir):
    path = workdir / "checkpoints" / "6" / "state" / "manifest.ocdbt"
    path.write_bytes(path.read_bytes()[:-20])


def nothing(_workdir):
    pass


@pytest.mark.parametrize(
    ("module", "change", "flags", "message"),
    [
        ("train.main", nothing, ["--config.quant.recipe=mxfp4"], "quant.recipe: none → mxfp4"),
        ("train.main", nothing, ["--config=configs/nope.py"], "nope.py"),
        ("train.main", nothing, ["--config.quant.recipe=mxfp5"], "unknown recipe 'mxfp5'"),
        ("train.main", nothing, ["--config.train.nope=1"], "nope"),
        ("train.evaluate", cut_manifest, [], "checkpoints/6 cannot be read"),
        ("train.evaluate", lambda w: (w / "config.json").unlink(), [], "not the workdir"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_leaves_the_workdir_alone(finished, tmp_path, module, change, flags, message):
    workdir = copy_with(finished, tmp_path, change)
    before = snapshot(tmp_path)
    arguments = argv(finished[0], workdir, **FINISHED) if module == "train.main" else [f"--workdir={workdir}"]
    code, out, err = run(module, *arguments, *flags)
    assert (code, out) == (cli.BAD_INPUT, [])
    assert len(err) == 1, err
    assert err[0].startswith("error: ")
    assert message in err[0]
    assert snapshot(tmp_path) == before


def test_a_missing_config_is_one_line():
    code, out, err = run("train.main")
    assert (code, out, len(err)) == (cli.BAD_INPUT, [], 1)
    assert "--config" in err[0]


def test_messages_of_several_lines_become_one(capsys, monkeypatch):
    def fail():
        raise InputError("first\n  second\tthird")

    monkeypatch.setattr(cli, "parse_flags", lambda *_: None)
    monkeypatch.setattr(cli.logging, "basicConfig", lambda **_: None)
    with pytest.raises(SystemExit) as exit_info:
        cli.run(fail)
    assert exit_info.value.code == cli.BAD_INPUT
    assert capsys.readouterr().err == "error: first second third\n"


@pytest.mark.parametrize(("loss", "expected"), [(None, None), (0.0, 1.0), (710.0, None), (float("inf"), None)])
def test_perplexity(loss, expected):
    assert cli.perplexity(loss) == expected


def test_only_bad_input_is_caught(monkeypatch):
    """A fault of the program keeps its traceback."""

    def fail():
        raise RuntimeError("a fault")

    monkeypatch.setattr(cli, "parse_flags", lambda *_: None)
    monkeypatch.setattr(cli.logging, "basicConfig", lambda **_: None)
    with pytest.raises(RuntimeError):
        cli.run(fail)
