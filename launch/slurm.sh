#!/bin/bash
# One training run over all GPUs of a Slurm allocation, one process per GPU:
#
#     sbatch --nodes=4 launch/slurm.sh --config=configs/llama3_8b_mlperf.py --workdir=/shared/runs/8b --config.mesh.data=4
#
# Submit from the repository root; the workdir must be on storage that all nodes share. The job is told to stop two minutes
# before its time is over, writes a checkpoint, and is queued again until the run is complete.
#SBATCH --job-name=fp4jax
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=fp4jax-%j.log
set -uo pipefail
source .venv/bin/activate
export JAX_COMPILATION_CACHE_DIR="${JAX_COMPILATION_CACHE_DIR:-$PWD/.jax_cache}"

# A process that fails ends the others at once; --gpus-per-task would hide the other GPUs of a node from RCCL and NCCL.
srun --kill-on-bad-exit=1 python -m train.main --cluster=slurm "$@"
code=$?
if [ $code -eq 143 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit $code
