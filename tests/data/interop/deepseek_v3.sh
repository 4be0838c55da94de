#!/usr/bin/env bash
set -euo pipefail
TP=${TP:-1}; PP=${PP:-16}; EP=${EP:-64}
NODES=${SLURM_NNODES:-128}
MODEL="
    --num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128
    --multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128
    --swiglu --disable-bias-linear --normalization RMSNorm --qk-layernorm --position-embedding-type rope
    --untie-embeddings-and-output-weights --vocab-size 129280 --make-vocab-size-divisible-by 1
    --num-experts 256 --moe-router-topk 8 --moe-ffn-hidden-size 2048 --moe-shared-expert-intermediate-size 2048
    --moe-layer-freq ([0]*3+[1]*58) --moe-router-score-function sigmoid --moe-router-num-groups 8 --moe-router-group-topk 4
    --moe-router-pre-softmax --moe-router-enable-expert-bias --moe-grouped-gemm --moe-aux-loss-coeff 1e-4
    --mtp-num-layers 1 --mtp-loss-scaling-factor 0.1
"
LAYOUT='Et*3|(tt|)*29,m|L'
PARALLEL="--tensor-model-parallel-size $TP --pipeline-model-parallel-size $PP --expert-model-parallel-size $EP
    --expert-tensor-parallel-size 1 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
EXTRA="--moe-token-dispatcher-type flex --moe-enable-deepep --overlap-moe-expert-parallel-comm --delay-wgrad-compute"
RECOMPUTE="--recompute-granularity selective --recompute-modules mla_up_proj layernorm moe_act"
LAUNCH="torchrun --nnodes $NODES --nproc-per-node 8 --rdzv-id $SLURM_JOB_ID --rdzv-backend c10d"
$LAUNCH pretrain_gpt.py $MODEL $PARALLEL $EXTRA $RECOMPUTE \
    --pipeline-model-parallel-layout "$LAYOUT" \
    --seq-length 4096 --max-position-embeddings 4096 --micro-batch-size 1 --global-batch-size 8192 --bf16 \
    --train-samples 1000000 --hidden-dropout 0 --attention-dropout 0 --norm-epsilon 1e-6
