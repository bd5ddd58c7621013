"""Evaluation of Hugging Face directories: models with losses known in closed form, and a real one against numpy."""

import dataclasses
import itertools
import json
import math
import pathlib
import re

import jax
import numpy as np
import pytest
import tokenizers
from helpers import run
from test_huggingface import numpy_logits, tensors, write
from test_sources import write_megatron

import fp4jax
from fp4jax import bits, recipes
from fp4jax.numerics import Numerics
from train import evaluation, generate, harness, perplexity, preparation, prepared, pretrained, step
from train.errors import InputError
from train.tokenizer import ByteTokenizer

BOS, EOS, VOCAB = 256, 257, 288
FOUND = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "head_dim": 16,
    "num_key_value_heads": 2,
    "intermediate_size": 32,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "rope_theta": 100.0,
}
DOCUMENTS = [
    "in the beginning",
    "a",
    "God created the heaven and the earth",
    "ü",
    "and the earth was without form, and void" * 2,
]
OPTIONS = evaluation.Options()
DIMENSIONS = (((1,), (0,)), ((), ()))


def write_tokenizer(directory, *, post_processor=True):
    """Write bytes as tokens, with <s> put in front of a text and </s> ending it."""
    tokenizer = tokenizers.Tokenizer.from_str(ByteTokenizer().to_json())
    tokenizer.add_special_tokens(["<s>", "</s>"])
    if post_processor:
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", BOS)]
        )
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": {"content": "</s>"}}))


def write_text(directory, documents, name="text"):
    path = directory / f"{name}.jsonl"
    path.write_text("\n".join(json.dumps({"text": document}) for document in documents))
    return str(path)


def bigram(directory, *, seed=0, **changes):
    """Write a Llama that gives log p(next | this) of a random table: one-hot embeddings, blocks that add nothing; return it."""
    found = {**FOUND, "hidden_size": VOCAB, "num_hidden_layers": 1, **changes}
    table = np.random.default_rng(seed).normal(size=(VOCAB, VOCAB)) * 2
    table -= np.log(np.exp(table).sum(1, keepdims=True))
    weights = {name: np.zeros_like(x) for name, x in tensors(found).items()}
    weights |= {name: np.ones_like(x) for name, x in weights.items() if name.endswith("norm.weight")}
    weights["model.embed_tokens.weight"] = np.eye(VOCAB, dtype=np.float32)
    height = 1 / np.sqrt(1 / VOCAB + found["rms_norm_eps"])
    weights["lm_head.weight"] = np.ascontiguousarray(table.T / height, np.float32)
    write(directory, found, weights)
    write_tokenizer(directory)
    return table


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    """(directory, table of log-probabilities)"""
    directory = tmp_path_factory.mktemp("bigram")
    return directory, bigram(directory)


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """A random model: (directory, config.json's content, tensors)."""
    directory, weights = tmp_path_factory.mktemp("real"), tensors(FOUND)
    write(directory, FOUND, weights)
    write_tokenizer(directory)
    return directory, FOUND, weights


def opened(directory, recipe=None):
    return evaluation.open_directory(directory, recipe=recipe, impl=None, dtype="float32")


def streams(documents, *, separate, bos):
    texts = documents if separate else ["\n\n".join(documents)]
    return [[*([BOS] if bos else []), *text.encode()] for text in texts]


# ---- Figures known in closed form ----


@pytest.mark.parametrize(
    ("recipe", "separate", "bos"), [("none", False, "auto"), ("none", True, "no"), ("mxfp4_h16", True, "auto")]
)
def test_a_bigram_model(known, tmp_path, recipe, separate, bos):
    directory, table = known
    model, path = opened(directory, recipe), write_text(tmp_path, DOCUMENTS)
    pairs = [pair for s in streams(DOCUMENTS, separate=separate, bos=bos == "auto") for pair in itertools.pairwise(s)]
    expected = -np.mean([table[pair] for pair in pairs])
    size = sum(len(text.encode()) for text in DOCUMENTS) + (0 if separate else 2 * (len(DOCUMENTS) - 1))
    for window, stride, batch_size in ((0, 0, 8), (16, 5, 3))[recipe != "none" :]:
        options = OPTIONS._replace(window=window, stride=stride, batch_size=batch_size, separate=separate, bos=bos)
        (found,) = evaluation.evaluate(model, [path], options)
        assert found["tokens"] == len(pairs) == (size if bos == "auto" else size - (len(DOCUMENTS) if separate else 1))
        assert found["nats_per_token"] == pytest.approx(expected, rel=2e-6)
        assert found["perplexity"] == pytest.approx(math.exp(expected), rel=2e-5)
        assert found["bits_per_byte"] == pytest.approx(expected / math.log(2), rel=2e-6)  # a byte is a token
        assert (found["dataset"], found["documents"], found["bos"]) == (path, 5, BOS if bos == "auto" else None)
        assert (found["window"], found["stride"]) == (window or 64, stride or 64)
        assert found["joined"] == ("separate" if separate else r"joined by '\n\n'")


def test_several_datasets_are_reported_each(known, tmp_path):
    directory, table = known
    paths = [write_text(tmp_path, DOCUMENTS[i : i + 1], f"text{i}") for i in (0, 2)]
    found = evaluation.evaluate(opened(directory), paths, OPTIONS)
    for path, document, one in zip(paths, (DOCUMENTS[0], DOCUMENTS[2]), found, strict=True):
        (stream,) = streams([document], separate=False, bos=True)
        assert one["dataset"] == path
        assert one["nats_per_token"] == pytest.approx(-np.mean(table[stream[:-1], stream[1:]]), rel=2e-6)
    (both,) = evaluation.evaluate(opened(directory), [str(tmp_path / "text*.jsonl")], OPTIONS)
    assert both["documents"] == 2


def test_the_protocol_takes_the_first_sequences_and_judges_only_all_of_them(known, tmp_path, monkeypatch):
    directory, table = known
    model, text = opened(directory), "In the beginning. " * 10
    path = write_text(tmp_path, [text[:90], text[90:]])
    stream = list(text.encode())[: 2 * 64 + 1]  # no separator, no BOS
    for sequences, target, reached in ((2, 0.1, False), (2, 100.0, True), (3, 100.0, None)):  # there are 2 whole ones
        monkeypatch.setitem(perplexity.PROTOCOLS, "mlperf", perplexity.Protocol(sequences, 64, target))
        (found,) = evaluation.evaluate(model, [path], OPTIONS._replace(protocol="mlperf"))
        assert (found["sequences"], found["tokens"], found["window"], found["stride"]) == (2, 128, 64, 64)
        assert (found["target"], found["reached"], found["bos"], found["bits_per_byte"]) == (target, reached, None, None)
        assert found["nats_per_token"] == pytest.approx(-np.mean(table[stream[:-1], stream[1:]]), rel=2e-6)


# ---- A model that sees its context ----


def brute_force(found, weights, stream, window, stride):
    """Return the loss of each token but the first, given the tokens of the first window that holds it."""
    out = []
    for t in range(1, len(stream)):
        begin = 0
        while t > begin + window:
            begin += stride
        logits = numpy_logits(found, weights, np.array(stream[begin:t]))[-1]
        out.append(np.log(np.exp(logits).sum()) - logits[stream[t]])
    return out


@pytest.mark.parametrize(("window", "stride"), [(12, 12), (12, 5), (16, 1)])
def test_each_token_has_the_context_that_the_window_gives_it(real, tmp_path, window, stride):
    directory, found, weights = real
    documents = ["the heaven and", "x", "and the earth was here"]
    path = write_text(tmp_path, documents)
    for separate in (False, True):
        expected = [
            loss
            for s in streams(documents, separate=separate, bos=True)
            for loss in brute_force(found, weights, s, window, stride)
        ]
        for batch_size in (1, 5):
            options = OPTIONS._replace(window=window, stride=stride, batch_size=batch_size, separate=separate)
            (result,) = evaluation.evaluate(opened(directory), [path], options)
            assert result["tokens"] == len(expected)
            assert result["nats_per_token"] == pytest.approx(np.mean(expected), rel=1e-5)
    one, other = (
        np.mean(brute_force(found, weights, s, window, k))
        for k in (stride, 2)
        for s in [streams(documents, separate=False, bos=True)[0]]
    )
    assert stride == 2 or abs(one - other) > 1e-4  # the tolerance would see another stride


@pytest.mark.parametrize("recipe", ["mxfp4_h16", "fp8_current"])
def test_padding_and_batch_do_not_change_a_document(real, recipe):
    """fp8_current scales a whole sequence: what a document is padded with would show, if it were padded."""
    model = opened(real[0], recipe)
    figures, equal = evaluation.losses(model), step.looks_ahead(model.settings.numerics)
    assert equal == (recipe == "fp8_current")
    texts = perplexity.encode(["the heaven and", "x"], model.tokenizer, separate=True, bos=BOS)
    pieces = perplexity.cut(texts.streams, window=12, stride=12)
    alone = [perplexity.score(figures, [piece], batch_size=8, equal=True) for piece in pieces]
    together = perplexity.score(figures, pieces, batch_size=16, equal=equal)
    np.testing.assert_allclose(together, np.concatenate(alone, axis=1), rtol=2e-6)


def test_looks_ahead_says_which_recipes_see_padding():
    """Other tokens after a position leave its dot as it is to the bit, but where a scale or mean is over all of them."""
    x, w = (jax.random.normal(jax.random.key(seed), shape) for seed, shape in ((0, (64, 128)), (1, (128, 64))))
    other = x.at[32:].multiply(100).at[32:].add(7)
    seen = {}
    for recipe in (recipes.get(name) for name in recipes.ENTRIES):
        numerics = step.eval_numerics(Numerics(recipe))
        if numerics.recipe not in seen:
            key = bits.step_key(0, 0) if numerics.recipe.needs_key else None
            dot = jax.jit(lambda x, r=numerics.recipe, k=key: fp4jax.quantized_dot_general(x, w, DIMENSIONS, recipe=r, key=k))
            seen[numerics.recipe] = bool((dot(x)[:32] != dot(other)[:32]).any())
            assert seen[numerics.recipe] == step.looks_ahead(Numerics(recipe)), str(recipe.fprop)
    assert set(seen.values()) == {True, False}


def test_long_sequences_are_computed_in_blocks_that_divide_them(real):
    settings = opened(real[0]).settings
    for length, blocks in ((64, (0, 0)), (4096, (512, 512)), (4100, (0, 0))):
        model = evaluation.for_length(settings, length).model
        assert (model.attention_block, model.loss_chunk) == blocks
        assert model.attention == ("blockwise" if blocks[0] else "dot_product")


# ---- The entry point ----


def test_the_entry_point_on_another_number_of_devices(real, tmp_path):
    """This process has 8; three do not divide the model's width."""
    path = write_text(tmp_path, DOCUMENTS[:3])
    model, options = opened(real[0], "fp8_current"), OPTIONS._replace(separate=True, window=16, stride=8)
    (here,) = evaluation.evaluate(model, [path], options)
    drawn = generate.generate(model, "In the", max_tokens=5, temperature=1.0, top_k=9, seed=3)
    flags = (f"--hf={real[0]}", "--recipe=fp8_current", f"--data={path}", "--window=16", "--stride=8", "--per_document")
    more = ("--generate=In the", "--max_tokens=5", "--temperature=1", "--top_k=9", "--seed=3")
    code, out, err = run("train.evaluate", *flags, *more, "--batch_size=4", devices=3)
    assert (code, len(out)) == (0, 1), err
    there = json.loads(out[0])
    assert (there["model"], there["recipe"], there["generation"]) == (str(real[0]), "fp8_current", drawn)
    (found,) = there["datasets"]
    for key in ("nats_per_token", "perplexity", "bits_per_byte"):
        assert found.pop(key) == pytest.approx(here[key], rel=1e-6)
    assert found == {key: here[key] for key in found}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--hf={hf}", "--workdir=x"], "--workdir and --hf exclude each other"),
        (["--hf={hf}", "--step=3"], "--step and --ema do not apply to --hf"),
        (["--hf={hf}", "--data=x", "--protocol=mlperf", "--stride=9"], "says how text is cut"),
        (["--hf={hf}", "--data=/nowhere/*", "--generate=x"], "no file matches"),
    ],
)
def test_wrong_flags_are_one_line(real, flags, message):
    code, out, err = run("train.evaluate", *(flag.format(hf=real[0]) for flag in flags))
    assert (code, out) == (2, [])
    assert re.search(message, err[-1]), err


def test_what_does_not_fit_the_model_is_named(real, tmp_path):
    model, text = opened(real[0]), write_text(tmp_path, DOCUMENTS)
    for sources, options, message in [
        ([], {}, "--data=FILES is missing"),
        ([text], {"window": 65}, "window=65 is above the model's max_seq_len=64"),
        ([text], {"window": 8, "stride": 9}, "stride=9 is not between 1 and window=8"),
    ]:
        with pytest.raises(InputError, match=message):
            evaluation.evaluate(model, sources, OPTIONS._replace(**options))
    with pytest.raises(InputError, match="--bos=yes: the tokenizer has no BOS"):
        evaluation.evaluate(model._replace(tokenizer=ByteTokenizer()), [text], OPTIONS._replace(bos="yes"))
    with pytest.raises(InputError, match="is not UTF-8"):
        generate.generate(model, "\udcff")
    with pytest.raises(InputError, match="temperature=nan"):
        generate.generate(model, "x", max_tokens=2, temperature=math.nan)
    with pytest.raises(InputError, match="exceed the model's max_seq_len=64"):
        generate.generate(model, "x", max_tokens=80)
    with pytest.raises(InputError, match="unknown recipe 'mxfp5'"):
        opened(real[0], "mxfp5")
    with pytest.raises(InputError, match=r"/nowhere has no config.json"):
        opened(pathlib.Path("/nowhere"))


# ---- The tokenizer ----


def test_bos_is_that_of_the_post_processor_or_of_the_tokenizers_config(tmp_path):
    bigram(tmp_path)
    tokenizer = pretrained.Tokenizer(tmp_path)
    assert (tokenizer.bos, tokenizer.eos, tokenizer.vocab_size) == (BOS, {EOS}, 258)
    assert tokenizer.decode(tokenizer.encode("naïve")) == "naïve"
    assert tokenizer.encode("ab").tolist() == [97, 98]
    write_tokenizer(tmp_path, post_processor=False)
    assert pretrained.Tokenizer(tmp_path).bos is None
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": {"content": "<s>"}, "add_bos_token": True}))
    assert pretrained.Tokenizer(tmp_path).bos == BOS
    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "add_bos_token": False}))
    left_out = pretrained.Tokenizer(tmp_path)
    assert (left_out.bos, left_out.front(), left_out.front("yes"), left_out.front("no")) == (None, None, BOS, None)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    assert pretrained.Tokenizer(tmp_path).eos == {5, 6}
    for wrong in (["257"], [257, [1]], "257", -1):
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": wrong}))
        with pytest.raises(InputError, match=r"eos_token_id .* holds something that is no token id"):
            pretrained.Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(InputError, match=r"tokenizer.json cannot be read"):
        pretrained.Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(InputError, match=r"has no tokenizer.json"):
        pretrained.Tokenizer(tmp_path)


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(tmp_path):
    bigram(tmp_path)
    found = {**FOUND, "vocab_size": 256}
    write(tmp_path, found, tensors(found))
    with pytest.raises(InputError, match=r"tokenizer.json has 258 ids, the model 256"):
        opened(tmp_path)


# ---- Generation ----


def test_greedy_generation_follows_the_likeliest_token(known):
    directory, table = known
    model = opened(directory)
    expected = [ord("I")]
    while len(expected) < 21 and expected[-1] != EOS:
        expected.append(int(np.argmax(table[expected[-1]])))
    found = generate.generate(model, "I", max_tokens=20)
    assert found["tokens"] == len(expected) - 1
    assert found["continuation"] == model.tokenizer.decode([t for t in expected[1:] if t != EOS])
    assert generate.generate(model, "I", max_tokens=20, temperature=1.0, top_k=1) == {**found, "temperature": 1.0, "top_k": 1}


def test_greedy_generation_sees_all_of_the_text(real):
    directory, found, weights = real
    model, tokens = opened(directory), [BOS, *b"In the"]
    for _ in range(6):
        tokens.append(int(np.argmax(numpy_logits(found, weights, np.array(tokens))[-1])))
    result = generate.generate(model, "In the", max_tokens=6)
    assert result["continuation"] == model.tokenizer.decode(tokens)[len("In the") :]
    without = [*b"In the"]
    for _ in range(6):
        without.append(int(np.argmax(numpy_logits(found, weights, np.array(without))[-1])))
    assert without != tokens[1:]
    result = generate.generate(model, "In the", max_tokens=6, bos="no")
    assert result["continuation"] == model.tokenizer.decode(without)[len("In the") :]


def test_sampling_follows_the_seed_the_distribution_and_top_k(known):
    directory, table = known
    model = opened(directory)
    drawn = [
        generate.generate(model, "I", max_tokens=1, temperature=0.7, top_k=3, seed=seed)["continuation"] for seed in range(300)
    ]
    best = np.argsort(table[ord("I")])[::-1][:3]
    shares = np.exp(table[ord("I")][best] / 0.7)
    shares /= shares.sum()
    counts = [drawn.count(model.tokenizer.decode([ord("I"), int(t)])[1:]) for t in best]
    assert sum(counts) == 300
    assert np.abs(np.array(counts) / 300 - shares).max() < 5 * 0.5 / np.sqrt(300)
    again = generate.generate(model, "I", max_tokens=1, temperature=0.7, top_k=3, seed=7)
    assert again["continuation"] == drawn[7]


def test_generation_ends_at_eos(tmp_path):
    bigram(tmp_path)
    found = json.loads((tmp_path / "config.json").read_text())
    table = np.full((VOCAB, VOCAB), -20.0)
    table[ord("a"), ord("b")] = table[ord("b"), EOS] = 0.0
    weights = {name: np.zeros_like(x) for name, x in tensors(found).items()}
    weights |= {name: np.ones_like(x) for name, x in weights.items() if name.endswith("norm.weight")}
    weights |= {
        "model.embed_tokens.weight": np.eye(VOCAB, dtype=np.float32),
        "lm_head.weight": np.ascontiguousarray(table.T, np.float32),
    }
    write(tmp_path, found, weights)
    result = generate.generate(opened(tmp_path), "a", max_tokens=10)
    assert (result["continuation"], result["tokens"], result["ended"]) == ("b", 2, True)


# ---- lm-evaluation-harness ----


class Request:
    def __init__(self, *args):
        self.args = args


def test_the_harness_scores_continuations_and_texts(real):
    directory, found, weights = real
    answers = harness.Harness(opened(directory), batch_size=3)
    long = "x" * 70

    def of_tokens(tokens, scored):
        logits = numpy_logits(found, weights, np.array(tokens[:-1]))
        logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        places = range(scored - 1, len(tokens) - 1)
        return sum(logp[i, tokens[i + 1]] for i in places), all(np.argmax(logp[i]) == tokens[i + 1] for i in places)

    best = chr(int(np.argmax(numpy_logits(found, weights, np.array([BOS, *b"the"]))[-1][:128])))
    cases = [("the ", "cat"), ("", "dog"), (long, "yz"), ("the", best)]
    expected = [
        of_tokens([BOS, *b"the cat"], 4),
        of_tokens([BOS, *b"dog"], 1),
        of_tokens([*(long + "yz").encode()][-65:], 63),
        of_tokens([BOS, *("the" + best).encode()], 4),
    ]
    got = answers.loglikelihood([Request(*case) for case in cases])
    for one, other in zip(got, expected, strict=True):
        assert one[0] == pytest.approx(other[0], rel=1e-5)
        assert one[1] == other[1]
    text = [BOS, *("abc" * 50).encode()]  # 150 tokens after BOS: 64, 64, and 22 with the context of a full window
    expected = of_tokens(text[:65], 1)[0] + of_tokens(text[64:129], 1)[0] + of_tokens(text[86:151], 43)[0]
    assert answers.loglikelihood_rolling([Request("abc" * 50), Request("a")]) == pytest.approx(
        [expected, of_tokens([BOS, ord("a")], 1)[0]], rel=1e-5
    )


def test_the_harness_generates_until_a_string(known):
    directory, _ = known
    model = opened(directory)
    whole = generate.generate(model, "I", max_tokens=12)["continuation"]
    answers = harness.Harness(model)
    assert answers.generate_until([Request("I", {"max_gen_toks": 12})]) == [whole]
    assert answers.generate_until([Request("I", {"max_gen_toks": 12, "until": [whole[3:5]]})]) == [
        whole[: whole.index(whole[3:5])]
    ]


def test_the_harness_keeps_the_last_tokens_of_a_long_text_and_draws_each_request_anew(known):
    answers = harness.Harness(opened(known[0]))
    long = [Request(text, {"max_gen_toks": 8}) for text in ("é" * 64, "é")]  # 64 − 8 − 1 bytes are left: half a letter first
    first, second = answers.generate_until(long)
    assert first == second  # a bigram model: the last byte decides
    drawn = answers.generate_until([Request("I", {"max_gen_toks": 12, "do_sample": True, "temperature": 1.0})] * 3)
    assert len(set(drawn)) == 3


def test_the_harness_answers_an_empty_continuation(known):
    answers = harness.Harness(opened(known[0])._replace(tokenizer=ByteTokenizer(end=True)))
    (empty, greedy), (other, _) = answers.loglikelihood([Request("a", ""), Request("abc", "d")])
    assert (empty, greedy) == (0, True)
    assert other < 0
    assert answers.loglikelihood([Request("", "")]) == [(0, True)]


def test_without_lm_eval_tasks_are_refused_in_one_line(known, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "lm_eval", None)
    with pytest.raises(InputError, match=r"--tasks needs lm-evaluation-harness: pip install lm-eval==0.4.13"):
        harness.run(opened(known[0]), ["hellaswag"], limit=1, batch_size=1)


def test_prepared_data_give_their_validation_split(known, tmp_path):
    """The figures of the same documents as text; BOS only where the data have none; another tokenizer is refused."""
    model = opened(known[0])
    documents = [f"document {i} " + "word " * i for i in range(12)]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps({"text": d}) + "\n" for d in documents))
    (tmp_path / "v.jsonl").write_text("".join(json.dumps({"text": d}) + "\n" for d in documents[:5]))
    (tmp_path / "tokenizer.json").write_text(model.tokenizer.to_json())
    plan = preparation.make_plan(
        train=f"{tmp_path}/t.jsonl",
        val=f"{tmp_path}/v.jsonl",
        tokenizer=str(tmp_path / "tokenizer.json"),
        marks="none",
        text_key="text",
        val_fraction=0.0,
    )
    preparation.prepare(plan, tmp_path / "prepared", workers=1)
    options = OPTIONS._replace(separate=True)
    (as_text,) = evaluation.evaluate(model, [str(tmp_path / "v.jsonl")], options)
    (as_ids,) = evaluation.evaluate(model, [str(tmp_path / "prepared")], options)
    assert as_ids == {**as_text, "dataset": str(tmp_path / "prepared")}
    other = preparation.make_plan(
        train=f"{tmp_path}/t.jsonl", val="", tokenizer="bpe:270", marks="none", text_key="text", val_fraction=0.3
    )
    preparation.prepare(other, tmp_path / "other", workers=1)
    with pytest.raises(InputError, match="other was prepared with another tokenizer than the model's"):
        evaluation.evaluate(model, [str(tmp_path / "other")], options)


def test_documents_that_are_kept_apart_predict_no_first_token(known, tmp_path):
    """Of an EOS only what comes before it is predicted, whatever the windows: the loss is that of training's validation."""
    directory, table = known
    write_text(tmp_path, DOCUMENTS, "t")
    write_tokenizer(tmp_path)
    texts = {"train": f"{tmp_path}/t.jsonl", "val": "", "text_key": "text", "val_fraction": 0.5}
    plan = preparation.make_plan(**texts, tokenizer=str(tmp_path / "tokenizer.json"), marks="eos")
    preparation.prepare(plan, tmp_path / "prepared", workers=1)
    ids = prepared.open_directory(tmp_path / "prepared").ids["val"].tolist()
    pairs = [(a, b) for a, b in itertools.pairwise(ids) if a != EOS]
    assert ids.count(EOS) > 1
    model = opened(directory)
    apart = dataclasses.replace(model.settings.model, document_end=EOS)
    model = model._replace(settings=dataclasses.replace(model.settings, model=apart))
    for window, stride in ((64, 64), (7, 3)):
        options = OPTIONS._replace(window=window, stride=stride, bos="no")
        (found,) = evaluation.evaluate(model, [str(tmp_path / "prepared")], options)
        assert found["tokens"] == len(pairs)
        assert found["nats_per_token"] == pytest.approx(-np.mean([table[a, b] for a, b in pairs]), rel=1e-5)
    with pytest.raises(InputError, match="prepared with documents='eos', --protocol=mlperf has documents='none'"):
        evaluation._read(model, str(tmp_path / "prepared"), OPTIONS._replace(protocol="mlperf"))


def test_token_ids_without_a_text_have_no_bytes(known, tmp_path):
    text = write_text(tmp_path, DOCUMENTS, "t")
    write_megatron(tmp_path / "ids.idx", [[[65, 66, 67]], [[68, 69]]])
    write_tokenizer(tmp_path)
    for val, known_bytes in ((text, True), (f"{text},{tmp_path}/ids.idx", False)):
        (tmp_path / "train.jsonl").write_text('{"text": "abc"}')
        plan = preparation.make_plan(
            train=f"{tmp_path}/train.jsonl",
            val=val,
            tokenizer=str(tmp_path / "tokenizer.json"),
            marks="eos",
            text_key="text",
            val_fraction=0.0,
        )
        output = tmp_path / f"prepared{known_bytes}"
        preparation.prepare(plan, output, workers=1)
        (found,) = evaluation.evaluate(opened(known[0]), [str(output)], OPTIONS)
        assert (found["bits_per_byte"] is not None) == known_bytes
