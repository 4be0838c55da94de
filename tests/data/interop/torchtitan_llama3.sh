#!/usr/bin/bash
set -ex
NGPU=${NGPU:-"8"}
export LOG_RANK=${LOG_RANK:-0}
MODULE=${MODULE:-"llama3"}
CONFIG=${CONFIG:-"llama3_70b"}
TORCHFT_LIGHTHOUSE=${TORCHFT_LIGHTHOUSE:-"http://localhost:29510"}
PYTORCH_ALLOC_CONF="expandable_segments:True" \
torchrun --nnodes 8 --nproc_per_node=${NGPU} --rdzv_backend c10d --rdzv_endpoint="localhost:0" \
  --local-ranks-filter ${LOG_RANK} --role rank --tee 3 \
  -m torchtitan.train --module ${MODULE} --config ${CONFIG} \
  --training.local-batch-size 16 --training.seq-len 8192 --training.steps 1000 \
  --parallelism.pipeline-parallel-degree 4 --parallelism.tensor-parallel-degree 8 \
  --parallelism.pipeline-parallel-schedule Interleaved1F1B --parallelism.pipeline-parallel-layers-per-stage 11 \
  --parallelism.pipeline_parallel_microbatch_size 2 --parallelism.fsdp-reshard-after-forward never \
  activation-checkpoint:full --activation-checkpoint.preserve-rng-state "$@"
