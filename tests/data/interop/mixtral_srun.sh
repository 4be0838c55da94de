#!/bin/bash
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=8
NNODES=8
ARGS=(
  --use-mcore-models --disable-bias-linear --seq-length 4096 --max-position-embeddings 32768
  --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
  --init-method-std 0.01 --attention-dropout 0.0 --hidden-dropout 0.0 --normalization RMSNorm
  --position-embedding-type rope --swiglu --untie-embeddings-and-output-weights
  --group-query-attention --num-query-groups 8 --no-masked-softmax-fusion --no-position-embedding
  --rotary-base 1000000
)
ARGS+=(--num-experts 8 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2)
ARGS+=(--moe-grouped-gemm --moe-token-dispatcher-type alltoall --overlap-param-gather --overlap-grad-reduce)
ARGS+=(--tokenizer-type Llama2Tokenizer --tokenizer-model ${TOKENIZER_MODEL} --vocab-size 32000)
ARGS+=(
  --tensor-model-parallel-size 1 --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 4
  --expert-model-parallel-size 8 --use-distributed-optimizer --sequence-parallel
  --micro-batch-size 1 --global-batch-size 256 --bf16 --lr 1e-4
)
if [ -n "${WANDB_API_KEY}" ]; then
    ARGS+=(--wandb-project mixtral --wandb-exp-name run)
fi
srun --mpi=pmix bash -c "torchrun --nproc_per_node 8 --nnodes $NNODES --rdzv-endpoint $HOSTNAME:6000 pretrain_gpt.py ${ARGS[*]}"
