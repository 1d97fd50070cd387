"""Rotary positions whose frequencies depend on the longest row: no row leaves the others, or is read in parts."""

from __future__ import annotations

import copy
from typing import Any

import harness
import pytest
import torch
import zoo
from joined_calls import calls_of, refilled, stock_results

import fastgen
from fastgen.cache.tree import BeamTree
from fastgen.optimizer.transformers.generate import chunked_prefill
from fastgen.optimizer.transformers.model import modules

pytestmark = pytest.mark.skipif(zoo.MAJOR < 5, reason="4.57 has other configurations for rotations")

TRAINED = 12  # positions up to which nothing depends on the length
HALF = zoo.GROUPED["head_dim"] // 2
KINDS: dict[str, dict[str, Any]] = {
    "dynamic": dict(
        max_position_embeddings=TRAINED, rope_parameters=dict(rope_type="dynamic", rope_theta=10000.0, factor=8.0)
    ),
    "longrope": dict(
        rope_parameters=dict(
            rope_type="longrope",
            rope_theta=10000.0,
            factor=1.0,
            short_factor=[1.0] * HALF,
            long_factor=[1.5 + i for i in range(HALF)],
            original_max_position_embeddings=TRAINED,
        )
    ),
}
LENGTHS = (16, 5, 4, 3)


def model_of(kind: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    family = zoo.Family(kind, zoo._model("LlamaForCausalLM", "LlamaConfig", zoo.GROUPED, **KINDS[kind]), zoo.text)
    monkeypatch.setitem(zoo.VARIANTS, kind, family)
    return zoo.fresh(kind)


def prompts(seed: int, lengths: tuple[int, ...] = LENGTHS) -> dict[str, torch.Tensor]:
    """One long text and short ones, padded on the left."""
    generator, longest = torch.Generator().manual_seed(seed), max(lengths)
    tokens = torch.randint(zoo.FIRST_WORD, zoo.VOCAB - 1, (len(lengths), longest), generator=generator)
    mask = torch.arange(longest)[None] >= longest - torch.tensor(lengths)[:, None]
    return dict(input_ids=tokens.masked_fill(~mask, zoo.PAD), attention_mask=mask.long())


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many sentences stayed, each time that some left."""
    seen: list[int] = []
    select = BeamTree.select

    def selected(self: BeamTree, sentences: torch.Tensor) -> None:
        seen.append(len(sentences))
        select(self, sentences)

    monkeypatch.setattr(BeamTree, "select", selected)
    return seen


def _same(model: Any, inputs: dict[str, Any], **options: Any) -> bool:
    """Whether fastgen finds what stock does. Each has a model that nobody has called: dynamic ones keep a length."""
    stock = harness.run_stock(copy.deepcopy(model), inputs, **options)
    ours, calls = harness.run_fastgen(copy.deepcopy(model), inputs, **options)
    harness.assert_path(calls, "auto", "accelerated")
    return torch.equal(stock, ours)


ENDS = list(range(zoo.FIRST_WORD, zoo.VOCAB, 6))  # so many that sentences end early, and at different steps


@pytest.mark.parametrize("kind", KINDS)
def test_sentences_stay(kind: str, left: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(kind, monkeypatch)
    options = dict(num_beams=3, max_new_tokens=20, eos_token_id=ENDS, early_stopping=True)
    assert all(_same(model, prompts(seed), **options) for seed in range(8)) and not left


@pytest.mark.parametrize("kind", KINDS)
def test_it_matters(kind: str, left: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """If they left, the others would be rotated otherwise."""
    model = model_of(kind, monkeypatch)
    monkeypatch.setattr(modules, "rotates_by_length_from", lambda modules: float("inf"))
    options = dict(num_beams=3, max_new_tokens=20, eos_token_id=ENDS, early_stopping=True)
    assert not all(_same(model, prompts(seed), **options) for seed in range(8)) and left


@pytest.mark.parametrize("kind", KINDS)
def test_short_texts_leave(kind: str, left: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(kind, monkeypatch)
    options = dict(num_beams=3, max_new_tokens=TRAINED - 6, eos_token_id=ENDS, early_stopping=True)
    assert all(_same(model, prompts(seed, (5, 4, 3, 2)), **options) for seed in range(4)) and left


def test_calls_share_no_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("longrope", monkeypatch)
    monkeypatch.setitem(zoo._shared, "longrope", model)
    calls = calls_of("longrope", num_beams=3)
    for stock, ours in zip(stock_results(model, calls), refilled(model, calls), strict=True):
        assert torch.equal(stock, ours)


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_is_read_at_once(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever memory there is: the beginning of a long prompt would be rotated as a short one."""
    model = model_of(kind, monkeypatch)
    monkeypatch.setattr(chunked_prefill, "_SHORTEST", 2)
    monkeypatch.setattr(chunked_prefill, "_free_memory", lambda device: 0)
    assert _same(model, prompts(0, (24, 20)), num_beams=3, max_new_tokens=6)


def test_whose_positions_count() -> None:
    parts = [torch.nn.Module() for _ in range(4)]
    assert modules.rotates_by_length_from(parts) == float("inf")
    parts[0].rope_type = "llama3"
    parts[1].rope_type, parts[1].original_max_seq_len = {"sliding_attention": "default", "full": "dynamic"}, 40
    assert modules.rotates_by_length_from(parts) == 40
    parts[2].rope_type = "longrope"
    assert modules.rotates_by_length_from(parts) == 0
    parts[2].config = zoo._get("LlamaConfig")(**KINDS["longrope"])
    assert modules.rotates_by_length_from(parts) == TRAINED


@pytest.mark.parametrize("refill", [False, True])
@pytest.mark.parametrize("beams", [1, 3])
def test_lists(beams: int, refill: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each source as it is alone: its positions are not rotated as a longer source of the list says.

    With `dynamic` rotations the host goes by the longest text of earlier calls, too, so there is no "alone".
    """
    model, options = model_of("longrope", monkeypatch), dict(num_beams=beams, max_new_tokens=5)
    sources = [row[row != zoo.PAD].tolist() for row in prompts(3)["input_ids"]]
    assert max(map(len, sources)) + 5 > TRAINED > min(map(len, sources)) + 5
    with fastgen.disabled():
        alone = [model.generate(torch.tensor([source]), **options)[0].tolist() for source in sources]
    found = fastgen.generate(model, sources, batch_size=8, refill=refill, **options)
    assert [output[0].tolist() for output in found] == alone
