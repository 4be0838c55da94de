# A command line of torchtitan 0.3.0, for docs/other_systems.md: Llama 3 8B on 32 devices.
torchrun --nproc_per_node=8 --nnodes=4 -m torchtitan.train --module llama3 --config llama3_8b \
  --training.local_batch_size 16 --training.seq_len 8192 --parallelism.pipeline_parallel_degree 4 \
  --parallelism.pipeline_parallel_schedule Interleaved1F1B --parallelism.tensor_parallel_degree 2 activation-checkpoint:full
