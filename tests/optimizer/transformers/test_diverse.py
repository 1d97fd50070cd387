"""Diverse beam search, which the host has moved out of its library: against a decoder without batches and caches."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import harness
import pytest
import torch
import zoo
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, MaxLengthCriteria, StoppingCriteria
from transformers.generation import utils

import fastgen
from fastgen import report
from fastgen.bench.soak.modes import default_dtype
from fastgen.decoding.diverse_beam_search import DiverseSearch
from fastgen.optimizer.transformers import versions
from fastgen.optimizer.transformers.generate import diverse_beam_search
from fastgen.optimizer.transformers.versions import CACHE

DIVERSE = dict(num_beams=6, num_beam_groups=3, diversity_penalty=0.7, max_new_tokens=12, num_return_sequences=4)
FAMILIES = ["bart", "gpt2", "llama", "marian", *(["t5"] if versions.FINDS_EAGER else [])]


def _run(model: Any, inputs: dict[str, Any], tier: str = "compat", **options: Any) -> Any:
    options = {**DIVERSE, **options, "return_dict_in_generate": True, "output_scores": True}
    output, (call,) = harness.run_fastgen(model, inputs, tier=tier, strict=tier == "compat", **options)
    assert call.tier == tier and "moved its own to the Hub" in call.reason
    return output


# ---------------------------------------------------------------------------------------------- the reference
class _Reference:
    """One sentence, all tokens read again in each step, hypotheses in Python's lists."""

    def __init__(self, model: Any, inputs: dict[str, Any], sentence: int, **options: Any) -> None:
        self.model, self.options = model, {**DIVERSE, **options}
        self.inputs = {name: x[sentence : sentence + 1] for name, x in inputs.items()}
        config = model.generation_config
        ends = self.options.get("eos_token_id", config.eos_token_id)
        self.ends = ends if isinstance(ends, list) else [ends]
        self.pad = config.pad_token_id
        self.prompt = [zoo.START if not hasattr(config, "decoder_start_token_id") else config.decoder_start_token_id]
        if not model.config.is_encoder_decoder:
            kept = self.inputs["attention_mask"][0].bool()
            self.prompt = self.inputs["input_ids"][0][kept].tolist()

    def log_probs(self, tokens: list[int]) -> Tensor:
        ids = torch.tensor([tokens])
        with torch.no_grad(), fastgen.disabled():
            if self.model.config.is_encoder_decoder:
                logits = self.model(**self.inputs, decoder_input_ids=ids, use_cache=False).logits
            else:
                logits = self.model(input_ids=ids, use_cache=False).logits
        return logits[0, -1].float().log_softmax(-1)

    def processed(self, scores: Tensor, tokens: list[int], before: list[int]) -> Tensor:
        options, scores = self.options, scores.clone()
        for token in before:
            scores[token] -= options["diversity_penalty"]
        if penalty := options.get("repetition_penalty"):
            for token in set(tokens):
                scores[token] *= penalty if scores[token] < 0 else 1 / penalty
        if len(tokens) - len(self.prompt) < options.get("min_new_tokens", 0):
            scores[self.ends] = -math.inf
        if allowed := options.get("prefix_allowed_tokens_fn"):
            mask = torch.full_like(scores, -math.inf)
            mask[allowed(0, torch.tensor(tokens))] = 0
            scores = scores + mask
        return scores

    def worth(self, score: float, length: int) -> float:
        return score / (length - len(self.prompt)) ** self.options.get("length_penalty", 1.0)

    def run(self) -> tuple[list[list[int]], list[float]]:
        options, groups = self.options, self.options["num_beam_groups"]
        size = options["num_beams"] // groups
        longest = len(self.prompt) + options["max_new_tokens"]
        beams = [[(0.0 if beam == 0 else -1e9, list(self.prompt)) for beam in range(size)] for _ in range(groups)]
        ended: list[list[tuple[float, list[int]]]] = [[] for _ in range(groups)]
        done = [False] * groups
        while len(beams[0][0][1]) < longest and not all(done):
            before: list[int] = []
            for group in range(groups):
                if done[group]:
                    beams[group] = [(0.0, [*tokens, self.pad]) for _, tokens in beams[group]]
                    before += [self.pad] * size
                    continue
                candidates = []
                for score, tokens in beams[group]:
                    scores = self.processed(self.log_probs(tokens), tokens, before) + score
                    candidates += [(float(x), tokens, token) for token, x in enumerate(scores)]
                candidates.sort(key=lambda candidate: -candidate[0])
                candidates = candidates[: max(2, 1 + len(self.ends)) * size]
                beams[group] = []
                for rank, (score, tokens, token) in enumerate(candidates):
                    if token in self.ends:
                        if rank < size:
                            self.end(ended[group], self.worth(score, len(tokens) + 1), [*tokens, self.ends[0]], size)
                        continue
                    beams[group].append((score, [*tokens, token]))
                    if len(beams[group]) == size:
                        break
                before += [tokens[-1] for _, tokens in beams[group]]
                length = len(beams[group][0][1])
                if len(ended[group]) == size:
                    early = options.get("early_stopping", False)
                    never = early == "never" and options.get("length_penalty", 1.0) > 0
                    attainable = self.worth(candidates[0][0], longest if never else length)
                    done[group] = early is True or min(ended[group])[0] >= attainable
        for group in range(groups):
            if not done[group]:
                for score, tokens in beams[group]:
                    self.end(ended[group], self.worth(score, len(tokens)), tokens, size)
        best = sorted((each for group in ended for each in group), key=lambda each: each[0])[::-1]
        best = best[: options["num_return_sequences"]]
        return [tokens[:longest] for _, tokens in best], [score for score, _ in best]

    @staticmethod
    def end(ended: list[tuple[float, list[int]]], score: float, tokens: list[int], size: int) -> None:
        if len(ended) == size:
            worst = min(range(size), key=lambda place: ended[place][0])
            if score <= ended[worst][0]:
                return
            del ended[worst]
        ended.append((score, tokens))


def _check(model: Any, inputs: dict[str, Any], outputs: Any, **options: Any) -> None:
    count = {**DIVERSE, **options}["num_return_sequences"]
    batch, prompt = len(outputs.sequences) // count, 0
    if not model.config.is_encoder_decoder:
        prompt = inputs["input_ids"].shape[1]
    scores = outputs.sequences_scores.view(batch, count)
    for sentence, its in enumerate(outputs.sequences.view(batch, count, -1)):
        reference = _Reference(model, inputs, sentence, **options)
        expected, values = reference.run()
        start = 0 if not prompt else prompt - len(reference.prompt)
        for place, tokens in enumerate(expected):
            found = its[place, start:].tolist()
            assert found[: len(tokens)] == tokens, f"sentence {sentence}, hypothesis {place}: {found} and not {tokens}"
            assert set(found[len(tokens) :]) <= {model.generation_config.pad_token_id}
        torch.testing.assert_close(scores[sentence], torch.tensor(values), atol=1e-4, rtol=1e-5)


def _inputs(family: str, **shape: Any) -> dict[str, Any]:
    return {**zoo.inputs_for(family, **shape), **zoo.FAMILIES[family].generate}


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str) -> None:
    model, inputs = zoo.load(family), _inputs(family)
    output = _run(model, inputs)
    _check(model, inputs, output)
    stock = _run(model, inputs, tier="stock")
    assert torch.equal(stock.sequences, output.sequences) and torch.equal(stock.beam_indices, output.beam_indices)


# Older versions penalise padding as a token of the prompt.
_IGNORES_PADDING = "padding_lengths" in inspect.getsource(utils.GenerationMixin._get_logits_processor)

OPTIONS: dict[str, dict[str, Any]] = {
    "two groups": dict(num_beams=4, num_beam_groups=2),
    "alone in its group": dict(num_beams=3, num_beam_groups=3, num_return_sequences=3),
    "one result": dict(num_return_sequences=1),
    "stopping early": dict(early_stopping=True),
    "never stopping early": dict(early_stopping="never"),
    "short": dict(length_penalty=-1.0, early_stopping="never"),
    "long": dict(length_penalty=2.5),
    "several ends": dict(eos_token_id=[24, 7, 11, 39]),
    "strong": dict(diversity_penalty=20.0),
    "repetitions": dict(repetition_penalty=1.8),
    "late ends": dict(min_new_tokens=9),
    "one token": dict(max_new_tokens=1),
    "prefix": dict(prefix_allowed_tokens_fn=lambda sentence, tokens: list(range(5 + len(tokens) % 3, zoo.VOCAB))),
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("family", ["bart", "gpt2"])
def test_options(family: str, options: dict[str, Any]) -> None:
    is_plain = "repetition_penalty" in options and not _IGNORES_PADDING
    model, inputs = zoo.load(family), _inputs(family, ragged=not is_plain)
    _check(model, inputs, _run(model, inputs, **options), **options)


def test_shapes() -> None:
    for shape in (dict(batch=1), dict(batch=5, length=3), dict(ragged=False)):
        model, inputs = zoo.load("bart"), _inputs("bart", **shape)
        _check(model, inputs, _run(model, inputs))


def test_whatever_the_default_dtype() -> None:
    model, inputs = zoo.load("bart"), _inputs("bart")
    expected = _run(model, inputs)
    with default_dtype(torch.float64):
        found = _run(model, inputs)
    assert torch.equal(found.sequences, expected.sequences)
    assert {each.dtype for each in found.scores} == {torch.float32}


def test_what_never_ends() -> None:
    options = dict(eos_token_id=None, num_return_sequences=6)
    output = _run(zoo.load("gpt2"), _inputs("gpt2"), **options)
    expected = _run(zoo.load("gpt2"), _inputs("gpt2"), tier="stock", **options)
    assert torch.equal(output.sequences, expected.sequences) and output.sequences.shape[1] == 9 + 12


class _Longest(StoppingCriteria):
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        self.calls += 1
        return torch.full((len(input_ids),), input_ids.shape[1] >= 6)


class _Seeing(LogitsProcessor):
    """What a processor of the user's is given: its group's rows, and what all have chosen so far."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int, int]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor, current_tokens: Tensor, beam_group_idx: int) -> Tensor:
        self.seen.append((beam_group_idx, len(input_ids), int((current_tokens != 0).sum())))
        return scores


def test_the_users_own_criteria_and_processors() -> None:
    criterion, processor = _Longest(), _Seeing()
    output = zoo.generate(
        zoo.load("bart"),
        {**_inputs("bart", batch=2), **DIVERSE, "stopping_criteria": [criterion],
         "logits_processor": LogitsProcessorList([processor])},
    )  # fmt: skip
    assert criterion.calls == 5 and output.shape[1] <= 7
    assert processor.seen[:3] == [(0, 4, 0), (1, 4, 4), (2, 4, 8)]


def test_scores_belong_to_the_rows_that_beam_indices_name() -> None:
    model, inputs = zoo.load("gpt2"), _inputs("gpt2")
    output = _run(model, inputs, min_new_tokens=12)
    for sequence, rows, score in zip(output.sequences, output.beam_indices, output.sequences_scores, strict=True):
        tokens = sequence[-12:]
        total = sum(float(output.scores[step][row, tokens[step]]) for step, row in enumerate(rows.tolist()))
        assert total / 12 == pytest.approx(float(score), abs=1e-5)


def test_a_model_that_stays_with_the_host() -> None:
    config = zoo.transformers.XGLMConfig(
        vocab_size=zoo.VOCAB, d_model=32, ffn_dim=48, num_layers=2, attention_heads=4, dropout=0.0,
        attention_dropout=0.0, max_position_embeddings=64, pad_token_id=zoo.PAD, eos_token_id=24, bos_token_id=2,
        init_std=0.4,
    )  # fmt: skip
    torch.manual_seed(0)
    model = zoo.transformers.XGLMForCausalLM(config).eval()
    inputs = _inputs("gpt2", ragged=False)
    output = _run(model, inputs, tier="stock")
    assert "tier='stock'" in report.calls()[-1].reason
    zoo.generate(model, {**inputs, **DIVERSE})
    last = report.calls()[-1]
    if versions.PREFILLS:
        assert "computes attention itself" in last.plan
    else:
        assert "attention implementation 'eager' has not been proven" in last.reason
    _check(model, inputs, output)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(do_sample=True), "draws nothing: set do_sample=False"),
        (dict(num_beams=5), "num_beams=5 is not divisible by num_beam_groups=3"),
        (dict(diversity_penalty=0.0), r"diversity_penalty=0.0 should be greater than 0"),
        (dict(diversity_penalty=None), r"diversity_penalty=None should be greater than 0"),
        (dict(output_attentions=True, return_dict_in_generate=True), "output_attentions: not available"),
        (dict(guidance_scale=1.5), "guidance_scale: not available"),
        (dict(streamer=SimpleNamespace(put=print, end=print)), "streamer: not available"),
    ],
)
def test_options_that_contradict(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        zoo.generate(copy.deepcopy(zoo.load("bart")), {**_inputs("bart"), **DIVERSE, **options})


def test_without_fastgen_the_host_says_where_it_is() -> None:
    before = utils.GENERATION_MODES_MAPPING
    with fastgen.disabled():
        assert utils.GENERATION_MODES_MAPPING is not before and not hasattr(utils.GenerationMixin, "_group_beam_search")
        with pytest.raises(ValueError, match="trust_remote_code"):
            zoo.generate(zoo.load("bart"), {**_inputs("bart"), **DIVERSE})
    assert len(zoo.generate(zoo.load("bart"), {**_inputs("bart"), **DIVERSE})) == 12


def test_recorded_and_slim() -> None:
    model, inputs = copy.deepcopy(zoo.load("bart")), _inputs("bart")
    for settings in (dict(replay="always"), dict(cache="x"), dict(replay="always", cache="x")):
        settings = {} if not versions.FINDS_EAGER else settings
        for _ in range(2):
            with harness.configured(**settings):
                _check(model, inputs, _run(model, inputs))


# ---------------------------------------------------------------------------------------------- negative controls
def _no_penalty(self: Any, group: int, tokens: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    return self._after(tokens, scores, current_tokens=chosen, beam_group_idx=group)


@pytest.mark.parametrize(
    ("owner", "name", "wrong"),
    [
        (diverse_beam_search._Processing, "__call__", _no_penalty),
        (diverse_beam_search, "_reordered", lambda model, cache, parents: cache),
    ],
)
def test_negative_controls(owner: Any, name: str, wrong: Callable[..., Any], monkeypatch: Any) -> None:
    monkeypatch.setattr(owner, name, wrong)
    model, inputs = zoo.load("bart"), _inputs("bart")
    with pytest.raises(AssertionError):
        _check(model, inputs, _run(model, inputs))


# ---------------------------------------------------------------------------------------------- the host's own scorer
try:
    from transformers.generation.beam_search import BeamSearchScorer
    from transformers.generation.logits_process import HammingDiversityLogitsProcessor
except ImportError:
    BeamSearchScorer = None


@pytest.mark.skipif(BeamSearchScorer is None, reason="this version has no BeamSearchScorer any more")
@pytest.mark.parametrize("early", [True, False, "never"])
@pytest.mark.parametrize("seed", range(6))
def test_like_the_hosts_scorer(seed: int, early: Any) -> None:
    """Step by step on the same scores, whatever a model is."""
    torch.manual_seed(seed)
    batch, beams, groups, vocabulary, longest, ends = 3, 6, 1 + seed % 3, 23, 14, [5, 9]
    penalty = [1.0, -0.5, 2.0][seed % 3]
    size, start = beams // groups, 2
    table = torch.randn(vocabulary, vocabulary, vocabulary) * 1.5

    def log_probs(tokens: Tensor) -> Tensor:
        before = tokens[:, -2] if tokens.shape[1] > 1 else tokens[:, -1]
        return table[before, tokens[:, -1]].log_softmax(-1)

    scorer = BeamSearchScorer(batch, beams, torch.device("cpu"), penalty, early, 4, groups, longest)
    diversity = HammingDiversityLogitsProcessor(0.8, beams, groups) if groups > 1 else None
    tokens = torch.full((batch * beams, 1), start)
    sums = torch.full((batch, beams), -1e9)
    sums[:, ::size] = 0
    sums = sums.flatten()
    while not scorer.is_done and tokens.shape[1] < longest:
        chosen = torch.zeros(batch * beams, dtype=torch.int64)
        following = tokens.clone()
        for group in range(groups):
            rows = [b * beams + i for b in range(batch) for i in range(group * size, (group + 1) * size)]
            scores = log_probs(tokens)[rows]
            if diversity is not None:
                scores = diversity(tokens[rows], scores, chosen, group)
            totals = (scores + sums[rows][:, None]).view(batch, -1)
            best, place = totals.topk(3 * size)
            step = scorer.process(
                tokens[rows], best, place % vocabulary, place // vocabulary, 0, ends, group_index=group,
                decoder_prompt_len=1,
            )  # fmt: skip
            sums[rows] = step["next_beam_scores"]
            following[rows] = tokens[rows][step["next_beam_indices"]]
            chosen[rows] = step["next_beam_tokens"]
        tokens = torch.cat([following, chosen[:, None]], dim=1)
    expected = scorer.finalize(tokens, sums, None, None, longest, 0, ends, decoder_prompt_len=1)

    config = dict(num_beams=beams, num_beam_groups=groups, diversity_penalty=0.8)
    policy = diverse_beam_search.DiversePolicy(groups, penalty, early, longest, 1, tuple(ends), 0)
    search = DiverseSearch(torch.full((batch * beams, 1), start), beams, policy)
    process = diverse_beam_search._Processing([], zoo.transformers.GenerationConfig(**config))
    while not search.done and search.running().shape[1] < longest:
        search.choose(log_probs(search.running()), process)
    found = search.result(4)
    assert found.tokens.flatten(0, 1).tolist() == expected["sequences"].tolist()
    torch.testing.assert_close(found.scores.flatten(), expected["sequence_scores"])


@pytest.mark.parametrize("ends", [24, None])
def test_the_users_maximal_length(ends: int | None) -> None:
    criteria = [MaxLengthCriteria(max_length=5)]
    options = {**DIVERSE, "stopping_criteria": criteria, "eos_token_id": ends}
    output = zoo.generate(zoo.load("bart"), {**_inputs("bart"), **options})
    assert output.shape[1] == 5


def test_the_cache_is_that_of_the_next_step() -> None:
    """As the host's searches return it: the last beams' keys, one row for each."""
    model, inputs = zoo.load("gpt2"), _inputs("gpt2", ragged=False)
    outputs = [getattr(_run(model, inputs, tier=tier, min_new_tokens=12), CACHE) for tier in ("compat", "stock")]
    mine, theirs = ([layer.keys for layer in cache.layers] for cache in outputs)
    search: list[DiverseSearch] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DiverseSearch, "result", _noting(DiverseSearch.result, search))
        _run(model, inputs, min_new_tokens=12)
    with torch.no_grad(), fastgen.disabled():
        expected = getattr(model(search[0].running()[:, :-1]), CACHE)
    for keys in (mine, theirs):
        for layer, of in zip(keys, expected.layers, strict=True):
            torch.testing.assert_close(layer, of.keys, atol=1e-5, rtol=1e-4)


def _noting(function: Callable[..., Any], calls: list[Any]) -> Callable[..., Any]:
    def noting(self: Any, *args: Any) -> Any:
        calls.append(self)
        return function(self, *args)

    return noting
