"""When drafting pays, by hand-made timings."""

from __future__ import annotations

import sys
import threading

import pytest

from fastgen.decoding.speculation import CHECK, DRAFT, LOOK_UP, PLAIN, SpeculationPolicy


def timed(policy: SpeculationPolicy, **seconds: float) -> None:
    for kind, each in seconds.items():
        for _ in range(3):
            policy.note_step(kind, each, True)


def test_steps_without_drafts_are_timed_first() -> None:
    policy = SpeculationPolicy(4)
    for _ in range(3):
        assert policy.choose(False) == PLAIN
        policy.note_step(PLAIN, 0.04, True)
    assert policy.choose(False) == DRAFT and not policy.is_hopeless


@pytest.mark.parametrize(
    ("draft", "accepted", "gain"),
    [(0.01, 4, 5 * 0.04 / (4 * 0.01 + 0.05)), (0.01, 0, 0.04 / (4 * 0.01 + 0.05)), (0.03, 4, 0.2 / 0.17)],
)
def test_gain(draft: float, accepted: int, gain: float) -> None:
    policy = SpeculationPolicy(4)
    timed(policy, **{PLAIN: 0.04, DRAFT: draft, CHECK: 0.05})
    for _ in range(6):
        assert policy.choose(False) == DRAFT, "six rounds are tried, whatever comes of them"
        policy.note_round(accepted)
    assert policy.gain == pytest.approx(gain)
    assert (policy.choose(False) == DRAFT) == (gain > 1.05) and policy.is_hopeless == (gain < 1.05)
    # Of the six rounds three draftings and three checks were noted.
    assert policy.saved == pytest.approx(6 * (1 + accepted) * 0.04 - 3 * (draft + 0.05))


def test_what_the_user_asks_for_is_done() -> None:
    policy = SpeculationPolicy(4, is_forced=True)
    timed(policy, **{PLAIN: 0.001, DRAFT: 1.0, CHECK: 1.0})
    for _ in range(40):
        policy.note_round(0)
    assert policy.choose(False) == DRAFT and not policy.is_hopeless


def test_recent_rounds_decide() -> None:
    policy = SpeculationPolicy(4)
    timed(policy, **{PLAIN: 0.04, DRAFT: 0.01, CHECK: 0.05})
    for _ in range(32):
        policy.note_round(4)
    assert policy.choose(False) == DRAFT
    for _ in range(32):
        policy.note_round(0)
    assert policy.is_hopeless and str(policy) == "64 rounds, 128 of 256 drafts accepted: they do not pay, and are off"


def test_what_does_not_pay_is_tried_again() -> None:
    policy = SpeculationPolicy(4)
    timed(policy, **{PLAIN: 0.04, DRAFT: 0.03, CHECK: 0.05})
    for _ in range(6):
        policy.note_round(0)
    assert [policy.may_try(40) for _ in range(99)] == [False] * 99
    assert policy.may_try(40) and not policy.is_hopeless and policy.choose(False) == PLAIN and policy.rounds == 0


@pytest.mark.parametrize("kind", [DRAFT, CHECK])
def test_steps_that_are_never_replayed_do_not_pay(kind: str) -> None:
    policy = SpeculationPolicy(4)
    timed(policy, **{each: 0.01 for each in (PLAIN, DRAFT, CHECK) if each != kind})
    for _ in range(47):
        policy.note_step(kind, 0.01, False)
        policy.note_round(4)
        assert policy.choose(False) == DRAFT
    policy.note_round(4)
    assert policy.choose(False) == PLAIN and not policy.may_try(40)


@pytest.mark.parametrize("is_forced", [False, True])
def test_a_failure_ends_drafting_for_a_while(is_forced: bool) -> None:
    policy = SpeculationPolicy(4, is_forced)
    policy.note_call(20, "a captured step differs")
    policy.note_call(20, None)
    assert policy.choose(False) == PLAIN
    assert str(policy) == "0 rounds, 0 of 0 drafts accepted: they are off, since a captured step differs"
    assert [policy.may_try(40) for _ in range(99)] == [False] * 99
    assert policy.may_try(40) and policy.failure is None


def test_room_is_for_the_longest_of_the_last_calls() -> None:
    policy = SpeculationPolicy(4)
    assert policy.room == 0
    policy.note_call(900, None)
    for _ in range(7):
        policy.note_call(20, None)
    assert policy.room == 900
    policy.note_call(30, None)
    assert policy.room == 30


def test_threads_share_a_policy() -> None:
    """While one forgets everything to try again, others ask."""
    policy, errors = SpeculationPolicy(4), []

    def work() -> None:
        try:
            for _ in range(60):
                timed(policy, **{PLAIN: 0.04, DRAFT: 0.03, CHECK: 0.05})
                for _ in range(6):
                    policy.note_round(0)
                for _ in range(100):
                    policy.may_try(40)
                policy.choose(True)
                str(policy)
        except Exception as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not errors


def test_words() -> None:
    policy = SpeculationPolicy(2)
    policy.note_round(1)
    assert str(policy) == "1 round, 1 of 2 drafts accepted"
    timed(policy, **{PLAIN: 0.4, DRAFT: 0.05, CHECK: 0.05})
    assert str(policy) == "1 round, 1 of 2 drafts accepted, +500 ms saved"


def test_looking_up_pays_by_the_tokens_that_come_of_it() -> None:
    policy = SpeculationPolicy(4)
    assert policy.choose(True) == PLAIN, "steps without drafts are timed first"
    timed(policy, **{PLAIN: 1.0, DRAFT: 0.5, CHECK: 1.5})
    assert policy.choose(True) == LOOK_UP and policy.choose(False) == DRAFT, "neither has been tried"
    policy.recent.extend([4] * 8)  # 5 tokens in 3.5 seconds: 1.43 a second
    policy.looked_up.extend([2] * 6)  # 3 tokens in 1.5
    assert policy.choose(True) == LOOK_UP
    policy.looked_up.extend([0] * 32)  # 1 token in 1.5
    answers = [policy.choose(True) for _ in range(64)]
    assert answers.count(LOOK_UP) == 2 and answers.count(DRAFT) == 62, "it is tried again now and then"
    policy.looked_up.extend([1] * 32)  # 2 tokens in 1.5: 1.33 a second
    assert policy.choose(True) == DRAFT


def test_looking_up_may_pay_where_drafting_does_not() -> None:
    policy = SpeculationPolicy(4)
    timed(policy, **{PLAIN: 1.0, DRAFT: 1.0, CHECK: 1.5})
    policy.recent.extend([4] * 6)  # 5 tokens in 5.5
    assert policy.is_hopeless and policy.choose(False) == PLAIN
    policy.looked_up.extend([4] * 6)  # 5 tokens in 1.5
    assert not policy.is_hopeless and policy.choose(True) == LOOK_UP and policy.choose(False) == PLAIN
    policy.looked_up.extend([0] * 32)
    assert policy.is_hopeless


def test_looking_up_that_brings_nothing_ends() -> None:
    """A text that is always found and never goes on as before, in steps that are timed or not."""
    for is_replayed in (True, False):
        policy = SpeculationPolicy(4)
        timed(policy, **{PLAIN: 1.0})
        for _ in range(200):
            if policy.choose(True) == LOOK_UP:
                policy.note_step(CHECK, 1.6, is_replayed)
                policy.note_round(0, is_looked_up=True)
        assert policy.rounds <= 48 + 200 / 32


def test_a_first_call_has_to_be_long() -> None:
    """It may be the only one, and copies of the weights take time."""
    policy = SpeculationPolicy(4)
    assert [policy.may_try(40), policy.may_try(40)] == [False, True]
    assert SpeculationPolicy(4).may_try(128) and SpeculationPolicy(4, is_forced=True).may_try(2)
