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
