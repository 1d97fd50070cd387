"""Texts of OpenAI's completions with tokenizers and models that others have: bytes for tokens, forced ends."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import openai_kit
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from fastgen.demo.job import SHIPPED_MODEL


def _save_bytes(folder: Path) -> None:
    """A Llama whose tokenizer is as Llama 2's: bytes for what it does not know, and no space at the beginning."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁acdehinot"]
    names += ["▁a", "▁an", "▁and"]
    vocabulary = {name: number for number, name in enumerate(names)}
    merges = [("▁", "a"), ("▁a", "n"), ("▁an", "d")]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    special = dict(bos_token="<s>", eos_token="</s>", pad_token="</s>", unk_token="<unk>")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4)
    ids = dict(bos_token_id=1, eos_token_id=2, pad_token_id=2)
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=len(names), **sizes, **ids)).save_pretrained(folder)


def _changed(folder: Path, file: str, **values: Any) -> None:
    path = folder / file
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | values), "utf-8")


def test_a_character_of_several_tokens_at_the_end_of_a_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The space after it is kept, however many of its bytes are among the last tokens of the prompt."""
    monkeypatch.setattr(openai_kit, "folder_of", lambda kind, folder: (_save_bytes(folder), folder)[1])
    with openai_kit.served("bytes", tmp_path) as at:
        word = at.tokenizer.convert_tokens_to_ids("▁and")
        asked = dict(model=at.name, max_tokens=1, temperature=0, logit_bias={str(word): 100})
        for prompt in ("nice", "nice 🎉", "nice 🎉🎉", "hat 🇩🇪", "ሰላም", "é", "aé", "aaé", "aaaé"):
            answer = at.client().completions.create(prompt=prompt, **asked)
            echo = at.client().completions.create(prompt=prompt, echo=True, **asked)
            assert (answer.choices[0].text, echo.choices[0].text) == (" and", f"{prompt} and")


def test_tokens_up_to_a_stop_of_a_tokenizer_that_says_it_cleans_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Llama 3's does, while the host decodes BPE as it is."""
    make = openai_kit.folder_of

    def folder_of(kind: str, folder: Path) -> Path:
        found = make(kind, folder)
        _changed(found, "tokenizer_config.json", clean_up_tokenization_spaces=True)
        return found

    monkeypatch.setattr(openai_kit, "folder_of", folder_of)
    with openai_kit.served("gpt2", tmp_path) as at:
        (the,) = at.tokenizer(" the").input_ids
        answer = at.client().completions.create(
            model=at.name,
            prompt="the cat",
            max_tokens=20,
            temperature=0,
            stop="h",
            logit_bias={str(the): 100},
            logprobs=0,
        )
        assert answer.usage.completion_tokens == len(answer.choices[0].logprobs.tokens) == 1


@pytest.mark.parametrize("more", [dict(temperature=0), dict(temperature=0, best_of=4)], ids=str)
def test_an_end_that_is_forced_is_a_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    def folder_of(kind: str, folder: Path) -> Path:
        shutil.copytree(SHIPPED_MODEL, folder, dirs_exist_ok=True)
        _changed(folder, "generation_config.json", forced_eos_token_id=2)
        return folder

    monkeypatch.setattr(openai_kit, "folder_of", folder_of)
    with openai_kit.served("forced", tmp_path) as at:
        for tokens, reason in ((4, "length"), (40, "stop")):
            answer = at.client().completions.create(model=at.name, prompt="order 4213", max_tokens=tokens, **more)
            assert answer.choices[0].finish_reason == reason
