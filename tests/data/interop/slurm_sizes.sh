#!/usr/bin/env bash
#SBATCH -N 8
#SBATCH --ntasks-per-node=8 --gpus-per-node=8
#SBATCH --array=1-20%1   # twenty parts, one after the other
set -euo pipefail
SIZE=${SIZE:-medium}
PRECISION=bf16
case "$SIZE" in
  small|tiny) LAYERS=16; WIDTH=2048; HEADS=16; TP=1; PP=2 ;;
  medium)
    LAYERS=40; WIDTH=5120; HEADS=40   # as wide as it is deep
    TP=4; PP=4 ;;
  *) echo "no size $SIZE" >&2; exit 1 ;;
esac
while [[ $# -gt 0 ]]; do
  case $1 in
    --layers) LAYERS=$2; shift 2 ;;
    *) shift ;;
  esac
done
DP=$(( SLURM_NTASKS / (TP * PP) ))
args=(
  --tensor-model-parallel-size "$TP" --pipeline-model-parallel-size "$PP"
  --num-layers "$LAYERS" --hidden-size "$WIDTH" --num-attention-heads "$HEADS" --ffn-hidden-size $((WIDTH * 3))
  --seq-length 4096 --max-position-embeddings 4096 --position-embedding-type rope --swiglu --disable-bias-linear
  --normalization RMSNorm --untie-embeddings-and-output-weights --hidden-dropout 0 --vocab-size 32000
  --micro-batch-size 2 --global-batch-size $((2 * DP * 16)) --use-distributed-optimizer
)
if [ "$PRECISION" = fp16 ]; then
  args+=(--fp16 --recompute-activations)
elif [[ $PRECISION == bf* && $TP -gt 1 ]]; then
  args+=("--bf16 --sequence-parallel")
fi
((LAYERS > 64)) && args+=(--recompute-activations) || args+=(--optimizer lion)
train() {
  local script=$1; shift
  srun --mpi=pmix --container-image=image.sqsh python -u "$script" ${args[@]} "$@"
}
train pretrain_gpt.py --overlap-grad-reduce
