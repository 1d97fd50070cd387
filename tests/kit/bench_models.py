"""Small random models of transformers, and calls of fixed length: what the tests of fastgen.bench measure."""

from __future__ import annotations

from typing import Any

import torch
import transformers

VOCAB = 120
_PAIR = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}


def load(kind: str, width: int = 32, vocabulary: int = VOCAB, **options: Any) -> Any:
    """`kind`: bart, t5, gpt2 or llama."""
    common = {"vocab_size": vocabulary, "pad_token_id": 1, "eos_token_id": 2, "bos_token_id": 0}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if kind == "bart":
            sizes = {"d_model": width, "encoder_ffn_dim": 4 * width, "decoder_ffn_dim": 4 * width}
            options = {**_PAIR, "decoder_start_token_id": 2, "forced_eos_token_id": None, **options}
            config: Any = transformers.BartConfig(**common, **sizes, **options)
            model: Any = transformers.BartForConditionalGeneration(config)
        elif kind == "t5":
            sizes = {"d_model": width, "d_kv": width // 4, "d_ff": 4 * width, "num_heads": 4}
            options = {"num_layers": 2, "decoder_start_token_id": 1, **options}
            config = transformers.T5Config(**common, **sizes, **options)
            model = transformers.T5ForConditionalGeneration(config)
        elif kind == "gpt2":
            config = transformers.GPT2Config(**common, n_embd=width, n_layer=2, n_head=4, **options)
            model = transformers.GPT2LMHeadModel(config)
        else:
            sizes = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": 2}
            heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
            config = transformers.LlamaConfig(**common, **sizes, **heads, **options)
            model = transformers.LlamaForCausalLM(config)
    return model.eval()


def generate(model: Any, batch: int = 2, length: int = 12, new: int = 8, beams: int = 3, **options: Any) -> Any:
    random = torch.Generator().manual_seed(1)
    ids = torch.randint(3, model.config.vocab_size, (batch, length), generator=random)
    fixed = {"num_beams": beams, "min_new_tokens": new, "max_new_tokens": new, "do_sample": False}
    return model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **fixed, **options)
