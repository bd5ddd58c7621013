"""train.export: what it writes is read back by others: the weights by numpy, the tokenizer by the `tokenizers` library."""

import json
import re

import numpy as np
import pytest
import safetensors.numpy
import tokenizers
from helpers import leaves, run, settings, train, write_corpus
from test_huggingface import numpy_logits, our_logits

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
    expected = our_logits(s.model, state.params, ids[:16])
    np.testing.assert_allclose(numpy_logits(found, weights, ids[:16]), expected, atol=1e-4)

    code, _, err = run("train.export", f"--workdir={workdir}", f"--output={tmp_path / 'average'}", "--ema")
    assert code == 0, err
    average = safetensors.numpy.load_file(tmp_path / "average" / "model.safetensors")["model.norm.weight"]
    np.testing.assert_array_equal(average, np.asarray(leaves(state.ema)["['final_norm']['scale']"]).astype(average.dtype))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--workdir=DIR and --output=DIR are needed"),
        (["--output={tmp}", "--workdir={run}"], "--output: .* is there already"),
        (["--output={tmp}/x", "--workdir={run}", "--dtype=float16"], "dtype='float16' is not one of float32, bfloat16"),
        (["--output={tmp}/x", "--workdir={run}", "--step=7"], "no checkpoint of step 7"),
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
