"""The config: every leaf is a flag, the recipe's leaves go on top of its base, and bad input raises InputError in one line.

The entry points turn an InputError into one line on stderr and exit code 2 (test_cli.py), so most bad input is tried here.
"""

import dataclasses
import json
import pathlib
import runpy

import pytest
from helpers import argv, parse, raw_config, settings, snapshot, write_corpus

from fp4jax import recipes
from fp4jax.recipe import Recipe, leaves, override
from train import config, loop, sharding, step
from train.errors import InputError

CONFIGS = sorted((pathlib.Path(__file__).parent.parent / "configs").glob("*.py"))


@pytest.fixture
def corpus(tmp_path):
    return write_corpus(tmp_path)


# ---- Leaves ----


def flat(tree, prefix=""):
    if not isinstance(tree, dict):
        return {prefix: tree}
    return {k: v for key, value in tree.items() for k, v in flat(value, f"{prefix}.{key}".lstrip(".")).items()}


def changed(path, value):
    """Return another value of the leaf's type, as a flag's text and as the config then holds it."""
    if type(value) is bool:
        return str(not value), not value
    if type(value) is int:
        return str(value + 3), value + 3
    if type(value) is float:
        return repr(value / 2 + 0.125), value / 2 + 0.125
    if type(value) is tuple:
        return "('a','b')", ("a", "b")
    if value is None:  # a recipe leaf
        leaf = path.rsplit(".", 1)[-1]
        numbers = {"block": 32, "across": 16, "size": 16, "keep_last": 1}
        if leaf == "pad":
            return "true", True
        return (str(numbers[leaf]), numbers[leaf]) if leaf in numbers else ("text", "text")
    return "text", "text"


def test_every_leaf_is_a_flag():
    before = flat(config.default_config().to_dict())
    assert {path.split(".")[0] for path in before} == {"model", "data", "optimizer", "quant", "train", "mesh", "diagnose"}
    changes = {path: changed(path, value) for path, value in before.items()}
    result = parse("--config=configs/tiny_cpu.py", *(f"--config.{path}={text}" for path, (text, _) in changes.items()))
    assert flat(result.to_dict()) == {path: value for path, (_, value) in changes.items()}


def test_quant_has_every_leaf_of_a_recipe_as_an_unset_placeholder():
    quant = flat(config.default_config().quant.to_dict())
    paths = [path for path, _ in leaves(Recipe())]
    assert len(paths) == 48
    assert {path for path, value in quant.items() if value is None} == {*paths, "keep_last"}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("fprop.lhs.block", "x"),
        ("fprop.lhs.block", 1.5),
        ("wgrad.rotation.size", "x"),
        ("dgrad.pad", 3),
        ("dgrad.rhs.format", 3),
    ],
)
def test_recipe_leaves_are_typed(path, value):
    with pytest.raises(TypeError):
        config.default_config().quant.update_from_flattened_dict({path: value})


# finetune needs a directory: tests/test_pretrained.py.
@pytest.mark.parametrize("path", [path for path in CONFIGS if path.stem != "finetune"], ids=lambda path: path.stem)
def test_config_files_resolve_and_say_what_they_are(path):
    module = runpy.run_path(str(path))
    docstring = module["__doc__"]
    assert "python -m train." in docstring
    assert f"configs/{path.name}" in docstring
    default = module["get_config"]()
    assert default.is_locked
    config.resolve(default)


def test_tiny_cpu_takes_every_recipe():
    get_config = runpy.run_path("configs/tiny_cpu.py")["get_config"]
    for name in recipes.names():
        assert config.resolve(get_config(name)).recipe_name == name


# ---- The recipe ----


def test_set_leaves_go_on_top_of_the_base(corpus):
    s = settings(corpus, quant__recipe="mxfp4_h16", quant__wgrad__rotation__size=32, quant__fprop__lhs__rounding="sr")
    base = recipes.get("mxfp4_h16")
    assert s.numerics.recipe.wgrad.rotation.size == 32
    assert s.numerics.recipe.fprop.lhs == dataclasses.replace(base.fprop.lhs, rounding="sr")
    assert (s.numerics.recipe.fprop.rhs, s.numerics.recipe.dgrad) == (base.fprop.rhs, base.dgrad)
    assert s.recipe_name == "mxfp4_h16*"


def test_a_leaf_set_to_what_the_base_says_changes_nothing(corpus):
    assert settings(corpus, quant__recipe="mxfp4_sr", quant__fprop__lhs__rounding="sr").recipe_name == "mxfp4_sr"


def test_a_false_or_zero_leaf_counts_as_set(corpus):
    s = settings(corpus, quant__recipe="mxfp4_h16", quant__fprop__rotation__size=0)
    assert s.numerics.recipe.fprop == recipes.get("mxfp4").fprop


def test_an_unknown_recipe_as_the_argument_is_named():
    with pytest.raises(InputError, match="unknown recipe 'mxfp5'"):
        config.resolve(parse("--config=configs/tiny_cpu.py:mxfp5"))


def test_the_recipe_of_the_argument_yields_to_the_flag():
    assert parse("--config=configs/tiny_cpu.py:mxfp4", "--config.quant.recipe=none").quant.recipe == "none"


def test_settings_survive_json(corpus):
    s = settings(corpus, quant__recipe="mxfp4_rht16", quant__dgrad__lhs__rounding="sr", quant__exempt=("lm_head", "mlp/*"))
    assert config.from_json_dict(json.loads(json.dumps(s.to_dict()))) == s


# ---- Bad input: flags ----


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config=configs/tiny_cpu.py", "--config.nope=1"], "no such config key.*nope"),
        (["--config=configs/tiny_cpu.py", "--config.train.nope=1"], "no such config key.*nope"),
        (["--config=configs/tiny_cpu.py", "--config.quant.fprop.lhs.nope=1"], "nope"),
        (["--config=configs/tiny_cpu.py", "--config.train.steps=1.5"], "train.steps=1.5"),
        (["--config=configs/tiny_cpu.py", "--config.optimizer.peak_lr=fast"], "peak_lr=fast"),
        (["--config=configs/tiny_cpu.py", "--config.quant.strict=maybe"], "strict=maybe"),
        (["--config=configs/tiny_cpu.py", "--config.train=3"], "config.train=3"),
        (["--config=configs/nope.py"], "nope.py"),
        (["--config=configs"], "configs"),
        (["--config.train.steps=3"], "config.train.steps"),
        (["--bogus=1"], "bogus"),
        (["word"], "word"),
    ],
)  # fmt: skip
def test_bad_flags(arguments, message):
    with pytest.raises(InputError, match=message):
        config.resolve(parse(*arguments))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def get_config(): return 1 / 0", "ZeroDivisionError"),
        ("def get_config(): return undefined", "NameError.*undefined"),
        ("def get_config(): raise RuntimeError('two\\nlines')", "two\nlines"),
        ("x = = 3", "syn.py|syntax"),
        ("import no_such_module", "no_such_module"),
        ("x = 1", "get_config"),
        ("from train.config import default_config as get_config\nc = get_config()\nc.train.steps = 'x'", "steps"),
        ("from train.config import default_config as get_config\nc = get_config()\nc.lock()\nc.train.stepz = 1", "stepz"),
        ("from train.errors import InputError\nraise InputError('says so')", "^says so"),
    ],
)
def test_config_files_with_errors(tmp_path, source, message):
    path = tmp_path / "broken.py"
    path.write_text(source)
    with pytest.raises(InputError, match=message):
        parse(f"--config={path}")


# ---- Bad input: values ----

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimizer__peak_lr": NAN}, "peak_lr=nan"),
        ({"optimizer__peak_lr": INF}, "peak_lr=inf"),
        ({"optimizer__warmup_steps": 12}, "warmup_steps=12"),
        ({"train__steps": 0}, "train.steps=0"),
        ({"train__batch_size": 0}, "batch_size=0"),
        ({"train__accumulation": 3}, "batch_size=8.*accumulation=3"),
        ({"train__eval_every": -1}, "eval_every=-1"),
        ({"train__target_loss": NAN}, "target_loss=nan"),
        ({"train__target_loss": 2.0, "train__eval_every": 0}, "target_loss=2.0 has no effect"),
        ({"train__keep_every": 5, "train__keep_checkpoints": 0}, "keep_every=5 has no effect"),
        ({"train__spike_window": 64}, "spike_window=64 has no effect"),
        ({"train__steps": 2**31}, "train.steps=2147483648 is out of range"),
        ({"model__vocab_size": 10**12}, "vocab_size=1000000000000 is not below"),
        ({"quant__schedule": ((6, "bf16"),), "train__steps": 6}, "step 6 is not before the run's end, train.steps=6"),
        ({"optimizer__eps": 1e-40}, "eps=1e-40 must be positive in float32"),
        ({"optimizer__peak_lr": 1e-46, "optimizer__end_lr": 0.0}, "peak_lr=1e-46"),
        ({"optimizer__b2": 1 - 1e-9}, "b2=0.999999999 must be below 1 in float32"),
        ({"train__seed": -1}, "seed=-1"),
        ({"train__seed": 2**32}, "seed="),
        ({"quant__recipe": "mxfp5"}, "unknown recipe 'mxfp5'.*mxfp4"),
        ({"quant__recipe": ""}, "unknown recipe"),
        ({"quant__impl": "cuda"}, "unknown impl='cuda'"),
        ({"quant__exempt": (3,)}, "exempt="),
        ({"quant__fprop__lhs__block": 48}, "block=48"),
        ({"quant__fprop__lhs__rounding": "up"}, "rounding='up'"),
        ({"quant__fprop__lhs__format": "fp3"}, "fp3"),
        ({"quant__fprop__rotation__size": 24}, "size=24"),
        ({"quant__recipe": "none", "quant__fprop__rotation__size": 16}, "rotation"),
        ({"model__vocab_size": 255}, "vocab_size=255.*256"),
        ({"data__tokenizer": "bpe:300"}, "vocab_size=256.*300"),
        ({"data__tokenizer": "words"}, "words"),
        ({"data__seq_len": 65}, "seq_len=65.*max_seq_len=64"),
        ({"data__seq_len": 0}, "seq_len=0"),
        ({"data__files": ""}, "data.files=''"),
        ({"data__source": "web"}, "'web'"),
        ({"model__loss_chunk": 24}, "seq_len=32.*loss_chunk=24"),
        ({"model__attention": "blockwise", "model__attention_block": 24}, "seq_len=32.*attention_block=24"),
        ({"model__n_heads": 3}, "n_heads=3"),
        ({"model__dtype": "float8"}, "dtype='float8'"),
        ({"mesh__tensor": 0}, "mesh.tensor=0"),
        ({"mesh__data": -1}, "mesh.data=-1"),
    ],
)
def test_bad_values(corpus, changes, message):
    with pytest.raises(InputError, match=message):
        settings(corpus, **changes)


def test_a_section_of_another_type_and_an_unknown_key_are_refused(corpus):
    raw = raw_config(corpus)
    with raw.unlocked():
        raw.train.nope = 1
    with pytest.raises(InputError, match="nope"):
        config.resolve(raw)


# ---- Bad input: what must fit together, before anything is compiled or written ----


@pytest.fixture
def no_compile(monkeypatch):
    def refuse(*_args, **_kwargs):
        raise AssertionError("compiled before the input was checked")

    for name in ("init_state", "make_train_step", "make_eval_step"):
        monkeypatch.setattr(step, name, refuse)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model__d_ff": 80}, "d_ff.*80 is not a multiple of 32"),
        ({"model__d_ff": 80, "quant__recipe": "mxfp4_fprop"}, "d_ff.*80 is not a multiple of 32"),
        ({"model__d_model": 72, "model__d_ff": 96}, "72 is not a multiple of 32"),
        ({"data__seq_len": 20, "train__batch_size": 2}, "40 is not a multiple of 32"),
        ({"quant__exempt": (), "model__vocab_size": 260}, "260 is not a multiple of 32"),
        ({"mesh__fsdp": 3}, "d_model=64.*3"),
        ({"mesh__fsdp": 3, "quant__strict": False}, "d_model=64.*3"),
        ({"mesh__data": 16}, "data=16.*8 devices"),
        ({"mesh__data": 8, "train__accumulation": 2}, "microbatch of 4.*8"),
        ({"mesh__tensor": 4, "mesh__data": 2}, "n_kv_heads=2.*4"),
        ({"mesh__tensor": 2, "model__d_ff": 96}, "d_ff.*48 is not a multiple of 32"),
        ({"mesh__context": 2}, "attn/q wgrad: positions per device = 16 is not a multiple of 32"),
        ({"mesh__data": 8, "data__seq_len": 16}, "tokens per device = 16 is not a multiple of 32"),
        ({"data__files": "/nowhere/*.txt"}, "no file matches '/nowhere"),
    ],
)
def test_what_does_not_fit_is_refused_before_a_compile(corpus, tmp_path, no_compile, changes, message):
    workdir = tmp_path / "run"
    with pytest.raises(InputError, match=message):
        loop.prepare(settings(corpus, **changes), workdir)
    assert not workdir.exists()


@pytest.mark.parametrize("text", ["", "ab", "one line of text"])
def test_a_corpus_that_is_too_small(tmp_path, text):
    (tmp_path / "small.txt").write_text(text)
    with pytest.raises(InputError):
        loop.prepare(settings(tmp_path / "small.txt"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_without_strict_ragged_gemms_stay_plain_and_the_census_says_so(corpus, tmp_path):
    _, _, census = loop.prepare(settings(corpus, model__d_ff=80, quant__strict=False), tmp_path / "run")
    down = {row["gemm"]: row for row in census if row["module"].endswith("mlp/down")}
    assert down["fprop"]["impl"] == "lax"
    assert "80 is not a multiple of 32" in down["fprop"]["exempt"]
    assert (down["dgrad"]["impl"], down["dgrad"]["exempt"]) == ("reference", "")


@pytest.mark.parametrize("make", [lambda p: p / "corpus.txt", lambda p: p / "corpus.txt" / "run", lambda _: "/proc/run"])
def test_a_workdir_that_cannot_be_written(corpus, tmp_path, make):
    before = snapshot(tmp_path)
    with pytest.raises(InputError, match=r"cannot be (written|read)"):
        loop.prepare(settings(corpus), pathlib.Path(make(tmp_path)))
    assert snapshot(tmp_path) == before


# ---- Rules, kept blocks, schedules ----


def test_rules_schedule_and_kept_blocks_resolve_and_round_trip(corpus):
    s = settings(
        corpus,
        quant__recipe="mxfp4_h16",
        quant__rules=(("mlp/down", "bf16"), ("layers/0/*", ":fprop=fp8_current")),
        quant__schedule=((5, "fp8_delayed"), (9, "mxfp4:fprop=bf16,dgrad.lhs.rounding=sr")),
        quant__keep_last=1,
        quant__wgrad__rotation__size=32,
    )
    n, base = s.numerics, s.numerics.recipe
    assert base == override(recipes.get("mxfp4_h16"), {"wgrad.rotation.size": 32})
    assert n.rules[0] == ("mlp/down", recipes.get("bf16"))
    assert n.rules[1][1] == dataclasses.replace(base, fprop=recipes.get("fp8_current").fprop)  # on top of the run's own recipe
    assert (n.keep_last, n.n_layers, s.recipe_name) == (1, s.model.n_layers, "mxfp4_h16*")
    names = [s.phase(step).recipe_name for step in (0, 4, 5, 8, 9, 10**6)]
    assert names == ["mxfp4_h16*"] * 2 + ["fp8_delayed"] * 2 + ["mxfp4:fprop=bf16,dgrad.lhs.rounding=sr"] * 2
    last = s.phase(9).numerics
    assert (last.rules, last.keep_last) == (n.rules, 1)
    assert (last.recipe.fprop.lhs.format, last.recipe.dgrad.lhs.rounding, last.recipe.wgrad.lhs.format) == (
        "bf16",
        "sr",
        "mxfp4",
    )
    assert config.from_json_dict(json.loads(json.dumps(s.to_dict()))) == s


def test_a_recipe_keeps_the_blocks_its_paper_keeps(corpus):
    kept = lambda **changes: settings(corpus, quant__recipe="nvidia_nvfp4", **changes).numerics.keep_last  # noqa: E731
    assert kept() == 1  # 15 % of two, rounded up
    assert kept(quant__keep_last=0) == 0
    assert kept(model__n_layers=20) == 3
    assert settings(corpus, quant__recipe="mxfp4").numerics.keep_last == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quant__rules": (("mlp/dwn", "bf16"),)}, "rule 'mlp/dwn' matches no layer"),
        ({"quant__rules": (("mlp/*", "mxfp5"),)}, "unknown recipe 'mxfp5'"),
        ({"quant__rules": (("mlp/*", ":fprop.lhs.nope=1"),)}, "unknown recipe leaf 'fprop.lhs.nope'"),
        ({"quant__rules": (("mlp/*", ":fprop"),)}, "'fprop' in recipe ':fprop' is not leaf=value"),
        ({"quant__rules": ("mlp/*", "bf16")}, "quant.rules=.*must hold .pattern, recipe. pairs"),
        ({"quant__exempt": ("lm_haed",)}, "exempt pattern 'lm_haed' matches no layer"),
        ({"quant__schedule": ((5, "bf16"), (5, "mxfp4"))}, r"the steps \[5, 5\] must be positive and rise"),
        ({"quant__schedule": ((0, "bf16"),)}, "must be positive"),
        ({"quant__schedule": (("5", "bf16"),)}, "must hold .step, recipe. pairs"),
        ({"quant__keep_last": 3}, "do not fit 2 blocks"),
        ({"quant__residuals": "codes"}, "unknown residuals='codes'"),
        ({"model__remat": "packed"}, "saves nothing without quant.residuals"),
        (
            {"quant__recipe": "fp8_delayed", "quant__exempt": (), "model__loss_chunk": 16},
            "loss_chunk does not go with delayed scaling of lm_head",
        ),
    ],
)
def test_bad_rules_and_schedules(corpus, changes, message):
    with pytest.raises(InputError, match=message):
        settings(corpus, **changes)


@pytest.mark.parametrize(
    "changes", [{"quant__schedule": ((5, "bf16"),)}, {"quant__rules": (("mlp/*", "bf16"),)}, {"quant__keep_first": 1}]
)
def test_another_schedule_or_rule_is_another_run(prepared, changes):
    corpus, workdir = prepared
    with pytest.raises(InputError, match=r"belongs to another run.*quant\."):
        loop.prepare(settings(corpus, **changes), workdir)


# ---- Bad input: a workdir of something else ----


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A workdir with its config.json and census.json; loop.prepare over another one must leave it as it is."""
    directory = tmp_path_factory.mktemp("prepared")
    corpus = write_corpus(directory)
    loop.prepare(settings(corpus), directory / "run")
    return corpus, directory / "run"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model__d_ff": 64}, "model.d_ff: 128 → 64"),
        ({"quant__recipe": "mxfp4"}, "quant.recipe: mxfp4_h16 → mxfp4"),
        ({"quant__fprop__lhs__rounding": "sr"}, "quant.recipe: mxfp4_h16 → mxfp4_h16\\*"),
        ({"quant__exempt": ()}, "quant.exempt"),
        ({"train__seed": 1}, "train.seed: 0 → 1"),
        ({"train__batch_size": 16}, "train.batch_size: 8 → 16"),
        ({"optimizer__peak_lr": 0.02}, "optimizer.peak_lr"),
        ({"train__steps": 20}, "optimizer.decay_steps: 12 → 20"),
        ({"data__val_fraction": 0.1}, "data.val_fraction"),
        ({"model__d_ff": 64, "train__seed": 1, "train__batch_size": 16, "data__seq_len": 16}, "and 1 more"),
    ],
)
def test_the_workdir_of_another_run(prepared, changes, message):
    corpus, workdir = prepared
    before = snapshot(workdir)
    with pytest.raises(InputError, match=f"(?s)belongs to another run.*{message}"):
        loop.prepare(settings(corpus, **changes), workdir)
    assert snapshot(workdir) == before


def test_the_workdir_of_other_data(prepared, tmp_path):
    _, workdir = prepared
    before = snapshot(workdir)
    with pytest.raises(InputError, match="other data"):
        loop.prepare(settings(write_corpus(tmp_path, seed=1)), workdir)
    assert snapshot(workdir) == before


def test_the_dtype_of_the_sum_of_gradients_is_one_of_three_and_stays(prepared):
    corpus, workdir = prepared
    with pytest.raises(InputError, match=r"train.grad_reduce_dtype='float16' is not one of auto, float32, bfloat16"):
        settings(corpus, train__grad_reduce_dtype="float16")
    with pytest.raises(InputError, match=r"belongs to another run.*train.grad_reduce_dtype: auto → float32"):
        loop.prepare(settings(corpus, train__grad_reduce_dtype="float32"), workdir)


def test_a_run_of_a_version_without_an_option_had_its_default(prepared, tmp_path):
    corpus, workdir = prepared
    stored = json.loads((workdir / "config.json").read_text())
    for name in ("name", "muon_rms", "ema_decay"):
        del stored["optimizer"][name]
    (tmp_path / "config.json").write_text(json.dumps(stored))
    with pytest.raises(InputError, match=r"belongs to another run.*optimizer.ema_decay: 0.0 → 0.9"):
        loop.prepare(settings(corpus, optimizer__ema_decay=0.9), tmp_path)
    loop.prepare(settings(corpus), tmp_path)


def test_what_may_change_when_a_run_is_resumed(prepared, tmp_path):
    corpus, workdir = prepared
    copy = tmp_path / "elsewhere.txt"
    copy.write_bytes(corpus.read_bytes())
    changes = {"optimizer__decay_steps": 12, "train__steps": 11, "train__eval_every": 2, "train__checkpoint_every": 1}
    loop.prepare(settings(copy, mesh__data=2, **changes), workdir)
    loop.prepare(settings(corpus), workdir)


FOREIGN = {
    "nothing": {"config.json": "{}"},
    "other keys": {"config.json": '{"name": "vite", "run": 3}'},
    "a list": {"config.json": "[1, 2]"},
    "no JSON": {"config.json": "learning_rate: 3"},
    "no text": {"config.json": b"\xff\xfe\x00"},
    "metrics without a config": {"metrics.jsonl": '{"step": 9, "loss": 1}\n'},
    "checkpoints without a config": {"checkpoints/9/state": "x"},
}


@pytest.mark.parametrize("files", FOREIGN.values(), ids=FOREIGN)
def test_a_directory_of_another_program(corpus, tmp_path, files):
    workdir = tmp_path / "foreign"
    for name, content in files.items():
        path = workdir / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    before = snapshot(workdir)
    with pytest.raises(InputError, match="foreign"):
        loop.prepare(settings(corpus), workdir)
    assert snapshot(workdir) == before


@pytest.mark.parametrize("run", [None, 3, {}, {"data_fingerprint": None}])
def test_a_config_json_without_its_fingerprint(corpus, tmp_path, run):
    loop.prepare(settings(corpus), tmp_path / "run")
    path = tmp_path / "run" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "run": run}))
    with pytest.raises(InputError, match="other data"):
        loop.prepare(settings(corpus), tmp_path / "run")


@pytest.mark.parametrize("section", ["model", "data", "optimizer", "train", "mesh", "diagnose", "quant"])
@pytest.mark.parametrize("damage", [None, 3, [], {"nope": 1}, "x", "missing"])
def test_a_damaged_config_json_is_refused_by_evaluation(corpus, section, damage):
    stored = settings(corpus).to_dict()
    stored[section] = damage
    if damage == "missing":
        del stored[section]
        if section == "diagnose":  # runs of older versions have none
            return
    with pytest.raises(InputError, match=r"config\.json"):
        config.from_json_dict(stored)


# ---- Seeds ----


def test_seeds_give_different_weights(corpus):
    s = settings(corpus, train__steps=1, optimizer__warmup_steps=0)
    kernels = []
    for seed in (0, 1, 2**32 - 1):
        with_seed = dataclasses.replace(s, train=dataclasses.replace(s.train, seed=seed))
        mesh = sharding.make_mesh(s.mesh)
        kernels.append(float(step.init_state(with_seed, mesh).params["lm_head"]["kernel"][0, 0]))
    assert len(set(kernels)) == 3


def test_flags_of_the_tests_say_what_their_config_says(corpus):
    arguments = [a for a in argv(corpus, "unused") if not a.startswith("--workdir")]
    assert config.resolve(parse(*arguments)) == settings(corpus)
