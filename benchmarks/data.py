"""How fast the data iterator and the tokenization are:  python -m benchmarks.data [--tokens=200000000]

The iterator reads windows of 8 192 + 1 ids at random places of a prepared directory, mapped into memory, in batches of 32, as
configs/llama3_8b_mlperf.py does; one process, no threads. Limit: one window is copied once, from 2- or 4-byte ids to int32, so
(id + 4) bytes per token. A node of 8 GPUs that trains 8 B at 40 000 tokens/s each needs 320 000 tokens/s in all, an 8th of it
from each of 8 processes. The directory is made of random ids, once without its pages in the page cache of the system (if it may
drop them) and once with. Tokenization: byte-level BPE of 32 000 ids trained here, on the pinned dependencies' Python sources,
by one process with the library's threads, and by one process per core.
"""

import argparse
import gzip
import json
import os
import pathlib
import tempfile
import time

import numpy as np

from train import corpus, data, page, preparation

NEEDED = 8 * 40_000
SEQ_LEN, BATCH = 8192, 32


def make_dataset(directory: pathlib.Path, tokens: int, dtype: str) -> data.Dataset:
    path = directory / f"{dtype}.bin"
    rng = np.random.default_rng(0)
    with open(path, "wb") as file:
        for _ in range(0, tokens, 10**7):
            file.write(rng.integers(0, 50_000, 10**7, dtype=dtype).tobytes())
    ids = np.memmap(path, dtype, "r")
    tokenizer = corpus.ByteTokenizer()
    return data.Dataset(train=(ids,), val=(ids[:9],), vocab_size=50_000, fingerprint="", tokenizer=tokenizer, largest_id=49_999)


def tokens_per_s(dataset: data.Dataset, seed: int, *, seconds: float = 5.0) -> float:
    iterator = data.train_iterator(dataset, seq_len=SEQ_LEN, batch_size=BATCH, seed=seed)
    next(iterator)
    begun, batches = time.perf_counter(), 0
    while time.perf_counter() - begun < seconds:
        next(iterator)
        batches += 1
    return batches * BATCH * SEQ_LEN / (time.perf_counter() - begun)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=200_000_000)
    arguments = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    print(f"commit {page.commit()}, {cores} cores")
    print(f"{'iterator':28}{'tokens/s':>14}{'ns/token':>10}{'of 320 000/s':>14}")
    with tempfile.TemporaryDirectory() as name:
        directory = pathlib.Path(name)
        for dtype in ("uint16", "uint32"):
            dataset = make_dataset(directory, arguments.tokens, dtype)
            for cached in ("not cached", "cached"):
                with open(directory / f"{dtype}.bin", "rb") as file:
                    if cached == "cached":
                        while file.read(1 << 24):
                            pass
                    else:
                        os.fsync(file.fileno())
                        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                rate = tokens_per_s(dataset, seed=cached == "cached")
                print(f"{dtype + ', ' + cached:28}{rate:14,.0f}{1e9 / rate:10.1f}{rate / NEEDED:13.1f}x", flush=True)
        documents = corpus.read_python()
        files = [documents[i :: 4 * cores] for i in range(4 * cores)]
        for i, texts in enumerate(files):
            with gzip.open(directory / f"{i}.json.gz", "wt") as file:
                file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
        print(f"{'tokenization':28}{'tokens/s':>14}{'ns/token':>10}{'MB/s of text':>14}")
        for workers in sorted({1, cores}):
            output = directory / f"workers{workers}"
            plan = preparation.make_plan(
                train=f"{directory}/*.json.gz",
                val="",
                tokenizer="bpe:32000+eos",
                marks="eos",
                text_key="text",
                val_fraction=0.01,
                unit_bytes=1,
            )
            output.mkdir()
            preparation._begin(plan, output)  # pyright: ignore[reportPrivateUsage]
            preparation._tokenizer(plan, output)  # pyright: ignore[reportPrivateUsage]  # trained before the clock starts
            begun = time.perf_counter()
            manifest = preparation.prepare(plan, output, workers=workers)
            taken = time.perf_counter() - begun
            tokens, text = (sum(of[what] for of in manifest["splits"].values()) for what in ("tokens", "text_bytes"))
            label = f"{workers} process" + "es" * (workers > 1)
            print(f"{label:28}{tokens / taken:14,.0f}{1e9 * taken / tokens:10.1f}{text / taken / 1e6:14.1f}", flush=True)


if __name__ == "__main__":
    main()
