"""Exported directories in Hugging Face's own libraries, compared with what this project reads in them.

Runs twice. Here, in this project's environment, with --write it loads every exported directory with `models.huggingface` and
writes what it computed: logits, token ids, packed weights as they decode. Then, in an environment that has torch, transformers
and compressed-tensors and none of our packages, it loads the same directories with these and prints a comparison:

    python -m benchmarks.transformers_check --write /tmp/ours.npz DIR …
    OTHER/bin/python -P benchmarks/transformers_check.py /tmp/ours.npz DIR …

-P keeps this folder off the path, where kernels.py would pass for a library of that name. Differences are in float32, on the
CPU. Not run by CI: docs/checkpoints.md has the figures.
"""
# pyright: reportMissingImports=false

import json
import pathlib
import sys
from importlib.metadata import version

import numpy as np

TEXT = "In the beginning\n\n\t“naïve” — Ж 🙂 God said, Let there be light: and there was light. \x00\x7f end"
POSITIONS = 48


def write(output: pathlib.Path, directories: list[pathlib.Path]) -> None:
    """Write {directory/what: array} of every directory as this project reads it."""
    import jax.numpy as jnp
    import tokenizers

    from models import huggingface, llama

    found = {}
    for directory in directories:
        config = huggingface.read_config(directory, dtype="float32", scan_layers=False)
        params = huggingface.load(directory, config)
        ids = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json")).encode(TEXT).ids
        tokens = jnp.asarray(ids[:POSITIONS])[None]
        found[f"{directory}/ids"] = np.array(ids)
        found[f"{directory}/logits"] = np.asarray(llama.Llama(config).apply({"params": params}, tokens))[0]
        for module, (path, layer) in huggingface.linear_modules(config).items():
            block, leaf = path.split("/")
            found[f"{directory}/{module}"] = np.asarray(params[f"layers_{layer}"][block][leaf]["kernel"]).T
    np.savez(output, **found)


def check(ours: dict[str, np.ndarray], directory: pathlib.Path) -> None:
    """Print how transformers' reading of a directory differs from ours."""
    import torch
    import transformers

    ids = transformers.PreTrainedTokenizerFast.from_pretrained(directory)(TEXT)["input_ids"]
    expected = ours[f"{directory}/ids"].tolist()
    print(f"\n{directory}\n  tokenizer: {len(ids)} ids, {'the same' if ids == expected else 'OTHERS'}")
    packed = "quantization_config" in json.loads((directory / "config.json").read_text())
    tokens = torch.tensor([expected[:POSITIONS]])
    for dtype in (torch.float32, torch.bfloat16) if packed else (torch.float32,):
        options = {"quantization_config": transformers.CompressedTensorsConfig(dequantize=True)} if packed else {}
        model = transformers.LlamaForCausalLM.from_pretrained(directory, dtype=dtype, **options)
        compare_weights(ours, directory, model, dtype)
        if dtype == torch.float32:
            compare_logits(ours, directory, model, tokens, "dequantized at loading" if packed else "as loaded")
    if packed:
        model = transformers.LlamaForCausalLM.from_pretrained(directory)  # float32 fails: it is decompressed to bfloat16
        compare_logits(ours, directory, model, tokens, "decompressed at the first pass, all in bfloat16")
        compare_decoder(ours, directory)


def compare_logits(ours, directory, model, tokens, how: str) -> None:
    import torch

    with torch.no_grad():
        theirs = model(tokens).logits[0].float().numpy()
    mine = ours[f"{directory}/logits"]
    worst, relative = np.abs(theirs - mine).max(), np.linalg.norm(theirs - mine) / np.linalg.norm(mine)
    print(
        f"  logits, {how}: max |difference| {worst:.2e} of max |logit| {np.abs(mine).max():.1f}, relative norm {relative:.1e}"
    )


def compare_weights(ours, directory, model, dtype) -> None:
    """Count the weights of the blocks' linear layers that differ from ours, and from ours rounded to bfloat16."""
    import torch

    count = exact = rounded = 0
    worst = 0.0
    for name, module in model.named_modules():
        if (mine := ours.get(f"{directory}/{name}")) is not None:
            theirs, mine = module.weight.detach().float(), torch.from_numpy(mine)
            count += mine.numel()
            exact += int((theirs != mine).sum())
            rounded += int((theirs != mine.bfloat16().float()).sum())
            worst = max(worst, relative_difference(theirs, mine))
    print(
        f"  weights in {dtype}: of {count} differ {exact} from ours (relative {worst:.1e} at most), "
        f"{rounded} from ours rounded to bfloat16"
    )


def relative_difference(theirs, mine) -> float:
    return float(((theirs - mine).abs() / mine.abs().clamp_min(2.0**-126)).max())


def compare_decoder(ours, directory) -> None:
    """Count the weights that compressed-tensors' own functions decode otherwise when they are given float32 throughout."""
    import safetensors.torch
    import torch
    from compressed_tensors.compressors.mx_utils import decompress_mx_scale
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    found = json.loads((directory / "config.json").read_text())["quantization_config"]
    config = QuantizationConfig.model_validate(found)
    args = config.config_groups["group_0"].weights
    tensors, manifest = {}, json.loads((directory / "fp4jax.json").read_text())
    for file in directory.glob("*.safetensors"):
        tensors |= safetensors.torch.load_file(file)
    modules = [name.removesuffix(".weight_packed") for name in tensors if name.endswith(".weight_packed")]
    count = differ = exact_scales = 0
    worst = 0.0
    for module in modules:
        packed, scale = tensors[f"{module}.weight_packed"], tensors[f"{module}.weight_scale"]
        inverse, mine = tensors.get(f"{module}.weight_global_scale"), torch.from_numpy(ours[f"{directory}/{module}"])
        scale = decompress_mx_scale(scale) if inverse is None else scale
        values = unpack_fp4_from_uint8(packed, *mine.shape, dtype=torch.float32)
        theirs = dequantize(values, scale.float(), args=args, global_scale=inverse, dtype=torch.float32)
        count, differ = count + mine.numel(), differ + int((theirs != mine).sum())
        worst = max(worst, relative_difference(theirs, mine))
        exact_scales += inverse is not None and manifest["tensor_scales"][module] == float(1 / inverse)
    of = f"{differ} of {count} weights in {len(modules)} layers"
    print(f"  {config.format}, its decoder in float32: {of} differ, relative {worst:.1e} at most")
    if manifest.get("tensor_scales"):
        print(f"  1 / weight_global_scale is our tensor scale in {exact_scales} of {len(modules)} layers")


def main() -> None:
    arguments = [argument for argument in sys.argv[1:] if argument != "--write"]
    output, directories = pathlib.Path(arguments[0]), [pathlib.Path(argument) for argument in arguments[1:]]
    if "--write" in sys.argv:
        write(output, directories)
        return
    print(", ".join(f"{name} {version(name)}" for name in ("transformers", "compressed-tensors", "torch", "safetensors")))
    ours = dict(np.load(output))
    for directory in directories:
        check(ours, directory)


if __name__ == "__main__":
    main()
