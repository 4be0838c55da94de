#!/bin/bash
function model() {
  echo unused
}
PP=4
declare -a MODEL=( --num-layers 48 --hidden-size 2048 --num-attention-heads 32 --kv-channels 128 --ffn-hidden-size 6144 )
MODEL+=( --group-query-attention --num-query-groups 4 --qk-layernorm --swiglu --disable-bias-linear --norm-epsilon 1e-6 )
MODEL+=( --num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 768 --moe-router-dtype fp32 --position-embedding-type rope )
MODEL+=( --untie-embeddings-and-output-weights --padded-vocab-size 151936 --normalization RMSNorm --rotary-base 1000000 )
declare -A unused_table
PARALLEL=( --tensor-model-parallel-size 2 --pipeline-model-parallel-size ${PP} --num-virtual-stages-per-pipeline-rank 3
           --expert-model-parallel-size 4 --expert-tensor-parallel-size 1 --sequence-parallel
           --microbatch-group-size-per-virtual-pipeline-stage 8 --overlap-p2p-communication-warmup-flush )
OFFLOAD=( --fine-grained-activation-offloading --offload-modules core_attn attn_proj expert_fc1 --activation-offload-fraction 0.5 )
FP8=( --fp8-format hybrid --fp8-recipe blockwise )
exec torchrun --nproc-per-node=8 --nnodes=4 pretrain_gpt.py "${MODEL[@]}" "${PARALLEL[@]}" "${OFFLOAD[@]}" "${FP8[@]}" \
  --seq-length 4096 --micro-batch-size 1 --global-batch-size=256 --bf16 --use-distributed-optimizer \
  --moe-token-dispatcher-type alltoall --hidden-dropout 0 --max-position-embeddings 40960
