"""When speculative decoding pays: drafts cost steps of a cheaper model, and those accepted save steps of the model.

Speculative decoding: Leviathan et al. 2023, https://arxiv.org/abs/2211.17192. There the drafts' distribution decides,
too, which tokens are drawn. Here only the model's own outputs decide, as without drafts: a draft is accepted if it is
the token that was chosen.
"""

from __future__ import annotations

import math
import statistics
import threading
from collections import deque
from dataclasses import dataclass, field

from fastgen import locks

PLAIN, DRAFT, CHECK = "plain", "draft", "check"  # a step without drafts, a drafting step, one of several tokens
LOOK_UP = "look up"  # a round whose drafts take no steps
_TIMINGS, _ROUNDS = 3, 6  # of each kind, and of drafting, before anything is decided
_MOST_ROUNDS = 48  # without timings of each kind: a kind of step that is never replayed does not pay
_WORTH = 1.05  # the least gain in speed
_RECENT, _CALLS = 32, 8  # rounds and timings, and calls, that are remembered
_MIN_STEPS_AT_ONCE = 128  # of a model's first call: copying the weights takes as long as some thirty steps
_TRY_AGAIN = 100  # calls after which what did not pay is tried again: the machine may have been busy


@dataclass
class SpeculationPolicy:
    """Decides, round by round, whether to draft, by what steps of one model take on this machine; for all threads."""

    drafts: int  # of a round
    is_forced: bool = False  # draft whatever it costs
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    spent: float = 0.0  # seconds of all rounds, capturing included
    seconds: dict[str, deque[float]] = field(
        default_factory=lambda: {kind: deque(maxlen=_RECENT) for kind in (PLAIN, DRAFT, CHECK)}
    )
    recent: deque[int] = field(
        default_factory=lambda: deque(maxlen=_RECENT)
    )  # accepted in the last rounds that drafted
    looked_up: deque[int] = field(
        default_factory=lambda: deque(maxlen=_RECENT)
    )  # and in the last that looked drafts up
    not_looked_up: int = 0  # times that drafts could have been looked up since that was found not to pay
    calls: int = 0  # that could draft
    lengths: deque[int] = field(default_factory=lambda: deque(maxlen=_CALLS))  # steps of the last calls
    failure: str | None = None  # why steps of rounds are not replayed
    refused: int = 0  # calls that could have drafted since drafting was found not to pay
    _lock: threading.RLock = field(default_factory=locks.reentrant_lock, repr=False)

    @property
    def room(self) -> int:
        """The most steps that one of the last calls has taken."""
        with self._lock:
            return max(self.lengths, default=0)

    def note_call(self, steps: int, failure: str | None) -> None:
        """Note how many steps a call has taken, and why those of rounds are not replayed, if they are not."""
        with self._lock:
            self.lengths.append(steps)
            self.failure = self.failure or failure

    def note_step(self, kind: str, seconds: float, is_replayed: bool) -> None:
        """Note what a step took; `is_replayed`: it ran as most will."""
        with self._lock:
            if is_replayed:
                self.seconds[kind].append(seconds)
            if kind != PLAIN:
                self.spent += seconds

    def note_round(self, accepted: int, is_looked_up: bool = False) -> None:
        """Note how many of a round's drafts were accepted; `is_looked_up`: they took no drafting steps."""
        with self._lock:
            self.rounds += 1
            self.drafted += self.drafts
            self.accepted += accepted
            (self.looked_up if is_looked_up else self.recent).append(accepted)

    def choose(self, can_look_up: bool) -> str:
        """How the next step goes: `LOOK_UP` or `DRAFT`, a round with drafts of that kind; or `PLAIN`.

        Steps without drafts are timed first. Then some rounds of each kind are tried, and then timings decide.
        `can_look_up`: the text's last tokens were there before.
        """
        with self._lock:
            if self.failure or not (self.is_forced or len(self.seconds[PLAIN]) >= _TIMINGS):
                return PLAIN
            if can_look_up and self._tries_looking_up():
                return LOOK_UP
            return DRAFT if self._drafting_may_pay else PLAIN

    @property
    def _drafting_may_pay(self) -> bool:
        if self.is_forced or len(self.recent) < _ROUNDS:
            return True
        if any(len(found) < _TIMINGS for found in self.seconds.values()):
            return self.rounds < _MOST_ROUNDS
        return self.gain > _WORTH

    def _tries_looking_up(self) -> bool:
        if self._looking_up_may_pay:
            return True
        self.not_looked_up += 1
        return self.not_looked_up % _RECENT == 0  # the text may have changed

    @property
    def _looking_up_may_pay(self) -> bool:
        if len(self.looked_up) < _ROUNDS:
            return True
        plain, draft, check = (self.seconds[kind] for kind in (PLAIN, DRAFT, CHECK))
        if len(check) < _TIMINGS:
            return self.rounds < _MOST_ROUNDS
        others = [statistics.median(plain) / _WORTH] if len(plain) >= _TIMINGS else []
        if len(draft) >= _TIMINGS and self.recent:
            others.append(self._seconds_a_token(self.recent, self.drafts))
        return self._seconds_a_token(self.looked_up, 0) < min(others, default=math.inf)

    def _seconds_a_token(self, accepted: deque[int], steps: int) -> float:
        """Of rounds of which so many drafts were `accepted`, with so many drafting `steps` each."""
        drafting = steps * statistics.median(self.seconds[DRAFT]) if steps else 0.0
        return (drafting + statistics.median(self.seconds[CHECK])) / (1 + statistics.mean(accepted))

    @property
    def is_hopeless(self) -> bool:
        """Whether drafts of both kinds have been tried and do not pay, or cannot be checked."""
        with self._lock:
            if self.failure:
                return True
            is_known = len(self.looked_up) >= _ROUNDS and self._looking_up_may_pay
            return not self._drafting_may_pay and not is_known

    def may_try(self, steps: int) -> bool:
        """Whether a call of at most so many `steps` should draft, or try to; asked once for each call. What did not pay
        is tried again later."""
        with self._lock:
            if not self.is_hopeless:
                self.calls += 1
                return self.is_forced or self.calls > 1 or steps >= _MIN_STEPS_AT_ONCE
            self.refused += 1
            if self.refused < _TRY_AGAIN:
                return False
            self.refused = self.rounds = self.drafted = self.accepted = 0
            self.spent, self.failure = 0.0, None
            self.recent.clear()
            self.looked_up.clear()
            for found in self.seconds.values():
                found.clear()
            return True

    @property
    def gain(self) -> float:
        """How many times as fast tokens come with drafting steps as without; needs a round, and all timings."""
        with self._lock:
            return statistics.median(self.seconds[PLAIN]) / self._seconds_a_token(self.recent, self.drafts)

    @property
    def saved(self) -> float:
        """Seconds that drafts have saved so far, what capturing their steps took included; 0 without a timing."""
        with self._lock:
            plain = self.seconds[PLAIN]
            return (self.rounds + self.accepted) * statistics.median(plain) - self.spent if plain else 0.0

    def __str__(self) -> str:
        with self._lock:
            rounds = "1 round" if self.rounds == 1 else f"{self.rounds} rounds"
            text = f"{rounds}, {self.accepted} of {self.drafted} drafts accepted"
            if self.failure:
                return f"{text}: they are off, since {self.failure}"
            if self.is_hopeless:
                return f"{text}: they do not pay, and are off"
            return f"{text}, {1e3 * self.saved:+.0f} ms saved" if self.saved else text
