"""UniLM's `generate` against a decoder that keeps nothing and reads everything again."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
import unilm_kit as kit
from disguise import disguised
from torch import Tensor
from transformers import DynamicCache

from fastgen.models.unilm import UnilmForSeq2Seq
from fastgen.models.unilm.modeling import UnilmSelfAttention
from fastgen.optimizer.transformers.versions import CACHE

# Lengths of the sources, and the seed of the model: those whose greedy and beam searches end early, late and never.
BATCHES = {
    "one": ((7,), 19),
    "ragged": ((5, 9, 2, 7), 5),
    "ragged too": ((5, 9, 1, 7), 19),
    "empty": ((2, 2, 2), 5),
    "one token": ((1, 1), 5),
}


def assert_same(mine: Any, judge: Any) -> None:
    assert torch.equal(mine.sequences, judge.sequences)
    assert len(mine.scores) == len(judge.scores)
    for a, b in zip(mine.scores, judge.scores, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=0)
    if judge.get("sequences_scores") is not None:
        assert torch.equal(mine.beam_indices, judge.beam_indices)
        torch.testing.assert_close(mine.sequences_scores, judge.sequences_scores, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("lengths", "seed"), BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_beams": 3},
        {"num_beams": 5, "num_return_sequences": 5, "length_penalty": 0.0},
        {"num_beams": 4, "early_stopping": True, "length_penalty": 2.0, "min_new_tokens": 4},
        {"num_beams": 3, "eos_token_id": [kit.SEP, 17, 30]},
        {"num_beams": 2, "repetition_penalty": 1.3},
    ],
    ids=lambda options: "-".join(options) or "greedy",
)
def test_equals_the_reference(lengths: tuple[int, ...], seed: int, options: dict[str, Any]) -> None:
    model, inputs = kit.model(seed, end=3.0), kit.padded(kit.sources(*lengths))
    mine = kit.generate(model, inputs, max_new_tokens=9, **options)
    judge = kit.generate_by_reference(model, inputs, max_new_tokens=9, **options)
    assert_same(mine, judge)


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize(("end", "steps"), [(60.0, 1), (-60.0, 8)], ids=["ends at once", "never ends"])
def test_ends(beams: int, end: float, steps: int) -> None:
    model, inputs = kit.model(end=end), kit.padded(kit.sources(5, 9, 6))
    mine = kit.generate(model, inputs, num_beams=beams, max_new_tokens=8)
    assert_same(mine, kit.generate_by_reference(model, inputs, num_beams=beams, max_new_tokens=8))
    targets = mine.sequences[:, 9:]
    assert targets.shape[1] == steps
    assert bool((targets == kit.SEP).any()) == (end > 0)


@pytest.mark.parametrize(
    "fields",
    [
        {"num_hidden_layers": 1},
        {"hidden_size": 15, "num_attention_heads": 5, "intermediate_size": 7},
        {"hidden_size": 9, "num_attention_heads": 1, "vocab_size": 53},
        {"source_type_id": 0, "target_type_id": 1, "type_vocab_size": 2},
        {"hidden_act": "relu"},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_sizes(fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    if fields.get("hidden_act"):
        monkeypatch.setattr(kit.F, "gelu", torch.relu)
    model, inputs = kit.model(end=3.0, **fields), kit.padded(kit.sources(6, 3))
    judge = kit.generate_by_reference(model, inputs, num_beams=3, max_new_tokens=7)
    monkeypatch.undo()
    assert_same(kit.generate(model, inputs, num_beams=3, max_new_tokens=7), judge)


@pytest.mark.parametrize("beams", [1, 4])
def test_padding_on_either_side(beams: int) -> None:
    model, rows = kit.model(end=3.0), kit.sources(5, 9, 2, 7)
    left, right = (
        kit.generate(model, kit.padded(rows, side), num_beams=beams, max_new_tokens=8) for side in ("left", "right")
    )
    assert torch.equal(left.sequences[:, 9:], right.sequences[:, 9:])
    for index, row in enumerate(rows):
        alone = kit.generate(model, kit.padded([row]), num_beams=beams, max_new_tokens=8).sequences[0, len(row) :]
        assert left.sequences[index, 9 : 9 + len(alone)].tolist() == alone.tolist()


def test_logits_of_each_step() -> None:
    model, (source,) = kit.model(), kit.sources(8)
    reference, cached = kit.reference(model), kit.cached(model)
    target = [9, 31, 9, 4, 52, 3, 11]
    for length in range(len(target) + 1):
        expected = reference(source, target[:length])
        torch.testing.assert_close(cached(source, target[:length]), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("side", ["left", "right"])
def test_logits_of_a_padded_batch(side: str) -> None:
    model, rows, words = kit.model(), kit.sources(8, 3, 5), [[9, 10], [31, 8], [22, 40]]
    reference, inputs = kit.reference(model), kit.padded(rows, side)
    with torch.no_grad():
        output, mask = model(**inputs), inputs["attention_mask"]
        for step in range(3):
            for index, source in enumerate(rows):
                expected = reference(source, words[index][:step])
                torch.testing.assert_close(output.logits[index, -1], expected, atol=1e-5, rtol=1e-5)
            if step < 2:
                mask = torch.cat([mask, mask.new_ones(3, 1)], 1)
                tokens = torch.tensor([row[step : step + 1] for row in words])
                output = model(tokens, attention_mask=mask, **{CACHE: getattr(output, CACHE)})


def test_half_precision_keeps_its_dtype() -> None:
    model, inputs = kit.model().to(torch.bfloat16), kit.padded(kit.sources(8, 3))
    assert model(**inputs).logits.dtype == torch.bfloat16
    assert kit.generate(model, inputs, num_beams=2, max_new_tokens=4).sequences.shape == (2, 12)


# ------------------------------------------------------------------------------------------ the published search
@pytest.mark.parametrize("options", [{}, {"length_penalty": 0.9}, {"min_length": 4}, {"ngram_size": 2, "ignored": {9}}])
@pytest.mark.parametrize("beams", [1, 4])
def test_published_search_over_the_cache(beams: int, options: dict[str, Any]) -> None:
    model = kit.model(end=3.0)
    for source in kit.sources(6, 3, 9):
        mine, judge = (
            kit.published_search(logits, source, beams, 8, **options)
            for logits in (kit.cached(model), kit.reference(model))
        )
        assert mine == judge


def test_greedy_search_is_the_published_one() -> None:
    model = kit.model(end=3.0)
    for source in kit.sources(6, 3, 9):
        (best, *_) = kit.published_search(kit.reference(model), source, 1, 10)
        assert kit.generate(model, kit.padded([source]), max_new_tokens=10).sequences[0, len(source) :].tolist() == best


@pytest.mark.parametrize("bans", [{}, {"ngram_size": 2}, {"ngram_size": 2, "ignored": [0, 11, 22, 35, 50]}])
def test_beam_search_without_ends_is_the_published_one(bans: dict[str, Any]) -> None:
    """Where no hypothesis ends, nor is ever judged by its length, both searches follow the same rules."""
    names = {"ngram_size": "no_repeat_ngram_size", "ignored": "forbid_ignore_ids"}
    options = {names[name]: value for name, value in bans.items()}
    model, changed = kit.model(seed=0, end=-60.0), not bans
    for source in kit.sources(6, 3, 9):
        (best, *frame) = kit.published_search(kit.reference(model), source, 3, 12, **bans)
        inputs = kit.padded([source])
        output = kit.generate(
            model, inputs, num_beams=3, num_return_sequences=3, max_new_tokens=12, length_penalty=0.0, **options
        )
        targets = output.sequences[:, len(source) :].tolist()
        assert targets == frame
        assert targets[0] == best
        less = {**bans, "ignored": ()} if "ignored" in bans else {}
        changed |= kit.published_search(kit.reference(model), source, 3, 12, **less)[0] != best
    assert changed, "what was asked for made no difference"


# ---------------------------------------------------------------------------------------------- negative controls
def differs(model: UnilmForSeq2Seq) -> bool:
    """Whether some logits of four steps are not the reference's."""
    reference, cached, (source,) = kit.reference(model), kit.cached(model), kit.sources(8)
    pairs = [(cached(source, target), reference(source, target)) for target in ([], [9], [9, 31], [9, 31, 7])]
    return any((a - b).abs().max() > 1e-2 for a, b in pairs)


def test_control() -> None:
    assert not differs(kit.model())


def test_storing_the_mask_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    def storing(self: Any, hidden_states: Tensor, attention_mask: Any = None, cache: Any = None) -> Tensor:
        q, k, v = (self._heads(linear(hidden_states)) for linear in (self.query, self.key, self.value))
        keys, values = cache.update(k, v, self.layer_idx)
        is_token = torch.arange(keys.shape[2]) < keys.shape[2] - 1  # this step's [MASK] still sees no more than before
        seen = is_token.expand(q.shape[2], -1).clone()
        seen[-1] = True
        return torch.nn.functional.scaled_dot_product_attention(q, keys, values, seen).transpose(1, 2).flatten(2)

    monkeypatch.setattr(UnilmSelfAttention, "forward", disguised(storing, UnilmSelfAttention))
    assert differs(kit.model())


def test_a_causal_source_would_show() -> None:
    model, (source,) = kit.model(), kit.sources(8)
    ids, causal = torch.tensor([source]), torch.ones(8, 8, dtype=torch.bool).tril()[None, None]
    expected = kit.reference(model)(source, [])
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits[0, -1], expected, atol=1e-5, rtol=1e-5)
        assert (model(ids, attention_mask=causal).logits[0, -1] - expected).abs().max() > 1e-2


def test_other_segments_would_show() -> None:
    model = kit.model()
    reference = kit.reference(model)
    model.config.target_type_id = model.config.source_type_id
    reference.config = kit.config()
    source = kit.sources(8)[0]
    assert (kit.cached(model)(source, [9]) - reference(source, [9])).abs().max() > 1e-2


def test_counting_padding_would_show() -> None:
    model, inputs = kit.model(), kit.padded(kit.sources(8, 3))
    with torch.no_grad():
        shifted = model(**inputs, position_ids=torch.arange(8)[None])
    assert (shifted.logits - model(**inputs).logits)[1].abs().max() > 1e-2


# ---------------------------------------------------------------------------------------------------- odd requests
def test_only_tokens_are_cached() -> None:
    model, inputs = kit.model(), kit.padded(kit.sources(8, 3))
    cache = DynamicCache(config=model.config)
    model(**inputs, **{CACHE: cache})
    assert cache.get_seq_length() == 8
    model(torch.tensor([[9], [10]]), **{CACHE: cache})
    assert cache.get_seq_length() == 9


def test_without_a_cache() -> None:
    model, inputs = kit.model(), kit.padded(kit.sources(8, 3))
    logits, *rest = model(**inputs, use_cache=False, return_dict=False)
    assert not rest
    assert torch.equal(logits, model(**inputs).logits)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_cache": False}, "dynamic cache"),
        ({"cache_implementation": "static"}, "dynamic cache"),
        ({"prefill_chunk_size": 3}, "source at once"),
        ({"output_attentions": True}, "has no output_attentions"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_refuses(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kit.generate(kit.model(), kit.padded(kit.sources(8, 3)), max_new_tokens=3, **options)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rel_pos_bins": 32}, "relative positions"),
        ({"type_vocab_size": 5}, "below"),
        ({"num_attention_heads": 3}, "no multiple"),
    ],
)
def test_refuses_a_configuration(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kit.model(**fields)


def test_the_step_asks_for_no_numbers() -> None:
    """A step may be recorded: the cache's length may be a tensor, and no tensor's value decides what is done."""

    class Cache(DynamicCache):
        def get_seq_length(self, *args: Any) -> Any:
            length = super().get_seq_length(*args)
            return torch.tensor(length, device="cpu") if length else 0

    model, (source,) = kit.model(), kit.sources(8)
    cache = Cache(config=model.config)
    mask = torch.ones(1, 1, 1, 9, dtype=torch.bool)
    with torch.no_grad():
        model(torch.tensor([source]), **{CACHE: cache})
        with pytest.MonkeyPatch.context() as patch:
            for name in ("item", "__bool__", "__int__", "__index__", "tolist"):
                patch.setattr(Tensor, name, lambda *_: pytest.fail("a tensor was asked for its value"))
            step = model(torch.tensor([[9]]), attention_mask=mask, position_ids=torch.tensor([[8]]), **{CACHE: cache})
    torch.testing.assert_close(step.logits[0, -1], kit.reference(model)(source, [9]), atol=1e-5, rtol=1e-5)


def test_a_mask_in_four_dimensions_reaches_the_attention_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    forward = UnilmSelfAttention.forward

    def watching(self: Any, hidden_states: Tensor, attention_mask: Any = None, cache: Any = None) -> Tensor:
        seen.append(attention_mask)
        return forward(self, hidden_states, attention_mask, cache)

    monkeypatch.setattr(UnilmSelfAttention, "forward", watching)
    mask = torch.ones(1, 1, 8, 8, dtype=torch.bool)
    kit.model()(torch.tensor(kit.sources(8)), attention_mask=mask)
    assert len(seen) == 3
    assert all(given is mask for given in seen)


def test_fastgen_does_not_import_its_models() -> None:
    code = "import sys, fastgen; print([n for n in sys.modules if n.split('.')[0] in ('torch', 'transformers') "
    code += "or n.startswith('fastgen.models')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
