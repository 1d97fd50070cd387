"""The search that waits for the device once a step finds what the plain one finds, bit for bit, ties included."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("torch", reason="the searches need torch")

import torch
from plain_search import CPU
from torch import Tensor

from fastgen import ops
from fastgen.decoding.beam_search import BeamSearch, FinishingPolicy
from fastgen.decoding.device_beam_search import DeviceBeamSearch

BATCH, BEAMS, WORDS, END = 3, 3, 40, 2
POLICIES = [
    FinishingPolicy(penalty, early, max_length=14, prompt_length=1)
    for penalty, early in ((1.0, True), (1.0, False), (0.0, "never"), (2.0, "never"))
]


class Stops:
    """The end token stops a hypothesis; counts how often it is asked."""

    asked = 0

    def __call__(self, tokens: Tensor, hypotheses: Callable[[], Tensor]) -> Tensor:
        self.asked += 1
        assert torch.equal(hypotheses()[:, -1], tokens.flatten())
        return (tokens == END) | (hypotheses().shape[1] >= 14)


def drawn(kind: str, step: int, generator: torch.Generator) -> Tensor:
    """Logits `[B*M, V]` of these three sentences, of which the search drops those that have left."""
    logits = torch.randn(BATCH * BEAMS, WORDS, generator=generator)
    logits[:, END] += 1
    if kind == "equal":
        return logits.round()
    if kind == "infinite":
        logits[:, 2:] = -torch.inf
    elif kind == "nan" and step == 4:
        logits[5, 5] = torch.nan
    return logits


def assert_same(plain: BeamSearch, search: BeamSearch) -> None:
    assert (search.done, search.length, search.batch) == (plain.done, plain.length, plain.batch)
    for name, expected in vars(plain.live).items():
        torch.testing.assert_close(getattr(search.live, name), expected, rtol=0, atol=0, equal_nan=True, msg=name)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: f"{policy.early_stopping}-{policy.length_penalty}")
@pytest.mark.parametrize("repeats", [False, True])
@pytest.mark.parametrize("kind", ["apart", "equal", "infinite", "nan"])
@pytest.mark.parametrize("banned", [None, [7, 9]], ids=["log-probabilities", "logits"])
def test_as_the_plain_search(policy: FinishingPolicy, repeats: bool, kind: str, banned: list[int] | None) -> None:
    """Whether a step that found ties is done again, or is told of them before it goes on; while sentences leave."""
    if not ops.is_native(CPU):
        pytest.skip("no native operators")
    repeated = left = 0
    for seed in range(12):
        generator, prompt = torch.Generator().manual_seed(seed), torch.zeros(BATCH * BEAMS, 1, dtype=torch.int64)
        arguments = (prompt, BEAMS, 2 * BEAMS, policy, 1)
        plain, search = BeamSearch(*arguments), DeviceBeamSearch(*arguments, may_repeat_step=repeats)
        rows = torch.arange(BATCH * BEAMS)
        while not plain.done:
            logits, stops = drawn(kind, plain.length, generator)[rows], Stops()
            parents, expected = (
                choose(each, logits, banned, stops) for each, stops in ((search, stops), (plain, Stops()))
            )
            assert torch.equal(parents, expected)
            assert_same(plain, search)
            assert repeats or stops.asked == 1
            repeated += stops.asked - 1
            if plain.done:
                break
            assert search.num_finished() == plain.num_finished()
            if 0 < plain.num_finished() < plain.batch:
                leaving = plain.finished_mask()
                stay = plain.evict(leaving)
                assert torch.equal(search.evict(search.finished_mask()), stay)
                rows, left = rows.view(-1, BEAMS)[stay].flatten(), left + 1
        found, result = search.result(), plain.result()
        assert torch.equal(found.tokens, result.tokens) and torch.equal(found.rows, result.rows)
        torch.testing.assert_close(found.scores, result.scores, rtol=0, atol=0, equal_nan=True)
    assert (repeated > 0) == (repeats and kind != "apart")
    assert left > 0 or kind in ("infinite", "nan") or policy.length_penalty == 2.0


def choose(search: BeamSearch, logits: Tensor, banned: list[int] | None, stops: Stops) -> Tensor:
    """As the loop does: from logits if that can be, else from log-probabilities."""
    if banned is None:
        return search.choose(logits.log_softmax(-1), stops)
    before, tokens = vars(search.live).copy(), torch.tensor(banned)
    parents = search.choose_allowed(logits, tokens, stops)
    if parents is not None:
        return parents
    assert not search.done and all(value is before[name] for name, value in vars(search.live).items())
    return search.choose(logits.log_softmax(-1).index_fill(1, tokens, -torch.inf), stops, is_tied=True)
