"""Training from Hugging Face weights: the first loss is the model's own, it falls, a resume is exact, misfits are named."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest
from helpers import NoStop, argv, assert_same, leaves, parse, restore, rows, run, settings, snapshot, train, write_corpus
from test_huggingface import numpy_logits, tensors, write

from models import huggingface
from train import config, data, loop, pretrained
from train.errors import InputError
from train.tokenizer import ByteTokenizer

pytestmark = pytest.mark.usefixtures("shared_programs")

FOUND = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 32,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
}
SHORT = {"train__steps": 6, "train__eval_every": 3}


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """(corpus, directory of the model, its tensors)"""
    directory, weights = tmp_path_factory.mktemp("given"), tensors(FOUND)
    write(directory / "model", FOUND, weights)
    (directory / "model" / "tokenizer.json").write_text(ByteTokenizer().to_json())
    return write_corpus(directory), directory / "model", weights


def from_weights(given, **changes):
    text, directory, _ = given
    return settings(text, train__initial_weights=str(directory), **{**SHORT, **changes})


def numpy_loss(weights, tokens_BT1):
    total = []
    for tokens in tokens_BT1:
        logits = numpy_logits(FOUND, weights, tokens[:-1])
        total.append(np.log(np.exp(logits).sum(-1)) - logits[np.arange(len(tokens) - 1), tokens[1:]])
    return np.mean(total)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_first_loss_is_the_models_and_it_falls(given, tmp_path, optimizer):
    s = from_weights(given, quant__recipe="none", optimizer__name=optimizer)
    dataset = data.load(s.data)
    batch = next(data.train_iterator(dataset, seq_len=32, batch_size=8, seed=0))["tokens"]
    train(s, tmp_path / "run")
    losses = [row["train_loss"] for row in rows(tmp_path / "run") if "train_loss" in row]
    assert losses[0] == pytest.approx(numpy_loss(given[2], batch), rel=1e-5)
    assert losses[-1] < losses[0] - 0.1
    assert json.loads((tmp_path / "run" / "config.json").read_text())["train"]["initial_weights"] == str(given[1])
    assert abs(losses[0] - np.log(256)) > 0.05  # random weights would have that loss


def test_the_state_of_step_0(given, tmp_path):
    """On any mesh every parameter is the file's, and the average begins there; the moments are those of any run."""
    expected = leaves(huggingface.load(given[1], huggingface.read_config(given[1])))
    for name, changes in {"one": {}, "many": {"mesh__fsdp": 2, "mesh__tensor": 2}}.items():
        s = from_weights(given, quant__recipe="none", optimizer__ema_decay=0.9, **changes)
        dataset, mesh, _ = loop.prepare(s, tmp_path / name)
        begun = loop.Run(s, tmp_path / name, dataset, mesh)
        begun.close()
        for tree in (begun.state.params, begun.state.ema):
            assert leaves(tree).keys() == expected.keys()
            jax.tree.map(np.testing.assert_array_equal, leaves(tree), expected)
        assert begun.state.params["lm_head"]["kernel"].sharding.mesh == mesh
        assert int(begun.state.step) == 0
        assert not any(np.any(x) for x in leaves(begun.state.opt_state[1].mu).values())


def test_a_resume_reads_the_checkpoint_alone_and_is_exact(given, tmp_path):
    """In FP4 with healing in FP8, stopped before it; the directory is gone by then."""
    text, directory, _ = given
    moved = tmp_path / "model"
    shutil.copytree(directory, moved)
    s = settings(
        text,
        **SHORT,
        train__initial_weights=str(moved),
        quant__recipe="mxfp4_sr",
        quant__schedule=((5, "fp8_current"),),
    )
    train(s, tmp_path / "whole")
    looks = iter(range(100))
    stopped = train(s, tmp_path / "parts", NoStop(lambda: next(looks) >= 3))
    assert stopped.step == 3
    shutil.rmtree(moved)
    train(s, tmp_path / "parts")
    (one, run_one), (other, run_other) = (restore(s, tmp_path / name) for name in ("whole", "parts"))
    for path, x in leaves(one).items():
        assert_same(leaves(other)[path], x) if x.dtype == np.float32 else np.testing.assert_array_equal(leaves(other)[path], x)
    assert rows(tmp_path / "whole") == rows(tmp_path / "parts")
    assert run_one["recipe"] == run_other["recipe"] == "fp8_current"
    assert (tmp_path / "whole" / "census_from_step_5.json").exists()


def test_other_weights_on_resume_are_refused(given, tmp_path):
    s = from_weights(given, quant__recipe="none", train__steps=3)
    train(s, tmp_path / "run")
    before = snapshot(tmp_path / "run")
    for other in ("", "elsewhere"):
        changed = dataclasses.replace(s, train=dataclasses.replace(s.train, initial_weights=other))
        with pytest.raises(InputError, match=r"belongs to another run.*train.initial_weights: "):
            loop.prepare(changed, tmp_path / "run")
    assert snapshot(tmp_path / "run") == before


def test_what_does_not_fit_is_named_before_anything_is_written(given, tmp_path):
    _, directory, _ = given
    for changes, message in [
        ({"model__d_ff": 96}, "is another model than the run's: d_ff: 96 ≠ 128$"),
        ({"model__rope_theta": 1e4, "model__n_layers": 1}, r"n_layers: 1 ≠ 2; rope_theta: 10000.0 ≠ 500000.0$"),
        ({"train__initial_weights": "/nowhere"}, r"/nowhere has no config.json"),
        ({"data__tokenizer": "bpe:256"}, r"knows other token ids than data.tokenizer='bpe:256' gives: .* \[73, 110"),
    ]:
        with pytest.raises(InputError, match=message):
            loop.prepare(settings(given[0], **{"train__initial_weights": str(directory), **changes}), tmp_path / "run")
    shutil.copytree(directory, tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    with pytest.raises(InputError, match=r"train.initial_weights: .* has no safetensors files"):
        loop.prepare(settings(given[0], train__initial_weights=str(tmp_path / "model")), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_documents_may_be_kept_apart_and_weights_may_be_packed(given, saved, tmp_path):
    s = from_weights(given, model__document_end=10)
    pretrained.check(s, ByteTokenizer())
    _, workdir = saved
    code, _, err = run("train.export", f"--workdir={workdir}", f"--output={tmp_path / 'packed'}", "--dtype=mxfp4")
    assert code == 0, err
    pretrained.check(settings(given[0], train__initial_weights=str(tmp_path / "packed"), **SHORT), ByteTokenizer())


def test_without_a_tokenizer_nothing_can_be_said(given, tmp_path, caplog):
    shutil.copytree(given[1], tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").unlink()
    pretrained.check(settings(given[0], train__initial_weights=str(tmp_path / "model")), ByteTokenizer())
    assert "has no tokenizer.json" in caplog.text


def test_the_config_file_takes_the_shape_from_the_directory(given, tmp_path):
    s = config.resolve(parse(f"--config=configs/finetune.py:{given[1]},mxfp4:fprop=bf16,wgrad.lhs.rounding=sr"))
    assert huggingface.same_model(s.model, huggingface.read_config(given[1])) == []
    assert (s.model.vocab_size, s.data.seq_len, s.train.initial_weights) == (256, 64, str(given[1]))
    assert s.recipe_name == "mxfp4:fprop=bf16,wgrad.lhs.rounding=sr"
    for argument, message in (("", "name a model"), ("/nowhere", r"/nowhere has no config.json")):
        with pytest.raises(InputError, match=message):
            parse(f"--config=configs/finetune.py:{argument}")


def test_a_large_model_saves_memory(tmp_path):
    found = {**FOUND, "hidden_size": 2048, "max_position_embeddings": 131072}
    (tmp_path / "config.json").write_text(json.dumps(found))
    s = config.resolve(parse(f"--config=configs/finetune.py:{tmp_path}"))
    assert (s.model.dtype, s.model.remat, s.model.loss_chunk, s.data.seq_len) == ("bfloat16", "full", 256, 2048)
    assert s.model.max_seq_len == 131072


def test_an_exported_run_is_fine_tuned(saved, tmp_path):
    """Ours out, ours in: the loss goes on from where the exported checkpoint was."""
    s, workdir = saved
    code, _, err = run("train.export", f"--workdir={workdir}", f"--output={tmp_path / 'model'}", "--dtype=float32")
    assert code == 0, err
    flags = argv(s.data.files, tmp_path / "run", train__steps=2, optimizer__warmup_steps=1, quant__recipe="none")
    code, out, err = run("train.main", *flags, f"--config.train.initial_weights={tmp_path / 'model'}")
    assert code == 0, err
    first = next(row["train_loss"] for row in rows(tmp_path / "run") if "train_loss" in row)
    begun = [row["train_loss"] for row in rows(workdir) if "train_loss" in row]
    assert first < begun[0] - 0.05
    assert json.loads(out[-1])["step"] == 2
