"""train.export: what it writes is read back by others: the weights by numpy, the tokenizer by the `tokenizers` library."""

import json
import re

import numpy as np
import pytest
import safetensors.numpy
import tokenizers
from helpers import assert_same, leaves, run, settings, train, write_corpus
from test_huggingface import numpy_logits, our_logits

from fp4jax.ops import quantize
from fp4jax.recipe import OperandSpec
from models import huggingface
from train import checkpoint, corpus, sharding, step

TEXT = "In the beginning\n\n\t“naïve” — Ж 🙂 \x00\x7f end"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A finished run of two steps: (settings, workdir)."""
    directory = tmp_path_factory.mktemp("trained")
    s = settings(
        write_corpus(directory), quant__recipe="none", train__steps=2, optimizer__warmup_steps=1, optimizer__ema_decay=0.5
    )
    train(s, directory / "run")
    return s, directory / "run"


def test_a_checkpoint_becomes_a_model_that_others_read(trained, tmp_path):
    s, workdir = trained
    code, out, err = run("train.export", f"--workdir={workdir}", f"--output={tmp_path / 'model'}", "--dtype=float32")
    assert code == 0, err
    result = json.loads(out[-1])
    assert (result["step"], result["recipe"], result["ema"]) == (2, "none", False)
    checkpoints = checkpoint.Checkpoints(workdir)
    state, _ = checkpoints.restore(2, step.abstract_state(s, sharding.make_mesh(s.mesh)))
    checkpoints.close()

    found = json.loads((tmp_path / "model" / "config.json").read_text())
    weights = safetensors.numpy.load_file(tmp_path / "model" / "model.safetensors")
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json"))
    ids = np.array(tokenizer.encode(TEXT).ids)
    np.testing.assert_array_equal(ids, np.frombuffer(TEXT.encode(), np.uint8))
    assert tokenizer.decode(ids.tolist()) == TEXT
    assert json.loads((tmp_path / "model" / "tokenizer_config.json").read_text())["add_bos_token"] is False
    modes = {path.stat().st_mode for path in (tmp_path / "model").iterdir()}
    assert len(modes) == 1, "whoever may read one file may read all"
    expected = our_logits(s.model, state.params, ids[:16])
    np.testing.assert_allclose(numpy_logits(found, weights, ids[:16]), expected, atol=1e-4)

    code, _, err = run("train.export", f"--workdir={workdir}", f"--output={tmp_path / 'average'}", "--ema")
    assert code == 0, err
    average = safetensors.numpy.load_file(tmp_path / "average" / "model.safetensors")["model.norm.weight"]
    np.testing.assert_array_equal(average, np.asarray(leaves(state.ema)["['final_norm']['scale']"]).astype(average.dtype))


def test_a_checkpoint_becomes_packed_weights_and_a_manifest(trained, tmp_path):
    s, workdir = trained
    flags = (f"--workdir={workdir}", "--dtype=nvfp4", "--ema")
    code, out, err = run("train.export", f"--output={tmp_path / 'model'}", *flags)
    assert code == 0, err
    result = json.loads(out[-1])
    assert (result["packed"], result["kept"], result["step"]) == (14, 0, 2)
    manifest = json.loads((tmp_path / "model" / "fp4jax.json").read_text())
    assert (manifest["recipe"], manifest["dtype"], manifest["ema"], manifest["shared_scales"]) == ("none", "nvfp4", True, True)
    assert (manifest["cast_by"], manifest["rotation"], manifest["step"]) == ("the format's default", "none", 2)
    assert manifest["recipe_digest"] == s.numerics.recipe.digest()
    assert set(manifest["versions"]) == {"fp4jax", "jax", "safetensors"}

    checkpoints = checkpoint.Checkpoints(workdir)
    state, _ = checkpoints.restore(2, step.abstract_state(s, sharding.make_mesh(s.mesh)))
    checkpoints.close()
    found = huggingface.load(tmp_path / "model", huggingface.read_config(tmp_path / "model"))["layers"]["mlp"]
    average = state.ema["layers"]["mlp"]
    fused = np.concatenate([average["gate"]["kernel"][1], average["up"]["kernel"][1]], axis=1)
    values = quantize.quantize(fused, OperandSpec("nvfp4"), 0).dequantize()
    assert_same(np.concatenate([found["gate"]["kernel"][1], found["up"]["kernel"][1]], axis=1), values)
    down = quantize.quantize(average["down"]["kernel"][0], OperandSpec("nvfp4"), 0).dequantize()
    assert_same(found["down"]["kernel"][0], down)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--workdir=DIR and --output=DIR are needed"),
        (["--output={tmp}", "--workdir={run}"], "--output: .* is there already"),
        (
            ["--output={tmp}/x", "--workdir={run}", "--dtype=float16"],
            "--dtype=float16 is not one of bfloat16, float32, mxfp4, nvfp4",
        ),
        (["--output={tmp}/x", "--workdir={run}", "--step=7"], "no checkpoint of step 7"),
        (["--output={tmp}/x", "--workdir={run}", "--unrotated"], "--unrotated does not apply to --dtype=bfloat16"),
        (
            ["--output={tmp}/x", "--workdir={run}", "--dtype=mxfp4", "--shared_scales"],
            "--shared_scales does not apply to .*mxfp4",
        ),
    ],
)
def test_what_cannot_be_exported_is_one_line(trained, tmp_path, flags, message):
    given = [flag.format(tmp=tmp_path, run=trained[1]) for flag in flags]
    code, out, err = run("train.export", *given)
    assert (code, out, len(err)) == (2, [], 1)
    assert re.search(message, err[0])


def test_a_trained_bpe_is_written_as_it_is(tmp_path):
    text = ["the cat sat on the mat, the cat ran " * 20]
    bpe, _, _ = corpus.tokenize(text, text, tokenizer="bpe:270", cache_dir=tmp_path)
    again = tokenizers.Tokenizer.from_str(bpe.to_json())
    assert again.encode(TEXT).ids == bpe.encode(TEXT).tolist()
    assert again.get_vocab_size() == 270
