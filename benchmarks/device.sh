#!/usr/bin/env bash
# One GPU, under six minutes: the kernels against the reference, their times, 200 steps of the tiny model on them.
#   bash benchmarks/device.sh [WHEELS]
# Needs Python 3.12 with jax 0.11.2, and jax-triton 0.4.1 with triton 3.8 or 3.9, or 0.3.1 with triton 3.6 (Hopper). WHEELS: a
# folder of wheels for what is missing; nothing is fetched. Prints a summary of one line per part at the end.
set -uo pipefail
cd "$(dirname "$0")/.."
export JAX_PLATFORMS=${JAX_PLATFORMS:-cuda} PYTHONPATH=. XLA_PYTHON_CLIENT_PREALLOCATE=false
if [ $# -gt 0 ]; then python3 -m pip install --quiet --no-index --no-deps --find-links "$1" "$1"/*.whl || exit 1; fi
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null || rocminfo 2>/dev/null | grep -m1 gfx
python3 -c "import jax, triton, jax_triton; print('jax', jax.__version__, 'triton', triton.__version__, 'jax-triton', jax_triton.__version__)"

summary=()
part() { # NAME SECONDS COMMAND…
  local name=$1 limit=$2 start=$SECONDS
  shift 2
  echo "=== $name"
  timeout "$limit" "$@"
  local code=$?
  summary+=("$name: $([ $code = 0 ] && echo ok || echo "FAILED ($code)"), $((SECONDS - start)) s")
}

# Tests that compare bits are collected without the project's own settings: its plugins may be missing here.
part "kernels against the reference" 150 python3 -m pytest -q -x -c /dev/null --rootdir=. -p no:cacheprovider \
  tests/kernels_quantize.py tests/kernels_matmul.py tests/kernels_dot.py
part "times" 100 python3 -m benchmarks.kernels --rounds=10
part "200 steps of tiny on kernels" 100 python3 -m train.main --config=configs/tiny_cpu.py --config.quant.impl=triton \
  --config.quant.residuals=packed --config.model.dtype=bfloat16 --config.train.steps=200 --config.train.eval_every=100 \
  --config.train.checkpoint_every=0 --workdir="$(mktemp -d)/tiny"

echo "=== summary, commit $(git rev-parse --short HEAD 2>/dev/null || echo unknown)"
printf '%s\n' "${summary[@]}"
