# A launch script of Megatron-LM, for docs/other_systems.md: Llama 3 70B on 64 devices.
GPUS=8 NODES=${NNODES:-8}
MODEL=(
  --num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64 --group-query-attention --num-query-groups 8
  --swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope --rotary-base 500000
  --untie-embeddings-and-output-weights --vocab-size 128256 --seq-length 8192 --max-position-embeddings 8192
)
PARALLEL=(--tensor-model-parallel-size 8 --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 5)
PARALLEL+=(--sequence-parallel --use-distributed-optimizer --overlap-grad-reduce)
torchrun --nproc-per-node $GPUS --nnodes $NODES pretrain_gpt.py "${MODEL[@]}" "${PARALLEL[@]}" \
  --micro-batch-size 1 --global-batch-size 64 --bf16 --hidden-dropout 0 --data-path $DATA
