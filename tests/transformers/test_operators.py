"""Our operators inside the fast loop: that they run, where they may not, and that the output stays the host's."""

from __future__ import annotations

from collections import Counter
from typing import Any

import harness
import pytest
import torch
import zoo
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation.logits_process import (
    EncoderNoRepeatNGramLogitsProcessor,
    MinLengthLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
)

from fastgen import ops
from fastgen.decoding.beam_search import BeamSearch, FinishingPolicy
from fastgen.optimizer.transformers.processors import Processing

needs_native = pytest.mark.skipif(not ops.is_native(torch.device("cpu")), reason="no native operators")
TOKENS = dict(return_dict_in_generate=False, num_beams=4, max_new_tokens=12)


class Calls(TorchDispatchMode):
    """Counts the operators that a block runs."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket._qualified_op_name] += 1
        return func(*args, **(kwargs or {}))


def calls_in(model: Any, inputs: dict[str, Any], tier: str = "fast", **options: Any) -> Counter[str]:
    """The operators of a request that is compared with stock before."""
    harness.compare(model, inputs, tier=tier, **options)
    with Calls() as calls:
        harness.run_fastgen(model, inputs, tier=tier, **options)
    return calls.counts


@pytest.fixture(scope="module", params=["bart", "gpt2"])
def case(request: pytest.FixtureRequest) -> tuple[Any, dict[str, Any]]:
    return zoo.load(request.param), zoo.inputs_for(request.param)


@needs_native
def test_candidates_come_from_the_logits(case: tuple[Any, dict[str, Any]]) -> None:
    counts = calls_in(*case, **TOKENS)
    assert counts["fastgen::topk_log_softmax"] >= 5
    # Stock's arithmetic is for close calls only.
    assert counts["aten::_log_softmax"] < counts["fastgen::topk_log_softmax"] / 2


@pytest.mark.parametrize(
    "options", [{"no_repeat_ngram_size": 2}, {"no_repeat_ngram_size": 1}, {"no_repeat_ngram_size": 3, "min_length": 5}]
)
def test_ngram_bans_run_in_place(case: tuple[Any, dict[str, Any]], options: dict[str, Any]) -> None:
    counts = calls_in(*case, **TOKENS, **options)
    assert counts["fastgen::ban_repeated_ngrams_"] >= 3
    assert counts["fastgen::topk_log_softmax"] == 0
    assert counts["aten::unfold"] == 0  # the host's own


@needs_native
def test_bans_of_whole_columns_need_no_log_softmax(case: tuple[Any, dict[str, Any]]) -> None:
    counts = calls_in(*case, **TOKENS, min_length=8, suppress_tokens=[3, 5], begin_suppress_tokens=[7])
    assert counts["aten::_log_softmax"] < counts["fastgen::topk_log_softmax"] / 2


def test_source_ngram_bans_run_in_place(case: tuple[Any, dict[str, Any]]) -> None:
    counts = calls_in(*case, **TOKENS, encoder_no_repeat_ngram_size=2, no_repeat_ngram_size=2)
    assert counts["fastgen::ban_source_ngrams_"] == counts["fastgen::ban_repeated_ngrams_"] >= 5


def test_sources_leave_with_their_sentences(monkeypatch: pytest.MonkeyPatch) -> None:
    model, rows = zoo.load("bart"), []
    inputs = zoo.FAMILIES["bart"].inputs(model, batch=6)
    options = dict(return_dict_in_generate=False, num_beams=4, max_new_tokens=20, early_stopping=True)
    options |= dict(length_penalty=-1.0, encoder_no_repeat_ngram_size=1)
    stock = harness.run_stock(model, inputs, **options)
    ban = ops.ban_source_ngrams_
    monkeypatch.setattr(
        ops,
        "ban_source_ngrams_",
        lambda source, *args, **kwargs: rows.append(len(source)) or ban(source, *args, **kwargs),
    )
    harness.compare(model, inputs, tier="fast", stock=stock, **options)
    assert rows[0] == 6 > rows[-1], rows


@pytest.mark.parametrize("options", [{"output_scores": True, "return_dict_in_generate": True}, {"do_sample": True}])
def test_whole_log_probabilities_where_they_are_asked_for(
    case: tuple[Any, dict[str, Any]], options: dict[str, Any]
) -> None:
    assert calls_in(*case, **(TOKENS | options))["fastgen::topk_log_softmax"] == 0


def test_only_inside_our_loop(case: tuple[Any, dict[str, Any]]) -> None:
    counts = calls_in(*case, tier="compat", **TOKENS, no_repeat_ngram_size=2)
    assert not any(name.startswith("fastgen::") for name in counts)


# ---------------------------------------------------------------------------------------------- processors
class Keeper(LogitsProcessor):
    """Keeps what it returns."""

    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.kept.append(scores)
        return scores


class Subclass(NoRepeatNGramLogitsProcessor):
    pass


def both(processors: LogitsProcessorList, tokens: torch.Tensor, logits: torch.Tensor) -> None:
    expected = processors(tokens, logits.log_softmax(-1))
    assert torch.equal(Processing()(processors, tokens, logits), expected)


def test_order_and_foreign_processors_are_kept() -> None:
    class Double(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            return torch.where(scores.isinf(), -1.0, 2 * scores)

    tokens, logits = torch.randint(0, 3, (6, 7)), torch.randn(6, 5)
    minimum, ngrams, own = MinLengthLogitsProcessor(9, 2, device="cpu"), NoRepeatNGramLogitsProcessor(2), Subclass(1)
    for order in ([minimum, ngrams, Double(), own], [Double(), ngrams, own], [own, Double(), minimum, ngrams]):
        both(LogitsProcessorList(order), tokens, logits)


def test_what_a_foreign_processor_keeps_does_not_change() -> None:
    keeper = Keeper()
    tokens = torch.tensor([[1, 2, 1], [3, 3, 3]])
    scores = torch.zeros(2, 5)
    processors = LogitsProcessorList([keeper, NoRepeatNGramLogitsProcessor(2)])
    banned = Processing()(processors, tokens, scores)
    assert banned.isinf().sum() == 2
    assert not keeper.kept[0].isinf().any()


@pytest.mark.parametrize("n", [1, 2, 3])
def test_source_ngrams_are_rebuilt_exactly(n: int) -> None:
    generator = torch.Generator().manual_seed(n)
    for length in (1, 2, 3, 30):
        source = torch.randint(0, 4, (3, length), generator=generator)
        processors = LogitsProcessorList([EncoderNoRepeatNGramLogitsProcessor(n, source)])
        for so_far in range(6):
            tokens = torch.randint(0, 4, (6, so_far), generator=generator)
            both(processors, tokens, torch.randn(6, 6, generator=generator))


def test_sources_that_the_host_would_refuse_stay_with_it() -> None:
    processors = LogitsProcessorList([EncoderNoRepeatNGramLogitsProcessor(1, torch.tensor([[1], [2], [3], [4]]))])
    with pytest.raises(IndexError):
        Processing()(processors, torch.ones(6, 2, dtype=torch.int64), torch.randn(6, 6))


# ---------------------------------------------------------------------------------------------- near-ties
@needs_native
@pytest.mark.parametrize("kind", ["apart", "equal", "close", "infinite"])
def test_close_calls_are_the_hosts(kind: str) -> None:
    policy = FinishingPolicy(length_penalty=1.0, early_stopping=False, max_length=8, prompt_length=1)
    prompt = torch.zeros(6, 1, dtype=torch.int64)
    generator = torch.Generator().manual_seed(1)
    stock, ours = (BeamSearch(prompt, 3, 6, policy, 1) for _ in range(2))
    none, took = torch.empty(0, dtype=torch.int64), 0
    for _ in range(5):
        logits = torch.randn(6, 40, generator=generator)
        if kind == "equal":
            logits = logits.round()
        elif kind == "close":
            logits[:, 7] = logits.max(-1).values + 1
            logits[:, 3] = torch.nextafter(logits[:, 7], torch.tensor(0.0))
        elif kind == "infinite":
            logits[:, 2:] = -torch.inf
        stops = lambda tokens, hypotheses: tokens == 2  # noqa: E731
        expected = stock.choose(logits.log_softmax(-1), stops)
        parents = ours.choose_from_logits(logits, none, stops)
        if parents is None:
            took += 1
            parents = ours.choose(logits.log_softmax(-1), stops)
        assert torch.equal(parents, expected)
    assert torch.equal(stock.result().tokens, ours.result().tokens)
    assert torch.equal(stock.live.tokens, ours.live.tokens)
    assert took == (0 if kind == "apart" else 5)
