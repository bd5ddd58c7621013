"""Tokenize and pack text once:  python -m train.prepare --train='c4/*.json.gz' --tokenizer=tokenizer.json --output=prepared/c4

Reads text and Megatron's token files (train/sources.py says which), in parallel, and writes a directory that training maps into
memory: --config.data.source=prepared --config.data.files=prepared/c4. Whatever stops it, the same command goes on. A document
is its ids with --documents around them; text that looks like a special token is encoded as the characters it has. Without
--val every (1 / --val_fraction)-th document of a unit of files is held out. The last line of stdout is a JSON object.
"""

import logging
import os
import pathlib

from absl import flags

from train import cli, preparation
from train.errors import InputError

log = logging.getLogger(__name__)
TRAIN = flags.DEFINE_string("train", None, "Globs of the files for training, separated by commas.")
VAL = flags.DEFINE_string("val", "", "Globs of the files for validation; default: documents of the training files.")
OUTPUT = flags.DEFINE_string("output", None, "The directory to write.")
TOKENIZER = flags.DEFINE_string(
    "tokenizer", None, "tokenizer.json, Llama 3's tiktoken file, bytes, bytes+eos, bpe:N, bpe:N+eos."
)
DOCUMENTS = flags.DEFINE_string("documents", "eos", "What marks a document: eos, bos, bos+eos, newlines (two of them), none.")
TEXT_KEY = flags.DEFINE_string("text_key", "text", "Key or column of the text in JSON, Parquet and ArrayRecord files.")
VAL_FRACTION = flags.DEFINE_float("val_fraction", 0.001, "Share of the documents for validation, without --val.")
WORKERS = flags.DEFINE_integer("workers", 0, "Processes; 0: one per CPU core. It does not change the result.")


def main() -> int:
    if not TRAIN.value or not OUTPUT.value or not TOKENIZER.value:
        raise InputError("--train=FILES, --tokenizer=NAME and --output=DIR are needed")
    if WORKERS.value < 0:
        raise InputError(f"--workers={WORKERS.value} is negative")
    output = pathlib.Path(OUTPUT.value)
    plan = preparation.make_plan(
        train=TRAIN.value,
        val=VAL.value,
        tokenizer=TOKENIZER.value,
        marks=DOCUMENTS.value,
        text_key=TEXT_KEY.value,
        val_fraction=VAL_FRACTION.value,
    )
    lock = cli.lock_file(output / "lock")
    if lock is None:
        raise InputError(f"{output} is in use by another process that prepares it")
    stop = cli.StopRequest()
    workers = WORKERS.value or len(os.sched_getaffinity(0))
    try:
        manifest = preparation.prepare(plan, output, workers=workers, stop=lambda: stop.signal is not None)
    except preparation.Stopped:
        log.info("stopped by signal %d; the same command goes on after the last unit that was appended", stop.signal)
        return stop.exit_code
    counts = {split: {name: of[name] for name in ("documents", "tokens")} for split, of in manifest["splits"].items()}
    cli.print_result({"output": str(output), "digest": manifest["digest"], "tokenizer": manifest["tokenizer"]["id"], **counts})
    return cli.DONE


if __name__ == "__main__":
    cli.run(main)
