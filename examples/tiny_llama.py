"""Write what the README's and the documentation's commands train: a tiny Llama with a tokenizer, and a corpus.

python examples/tiny_llama.py        # tiny-llama/ (random weights) and corpus.jsonl, in the working directory
"""

import json

import tokenizers
import torch
import transformers

lines = [f"Line {i}: the shuttle crosses the warp {i % 7} times, then it rests." for i in range(2000)]
with open("corpus.jsonl", "w") as file:
    file.writelines(json.dumps({"text": line}) + "\n" for line in lines)

bpe = tokenizers.ByteLevelBPETokenizer()
bpe.train_from_iterator(lines, vocab_size=400, special_tokens=["<s>", "</s>"], show_progress=False)
fast = transformers.PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, bos_token="<s>", eos_token="</s>")
fast.save_pretrained("tiny-llama")

torch.manual_seed(0)
config = transformers.LlamaConfig(
    vocab_size=len(fast),
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    bos_token_id=0,
    eos_token_id=1,
)
transformers.utils.logging.disable_progress_bar()
transformers.LlamaForCausalLM(config).save_pretrained("tiny-llama")
print("wrote tiny-llama/ and corpus.jsonl")
