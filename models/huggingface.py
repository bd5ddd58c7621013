"""Llamas in Hugging Face's layout: a directory with config.json and safetensors files, with an index where they are several.

`read_config` and `load` bring one in, `save` writes one out. Their linear weights are [out, in] and one tensor per layer,
ours [in, out] and, under scan, stacked over layers; rotary pairs are split in halves in both, so nothing is permuted.
`load` reads only the slices that the devices here hold, one parameter after the other: beside the result it needs room for
one slice of one parameter. Every fault is a ValueError that names the file or the tensors.

Read: Llama 2, 3, 3.1, 3.2 (model_type "llama") in float32, bfloat16 or float16, with RoPE as published ("default"), "linear" or
"llama3"; linear weights also in MXFP4 or NVFP4, as `models.packed` says. Refused: other RoPE scalings, biases, other
activations, weights quantized otherwise.
"""

import dataclasses
import itertools
import json
import os
import pathlib
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy

from models import packed
from models.llama import LlamaConfig

# Our parameter, with * for the layer → their tensor.
NAMES = {
    "embed/embedding": "model.embed_tokens.weight",
    "layers/attn_norm/scale": "model.layers.*.input_layernorm.weight",
    "layers/attn/q/kernel": "model.layers.*.self_attn.q_proj.weight",
    "layers/attn/k/kernel": "model.layers.*.self_attn.k_proj.weight",
    "layers/attn/v/kernel": "model.layers.*.self_attn.v_proj.weight",
    "layers/attn/o/kernel": "model.layers.*.self_attn.o_proj.weight",
    "layers/mlp_norm/scale": "model.layers.*.post_attention_layernorm.weight",
    "layers/mlp/gate/kernel": "model.layers.*.mlp.gate_proj.weight",
    "layers/mlp/up/kernel": "model.layers.*.mlp.up_proj.weight",
    "layers/mlp/down/kernel": "model.layers.*.mlp.down_proj.weight",
    "final_norm/scale": "model.norm.weight",
    "lm_head/kernel": "lm_head.weight",
}
IGNORED = "rotary_emb.inv_freq"  # a buffer in old Llama 2 files, implied by the config
DTYPES = {"F32": np.float32, "BF16": ml_dtypes.bfloat16, "F16": np.float16}
SAVED = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}
ROPE_TYPES = {"default": "none", "linear": "linear", "llama3": "llama3.1"}
FILE_BYTES = 5 * 10**9  # of one safetensors file, as transformers splits them


# ---- The config ----


def read_config(directory: str | pathlib.Path, **changes: Any) -> LlamaConfig:
    """Return the model that config.json describes, with execution settings such as dtype or remat from `changes`."""
    directory = pathlib.Path(directory)
    path, found = directory / "config.json", _read_json(directory)
    try:
        return from_config(found, **changes)
    except KeyError as error:
        raise ValueError(f"{path} has no {error}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _read_json(directory: pathlib.Path) -> dict[str, Any]:
    path = directory / "config.json"
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"{directory} has no config.json") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} does not hold a JSON object")
    return found


def from_config(found: Mapping[str, Any], **changes: Any) -> LlamaConfig:
    """Return the model of a config.json's content; what is absent has the default of transformers' LlamaConfig."""
    needed = {
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "partial_rotary_factor": 1.0,
    }
    for key, value in needed.items():
        if (given := found.get(key, value)) != value:
            raise ValueError(f"{key}={given!r} is not supported, only {value!r}")
    if found.get("sliding_window"):
        raise ValueError("sliding_window is not supported")
    if found.get("quantization_config"):
        packed.from_config(found["quantization_config"])
    heads = found["num_attention_heads"]
    return LlamaConfig(
        **{
            "vocab_size": found["vocab_size"],
            "d_model": found["hidden_size"],
            "n_layers": found["num_hidden_layers"],
            "n_heads": heads,
            "n_kv_heads": found.get("num_key_value_heads") or heads,
            "d_ff": found["intermediate_size"],
            "head_dim": found.get("head_dim") or 0,
            "max_seq_len": found.get("max_position_embeddings", 2048),
            "norm_eps": found.get("rms_norm_eps", 1e-6),
            "init_std": found.get("initializer_range", 0.02),
            "tie_embeddings": found.get("tie_word_embeddings", False),
            **_rope(found),
            **changes,
        }
    )


def _rope(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary settings; transformers 5 keeps all of them in rope_parameters, older versions theta apart."""
    scaling = found.get("rope_parameters") or found.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping):
        raise ValueError(f"RoPE scaling {scaling!r} is not supported: it is no JSON object")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in ROPE_TYPES:
        raise ValueError(f"RoPE scaling {kind!r} is not supported, only {', '.join(ROPE_TYPES)}")
    out = {
        "rope_theta": scaling.get("rope_theta", found.get("rope_theta", 10000.0)),
        "rope_scaling": ROPE_TYPES[kind],
    }
    if kind != "default":
        out["rope_factor"] = scaling["factor"]
    if kind == "llama3":
        out["rope_low_freq_factor"], out["rope_high_freq_factor"] = scaling["low_freq_factor"], scaling["high_freq_factor"]
        out["rope_original_len"] = scaling["original_max_position_embeddings"]
    return out


def to_config(config: LlamaConfig, dtype: str) -> dict[str, Any]:
    """Return the content of config.json for a model saved in `dtype`."""
    kind = {ours: theirs for theirs, ours in ROPE_TYPES.items()}[config.rope_scaling]
    scaling: dict[str, Any] = {"rope_type": kind}
    if kind != "default":
        scaling["factor"] = config.rope_factor
    if kind == "llama3":
        scaling["low_freq_factor"], scaling["high_freq_factor"] = config.rope_low_freq_factor, config.rope_high_freq_factor
        scaling["original_max_position_embeddings"] = config.rope_original_len
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "intermediate_size": config.d_ff,
        "head_dim": config.head_size,
        "max_position_embeddings": config.max_seq_len,
        "rms_norm_eps": config.norm_eps,
        "initializer_range": config.init_std,
        "tie_word_embeddings": config.tie_embeddings,
        "rope_theta": config.rope_theta,
        "rope_scaling": None if kind == "default" else scaling,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": dtype,
    }


# ---- Names and shapes ----


def shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Return {our path: shape} of every parameter, the layers' without their layer axis."""
    c = config
    q, kv = c.n_heads * c.head_size, c.n_kv_heads * c.head_size
    found = {"embed/embedding": (c.vocab_size, c.d_model), "final_norm/scale": (c.d_model,)}
    found |= {"layers/attn_norm/scale": (c.d_model,), "layers/mlp_norm/scale": (c.d_model,)}
    found |= {"layers/attn/q/kernel": (c.d_model, q), "layers/attn/k/kernel": (c.d_model, kv)}
    found |= {"layers/attn/v/kernel": (c.d_model, kv), "layers/attn/o/kernel": (q, c.d_model)}
    found |= {"layers/mlp/gate/kernel": (c.d_model, c.d_ff), "layers/mlp/up/kernel": (c.d_model, c.d_ff)}
    found |= {"layers/mlp/down/kernel": (c.d_ff, c.d_model)}
    return found if c.tie_embeddings else {**found, "lm_head/kernel": (c.d_model, c.vocab_size)}


def expected(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Return {their name: shape} of every tensor of the model."""
    ours = {name: (shapes(config)[path], path) for name, (path, _) in _places_of(config).items()}
    return {name: shape[::-1] if path.endswith("kernel") else shape for name, (shape, path) in ours.items()}


def linear_modules(config: LlamaConfig) -> dict[str, tuple[str, int]]:
    """Return {their module: (path as in `models.llama.LINEAR_PATHS`, layer)} of the linear layers in the blocks."""
    return {
        name.removesuffix(".weight"): (path.removeprefix("layers/").removesuffix("/kernel"), layer)
        for name, (path, layer) in _places_of(config).items()
        if layer is not None and path.endswith("kernel")
    }


def _places_of(config: LlamaConfig) -> dict[str, tuple[str, int | None]]:
    """Return {their name: (our path, layer or None)} of every tensor."""
    out = {}
    for path in shapes(config):
        layers = range(config.n_layers) if path.startswith("layers/") else (None,)
        out |= {NAMES[path].replace("*", str(i)): (path, i) for i in layers}
    return out


def find_tensors(directory: pathlib.Path, config: LlamaConfig, format: str = "") -> dict[str, pathlib.Path]:
    """Return {their name: file} of the model's tensors, all of which are there, in shape, and no others. Nothing is read.

    format: that of linear weights which are packed, each of which may also be there as it is.
    """
    index = directory / "model.safetensors.index.json"
    files = sorted(directory.glob("*.safetensors"))
    if index.exists():
        try:
            files = [directory / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
        except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
            raise ValueError(f"{index} cannot be read: {error}") from None
    if not files:
        raise ValueError(f"{directory} has no safetensors files")
    where: dict[str, pathlib.Path] = {}
    found: dict[str, tuple[int, ...]] = {}
    for file in files:
        with _open(file) as opened:
            for name in opened.keys():  # noqa: SIM118 (no mapping)
                part = opened.get_slice(name)
                if name in where:
                    raise ValueError(f"{name} is in {where[name]} and in {file}")
                of_packed = packed.dtype_of(format, name)
                allowed = (of_packed,) if of_packed else tuple(DTYPES)
                if part.get_dtype() not in allowed and not name.endswith(IGNORED):
                    raise ValueError(f"{name} in {file} is {part.get_dtype()}, not one of {', '.join(allowed)}")
                where[name], found[name] = file, tuple(part.get_shape())
    wanted = expected(config)
    for module in linear_modules(config) if format else ():
        name = f"{module}.weight"
        if f"{name}_packed" in found:
            parts = packed.shapes(format, wanted.pop(name))
            wanted |= {name + suffix: shape for suffix, shape in parts.items()}
    extra = [name for name in found if name not in wanted and not name.endswith(IGNORED)]
    if config.tie_embeddings and "lm_head.weight" in extra:
        _check_tied(where)
        extra.remove("lm_head.weight")
    missing = [name for name in wanted if name not in found]
    wrong = [
        f"{name} {found[name]} instead of {wanted[name]}" for name in wanted if found.get(name, wanted[name]) != wanted[name]
    ]
    for what, names in (("has no", missing), ("has unknown", extra), ("has misshapen", wrong)):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise ValueError(f"{directory} {what} {', '.join(names[:3])}{more}")
    return {name: where[name] for name in wanted}


def _open(file: pathlib.Path) -> Any:
    try:
        return safetensors.safe_open(file, framework="np")
    except (OSError, safetensors.SafetensorError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from None


def _check_tied(where: Mapping[str, pathlib.Path]) -> None:
    """Raise ValueError where a file with tied embeddings also holds another head."""
    one, other = (_read(where[name], name) for name in ("model.embed_tokens.weight", "lm_head.weight"))
    if one.shape != other.shape or not np.array_equal(one, other):
        raise ValueError("tie_word_embeddings is true, but lm_head.weight differs from model.embed_tokens.weight")


def _read(file: pathlib.Path, name: str, index: tuple[slice, ...] = ()) -> np.ndarray:
    """Return (a slice of) one tensor, float8 as bytes: safetensors 0.8.0 gives numpy no array of these."""
    with _open(file) as opened:
        part = opened.get_slice(name)
        if not part.get_dtype().startswith("F8_"):
            return part[index or ...]
    with file.open("rb") as raw:
        length = int.from_bytes(raw.read(8), "little")
        entry = json.loads(raw.read(length))[name]
    start, _ = entry["data_offsets"]
    return np.array(np.memmap(file, np.uint8, "r", 8 + length + start, tuple(entry["shape"]))[index or ...])


# ---- In and out ----


def packed_format(directory: pathlib.Path) -> str:
    """Return the format of a directory's packed weights, "" where they are not; raises ValueError for another quantization."""
    quantization = _read_json(directory).get("quantization_config")
    return packed.from_config(quantization) if quantization else ""


def load(directory: str | pathlib.Path, config: LlamaConfig, shardings: Any = None) -> dict[str, Any]:
    """Return the parameters of `models.llama.Llama(config)`, float32, each placed as `shardings` (a tree like it) says.

    Without shardings they lie on the default device. Packed weights are decoded.
    """
    directory = pathlib.Path(directory)
    format = packed_format(directory)
    source = _Source(find_tensors(directory, config, format), format, packed.read_tensor_scales(directory) if format else {})
    tree: dict[str, Any] = {}
    for path, shape in shapes(config).items():
        for ours, layers in _places(path, config):
            full = shape if layers is None or not config.scan_layers else (config.n_layers, *shape)
            place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
            if shardings is not None:
                place = shardings
                for key in ours.split("/"):
                    place = place[key]

            def part(index, path=path, layers=layers, full=full):
                index = tuple(slice(*i.indices(n)) for i, n in zip(index, full, strict=True))
                if layers is None:
                    return _tensor(source, path, "", index)
                if not config.scan_layers:
                    return _tensor(source, path, layers, index)
                chosen = range(index[0].start, index[0].stop)
                return np.stack([_tensor(source, path, layer, index[1:]) for layer in chosen])

            node = tree
            *parents, leaf = ours.split("/")
            for key in parents:
                node = node.setdefault(key, {})
            node[leaf] = jax.block_until_ready(jax.make_array_from_callback(full, place, part))
    return tree


def _places(path: str, config: LlamaConfig) -> list[tuple[str, Any]]:
    """Return (path in the parameter tree, layer or None) of every array that holds a parameter; 0 under scan for all layers."""
    if not path.startswith("layers/"):
        return [(path, None)]
    if config.scan_layers:
        return [(path, 0)]
    return [(path.replace("layers/", f"layers_{i}/"), i) for i in range(config.n_layers)]


class _Source(NamedTuple):
    """Where tensors are read: {their name: file}, the format of those that are packed, {module: tensor scale}."""

    where: Mapping[str, pathlib.Path]
    format: str
    tensor_scales: Mapping[str, float]


def _tensor(source: _Source, path: str, layer: Any, index: tuple[slice, ...]) -> np.ndarray:
    name, where = NAMES[path].replace("*", str(layer)), source.where
    index = index[::-1] if path.endswith("kernel") else index
    if name in where:
        values = _read(where[name], name, index)
    else:
        rows, columns = index
        scale = source.tensor_scales.get(name.removesuffix(".weight"))
        values = packed.unpack(source.format, name, lambda name, index: _read(where[name], name, index), (rows, columns), scale)
    return np.asarray(values.T if path.endswith("kernel") else values, np.float32)


def save(
    directory: pathlib.Path,
    params: Mapping[str, Any],
    config: LlamaConfig,
    *,
    dtype: str = "bfloat16",
    packing: packed.Packing | None = None,
    manifest: Mapping[str, Any] | None = None,
    bos_id: int | None = None,
    eos_id: int | None = None,
    more: Mapping[str, str] | None = None,
) -> None:
    """Write a model so that transformers loads it: all of it or, at a fault, nothing. The directory must not be there yet.

    dtype: "bfloat16" (rounded to nearest even) or "float32", of all that `packing` does not name. manifest: JSON data that goes
    into `packed.MANIFEST`, to which the tensor scales of packed weights are added. more: {file name: content} of what else
    belongs there, such as the tokenizer's. bos_id, eos_id: written also where they are None, or transformers takes 1 and 2. One
    parameter at a time is on the host beside the file that is being filled.
    """
    if dtype not in SAVED:
        raise ValueError(f"{dtype=} is not one of {', '.join(SAVED)}")
    if directory.exists():
        raise ValueError(f"{directory} is there already")
    found, scales = {**to_config(config, dtype), "bos_token_id": bos_id, "eos_token_id": eos_id}, {}
    if packing is not None:
        ignore = {"lm_head", *linear_modules(config)} - set(packing.modules)
        found["quantization_config"] = packed.to_config(packing.format, ignore)
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f"{directory.name}.", dir=directory.parent) as around:
            temporary = pathlib.Path(around) / directory.name
            temporary.mkdir()
            _write_files(temporary, _tensors_of(params, config, SAVED[dtype], packing, scales))
            texts = {"config.json": json.dumps(found, indent=2) + "\n", **(more or {})}
            if manifest is not None:
                content = {**manifest, "tensor_scales": scales} if scales else manifest
                texts[packed.MANIFEST] = json.dumps(content, indent=2) + "\n"
            for name, text in texts.items():
                (temporary / name).write_text(text)
            os.replace(temporary, directory)
    except (OSError, safetensors.SafetensorError) as error:
        raise ValueError(f"{directory} cannot be written: {error}") from None


def _tensors_of(
    params: Mapping[str, Any],
    config: LlamaConfig,
    dtype: Any,
    packing: packed.Packing | None,
    scales: dict[str, float],
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (their name, array) of every tensor; put the tensor scales of packed ones into `scales`."""
    places = _places_of(config)
    for name, (path, layer) in places.items():
        module = name.removesuffix(".weight")
        if packing is None or module not in packing.modules:
            yield name, np.ascontiguousarray(_values(params, config, path, layer).astype(dtype))
            continue
        codes = packing.cast(module, lambda other: _values(params, config, *places[f"{other}.weight"]))
        if codes.tensor_scale is not None:
            scales[module] = codes.tensor_scale
        for suffix, values in packed.tensors(packing.format, codes).items():
            yield name + suffix, np.ascontiguousarray(values)


def _values(params: Mapping[str, Any], config: LlamaConfig, path: str, layer: int | None) -> np.ndarray:
    """Return one tensor as they orient it."""
    unrolled = layer is not None and not config.scan_layers
    node: Any = params
    for key in (path.replace("layers/", f"layers_{layer}/") if unrolled else path).split("/"):
        node = node[key]
    values = np.asarray(node if layer is None or unrolled else node[layer])
    return values.T if path.endswith("kernel") else values


def _write_files(directory: pathlib.Path, tensors) -> None:
    """Write tensors into files of FILE_BYTES at most (a larger tensor has one of its own), and the index of several."""
    files: list[tuple[pathlib.Path, list[str], int]] = []
    held: dict[str, np.ndarray] = {}
    for name, values in itertools.chain(tensors, [("", np.zeros(0))]):
        if held and (not name or sum(x.nbytes for x in held.values()) + values.nbytes > FILE_BYTES):
            file = directory / f"part{len(files)}"
            safetensors.numpy.save_file(held, file, metadata={"format": "pt"})
            file.chmod(directory.stat().st_mode & 0o666)  # it is the writer's alone otherwise
            files.append((file, list(held), sum(x.nbytes for x in held.values())))
            held = {}
        held |= {name: values} if name else {}
    weight_map = {}
    for i, (file, names, _) in enumerate(files):
        final = "model.safetensors" if len(files) == 1 else f"model-{i + 1:05d}-of-{len(files):05d}.safetensors"
        file.rename(directory / final)
        weight_map |= dict.fromkeys(names, final)
    if len(files) > 1:
        index = {"metadata": {"total_size": sum(size for _, _, size in files)}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def same_model(config: LlamaConfig, other: LlamaConfig) -> list[str]:
    """Return "field: a ≠ b" for every field in which two configs describe different functions of the same parameters.

    Not compared: how it is computed, and how the documents of a row are kept apart, which no config.json says.
    """
    execution = ("max_seq_len", "init_std", "scan_layers", "remat", "attention", "attention_block", "dtype", "loss_chunk")
    execution += ("document_end",)
    a, b = dataclasses.asdict(config), dataclasses.asdict(other)
    a["head_dim"], b["head_dim"] = config.head_size, other.head_size
    unused = () if config.rope_scaling != "none" else [name for name in a if name.startswith("rope_") and name[5:] in _SCALING]
    return [f"{name}: {a[name]} ≠ {b[name]}" for name in a if a[name] != b[name] and name not in (*execution, *unused)]


_SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_len")
