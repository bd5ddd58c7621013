"""FP4 weights packed as the compressed-tensors library packs them, which transformers and vLLM read. Layout only, in numpy.

A linear weight [out, in] called X.weight becomes, with blocks of 32 (MXFP4) or 16 (NVFP4) along `in`,

    X.weight_packed        uint8 [out, in/2]: two E2M1 codes per byte, the even index in the low nibble
    X.weight_scale         MXFP4: uint8 [out, in/32], the E8M0 byte (0 decodes to zero); NVFP4: float8_e4m3fn [out, in/16]
    X.weight_global_scale  NVFP4 only: float32 [1], the reciprocal 1/s of the tensor scale s, since loaders divide by it

and config.json's quantization_config says so. Value = code · 2^(byte - 127), or code · (block scale · s), each product rounded
to float32, below 2^-126 zero. 1/s rounds, and so does its reciprocal: the manifest, a file of ours that other loaders ignore,
keeps s itself. Without it s = 1/(1/s), which may be off by one unit in the last place.

Refused: quantized activations or caches, asymmetric or other formats, groups of several formats.
"""

import dataclasses
import json
import math
import pathlib
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

MANIFEST = "fp4jax.json"
BLOCKS = {"mxfp4": 32, "nvfp4": 16}
SUFFIXES = {"mxfp4": ("_packed", "_scale"), "nvfp4": ("_packed", "_scale", "_global_scale")}
DTYPES = {"mxfp4": ("U8", "U8"), "nvfp4": ("U8", "F8_E4M3", "F32")}
_WEIGHTS = {
    "mxfp4": {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
    "nvfp4": {"strategy": "tensor_group", "group_size": 16, "scale_dtype": "torch.float8_e4m3fn"},
}
_COMMON = {"num_bits": 4, "type": "float", "symmetric": True, "dynamic": False}
_MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_VALUES = np.concatenate([_MAGNITUDES, -_MAGNITUDES])

Read = Callable[[str, tuple[slice, ...]], np.ndarray]


class Codes(NamedTuple):
    """One packed weight. data: uint8 [out, in/2]; scale: bytes, uint8 [out, in/block]; tensor_scale: NVFP4's s, else None."""

    data: np.ndarray
    scale: np.ndarray
    tensor_scale: float | None


@dataclasses.dataclass(frozen=True)
class Packing:
    """What is packed, and how.

    format: "mxfp4" or "nvfp4". modules: names as in "model.layers.0.mlp.up_proj". cast(module, weight) returns the codes of
    one; weight(module) returns the float32 values [out, in] of that or any other module.
    """

    format: str
    modules: Collection[str]
    cast: Callable[[str, Callable[[str], np.ndarray]], Codes]


# ---- The config ----


def to_config(format: str, ignore: Collection[str]) -> dict[str, Any]:
    """Return the quantization_config of a model whose linear layers, but for the modules `ignore`, are packed."""
    weights = {**_COMMON, **_WEIGHTS[format]}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": f"{format}-pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": sorted(ignore),
    }


def from_config(found: Mapping[str, Any]) -> str:
    """Return the format, "mxfp4" or "nvfp4", of a quantization_config; raises ValueError for any other."""
    if not isinstance(found, Mapping):
        raise ValueError(f"quantization_config={found!r} is no JSON object")
    names = {f"{format}-pack-quantized": format for format in BLOCKS}
    name, quant_method = found.get("format"), found.get("quant_method")
    if quant_method != "compressed-tensors" or name not in names:
        what = f"{quant_method=}, format={name!r}"
        raise ValueError(f"quantization_config with {what} is not supported, only compressed-tensors' {', '.join(names)}")
    groups = found.get("config_groups")
    group = next(iter(groups.values()), None) if isinstance(groups, Mapping) and len(groups) == 1 else None
    if not isinstance(group, Mapping) or not isinstance(group.get("weights"), Mapping):
        raise ValueError("quantization_config is not supported without exactly one of config_groups, with weights")
    wanted = {**_COMMON, **_WEIGHTS[names[name]]}
    weights = {"dynamic": False, **group["weights"]}
    weights["scale_dtype"] = weights.get("scale_dtype") or wanted["scale_dtype"]
    wrong = [key for key, value in wanted.items() if weights.get(key) != value]
    wrong += [key for key in ("input_activations", "output_activations") if group.get(key)]
    wrong += [key for key in ("kv_cache_scheme", "transform_config") if found.get(key)]
    if wrong:
        raise ValueError(f"quantization_config of format {name} is not supported with these values of {', '.join(wrong)}")
    return names[name]


def read_tensor_scales(directory: pathlib.Path) -> dict[str, float]:
    """Return {module: s} of the manifest, {} where there is none."""
    path = directory / MANIFEST
    try:
        return dict(json.loads(path.read_text()).get("tensor_scales", {}))
    except FileNotFoundError:
        return {}
    except (AttributeError, OSError, TypeError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None


# ---- The tensors ----


def shapes(format: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Return {suffix: shape} of what takes the place of a weight [out, in]."""
    rows, columns = shape
    all_shapes = {"_packed": (rows, columns // 2), "_scale": (rows, columns // BLOCKS[format]), "_global_scale": (1,)}
    return {suffix: all_shapes[suffix] for suffix in SUFFIXES[format]}


def dtype_of(format: str, name: str) -> str:
    """Return the safetensors dtype that a tensor of this name must have, "" where it is not one of a packed weight's."""
    suffixes = zip(SUFFIXES.get(format, ()), DTYPES.get(format, ()), strict=True)
    return next((dtype for suffix, dtype in suffixes if name.endswith(f".weight{suffix}")), "")


def tensors(format: str, codes: Codes) -> dict[str, np.ndarray]:
    """Return {suffix: array} as stored."""
    if format == "mxfp4":
        return {"_packed": codes.data, "_scale": codes.scale}
    assert codes.tensor_scale is not None
    inverse = np.float32(1) / np.float32(codes.tensor_scale)
    return {"_packed": codes.data, "_scale": codes.scale.view(ml_dtypes.float8_e4m3fn), "_global_scale": inverse.reshape(1)}


def unpack(format: str, name: str, read: Read, index: tuple[slice, slice], tensor_scale: float | None) -> np.ndarray:
    """Return the float32 values of weight[index], read by `read(name + suffix, index)` as bytes or float32.

    tensor_scale: s from the manifest; raises ValueError where its reciprocal is not what the file holds.
    """
    rows, columns = index
    block = BLOCKS[format]
    first, last = columns.start // block, math.ceil(columns.stop / block)
    data = read(f"{name}_packed", (rows, slice(first * block // 2, last * block // 2)))
    scale = read(f"{name}_scale", (rows, slice(first, last)))
    if format == "mxfp4":
        scale = np.where(scale == 255, np.float32(np.nan), (scale.astype(np.uint32) << 23).view(np.float32))
    else:
        (inverse,) = read(f"{name}_global_scale", (slice(0, 1),))
        s = np.float32(1) / inverse if tensor_scale is None else np.float32(tensor_scale)
        if np.float32(1) / s != inverse:
            raise ValueError(f"{MANIFEST} has tensor scale {s} for {name}, but its global scale is {inverse}, not 1/{s}")
        scale = _flush(scale.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * s)
    codes = np.stack([data & 15, data >> 4], axis=-1).reshape(len(data), -1, block)
    values = _flush(_VALUES[codes] * scale[..., None]).reshape(len(data), -1)
    return values[:, columns.start - first * block : columns.stop - first * block]


def _flush(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < np.float32(2.0**-126), np.copysign(np.float32(0), x), x)
