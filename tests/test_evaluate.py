"""Evaluation: the token-weighted mean of a padded split, whatever the batch and the devices, in the run's or another recipe."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest
from absl import flags
from absl.testing import flagsaver
from helpers import compiled_step, initial_state, rows, run, settings, snapshot, train, write_corpus

from fp4jax import recipes
from models import llama
from train import cli, config, data, evaluate, sharding, step
from train.errors import InputError

pytestmark = pytest.mark.usefixtures("shared_programs")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A finished run of an FP4 recipe with stochastic rounding and a ragged validation split: (settings, workdir)."""
    directory = tmp_path_factory.mktemp("trained")
    s = settings(
        write_corpus(directory),
        quant__recipe="mxfp4_sr",
        train__steps=4,
        data__max_val_sequences=0,
        train__eval_every=2,
        train__checkpoint_every=2,
    )
    train(s, directory / "run")
    return s, directory / "run"


def run_evaluate(capsys, workdir, **options):
    """Call the entry point in this process; return its JSON object."""
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
    values = {
        "workdir": str(workdir),
        "step": None,
        "recipe": None,
        "stochastic": False,
        "batch_size": None,
        "ema": False,
        **options,
    }
    with flagsaver.flagsaver(**values):
        code = evaluate.main()
    out = capsys.readouterr().out.splitlines()
    assert (code, len(out)) == (cli.DONE, 1)
    return json.loads(out[0])


# ---- The entry point ----


def test_it_repeats_the_last_validation_loss_of_training(trained, capsys):
    s, workdir = trained
    before = snapshot(workdir)
    result = run_evaluate(capsys, workdir)
    assert set(result) == {"step", "val_loss", "perplexity", "tokens", "recipe"}
    assert (result["step"], result["tokens"], result["recipe"]) == (4, 4 * 8 * 32, "mxfp4_sr")
    assert result["val_loss"] == pytest.approx(rows(workdir)[-1]["val_loss"], rel=1e-6)
    assert result["perplexity"] == pytest.approx(np.exp(result["val_loss"]))
    assert snapshot(workdir) == before
    assert s.recipe_name == "mxfp4_sr"


def test_an_earlier_step(trained, capsys):
    _, workdir = trained
    (row,) = [r for r in rows(workdir) if r["step"] == 2 and "val_loss" in r]
    result = run_evaluate(capsys, workdir, step=2)
    assert result["step"] == 2
    assert result["val_loss"] == pytest.approx(row["val_loss"], rel=1e-6)


def test_another_recipe_and_stochastic_rounding_change_the_result(trained, capsys):
    _, workdir = trained
    own = run_evaluate(capsys, workdir)["val_loss"]
    plain = run_evaluate(capsys, workdir, recipe="none")
    assert plain["recipe"] == "none"
    stochastic = run_evaluate(capsys, workdir, stochastic=True)["val_loss"]
    assert len({own, plain["val_loss"], stochastic}) == 3
    # The nearest value is that of the recipe without stochastic rounding.
    assert run_evaluate(capsys, workdir, recipe="mxfp4")["val_loss"] == own
    assert own == pytest.approx(stochastic, rel=0.02)


def test_the_averaged_weights(trained, capsys, tmp_path):
    changes = {"optimizer__ema_decay": 0.9, "train__steps": 4, "train__eval_every": 2, "train__checkpoint_every": 2}
    train(settings(write_corpus(tmp_path), quant__recipe="none", **changes), tmp_path / "run")
    for row in (r for r in rows(tmp_path / "run") if "val_loss" in r):
        trained_loss, of_average = (run_evaluate(capsys, tmp_path / "run", step=row["step"], ema=e) for e in (False, True))
        assert trained_loss["val_loss"] == pytest.approx(row["val_loss"], rel=1e-6)
        assert of_average["val_loss"] == pytest.approx(row["val_loss_ema"], rel=1e-6)
        assert row["val_loss_ema"] > row["val_loss"] * (1 + 1e-4)  # it lags, and the loss falls
    with pytest.raises(InputError, match=r"has no averaged weights for --ema.*ema_decay=0"):
        run_evaluate(capsys, trained[1], ema=True)


@pytest.mark.parametrize("stochastic", [False, True])
def test_the_batch_size_does_not_change_the_result(trained, capsys, stochastic):
    _, workdir = trained
    one, other = (run_evaluate(capsys, workdir, batch_size=b, stochastic=stochastic)["val_loss"] for b in (8, 24))
    assert other == pytest.approx(one, rel=1e-6)


def test_the_number_of_devices_does_not_change_the_result(trained, capsys):
    """This process has 8 devices; the subprocesses have one, and three, which do not divide the model's width."""
    _, workdir = trained
    here = run_evaluate(capsys, workdir)
    for devices in (1, 3):
        code, out, err = run("train.evaluate", f"--workdir={workdir}", "--batch_size=5", devices=devices)
        assert (code, len(out)) == (cli.DONE, 1), err
        there = json.loads(out[0])
        assert there.pop("val_loss") == pytest.approx(here["val_loss"], rel=1e-6)
        assert (there["step"], there["tokens"], there["recipe"]) == (4, here["tokens"], here["recipe"])


def test_windows_over_the_validation_split(trained, capsys):
    """Cut as in training, the split gives the validation loss; a smaller stride gives more context, and another loss."""
    s, workdir = trained
    own = run_evaluate(capsys, workdir)
    result = run_evaluate(capsys, workdir, window=s.data.seq_len)
    (found,) = result["datasets"]
    tokens = len(data.load(s.data).val[0]) - 1
    assert (found["dataset"], found["tokens"], found["stride"]) == ("validation split", tokens, s.data.seq_len)
    assert (result["step"], result["recipe"]) == (4, "mxfp4_sr")
    assert found["nats_per_token"] == pytest.approx(own["val_loss"], rel=1e-6)
    assert found["bits_per_byte"] == pytest.approx(own["val_loss"] / np.log(2), rel=1e-6)  # a token is a byte
    (more,) = run_evaluate(capsys, workdir, stride=s.data.seq_len // 2)["datasets"]
    assert more["tokens"] == tokens
    assert abs(more["nats_per_token"] - own["val_loss"]) > 1e-5


def test_other_text_and_a_continuation(trained, capsys, tmp_path):
    _, workdir = trained
    (tmp_path / "a.txt").write_text("abc def " * 20)
    (tmp_path / "b.txt").write_text("fed cba " * 30)
    paths = [str(tmp_path / "a.txt"), str(tmp_path / "b.txt")]
    result = run_evaluate(capsys, workdir, data=[",".join(paths)], generate="abc", max_tokens=4)
    assert [(found["dataset"], found["tokens"]) for found in result["datasets"]] == [(paths[0], 159), (paths[1], 239)]
    assert (result["generation"]["prompt"], result["generation"]["tokens"]) == ("abc", 4)
    assert "val_loss" not in result


# ---- Bad input ----


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workdir": ""}, "--workdir"),
        ({"workdir": "/nowhere"}, "not the workdir"),
        ({"workdir": "/etc/passwd"}, "cannot be read"),
        ({"step": 3}, r"no checkpoint of step 3.*\[2, 4\]"),
        ({"step": -1}, "no checkpoint of step -1"),
        ({"recipe": "mxfp5"}, "unknown recipe 'mxfp5'"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"dtype": "bfloat16"}, "--dtype applies to --hf"),
        ({"per_document": True}, "--per_document applies to --data"),
        ({"text_key": "body", "window": 8}, "--text_key applies to --data"),
        ({"bos": "no"}, "--bos applies to --data or --generate"),
        ({"temperature": 1.0}, "--temperature applies to --generate"),
        ({"generate": "a", "stochastic": True}, "--stochastic applies to a loss"),
        ({"generate": "a", "batch_size": 2}, "--batch_size applies to a loss or --tasks"),
        ({"limit": 5}, "--limit applies to --tasks"),
    ],
)
def test_bad_flags(trained, capsys, options, message):
    before = snapshot(trained[1])
    with pytest.raises(InputError, match=message):
        run_evaluate(capsys, options.pop("workdir", trained[1]), **options)
    assert snapshot(trained[1]) == before


def test_other_data_a_missing_corpus_and_a_damaged_config(trained, capsys, tmp_path):
    _, workdir = trained
    shutil.copytree(workdir, tmp_path / "run")
    path = tmp_path / "run" / "config.json"
    stored = json.loads(path.read_text())
    other = write_corpus(tmp_path, seed=1)
    for change, message in [
        ({"data": {**stored["data"], "files": str(other)}}, "changed"),
        ({"data": {**stored["data"], "files": "/nowhere/*.txt"}}, "no file matches"),
        ({"run": None}, "changed"),
        ({"quant": {**stored["quant"], "resolved": None}}, "config.json"),
        ({"model": {**stored["model"], "d_model": "x"}}, "config.json"),
        ({"model": {**stored["model"], "d_ff": 96}}, "cannot be read"),
    ]:
        path.write_text(json.dumps({**stored, **change}))
        with pytest.raises(InputError, match=message):
            run_evaluate(capsys, tmp_path / "run")


def test_without_its_data_a_run_is_evaluated_on_other_text_and_exported(trained, capsys, tmp_path):
    _, workdir = trained
    (tmp_path / "a.txt").write_text("abc def " * 20)
    text = {"data": [str(tmp_path / "a.txt")], "generate": "abc", "max_tokens": 4}
    with_data = run_evaluate(capsys, workdir, **text)
    shutil.copytree(workdir, tmp_path / "run")
    path = tmp_path / "run" / "config.json"
    stored = json.loads(path.read_text())
    path.write_text(json.dumps({**stored, "data": {**stored["data"], "files": "/nowhere/*.txt"}}))
    assert run_evaluate(capsys, tmp_path / "run", **text) == with_data
    code, _, err = run("train.export", f"--workdir={tmp_path / 'run'}", f"--output={tmp_path / 'out'}")
    assert code == 0, err
    (tmp_path / "run" / "tokenizer.json").write_text("{")
    with pytest.raises(InputError, match=r"tokenizer.json cannot be read"):
        run_evaluate(capsys, tmp_path / "run", **text)
    (tmp_path / "run" / "tokenizer.json").unlink()  # as a run of an older version
    with pytest.raises(InputError, match="no file matches"):
        run_evaluate(capsys, tmp_path / "run", **text)


def test_a_loss_that_is_not_finite_exits_with_3(trained, capsys, monkeypatch):
    monkeypatch.setattr(step, "validation_loss", lambda *_: float("nan"))
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
    with flagsaver.flagsaver(workdir=str(trained[1]), step=None, recipe=None, stochastic=False, batch_size=None):
        assert evaluate.main() == cli.GUARD
    assert capsys.readouterr().out == ""


# ---- The loss ----


def batches(s, dataset, size):
    return data.val_batches(dataset, seq_len=s.data.seq_len, batch_size=size, max_sequences=s.data.max_val_sequences)


def test_the_loss_is_the_mean_over_real_tokens(trained):
    """Against the logits of every window, one at a time, cut to its real tokens."""
    s, _ = trained
    s = dataclasses.replace(s, numerics=dataclasses.replace(s.numerics, recipe=recipes.get("none")))
    dataset, mesh = data.load(s.data), sharding.make_mesh(s.mesh)
    state = initial_state(s, mesh)
    forward = jax.jit(lambda params, tokens: llama.Llama(s.model).apply({"params": params}, tokens))
    total, stream = 0.0, dataset.val[0].astype(np.int32)
    assert (len(stream) - 1) % s.data.seq_len, "the last window must be padded"
    for start in range(0, len(stream) - 1, s.data.seq_len):
        window = stream[start : start + s.data.seq_len + 1]
        padded = np.pad(window, (0, s.data.seq_len + 1 - len(window)))
        logits = np.asarray(forward(state.params, padded[None, :-1]), np.float64)[0, : len(window) - 1]
        total += (np.log(np.exp(logits).sum(-1)) - logits[np.arange(len(window) - 1), window[1:]]).sum()
    for size in (8, 5):
        loss = step.validation_loss(step.make_eval_step(s, mesh), mesh, state, batches(s, dataset, size))
        assert loss == pytest.approx(total / (len(stream) - 1), rel=1e-6)


def test_without_a_batch_the_loss_is_unknown(trained):
    s, _ = trained
    mesh, _ = compiled_step(s)
    assert np.isnan(step.validation_loss(step.make_eval_step(s, mesh), mesh, initial_state(s, mesh), iter(())))


def test_per_tensor_scales_are_taken_per_sequence(trained):
    s, _ = trained
    s = dataclasses.replace(s, numerics=dataclasses.replace(s.numerics, recipe=recipes.get("fp8_current")))
    dataset, mesh = data.load(s.data), sharding.make_mesh(s.mesh)
    losses = [
        step.validation_loss(step.make_eval_step(s, mesh), mesh, initial_state(s, mesh), batches(s, dataset, b)) for b in (1, 8)
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


def test_evaluation_compiles_once(trained):
    s, _ = trained
    dataset, mesh = data.load(s.data), sharding.make_mesh(s.mesh)
    eval_step = step.make_eval_step(
        dataclasses.replace(s, numerics=dataclasses.replace(s.numerics, recipe=recipes.get("bf16"))), mesh
    )
    for size in (8, 8):
        step.validation_loss(eval_step, mesh, initial_state(s, mesh), batches(s, dataset, size))
    assert eval_step._cache_size() == 1


def test_a_sequence_shorter_than_a_token_block_is_evaluated(tmp_path):
    """wgrad's blocks run over the tokens of a batch; evaluation has no wgrad, so 16 positions are enough."""
    s = settings(write_corpus(tmp_path), quant__recipe="mxfp4", data__seq_len=16, data__max_val_sequences=4)
    mesh = sharding.make_mesh(s.mesh)
    loss = step.validation_loss(step.make_eval_step(s, mesh), mesh, initial_state(s, mesh), batches(s, data.load(s.data), 4))
    assert loss == pytest.approx(np.log(256), rel=0.05)


def test_settings_of_a_workdir_are_those_of_the_run(trained):
    s, workdir = trained
    stored = json.loads((workdir / "config.json").read_text())
    assert config.from_json_dict(stored) == s
