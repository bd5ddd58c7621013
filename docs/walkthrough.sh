#!/usr/bin/env bash
# From 100 000 documents in C4's layout to a packed FP4 checkpoint that is evaluated again: what docs/data.md describes.
#   python3 -m uv run bash docs/walkthrough.sh [DIR]     DIR: default runs/walkthrough; about ten minutes on two cores
# Preparation and training are each killed (kill -9) once on the way and continued by the same command.
set -euo pipefail
cd "$(dirname "$0")/.."
dir=${1:-runs/walkthrough}
mkdir -p "$dir"
say() { printf '\n== %s\n' "$*"; }
kill_once() { # PATH COMMAND …: run it, kill it without warning as soon as PATH is there and not empty
    local path=$1; shift
    "$@" & local pid=$!
    until [ -s "$path" ] || ! kill -0 "$pid" 2>/dev/null; do sleep 0.2; done
    kill -9 "$pid" 2>/dev/null || true
    wait "$pid" 2>/dev/null || true
}

say "text: 100 000 documents in 8 shards, made of the King James text"
python - "$dir" <<'PY'
import gzip, json, pathlib, random, sys
from train import corpus

target = pathlib.Path(sys.argv[1])
words, draw = " ".join(corpus.read_bible()).split(" "), random.Random(0)
for split, shards, documents in (("train", 8, 12_500), ("validation", 1, 500)):
    for shard in range(shards):
        with gzip.open(target / f"c4-{split}.{shard:05d}-of-{shards:05d}.json.gz", "wt", compresslevel=3) as file:
            for _ in range(documents):
                first, length = draw.randrange(len(words) - 400), draw.randint(20, 400)
                text = " ".join(words[first : first + length])
                file.write(json.dumps({"text": text, "timestamp": "", "url": ""}) + "\n")
PY

prepare=(python -m train.prepare --train="$dir/c4-train.*.json.gz" --val="$dir/c4-validation.*.json.gz"
    --tokenizer=bpe:4096+eos --output="$dir/prepared")
say "prepare, killed"; kill_once "$dir/prepared/train.bin" "${prepare[@]}"
say "prepare, continued"; "${prepare[@]}"

train=(python -m train.main --config=configs/tiny_cpu.py:mxfp4_h16 --workdir="$dir/run"
    --config.data.source=prepared --config.data.files="$dir/prepared" --config.data.tokenizer=
    --config.data.max_val_sequences=64 --config.model.vocab_size=4096 --config.model.document_end=0
    --config.train.steps=200 --config.train.checkpoint_every=50 --config.train.eval_every=100
    --config.optimizer.warmup_steps=20)
say "train, killed"; kill_once "$dir/run/checkpoints/50" "${train[@]}"
say "train, continued"; "${train[@]}"

say "evaluate in the recipe it was trained in, and in full precision"
python -m train.evaluate --workdir="$dir/run"
python -m train.evaluate --workdir="$dir/run" --recipe=none
say "export in BF16 and in MXFP4, and evaluate what was exported on other text, sliding"
for dtype in bfloat16 mxfp4; do
    rm -rf "$dir/$dtype"
    python -m train.export --workdir="$dir/run" --output="$dir/$dtype" --dtype=$dtype $([ $dtype = mxfp4 ] && echo --unrotated)
    python -m train.evaluate --hf="$dir/$dtype" --data="$dir/c4-validation.00000-of-00001.json.gz" --window=128 --stride=64 --per_document
done
say "a continuation"
python -m train.evaluate --hf="$dir/bfloat16" --generate="And the LORD said unto Moses," --max_tokens=24
say "done: $dir"
