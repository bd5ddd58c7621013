"""Packed MXFP4 and NVFP4 weights: read from the file's bytes by hand, they are the reference quantizer's codes, bit for bit."""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from helpers import assert_same, settings
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fp4jax import recipes
from fp4jax.ops import quantize
from fp4jax.recipe import OperandSpec
from models import huggingface, llama, packed
from train import packing
from train.errors import InputError

Q, K, V = (f"model.layers.1.self_attn.{name}_proj" for name in "qkv")
GATE, UP, DOWN = (f"model.layers.1.mlp.{name}_proj" for name in ("gate", "up", "down"))
OURS = {Q: ("attn", "q"), K: ("attn", "k"), V: ("attn", "v"), GATE: ("mlp", "gate"), UP: ("mlp", "up"), DOWN: ("mlp", "down")}


def run_settings(recipe, **changes):
    return settings("corpus.txt", quant__recipe=recipe, **changes)


def make_params(model, *, seed=0):
    """Return random weights, each layer and linear of another size."""
    init = lambda: llama.Llama(model).init(jax.random.key(0), jnp.zeros((1, 8), jnp.int32))  # noqa: E731
    draw = np.random.default_rng(seed)
    return jax.tree.map(
        lambda x: jnp.asarray(draw.normal(size=x.shape) * draw.uniform(0.01, 1), jnp.float32), jax.eval_shape(init)["params"]
    )


def export(directory, s, format, params, *, shared=False, unrotated=False):
    choice = packing.choose(s, format, unrotated=unrotated)
    chosen = packing.packing(s, format, choice, shared=shared)
    huggingface.save(directory, params, s.model, packing=chosen, manifest=packing.describe(s, choice))
    return choice


def raw_tensors(directory):
    """Return {name: (dtype, bytes as uint8 in the tensor's shape)} of model.safetensors, parsed here."""
    content = (directory / "model.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    out = {}
    for name, entry in json.loads(content[8 : 8 + length]).items():
        if name != "__metadata__":
            start, end = entry["data_offsets"]
            values = np.frombuffer(content[8 + length + start : 8 + length + end], np.uint8)
            out[name] = entry["dtype"], values.reshape(*entry["shape"], -1)
    return out


def decode_by_hand(raw, name, format, tensor_scale=None):
    """Return (codes, scale bytes, values) of a packed weight, [out, in], from the fields of every code."""
    data, scale = (raw[f"{name}.weight_{part}"][1][..., 0].astype(np.int32) for part in ("packed", "scale"))
    column = np.arange(2 * data.shape[1])
    codes = np.where(column % 2, data[:, column // 2] // 16, data[:, column // 2] % 16)
    if format == "mxfp4":
        decoded = np.float32(2) ** (scale - 127)
    else:
        decoded = float_of(scale, mantissa_bits=3, bias=7) * np.float32(tensor_scale)
    signed = np.where(codes < 8, 1, -1) * float_of(codes % 8, mantissa_bits=1, bias=1)
    return codes, scale, signed.astype(np.float32) * decoded[:, column // (32 if format == "mxfp4" else 16)]


def float_of(bits, *, mantissa_bits, bias):
    exponent, fraction = bits >> mantissa_bits, (bits % (1 << mantissa_bits)) / (1 << mantissa_bits)
    values = np.where(exponent == 0, fraction * 2.0 ** (1 - bias), (1 + fraction) * 2.0 ** (exponent - bias))
    return values.astype(np.float32)


CASES = {
    "mxfp4": ("mxfp4", "mxfp4", {}, "mxfp4.1x32.even.rne"),
    "mxfp4, cast from bfloat16": ("mxfp4", "mxfp4", {"model__dtype": "bfloat16"}, "mxfp4.1x32.even.rne"),
    "mxfp4, unrolled": ("mxfp4", "mx_baseline", {"model__scan_layers": False}, "mxfp4.1x32.floor.rne"),
    "mxfp4, stochastic in training": ("mxfp4", "mxfp4_sr", {}, "mxfp4.1x32.even.rne"),
    "mxfp4, square": ("mxfp4", "amd_primus_turbo", {}, "mxfp4.32x32.even.rne"),
    "mxfp4, trained in bf16": ("mxfp4", "bf16", {}, "mxfp4.1x32.even.rne"),
    "mxfp4, unrotated": ("mxfp4", "mxfp4_h16", {}, "mxfp4.1x32.even.rne"),
    "nvfp4, trained in mxfp4": ("nvfp4", "mxfp4_h16", {}, "nvfp4.1x16.two_level.rne"),
    "nvfp4, square": ("nvfp4", "nvidia_nvfp4", {"quant__keep_last": 0}, "nvfp4.16x16.two_level.rne"),
    "nvfp4, one level": ("nvfp4", "fp4_all_the_way", {}, "nvfp4.1x16.single_level.rne"),
    "nvfp4, four over six": ("nvfp4", "quartet2", {}, "nvfp4.1x16.four_over_six.rne"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_file_holds_the_codes_of_the_reference_quantizer(tmp_path, case):
    format, recipe, changes, cast = CASES[case]
    s = run_settings(recipe, **changes)
    params = make_params(s.model)
    choice = export(tmp_path / "out", s, format, params, unrotated="unrotated" in case)
    assert {str(spec) for spec in choice.casts.values()} == {cast}
    raw, config = raw_tensors(tmp_path / "out"), huggingface.read_config(tmp_path / "out", scan_layers=s.model.scan_layers)
    loaded = huggingface.load(tmp_path / "out", config)
    scales = packed.read_tensor_scales(tmp_path / "out")
    for name, (block, leaf) in OURS.items():
        ours, back = (tree["layers_1"] if not s.model.scan_layers else tree["layers"] for tree in (params, loaded))
        w, back = (x[block][leaf]["kernel"] if not s.model.scan_layers else x[block][leaf]["kernel"][1] for x in (ours, back))
        q = quantize.quantize(w.astype(s.model.dtype), choice.casts[name], 0)
        codes, scale_bytes, values = decode_by_hand(raw, name, format, scales.get(name))
        np.testing.assert_array_equal(codes, q.codes.T)
        across = choice.casts[name].across or 1
        np.testing.assert_array_equal(scale_bytes, np.repeat(q.scale_bytes.T, across, axis=0))
        assert_same(values, q.dequantize().T)
        assert_same(back, q.dequantize())
        if format == "nvfp4":
            dtype, inverse = raw[f"{name}.weight_global_scale"]
            assert (dtype, inverse.shape) == ("F32", (1, 4))
            assert scales[name] == float(q.tensor_scale.item())
            assert inverse.view(np.float32).item() == np.float32(1) / np.float32(scales[name])
    kinds = {name.rpartition("_")[2]: dtype for name, (dtype, _) in raw.items() if DOWN in name}
    assert kinds == {"packed": "U8", "scale": "U8"} if format == "mxfp4" else {"packed": "U8", "scale": "F32"}
    assert raw["lm_head.weight"][0] == raw["model.embed_tokens.weight"][0] == raw["model.norm.weight"][0] == "BF16"
    assert_same(loaded["lm_head"]["kernel"], params["lm_head"]["kernel"].astype(jnp.bfloat16))


@pytest.mark.parametrize("format", ["mxfp4", "nvfp4"])
def test_extreme_blocks_are_decoded_as_the_reference_decodes_them(format):
    draw = np.random.default_rng(0)
    w = draw.normal(size=(64, 64)) * 2.0 ** draw.integers(-135, 100, (64, 64 // 16)).repeat(16, axis=1)
    w[0], w[1, ::2] = 0, -0.0
    w = np.asarray(w, np.float32)
    if format == "mxfp4":
        w[5, 40] = np.nan
    spec = OperandSpec(format)
    codes = packing.pack(w, spec, "float32", [])
    stored = {
        f"w{suffix}": x.view(np.uint8) if suffix == "_scale" else x for suffix, x in packed.tensors(format, codes).items()
    }
    read = lambda name, index: stored[name][index]  # noqa: E731
    got = packed.unpack(format, "w", read, (slice(0, 64), slice(0, 64)), codes.tensor_scale)
    expected = quantize.quantize(jnp.asarray(w), spec, 1).dequantize()
    assert_same(got, expected)
    assert np.isnan(got).sum() == (32 if format == "mxfp4" else 0)
    for rows, columns in ((slice(3, 9), slice(7, 50)), (slice(0, 1), slice(63, 64)), (slice(5, 64), slice(16, 32))):
        part = packed.unpack(format, "w", read, (rows, columns), codes.tensor_scale)
        assert_same(part, np.asarray(expected)[rows, columns])


def test_layers_that_a_loader_fuses_can_share_a_tensor_scale(tmp_path):
    s = run_settings("quartet2")
    params = make_params(s.model)
    export(tmp_path / "own", s, "nvfp4", params)
    choice = export(tmp_path / "shared", s, "nvfp4", params, shared=True)
    own, shared = (packed.read_tensor_scales(tmp_path / name) for name in ("own", "shared"))
    assert len({own[name] for name in (Q, K, V)}) == 3
    for group in ((Q, K, V), (GATE, UP)):
        assert {shared[name] for name in group} == {max(own[name] for name in group)}
        kernels = [params["layers"][OURS[n][0]][OURS[n][1]]["kernel"][1] for n in group]
        fused = quantize.quantize(jnp.concatenate(kernels, axis=1), choice.casts[Q], 0).dequantize()
        loaded = huggingface.load(tmp_path / "shared", s.model)["layers"]
        assert_same(jnp.concatenate([loaded[OURS[n][0]][OURS[n][1]]["kernel"][1] for n in group], axis=1), fused)
    assert shared[DOWN] == own[DOWN]


def test_the_config_names_what_is_packed_and_what_is_not(tmp_path):
    changes = {"quant__exempt": ("lm_head", "attn/v"), "quant__rules": (("layers/1/mlp/down", "mxfp4:fprop=bf16"),)}
    s = run_settings("mxfp4", model__n_layers=4, quant__keep_first=1, quant__keep_last=1, **changes)
    choice = export(tmp_path / "out", s, "mxfp4", make_params(s.model))
    found = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert (found["quant_method"], found["format"]) == ("compressed-tensors", "mxfp4-pack-quantized")
    weights = found["config_groups"]["group_0"]["weights"]
    assert (weights["num_bits"], weights["type"], weights["strategy"], weights["group_size"]) == (4, "float", "group", 32)
    blocks = {f"model.layers.{i}.{name}" for i in (0, 3) for name in (*(f"self_attn.{x}_proj" for x in "qkvo"),)}
    blocks |= {f"model.layers.{i}.mlp.{name}_proj" for i in (0, 3) for name in ("gate", "up", "down")}
    single = {"model.layers.1.self_attn.v_proj", "model.layers.2.self_attn.v_proj", "model.layers.1.mlp.down_proj"}
    assert set(found["ignore"]) == {"lm_head", *blocks, *single}
    names = raw_tensors(tmp_path / "out")
    assert {name.removesuffix(".weight_packed") for name in names if name.endswith("_packed")} == set(choice.casts)
    assert all(f"{name}.weight" in names for name in found["ignore"])
    manifest = json.loads((tmp_path / "out" / packed.MANIFEST).read_text())
    assert manifest["kept"]["model.layers.0.self_attn.q_proj"] == "keep_first=1"
    assert manifest["kept"]["model.layers.1.mlp.down_proj"] == "rule 'layers/1/mlp/down'"
    assert (manifest["cast_by"], manifest["rotation"]) == ("recipe mxfp4", "none")
    assert [(p["scale_rule"], p["rounding"], len(p["modules"])) for p in manifest["packed"]] == [("even", "rne", 11)]


def test_a_length_that_does_not_divide_stays_in_high_precision_and_the_manifest_says_so():
    s = run_settings("bf16", model__d_ff=112, quant__strict=False)
    choice = packing.choose(s, "mxfp4")
    assert choice.kept == {
        f"model.layers.{i}.mlp.down_proj": "[64, 112] does not divide into blocks of 1 x 32" for i in range(2)
    }
    assert packing.choose(s, "nvfp4").kept == {}


@pytest.mark.parametrize(
    ("recipe", "format", "options", "message"),
    [
        ("mxfp4_h16", "mxfp4", {}, "recipe mxfp4_h16 multiplies weights rotated by H16d in fprop, .*--unrotated"),
        ("quartet", "mxfp4", {}, "rotated by H32"),
        ("mxfp4:fprop.rhs.scale_rule=floor_3_4", "mxfp4", {}, "whose codes stand for 0.75 of the weight"),
        ("mxfp4", "mxfp4", {"unrotated": True}, "--unrotated does not apply: recipe mxfp4 rotates no weight"),
        ("mxfp4_h16", "nvfp4", {"unrotated": True}, "--unrotated does not apply"),
    ],
)
def test_what_no_loader_can_undo_is_refused(recipe, format, options, message):
    with pytest.raises(InputError, match=message):
        packing.choose(run_settings(recipe), format, **options)


def test_a_model_without_a_layer_to_pack_is_refused():
    with pytest.raises(InputError, match="--dtype=mxfp4: no layer can be packed: keep_first=2"):
        packing.choose(run_settings("mxfp4", quant__keep_first=2), "mxfp4")


def test_stochastic_recipes_are_exported_rounded_to_nearest():
    specs = packing.choose(run_settings("mxfp4_sr"), "mxfp4").casts.values()
    assert recipes.get("mxfp4_sr").fprop.rhs.rounding == "sr"
    assert {spec.rounding for spec in specs} == {"rne"}


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    s = run_settings("quartet2")
    directory = tmp_path_factory.mktemp("packed") / "nvfp4"
    export(directory, s, "nvfp4", make_params(s.model))
    return s, directory


def copy(directory, to):
    to.mkdir()
    for file in directory.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    return to


def test_each_device_decodes_its_own_slices_also_where_they_cut_blocks(exported):
    s, directory = exported
    whole = huggingface.load(directory, s.model)
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(8), ("fsdp",))
    specs = jax.tree.map(lambda x: P(None, "fsdp") if x.ndim == 3 else P(), whole)  # 64 inputs over 8: half a block each
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda x: isinstance(x, P))
    jax.tree.map(assert_same, huggingface.load(directory, s.model, shardings), whole)


def test_without_the_manifest_a_tensor_scale_is_off_by_one_unit_at_most(exported, tmp_path):
    s, directory = exported
    whole, without = huggingface.load(directory, s.model), copy(directory, tmp_path / "copy")
    (without / packed.MANIFEST).unlink()
    other = huggingface.load(without, s.model)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2**-22), whole, other)


def test_a_manifest_of_other_weights_is_refused(exported, tmp_path):
    s, directory = exported
    wrong = copy(directory, tmp_path / "copy")
    manifest = json.loads((wrong / packed.MANIFEST).read_text())
    manifest["tensor_scales"][UP] *= 1.01
    (wrong / packed.MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=r"has tensor scale .* for model.layers.1.mlp.up_proj"):
        huggingface.load(wrong, s.model)
    (wrong / packed.MANIFEST).write_text("[]")
    with pytest.raises(ValueError, match=r"fp4jax.json cannot be read"):
        huggingface.load(wrong, s.model)


def test_a_part_that_is_missing_is_named(exported, tmp_path):
    s, directory = exported
    kinds = {"BF16": ml_dtypes.bfloat16, "F32": np.float32, "F8_E4M3": ml_dtypes.float8_e4m3fn, "U8": np.uint8}
    tensors = {name: np.ascontiguousarray(x).view(kinds[dtype])[..., 0] for name, (dtype, x) in raw_tensors(directory).items()}
    file = copy(directory, tmp_path / "copy") / "model.safetensors"
    scale = tensors.pop(f"{UP}.weight_scale")
    safetensors.numpy.save_file(tensors, file)
    with pytest.raises(ValueError, match=r"has no model.layers.1.mlp.up_proj.weight_scale$"):
        huggingface.load(file.parent, s.model)
    safetensors.numpy.save_file({**tensors, f"{UP}.weight_scale": scale[:, 1:].copy()}, file)
    with pytest.raises(ValueError, match=r"has misshapen .*up_proj.weight_scale \(128, 3\) instead of \(128, 4\)"):
        huggingface.load(file.parent, s.model)
    safetensors.numpy.save_file({**tensors, f"{UP}.weight_scale": scale.view(np.uint8)}, file)
    with pytest.raises(ValueError, match=r"up_proj.weight_scale in .* is U8, not one of F8_E4M3"):
        huggingface.load(file.parent, s.model)


def group(**changes):
    weights = {**packed.to_config("mxfp4", [])["config_groups"]["group_0"]["weights"], **changes}
    return {"config_groups": {"group_0": {"weights": weights}}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quant_method": "quark"}, "quant_method='quark'"),
        ({"format": "pack-quantized"}, "format='pack-quantized' is not supported, only .*mxfp4-pack-quantized"),
        ({"config_groups": {}}, "exactly one of config_groups"),
        (group(group_size=16), "mxfp4-pack-quantized is not supported with these values of group_size"),
        (group(symmetric=False), "symmetric"),
        ({"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
    ],
)
def test_other_quantizations_are_refused(changes, message):
    found = packed.to_config("mxfp4", ["lm_head"])
    assert packed.from_config(found) == "mxfp4"
    with pytest.raises(ValueError, match=message):
        packed.from_config({**found, **changes})
    found["config_groups"]["group_0"]["input_activations"] = {"num_bits": 4}
    with pytest.raises(ValueError, match="input_activations"):
        packed.from_config(found)
