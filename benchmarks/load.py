"""How much memory reading and writing a model in Hugging Face's layout takes:  python -m benchmarks.load [--layers=16]

The shape of Llama 3.2 1B (bfloat16, tied head; 2.5 GB in two or more files), random weights. The float32 parameters are 4 bytes
each and stay; limit: these and one tensor beside them. Each row is a process of its own: its largest resident set, what it held
before, and the difference over the bytes of the parameters. Files that are mapped count as resident while they are read.
"""

import argparse
import json
import pathlib
import re
import subprocess
import sys
import tempfile
import time

import jax
import ml_dtypes
import numpy as np
import safetensors.numpy

from models import huggingface, llama
from train import page

PER_FILE = 60  # tensors


def config_of(layers: int) -> llama.LlamaConfig:
    """Return the shape of `configs/llama3.py` 1b with so many blocks."""
    return llama.LlamaConfig(128256, 2048, layers, 32, 8, 8192, tie_embeddings=True)


def write(directory: pathlib.Path, config: llama.LlamaConfig) -> None:
    """Write a model of random weights, a file at a time."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(huggingface.to_config(config, "bfloat16")))
    rng, weight_map, held = np.random.default_rng(0), {}, {}
    tensors = list(huggingface.expected(config).items())
    for number, (name, shape) in enumerate(tensors, start=1):
        held[name] = rng.standard_normal(shape, np.float32).astype(ml_dtypes.bfloat16)
        file = f"model-{(number - 1) // PER_FILE:05d}.safetensors"
        weight_map[name] = file
        if number % PER_FILE == 0 or number == len(tensors):
            safetensors.numpy.save_file(held, directory / file)
            held = {}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def resident() -> int:
    """Return the largest resident set of this process so far (Linux; getrusage counts the parent's too)."""
    status = pathlib.Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024  # pyright: ignore


def measure(directory: pathlib.Path, output: str) -> None:
    config = huggingface.read_config(directory)
    jax.block_until_ready(jax.numpy.zeros(1))
    before, started = resident(), time.perf_counter()
    params = huggingface.load(directory, config)
    if output:
        huggingface.save(pathlib.Path(output), params, config)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    peak, seconds = resident(), time.perf_counter() - started
    row = [f"{value / 1e9:.2f}" for value in (size, before, peak)] + [f"{(peak - before) / size:.2f}", f"{seconds:.1f}"]
    print(f"{'load, save' if output else 'load':12}" + "".join(f"{each:>14}" for each in row))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        measure(pathlib.Path(arguments.measure[0]), arguments.measure[1])
        return
    print(f"commit {page.commit()}")
    print(" " * 12 + "".join(f"{name:>14}" for name in ("parameters GB", "before", "largest", "ratio", "seconds")), flush=True)
    with tempfile.TemporaryDirectory() as name:
        directory = pathlib.Path(name)
        write(directory / "model", config_of(arguments.layers))
        for output in ("", str(directory / "out")):
            subprocess.run([sys.executable, "-m", "benchmarks.load", "--measure", str(directory / "model"), output], check=True)


if __name__ == "__main__":
    main()
