"""Models converted for CTranslate2 decode as the host does: tiny ones of random weights."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
import zoo

from fastgen.bench.runners.convert import spec_of

ctranslate2 = pytest.importorskip("ctranslate2")
converters = pytest.importorskip("ctranslate2.converters.transformers")


def converted(folder: Path, model: Any, loader: str, tokenizer: Any = None) -> str:
    spec = spec_of(model, getattr(converters, loader)(), tokenizer)
    spec.validate()
    spec.optimize(quantization=None)
    folder.mkdir()
    spec.save(str(folder))
    return str(folder)


def test_llama(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    # Heads of 32 numbers, the fewest that CTranslate2's attention has on a CPU.
    model = LlamaForCausalLM(LlamaConfig(**{**zoo.GROUPED, "hidden_size": 128, "head_dim": 32, "rms_norm_eps": 1e-3}))
    prompt = torch.randint(5, zoo.VOCAB, (1, 9))
    options = dict(do_sample=False, max_new_tokens=12, min_new_tokens=12)
    expected = model.eval().generate(prompt, **options)[0, 9:].tolist()
    engine = ctranslate2.Generator(converted(tmp_path / "model", model, "LlamaLoader"), intra_threads=1)
    prompts = [[str(token) for token in prompt[0].tolist()]]
    (found,) = engine.generate_batch(prompts, max_length=12, min_length=12, include_prompt_in_result=False)
    assert [int(name) for name in found.sequences[0]] == expected


def test_whisper(tmp_path: Path) -> None:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    torch.manual_seed(0)
    sizes = dict(d_model=64, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=64, decoder_ffn_dim=64)
    model = WhisperForConditionalGeneration(
        WhisperConfig(**sizes, encoder_attention_heads=1, decoder_attention_heads=1, suppress_tokens=None)
    ).eval()
    model.generation_config.eos_token_id = model.config.eos_token_id
    special = {50257: "<|endoftext|>", 50258: "<|startoftranscript|>", 50259: "<|en|>", 50359: "<|transcribe|>"}
    special |= {50362: "<|nospeech|>", 50363: "<|notimestamps|>"}
    tokenizer = SimpleNamespace(convert_ids_to_tokens=lambda ids: [special.get(one, str(one)) for one in ids])
    prompt = torch.tensor([[50258, 50259, 50359, 50363]])
    features = torch.randn(1, 80, 3000)
    with torch.no_grad():
        model.proj_out.weight[50257:] -= 0.2 * model.proj_out.weight[50257:]  # special tokens are unlikely
        expected = model.generate(
            input_features=features, decoder_input_ids=prompt, max_new_tokens=8, min_new_tokens=8, num_beams=2
        )[0].tolist()
    engine = ctranslate2.models.Whisper(converted(tmp_path / "model", model, "WhisperLoader", tokenizer))
    view = ctranslate2.StorageView.from_array(numpy.ascontiguousarray(features.numpy()))
    (found,) = engine.generate(view, prompt.tolist(), beam_size=2, max_length=16)
    assert found.sequences_ids[0][:8] == expected[:8]


GGUF = {
    "attn_norm": "input_layernorm",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_up": "mlp.up_proj",
}


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 96}
    return LlamaForCausalLM(LlamaConfig(**{**zoo.GROUPED, **sizes})).eval()


@pytest.mark.parametrize("is_int8", [False, True])
def test_a_gguf_file_has_the_weights(tmp_path: Path, is_int8: bool) -> None:
    gguf = pytest.importorskip("gguf")
    from fastgen.bench.runners.gguf import write

    model = llama()
    write(model, tmp_path / "model.gguf", is_int8)
    read = gguf.GGUFReader(tmp_path / "model.gguf").tensors
    found = {each.name: torch.tensor(gguf.dequantize(each.data, each.tensor_type)) for each in read}
    assert {"token_embd.weight", "output_norm.weight", "output.weight"} <= {*found}
    layer = model.model.layers[1]
    for name, theirs in GGUF.items():
        weight = layer.get_submodule(theirs).weight.detach()
        step = float(weight.abs().max()) / 127 if is_int8 and weight.ndim == 2 else 0.0
        torch.testing.assert_close(found[f"blk.1.{name}.weight"], weight, rtol=0, atol=step)
    if not is_int8:  # the halves of a head, which transformers rotates together, are neighbours there
        query = layer.self_attn.q_proj.weight.detach()
        order = torch.cat([torch.arange(16).view(2, 8).t().flatten() + 16 * head for head in range(4)])
        assert torch.equal(found["blk.1.attn_q.weight"], query[order])


def test_llama_cpp(tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    pytest.importorskip("gguf")
    import json

    from fastgen.bench.runners import gguf, llamacpp

    model, prompt = llama(), torch.randint(5, zoo.VOCAB, (1, 9), generator=torch.Generator().manual_seed(0))
    expected = model.generate(prompt, do_sample=False, max_new_tokens=12, min_new_tokens=12)[0, 9:].tolist()
    gguf.write(model, tmp_path / gguf.FLOAT32, is_int8=False)
    (tmp_path / gguf.JOB).write_text(json.dumps({"prompts": prompt.tolist(), "new": 12, "ends": []}))
    runner = llamacpp.Runner({"folder": str(tmp_path), "threads": 1, "options": {}})
    for _ in range(2):  # nothing of the first call is left
        assert runner.outputs(runner.generate()) == {"tokens": [expected]}
