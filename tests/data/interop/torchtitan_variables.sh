#!/bin/bash
traced ()
{
    TORCH_TRACE=~/traces "$@";
}
{
# --parallelism.pipeline_parallel_degree=8 did not fit
NGPU=16 MODULE=llama3 CONFIG=llama3_8b OMP_NUM_THREADS=8 traced ./run_train.sh \
    --parallelism.pipeline_parallel_degree=2 \
    --parallelism.data_parallel_shard_degree 8 \
    --training.local_batch_size 4 --training.seq_len=8192 \
    --activation_checkpoint.mode=full --debug.print-config
} 2>&1 | tee log.txt
