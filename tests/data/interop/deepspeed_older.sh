#! /bin/bash
CONFIG=ds.json
cat <<EOT > $CONFIG
{"train_micro_batch_size_per_gpu": 4, "--num-layers": 7}
EOT
MODEL="--num_layers 24 --hidden_size 2048 --num_attention_heads 16 --seq_length 2048 --max_position_embeddings 2048
       --vocab_size 50257 --position_embedding_type alibi"
export START="deepspeed --num_nodes 4 --num_gpus=8 --hostfile hosts"
export CMD=" \
    `pwd`/pretrain_gpt.py --tensor_model_parallel_size 2 --pipeline_model_parallel_size 4 \
    --micro_batch_size 4 --global_batch_size 256 --fp16 \
    --checkpoint_activations --zero_stage 1 --deepspeed_config $CONFIG \
    $MODEL"
bash -c '$START $CMD' 2>&1 | tee log.txt
