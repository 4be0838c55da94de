# Another split of the layers on the first and the last rank, and context parallelism.
OPTIONS=" \
  --num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64 \
  --group-query-attention --num-query-groups 8 --swiglu --disable-bias-linear --normalization RMSNorm \
  --position-embedding-type rope --rotary-base 500000 --untie-embeddings-and-output-weights --vocab-size 128256 \
  --seq-length 8192 --max-position-embeddings 8192 --bf16 --hidden-dropout 0"
OPTIONS="$OPTIONS --tensor-model-parallel-size 4 --pipeline-model-parallel-size 4 --context-parallel-size 2 --cp-comm-type p2p"
OPTIONS+=" --decoder-first-pipeline-num-layers 18 --decoder-last-pipeline-num-layers 18"
OPTIONS="${OPTIONS} --micro-batch-size 1 --global-batch-size 128 --use-distributed-optimizer --grad-reduce-in-bf16"
python -m torch.distributed.launch --nproc_per_node 8 --nnodes 8 --use_env pretrain_gpt.py $OPTIONS \
  --recompute-granularity full --recompute-method block --recompute-num-layers 4 2>&1 | tee log.txt
