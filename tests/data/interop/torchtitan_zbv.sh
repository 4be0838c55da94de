torchrun --nproc_per_node=8 --nnodes=2 -m torchtitan.train --module deepseek_v3 --config deepseek_v3_671b \
  --training.local_batch_size=32 --training.seq_len=4096 --training.global_batch_size 64 \
  --parallelism.pipeline_parallel_degree=8 --parallelism.expert_parallel_degree=2 \
  --parallelism.pipeline_parallel_schedule=ZBVZeroBubble --parallelism.no-enable-sequence-parallel \
  --checkpoint.enable --compile.enable --comm.train_timeout_seconds 300 \
  --parallelism.pipeline_parallel_first_stage_less_layers 2 --parallelism.pipeline_parallel_last_stage_less_layers 2
