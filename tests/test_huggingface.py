"""Models in Hugging Face's layout against a Llama written in numpy from their tensors alone; names, shapes and refusals."""

import json
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from models import huggingface, llama

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
BASE = {
    "model_type": "llama",
    "vocab_size": 37,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100.0,
    "hidden_act": "silu",
}
MODELS = {
    "grouped": {},
    "multi-query": {"num_key_value_heads": 1},
    "multi-head": {"num_key_value_heads": None},
    "tied": {"tie_word_embeddings": True},
    "wide heads": {"head_dim": 12},
    "llama3": {"rope_scaling": LLAMA3},
    "linear": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "transformers 5": {"rope_parameters": {**LLAMA3, "rope_theta": 50.0}, "rope_theta": None},
}


def tensors(found, *, seed=0, dtype=np.float32):
    """Return random tensors of a config.json's model."""
    draw = np.random.default_rng(seed)
    d, f, heads = found["hidden_size"], found["intermediate_size"], found["num_attention_heads"]
    size = found.get("head_dim") or d // heads
    kv = (found.get("num_key_value_heads") or heads) * size
    out = {"model.embed_tokens.weight": (found["vocab_size"], d), "model.norm.weight": (d,)}
    if not found.get("tie_word_embeddings"):
        out["lm_head.weight"] = (found["vocab_size"], d)
    for i in range(found["num_hidden_layers"]):
        at = f"model.layers.{i}."
        out |= {at + "input_layernorm.weight": (d,), at + "post_attention_layernorm.weight": (d,)}
        out |= {at + "self_attn.q_proj.weight": (heads * size, d), at + "self_attn.o_proj.weight": (d, heads * size)}
        out |= {at + "self_attn.k_proj.weight": (kv, d), at + "self_attn.v_proj.weight": (kv, d)}
        out |= {at + "mlp.gate_proj.weight": (f, d), at + "mlp.up_proj.weight": (f, d), at + "mlp.down_proj.weight": (d, f)}
    return {name: ((len(shape) == 1) + draw.normal(size=shape) * 0.3).astype(dtype) for name, shape in out.items()}


def numpy_logits(found, weights, tokens_T):
    """The model in float64, position by position and head by head."""
    w = {name: np.asarray(x, np.float64) for name, x in weights.items()}
    heads = found["num_attention_heads"]
    groups = found.get("num_key_value_heads") or heads
    size = found.get("head_dim") or found["hidden_size"] // heads
    scaling = found.get("rope_parameters") or found.get("rope_scaling") or {}
    theta = scaling.get("rope_theta") or found["rope_theta"]
    frequencies = []
    for pair in range(size // 2):
        frequency = theta ** (-2 * pair / size)
        kind = scaling.get("rope_type", scaling.get("type"))
        if kind == "linear":
            frequency /= scaling["factor"]
        if kind == "llama3":
            wavelength, original = 2 * math.pi / frequency, scaling["original_max_position_embeddings"]
            if wavelength > original / scaling["low_freq_factor"]:
                frequency /= scaling["factor"]
            elif wavelength > original / scaling["high_freq_factor"]:
                low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
                smooth = (original / wavelength - low) / (high - low)
                frequency = (1 - smooth) * frequency / scaling["factor"] + smooth * frequency
        frequencies.append(frequency)

    def norm(x, weight):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + found["rms_norm_eps"]) * weight

    def rotate(x, position):
        half, angle = size // 2, position * np.array(frequencies)
        cos, sin = np.cos(angle), np.sin(angle)
        return np.concatenate([x[:half] * cos - x[half:] * sin, x[half:] * cos + x[:half] * sin])

    x = w["model.embed_tokens.weight"][tokens_T]
    for i in range(found["num_hidden_layers"]):
        at = f"model.layers.{i}."
        h = norm(x, w[at + "input_layernorm.weight"])
        q, k, v = (h @ w[f"{at}self_attn.{name}_proj.weight"].T for name in "qkv")
        out = np.zeros((len(tokens_T), heads * size))
        for head in range(heads):
            of_q, of_kv = slice(head * size, (head + 1) * size), head // (heads // groups)
            of_kv = slice(of_kv * size, (of_kv + 1) * size)
            for t in range(len(tokens_T)):
                query = rotate(q[t, of_q], t)
                scores = np.array([query @ rotate(k[u, of_kv], u) for u in range(t + 1)]) / math.sqrt(size)
                p = np.exp(scores - scores.max())
                out[t, of_q] = (p / p.sum()) @ v[: t + 1, of_kv]
        x = x + out @ w[at + "self_attn.o_proj.weight"].T
        h = norm(x, w[at + "post_attention_layernorm.weight"])
        gate, up = (h @ w[f"{at}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w[at + "mlp.down_proj.weight"].T
    head = (
        w["lm_head.weight"]
        if "lm_head.weight" in w and not found.get("tie_word_embeddings")
        else w["model.embed_tokens.weight"]
    )
    return norm(x, w["model.norm.weight"]) @ head.T


def write(directory, found, weights, *, files=1):
    """Write a model as transformers does, over several files with an index where asked."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(found))
    names = list(weights)
    if files == 1:
        safetensors.numpy.save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
        return directory
    weight_map = {}
    for i in range(files):
        file = f"model-{i + 1:05d}-of-{files:05d}.safetensors"
        safetensors.numpy.save_file({name: weights[name] for name in names[i::files]}, directory / file)
        weight_map |= dict.fromkeys(names[i::files], file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory


def our_logits(config, params, tokens_T):
    return np.asarray(llama.Llama(config).apply({"params": params}, jnp.asarray(tokens_T)[None]))[0]


TOKENS = np.random.default_rng(1).integers(0, 37, 24)


@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_logits_in_and_out(tmp_path, name, scan):
    found = {**BASE, **MODELS[name]}
    found = {key: value for key, value in found.items() if value is not None}
    weights = tensors(found)
    expected = numpy_logits(found, weights, TOKENS)
    directory = write(tmp_path / "theirs", found, weights, files=1 + 2 * scan)
    config = huggingface.read_config(directory, scan_layers=scan)
    params = huggingface.load(directory, config)
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(
        jnp.shape, llama.Llama(config).init(jax.random.key(0), TOKENS[None])["params"]
    )
    np.testing.assert_allclose(our_logits(config, params, TOKENS), expected, atol=1e-4)

    huggingface.save(tmp_path / "ours", params, config, dtype="float32")
    back = safetensors.numpy.load_file(tmp_path / "ours" / "model.safetensors")
    assert back.keys() == weights.keys()
    for tensor, values in weights.items():
        np.testing.assert_array_equal(back[tensor], values)
    written = json.loads((tmp_path / "ours" / "config.json").read_text())
    np.testing.assert_allclose(numpy_logits(written, back, TOKENS), expected, atol=1e-12)
    assert huggingface.same_model(huggingface.read_config(tmp_path / "ours"), config) == []


def test_other_rope_gives_other_logits(tmp_path):
    """The tolerance above would see a scaling that is ignored."""
    plain = numpy_logits(BASE, tensors(BASE), TOKENS)
    for name in ("llama3", "linear"):
        assert np.abs(numpy_logits({**BASE, **MODELS[name]}, tensors(BASE), TOKENS) - plain).max() > 1e-2


@pytest.mark.parametrize(("dtype", "kind"), [(ml_dtypes.bfloat16, "BF16"), (np.float16, "F16")])
def test_half_precision_is_read_exactly_and_bfloat16_is_written_rounded(tmp_path, dtype, kind):
    weights = tensors(BASE, dtype=dtype)
    directory = write(tmp_path / "theirs", BASE, weights)
    config = huggingface.read_config(directory)
    params = huggingface.load(directory, config)
    q = np.asarray(params["layers"]["attn"]["q"]["kernel"])
    assert q.dtype == np.float32
    np.testing.assert_array_equal(q[1], weights["model.layers.1.self_attn.q_proj.weight"].astype(np.float32).T)
    huggingface.save(tmp_path / "ours", params, config)
    back = safetensors.numpy.load_file(tmp_path / "ours" / "model.safetensors")
    for name, values in weights.items():
        assert back[name].dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(back[name], values.astype(np.float32).astype(ml_dtypes.bfloat16))


def test_a_large_model_is_split_into_files_with_an_index(tmp_path, monkeypatch):
    directory = write(tmp_path / "theirs", BASE, tensors(BASE))
    config = huggingface.read_config(directory)
    params = huggingface.load(directory, config)
    monkeypatch.setattr(huggingface, "FILE_BYTES", 12000)
    huggingface.save(tmp_path / "ours", params, config, dtype="float32")
    files = sorted(path.name for path in (tmp_path / "ours").glob("*.safetensors"))
    assert len(files) > 3
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert all((tmp_path / "ours" / name).stat().st_size < 14000 for name in files)
    index = json.loads((tmp_path / "ours" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == huggingface.expected(config).keys()
    assert index["metadata"]["total_size"] == 4 * llama.num_params(config)
    jax.tree.map(np.testing.assert_array_equal, huggingface.load(tmp_path / "ours", config), params)


def test_each_device_reads_its_own_slices(tmp_path, monkeypatch):
    directory = write(tmp_path / "theirs", BASE, tensors(BASE))
    config = huggingface.read_config(directory)
    whole = huggingface.load(directory, config)
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("fsdp", "tensor"))
    specs = jax.tree.map(lambda x: P(None, "fsdp", "tensor") if x.ndim == 3 else P(), whole)
    specs["embed"]["embedding"], specs["lm_head"]["kernel"] = P(None, "fsdp"), P("fsdp")  # 37 does not divide
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda x: isinstance(x, P))
    sizes, real = [], huggingface._read
    monkeypatch.setattr(huggingface, "_read", lambda *a: (lambda x: (sizes.append((a[1], x.shape)), x)[1])(real(*a)))
    split = huggingface.load(directory, config, shardings)
    jax.tree.map(np.testing.assert_array_equal, split, whole)
    assert {shape for name, shape in sizes if "q_proj" in name} == {(16, 16)}
    assert split["layers"]["attn"]["q"]["kernel"].sharding == shardings["layers"]["attn"]["q"]["kernel"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mistral"}, "model_type='mistral' is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ({"attention_bias": True}, "attention_bias=True is not supported"),
        ({"mlp_bias": True}, "mlp_bias=True is not supported"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "RoPE scaling 'dynamic' is not supported"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "RoPE scaling 'yarn' is not supported"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "RoPE scaling 'longrope' is not supported"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "has no 'low_freq_factor'"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config with quant_method='awq', .* is not supported"),
        ({"num_key_value_heads": 3}, "n_heads=4 is not a multiple of n_kv_heads=3"),
        ({"hidden_size": "32"}, "d_model='32' is not"),
        ({"rope_scaling": "linear"}, "'linear' is not supported: it is no JSON object"),
        ({"quantization_config": [1]}, "is no JSON object"),
    ],
)
def test_models_of_another_kind_are_refused(tmp_path, changes, message):
    (tmp_path / "config.json").write_text(json.dumps({**BASE, **changes}))
    with pytest.raises(ValueError, match=message):
        huggingface.read_config(tmp_path)


def without(name):
    return lambda weights: weights.pop(name)


FAULTS = {
    "missing": (without("model.layers.1.mlp.up_proj.weight"), r"has no model.layers.1.mlp.up_proj.weight$"),
    "extra": (
        lambda w: w.update({"model.layers.3.input_layernorm.weight": np.ones(32, np.float32)}),
        "has unknown model.layers.3",
    ),
    "bias": (
        lambda w: w.update({"model.layers.0.self_attn.q_proj.bias": np.ones(32, np.float32)}),
        "has unknown .*q_proj.bias",
    ),
    "misshapen": (lambda w: w.update({"lm_head.weight": w["lm_head.weight"].T.copy()}), r"misshapen lm_head.weight \(32, 37\)"),
    "integer": (lambda w: w.update({"model.norm.weight": np.ones(32, np.int8)}), "is I8, not one of F32, BF16, F16"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_tensors_are_refused_by_name(tmp_path, fault):
    weights = tensors(BASE)
    change, message = FAULTS[fault]
    change(weights)
    directory = write(tmp_path, BASE, weights)
    with pytest.raises(ValueError, match=message):
        huggingface.load(directory, huggingface.read_config(directory))


def test_what_old_files_hold_besides_is_ignored_and_a_tied_head_must_be_tied(tmp_path):
    tied = {**BASE, "tie_word_embeddings": True}
    weights = {**tensors(tied), "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].copy()
    directory = write(tmp_path / "a", tied, weights)
    huggingface.load(directory, huggingface.read_config(directory))
    weights["lm_head.weight"][3, 2] += 1
    directory = write(tmp_path / "b", tied, weights)
    with pytest.raises(ValueError, match=r"lm_head.weight differs from"):
        huggingface.load(directory, huggingface.read_config(directory))


def test_damaged_and_missing_files_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"has no config.json"):
        huggingface.read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config.json cannot be read"):
        huggingface.read_config(tmp_path)
    directory = write(tmp_path / "model", BASE, tensors(BASE), files=2)
    config = huggingface.read_config(directory)
    (directory / "model-00002-of-00002.safetensors").write_bytes(b"short")
    with pytest.raises(ValueError, match=r"model-00002-of-00002.safetensors cannot be read"):
        huggingface.load(directory, config)
    (directory / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ValueError, match=r"model-00002-of-00002.safetensors cannot be read"):
        huggingface.load(directory, config)
    (directory / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(ValueError, match=r"index.json cannot be read"):
        huggingface.load(directory, config)


def test_nothing_is_written_over_or_left_half_written(tmp_path, monkeypatch):
    directory = write(tmp_path / "theirs", BASE, tensors(BASE))
    config = huggingface.read_config(directory)
    params = huggingface.load(directory, config)
    with pytest.raises(ValueError, match="is there already"):
        huggingface.save(directory, params, config)
    monkeypatch.setattr(safetensors.numpy, "save_file", lambda *_, **__: (_ for _ in ()).throw(OSError(28, "no space")))
    with pytest.raises(ValueError, match=r"cannot be written: .*no space"):
        huggingface.save(tmp_path / "full", params, config)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["theirs"]
