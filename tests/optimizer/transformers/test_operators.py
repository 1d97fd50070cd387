"""Our operators inside the fast loop: that they run, where they may not, and that the output stays the host's."""

from __future__ import annotations

import copy
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
from fastgen.layers import packed_weights
from fastgen.optimizer.transformers.generate.processors import Processing
from fastgen.patching import foreign_code

needs_native = pytest.mark.skipif(not ops.is_native(torch.device("cpu")), reason="no native operators")
TOKENS = dict(return_dict_in_generate=False, num_beams=4, max_new_tokens=12)


@pytest.fixture(autouse=True)
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mode of the user's would have the call left to the host; the one here counts, and changes nothing."""
    monkeypatch.setattr(foreign_code, "active_mode", lambda: None)


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


def log_softmaxes(counts: Counter[str]) -> int:
    return counts["aten::_log_softmax"] + counts["aten::log_softmax"]  # the latter into given memory


@pytest.fixture(scope="module", params=["bart", "gpt2"])
def case(request: pytest.FixtureRequest) -> tuple[Any, dict[str, Any]]:
    return zoo.load(request.param), zoo.inputs_for(request.param)


@needs_native
@pytest.mark.parametrize("options", [{}, {"min_length": 8, "suppress_tokens": [3, 5]}, {"repetition_penalty": 1.3}])
def test_candidates_come_from_the_rows(case: tuple[Any, dict[str, Any]], options: dict[str, Any]) -> None:
    counts = calls_in(*case, **TOKENS, **options)
    steps = counts["fastgen::beam_candidates"]
    assert steps >= 5
    # Where tokens are banned at most, nobody needs the log-probabilities of all of them, but for ties.
    assert (log_softmaxes(counts) < steps / 2) == ("repetition_penalty" not in options), counts


@needs_native
def test_all_log_probabilities_where_they_are_asked_for(case: tuple[Any, dict[str, Any]]) -> None:
    counts = calls_in(*case, num_beams=4, max_new_tokens=12, return_dict_in_generate=True, output_scores=True)
    assert log_softmaxes(counts) >= counts["fastgen::beam_candidates"] >= 5


@pytest.mark.parametrize(
    "options", [{"no_repeat_ngram_size": 2}, {"no_repeat_ngram_size": 1}, {"no_repeat_ngram_size": 3, "min_length": 5}]
)
def test_ngram_bans_run_in_place(case: tuple[Any, dict[str, Any]], options: dict[str, Any]) -> None:
    counts = calls_in(*case, **TOKENS, **options)
    assert counts["fastgen::ban_repeated_ngrams_"] >= 3
    assert counts["aten::unfold"] == 0  # the host's own


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


def test_sampling_needs_all_scores(case: tuple[Any, dict[str, Any]]) -> None:
    assert calls_in(*case, **(TOKENS | {"do_sample": True}))["fastgen::beam_candidates"] == 0


def test_the_hosts_loop_has_attention_alone(case: tuple[Any, dict[str, Any]]) -> None:
    counts = calls_in(*case, tier="compat", **TOKENS, no_repeat_ngram_size=2)
    found = {name for name in counts if name.startswith("fastgen::")}
    assert found == ({"fastgen::beam_attention"} if ops.is_native(torch.device("cpu")) else set())


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


@needs_native
@pytest.mark.parametrize("half", packed_weights.HALVES, ids=str)
@pytest.mark.parametrize("family", ["bart", "llama"])
def test_weights_that_are_halves(family: str, half: torch.dtype) -> None:
    """Models in float32 whose weights had 16 bits are read in 16 bits, with the same tokens."""
    model = copy.deepcopy(zoo.load(family))
    if half == torch.bfloat16:
        for layer in model.modules():
            if isinstance(layer, torch.nn.Linear):
                layer.weight.data[0, 0] = 1e-30  # too small for float16
    model = model.to(half).float()
    with harness.configured(packing="always"):
        for search in ({"num_beams": 4}, {"num_beams": 1, "do_sample": False}):
            harness.compare(
                model, zoo.inputs_for(family), tier="fast" if search["num_beams"] > 1 else "compat", **search
            )
            layers = [module for module in model.modules() if module in packed_weights._halves]
            assert len(layers) >= 4
    for layer in layers:
        read = packed_weights._halves[layer].copy
        assert read.dtype == half and torch.equal(read.float(), layer.weight)


# ---------------------------------------------------------------------------------------------- ties
@needs_native
@pytest.mark.parametrize("kind", ["apart", "equal", "close", "infinite", "nan", "few", "same rows"])
def test_the_same_beams_as_from_all_scores(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, step after step, so that a tie finds the scores that `torch.topk` alone would have found."""
    policy = FinishingPolicy(length_penalty=1.0, early_stopping=False, max_length=12, prompt_length=1)
    prompt = torch.zeros(6, 1, dtype=torch.int64)
    stops = lambda tokens, hypotheses: tokens == 2  # noqa: E731
    direct = 0
    for seed in range(60):
        generator = torch.Generator().manual_seed(seed)
        stock, ours = (BeamSearch(prompt, 3, 6, policy, 1) for _ in range(2))
        monkeypatch.setattr(stock, "_candidates_by_row", lambda log_probs: None)
        by_row = ours._candidates_by_row

        def counted(log_probs: torch.Tensor, by_row: Any = by_row) -> Any:
            nonlocal direct
            found = by_row(log_probs)
            direct += found is not None
            return found

        monkeypatch.setattr(ours, "_candidates_by_row", counted)
        steady = torch.randn(1, 40, generator=generator)  # the same at every step: sums tie, whatever their order
        for step in range(9):
            logits = torch.randn(6, 40, generator=generator)
            if kind == "equal":
                logits = logits.round()
            elif kind == "close":
                logits[:, 7] = logits.max(-1).values + 1
                logits[:, 3] = torch.nextafter(logits[:, 7], torch.tensor(0.0))
            elif kind == "infinite":
                logits[:, 2:] = -torch.inf
            elif kind == "nan" and step == 4:
                logits[seed % 6, 5] = torch.nan
            elif kind == "few":
                logits = logits[:, :6]
            elif kind == "same rows":
                logits = steady.expand(6, -1)
            expected = stock.choose(logits.log_softmax(-1), stops)
            assert torch.equal(ours.choose(logits.log_softmax(-1), stops), expected)
            torch.testing.assert_close(ours.live.scores, stock.live.scores, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(stock.result().tokens, ours.result().tokens)
        assert torch.equal(stock.live.tokens, ours.live.tokens)
    assert direct == 540 if kind == "apart" else direct < 540


@needs_native
@pytest.mark.parametrize("banned", [[], [2], [0, 7, 39]])
def test_the_same_beams_from_logits_as_from_log_probabilities(banned: list[int]) -> None:
    policy = FinishingPolicy(length_penalty=1.0, early_stopping=False, max_length=12, prompt_length=1)
    prompt, tokens = torch.zeros(6, 1, dtype=torch.int64), torch.tensor(banned, dtype=torch.int64)
    stops = lambda tokens, hypotheses: tokens == 2  # noqa: E731
    direct = 0
    for seed in range(60):
        generator = torch.Generator().manual_seed(seed)
        all_scores, ours = (BeamSearch(prompt, 3, 6, policy, 1) for _ in range(2))
        for step in range(9):
            logits = 100 * seed + torch.randn(6, 40, generator=generator)
            if seed % 3 == 2:
                logits = logits.round()  # ties are left to all log-probabilities
            elif seed % 30 == 1:
                logits[seed % 6, (banned or [3])[0]] = torch.inf  # all of the row's are NaN
            log_probs = logits.log_softmax(-1).index_fill_(1, tokens, -torch.inf)
            is_broken = bool(logits.isinf().any())
            expected, before = all_scores.choose(log_probs, stops), logits.clone()
            parents = ours.choose_allowed(logits, tokens, stops)
            assert torch.equal(logits, before)
            direct += parents is not None
            assert parents is None or not is_broken
            parents = ours.choose(log_probs, stops) if parents is None else parents
            assert torch.equal(parents, expected), (seed, step)
            torch.testing.assert_close(ours.live.scores, all_scores.live.scores, rtol=1e-6, atol=1e-5, equal_nan=True)
        assert torch.equal(all_scores.result().tokens, ours.result().tokens)
    assert 300 < direct < 540
