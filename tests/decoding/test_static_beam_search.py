"""The search whose steps are recorded and replayed finds what the plain one finds."""

from __future__ import annotations

from functools import partial

import pytest

pytest.importorskip("torch", reason="the searches need torch")

import torch
from plain_search import CPU, Table, beam_search, decode, drawn_table, stops

from fastgen.decoding.beam_search import BeamSearch, FinishingPolicy
from fastgen.decoding.search import Hypotheses
from fastgen.replay.replayer import Replayer

pytestmark = pytest.mark.usefixtures("recording")
STOPPING = [(1.0, True), (1.0, False), (0.0, "never")]
POLICIES = [FinishingPolicy(penalty, early, max_length=14, prompt_length=1) for penalty, early in STOPPING]


def run(search: BeamSearch, table: Table, evicts: bool = False) -> int:
    return decode(search, table, partial(search.choose, is_stopped=stops([1], 14)), evicts)


def assert_same(found: Hypotheses, plain: BeamSearch) -> None:
    expected = plain.result()
    assert torch.equal(found.tokens, expected.tokens) and torch.equal(found.rows, expected.rows)
    torch.testing.assert_close(found.scores, expected.scores)


@pytest.mark.parametrize("evicts", [False, True])
@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: f"{policy.early_stopping}")
def test_as_the_plain_search(policy: FinishingPolicy, is_late: bool, evicts: bool) -> None:
    """The next request goes on with the captured steps, also where sentences left the one before."""
    left, late, replays = 0, set(), 0
    for seed in range(6):
        tables, (first, second) = [drawn_table(seed + each, 8) for each in (0, 1)], (Replayer(CPU), Replayer(CPU))
        plain, other = (beam_search("plain", 3, 2, policy) for _ in tables)
        run(plain, tables[0])
        run(other, tables[1])
        search = beam_search("static", 3, 2, policy, replayer=first, is_late=is_late)
        first.retains_buffers = True
        left += run(search, tables[0], evicts)
        result = search.result()
        assert_same(result, plain)
        late.add(search.length - plain.length)
        search.restore_first_buffers()
        assert search.batch == 3 and first.failure is None
        if first.has_captured(None):  # before any sentence left
            search.restart(torch.zeros(6, 1, dtype=torch.int64), second)
            run(search, tables[1])
            assert_same(search.result(), other)
            assert_same(result, plain)
            assert second.counts.captures == 0 and second.counts.replays >= search.length - 2
            replays += second.counts.replays
    assert (left > 0) == evicts and replays > 0
    assert late <= {0, is_late} and (1 in late) == is_late
