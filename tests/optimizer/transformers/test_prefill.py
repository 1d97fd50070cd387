"""A prompt read in chunks: the option, and our own choice where memory is short."""

from __future__ import annotations

import copy
from typing import Any

import harness
import pytest
import torch
import zoo
from disguise import disguised

import fastgen

DECODERS = [name for name in zoo.DECODERS if name in zoo.ACCELERATED]
SEARCHES: dict[str, dict[str, Any]] = {
    "beams": dict(num_beams=4, num_return_sequences=2),
    "greedy": dict(),
    "samples": dict(do_sample=True, top_k=12, num_return_sequences=3),
    "beam_samples": dict(num_beams=3, do_sample=True),
}
DETAILS = dict(max_new_tokens=10, return_dict_in_generate=True, output_scores=True, output_logits=True)
CHUNKS = (1, 3, 4, 11, 50)  # of a prompt of 11 tokens


@pytest.fixture
def chunks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of tokens that the models' forward passes are given, through their embeddings."""
    seen: list[int] = []
    embed = torch.nn.Embedding.forward

    def forward(self: Any, tokens: torch.Tensor) -> torch.Tensor:
        seen.append(tokens.shape[-1])
        return embed(self, tokens)

    monkeypatch.setattr(torch.nn.Embedding, "forward", disguised(forward, torch.nn.Embedding))
    return seen


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("name", DECODERS)
def test_chunks(name: str, search: str, chunks: list[int]) -> None:
    model = zoo.load(name)
    options = {**SEARCHES[search], **DETAILS}
    tiers = harness.TIERS if "num_beams" in options else ("auto",)
    for padding in (None, "left"):
        inputs = zoo.inputs_for(name, length=11, ragged=padding is not None)
        for size in CHUNKS:
            stock = harness.run_stock(model, inputs, prefill_chunk_size=size, **options)
            for tier in tiers:
                chunks.clear()
                harness.compare(model, inputs, tier, stock=stock, prefill_chunk_size=size, **options)
                if zoo.MAJOR >= 5 or search in ("greedy", "samples"):  # 4.57 has it for these alone
                    assert max(chunks) == min(size, 11 if zoo.MAJOR >= 5 else 10)
                else:
                    assert max(chunks) == 11


def test_left_to_stock() -> None:
    """Stock cuts the source's mask for an encoder-decoder model, and embeddings not at all."""
    options = dict(num_beams=3, max_new_tokens=6, prefill_chunk_size=4)
    model = zoo.load("llama")
    inputs = zoo.inputs_for("llama")
    embeddings = dict(inputs, inputs_embeds=model.get_input_embeddings()(inputs["input_ids"]))
    for name, given in (("bart", zoo.inputs_for("bart")), ("llama", embeddings)):
        with pytest.raises(fastgen.FallbackError, match="prefill_chunk_size"):
            harness.run_fastgen(zoo.load(name), given, **options)


# ---------------------------------------------------------------------------------------------- where memory asks
chunked = pytest.mark.skipif(zoo.MAJOR < 5, reason="4.57 has chunks for some searches only")


def _short_of_memory(monkeypatch: pytest.MonkeyPatch, model: Any, batch: int, length: int) -> None:
    from fastgen.optimizer.transformers.generate import chunked_prefill as module

    monkeypatch.setattr(module, "_SHORTEST", 2)
    # The prompts take all of it, and chunks of a power of two tokens at most a quarter: 4 of 24.
    enough = batch * length * module._bytes_per_token(model, length)
    monkeypatch.setattr(module, "_free_memory", lambda device: enough)


@chunked
@pytest.mark.parametrize("search", ["beams", "greedy", "samples"])
@pytest.mark.parametrize("name", DECODERS)
def test_memory_asks(name: str, search: str, chunks: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = zoo.load(name), zoo.inputs_for(name, length=24)
    _short_of_memory(monkeypatch, model, *inputs["input_ids"].shape)
    options = {**SEARCHES[search], **DETAILS}
    stock = harness.run_stock(model, inputs, **options)
    assert max(chunks) == 24, "stock is not to be chunked"
    for tier in harness.TIERS if "num_beams" in options else ("auto",):
        chunks.clear()
        harness.compare(model, inputs, tier, stock=stock, **options)
        assert max(chunks) == 4
    assert model.generation_config.prefill_chunk_size is None


@chunked
def test_memory_does_not_ask(chunks: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = zoo.load("llama"), zoo.inputs_for("llama", length=24)
    options = dict(num_beams=3, max_new_tokens=4, return_dict_in_generate=True)
    harness.compare(model, inputs, **options)  # plenty of memory, and a short prompt
    assert max(chunks) == 24
    stock = harness.run_stock(model, inputs, **options)
    _short_of_memory(monkeypatch, model, *inputs["input_ids"].shape)
    chunks.clear()
    torch.use_deterministic_algorithms(True)
    try:
        harness.compare(model, inputs, stock=stock, **options)
    finally:
        torch.use_deterministic_algorithms(False)
    assert max(chunks) == 24
    chunks.clear()
    other = copy.deepcopy(model)
    other.config.model_type = "unheard_of"
    harness.compare(other, inputs, stock=stock, **options)
    assert max(chunks) == 24
