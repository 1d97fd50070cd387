"""Writes a task's model as GGUF files for llama.cpp, in a process of its own: the engine runs without torch."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fastgen.bench import models
from fastgen.bench.runners import Missing, Refused
from fastgen.bench.runners.convert import unpadded

FLOAT32, INT8, JOB = "model-f32.gguf", "model-q8_0.gguf", "llamacpp.json"  # in the folder that the order names

# GGUF's names of a Llama's tensors.
_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


class Runner:
    def __init__(self, order: dict[str, Any]) -> None:
        try:
            import gguf  # noqa: F401
            import llama_cpp  # noqa: F401  without it there is nothing to write for
        except ImportError:
            raise Missing("llama.cpp is not installed: pip install llama-cpp-python gguf") from None
        job = models.build(order["task"], order["folders"])
        if job.model.config.model_type != "llama":
            raise Refused(f"this benchmark does not write models of type {job.model.config.model_type} for llama.cpp")
        if job.options["num_beams"] != 1 or job.options.get("do_sample"):
            raise Refused("llama.cpp's library searches greedily or draws samples of its own")
        folder = Path(order["folder"])
        write(job.model, folder / FLOAT32, is_int8=False)
        write(job.model, folder / INT8, is_int8=True)
        prompts = [row for batch in job.batches for row in unpadded(batch)]
        document = {"prompts": prompts, "new": job.options["max_new_tokens"], "ends": job.ends}
        (folder / JOB).write_text(json.dumps(document))

    def versions(self) -> dict[str, str]:
        return {"gguf": importlib.metadata.version("gguf")}


def write(model: Any, path: Path, is_int8: bool) -> None:
    """Write a Llama, with weights in float32 or as blocks of 32 codes of 8 bits with a scale each (q8_0).

    The file has no vocabulary: the engine gets and gives ids.
    """
    import gguf

    config = model.config
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("none")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0 if is_int8 else gguf.LlamaFileType.ALL_F32)
    for name, tensor in _tensors(model):
        if is_int8 and tensor.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quantize(tensor, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tensors(model: Any) -> Iterator[tuple[str, Any]]:
    """GGUF's names, and the weights as float32 arrays."""
    config = model.config
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    yield "token_embd.weight", model.model.embed_tokens.weight.detach().numpy()
    yield "output_norm.weight", model.model.norm.weight.detach().numpy()
    if not config.tie_word_embeddings:
        yield "output.weight", model.lm_head.weight.detach().numpy()
    for number, layer in enumerate(model.model.layers):
        for theirs, name in _NAMES.items():
            weight = layer.get_submodule(theirs).weight.detach().numpy()
            if name in heads:  # transformers rotates halves of a head, llama.cpp neighbours
                halves = weight.reshape(heads[name], 2, -1, weight.shape[1])
                weight = halves.swapaxes(1, 2).reshape(weight.shape)
            yield f"blk.{number}.{name}.weight", weight
