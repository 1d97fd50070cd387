"""The engine keeps prompts between requests: what they begin with alike is read once, and answers stay the same."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import harness
import pytest
import torch
import zoo
from transformers import GenerationConfig

import fastgen
from fastgen.cache import by_model
from fastgen.optimizer.transformers import versions
from fastgen.serving.engine import Engine
from fastgen.serving.generation_request import Event, Finished, GenerationRequest

pytestmark = pytest.mark.skipif(not versions.PREFILLS, reason="4.57 reads prompts otherwise")


@pytest.fixture(autouse=True)
def _on() -> Iterator[None]:
    with harness.keeping_prefixes():
        yield


def answered(engine: Engine, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    events: list[Event] = []
    config = GenerationConfig(**options, max_new_tokens=8, pad_token_id=zoo.PAD, eos_token_id=zoo.UNUSED)
    ask = GenerationRequest(prompts, config, str(options), events.append)
    engine.submit(ask)
    end = time.monotonic() + 240
    while not ask.is_over:
        assert time.monotonic() < end
        time.sleep(0.005)
    found: dict[int, list[int]] = {}
    for event in events:
        assert isinstance(event, Finished), event
        found[event.which] = event.found.tokens[0]
    return [found[number] for number in range(len(prompts))]


@pytest.mark.parametrize("options", [dict(num_beams=3), dict()], ids=["beams", "greedy"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral"])
def test_answers_with_a_shared_beginning(name: str, options: dict[str, Any]) -> None:
    model, draw = zoo.load(name), torch.Generator().manual_seed(3)

    def words(count: int) -> list[int]:
        return torch.randint(zoo.FIRST_WORD, zoo.VOCAB - 1, (count,), generator=draw).tolist()

    beginning, engine = words(24), Engine(model, most_rows=32)
    try:
        for sizes in ((5,), (3, 7, 4), (9,), (2, 6)):
            prompts = [beginning + words(size) for size in sizes]
            ours = answered(engine, prompts, **options)
            for prompt, tokens in zip(prompts, ours, strict=True):
                ids = torch.tensor([prompt])
                with fastgen.disabled(), torch.no_grad():
                    stock = model.generate(
                        ids,
                        attention_mask=torch.ones_like(ids),
                        max_new_tokens=8,
                        do_sample=False,
                        eos_token_id=zoo.UNUSED,
                        **options,
                    )
                assert stock[0, len(prompt) :].tolist() == tokens
    finally:
        engine.close()
    counts = by_model.counts()
    assert (counts["calls"], counts["hits"]) == (4, 3) and counts["tokens"] >= 3 * 24
