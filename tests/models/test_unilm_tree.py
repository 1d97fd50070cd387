"""UniLM over the beam tree: what the host finds over its own cache, token for token."""

from __future__ import annotations

from typing import Any

import harness
import pytest
import torch
import unilm_kit as kit

import fastgen
from fastgen import report
from fastgen.layers import attention
from fastgen.optimizer.transformers import versions
from fastgen.optimizer.transformers.model import streams
from fastgen.replay import statistics

BATCHES = [(9, 4, 12), (6,), (2, 11, 5, 1, 7)]
SEARCHES: dict[str, dict[str, Any]] = {
    "plain": dict(num_beams=4),
    "returned": dict(num_beams=5, num_return_sequences=4, length_penalty=0.4, output_scores=True),
    "early": dict(num_beams=3, early_stopping=True, min_new_tokens=3),
    "banned": dict(num_beams=4, no_repeat_ngram_size=2, forbid_ignore_ids=[9, 11, 30]),
    "repetition": dict(num_beams=3, repetition_penalty=1.4),
    "never": dict(num_beams=3, eos_token_id=None, max_new_tokens=26),
}


def _inputs(lengths: tuple[int, ...] = BATCHES[0], side: str = "left") -> dict[str, torch.Tensor]:
    return kit.padded(kit.sources(*lengths), side)


@pytest.mark.parametrize("tier", harness.TIERS)
@pytest.mark.parametrize("lengths", BATCHES, ids=str)
@pytest.mark.parametrize("search", SEARCHES)
def test_beam_search(search: str, lengths: tuple[int, ...], tier: str) -> None:
    options = {"max_new_tokens": 14, **SEARCHES[search]}
    harness.compare(kit.model(), _inputs(lengths), tier=tier, **options)


@pytest.mark.parametrize("end", [60.0, -60.0], ids=["ends at once", "never ends"])
def test_ends(end: float) -> None:
    harness.compare(kit.model(end=end), _inputs(), num_beams=3, max_new_tokens=8)


@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(do_sample=True, num_return_sequences=3),
        dict(do_sample=True, num_beams=3, output_scores=True, top_k=0),
    ],
    ids=["greedy", "sampled", "beam sampled"],
)
def test_without_beams(options: dict[str, Any]) -> None:
    harness.compare(kit.model(), _inputs(), max_new_tokens=12, **options)


def test_padding_on_the_right() -> None:
    harness.compare(kit.model(), _inputs(side="right"), num_beams=4, max_new_tokens=12)


def test_sentences_leave() -> None:
    """With the ban of UniLM's own, which looks at each row alone."""
    model, options = kit.model(end=1.0), dict(SEARCHES["banned"], max_new_tokens=20, return_dict_in_generate=False)
    harness.compare(model, _inputs((9, 4, 12, 3, 8, 6, 2)), **options)
    harness.compare(
        model, _inputs((9, 4, 12, 3, 8, 6, 2)), num_beams=3, max_new_tokens=20, return_dict_in_generate=False
    )


@pytest.mark.skipif(not versions.COUNTS_IN_TENSORS, reason="steps of this version are never replayed")
def test_replayed() -> None:
    """Call after call, the later ones by steps that the first has recorded."""
    model = kit.model()
    with harness.configured(replay="always"):
        for seed in range(3):
            inputs = kit.padded(kit.sources(9, 4, 12, seed=seed))
            for options in (SEARCHES["plain"], SEARCHES["banned"]):
                harness.compare(model, inputs, max_new_tokens=12, return_dict_in_generate=False, **options)
    counted = statistics.counts(model)
    assert counted.replays > 50


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    """The first words' logits, which all have the same tokens before them."""
    exact, half = kit.model(), kit.model().to(dtype)
    options = dict(max_new_tokens=2, min_new_tokens=2, num_beams=2, output_logits=True, return_dict_in_generate=True)
    expected = harness.run_stock(exact, _inputs(), **options).logits[0]
    stock = harness.run_stock(half, _inputs(), **options).logits[0]
    ours, _ = harness.run_fastgen(half, _inputs(), **options)
    errors = [float((logits.float() - expected).abs().max()) for logits in (ours.logits[0], stock)]
    assert errors[0] <= 2 * errors[1]


def test_one_copy_of_each_source() -> None:
    """Keys and values of three padded sources, however many beams, and of no `[MASK]`."""
    sizes = []
    for beams in (2, 4):
        options = dict(num_beams=beams, max_new_tokens=7, eos_token_id=None)
        _, (call,) = harness.run_fastgen(kit.model(), _inputs(), **options)
        assert call.cache_bytes is not None
        sizes.append(call.cache_bytes)
    numbers = 2 * 20 * 4  # keys and values of a token in a layer
    assert sizes[0] >= 3 * 3 * 12 * numbers
    assert sizes[1] - sizes[0] <= 3 * 3 * 2 * 8 * numbers, "only slots of generated tokens grow with the beams"


def test_status_says_so() -> None:
    harness.run_fastgen(kit.model(), _inputs(), num_beams=3, max_new_tokens=5)
    assert "UnilmForSeq2Seq" in str(fastgen.status())
    assert report.counters()["stock"] == 0


def test_attention_that_somebody_has_replaced_stays_with_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    model = kit.model()
    kind = type(model.bert.encoder.layer[0].attention.self)
    stock = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, *args, **kwargs: 2 * stock(self, *args, **kwargs))
    harness.compare(model, _inputs(), expected="fallback", num_beams=3, max_new_tokens=5)


def _blind(patch: pytest.MonkeyPatch) -> None:
    """The `[MASK]` does not see itself."""
    patch.setattr(
        streams, "stream_attention", lambda *args: attention.stream_attention(*args[:6], _far(args[0]), args[7])
    )


def _far(query: torch.Tensor) -> torch.Tensor:
    return query.new_full((*query.shape[:2], 1), torch.finfo(query.dtype).min)


def _generous(patch: pytest.MonkeyPatch) -> None:
    """It attends to all slots, those of other beams too."""
    plain = attention.stream_attention
    patch.setattr(streams, "stream_attention", lambda *args: plain(*args[:5], torch.zeros_like(args[5]), *args[6:]))


@pytest.mark.parametrize("broken", [_blind, _generous])
def test_negative_controls(broken: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch)
    with pytest.raises((AssertionError, fastgen.FallbackError)):  # on 4.57 a trial notices
        harness.compare(kit.model(), _inputs(), num_beams=4, max_new_tokens=12, output_scores=True)
