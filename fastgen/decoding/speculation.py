"""When speculative decoding pays: drafts cost steps of a cheaper model, and those accepted save steps of the model.

Speculative decoding: Leviathan et al. 2023, https://arxiv.org/abs/2211.17192. There the drafts' distribution decides,
too, which tokens are drawn. Here only the model's own outputs decide, as without drafts: a draft is accepted if it is
the token that was chosen.
"""

from __future__ import annotations

import statistics
import threading
from collections import deque
from dataclasses import dataclass, field

PLAIN, DRAFT, CHECK = "plain", "draft", "check"  # a step without drafts, a drafting step, one of several tokens
_TIMINGS, _ROUNDS = 3, 6  # of each kind, and of drafting, before anything is decided
_MOST_ROUNDS = 48  # without timings of each kind: a kind of step that is never replayed does not pay
_WORTH = 1.05  # the least gain in speed
_RECENT, _CALLS = 32, 8  # rounds and timings, and calls, that are remembered
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
    recent: deque[int] = field(default_factory=lambda: deque(maxlen=_RECENT))  # accepted drafts of the last rounds
    looked_up: deque[int] = field(default_factory=lambda: deque(maxlen=_RECENT))  # of those that took no drafting steps
    not_looked_up: int = 0  # rounds that could have done without drafting steps since that was found not to pay
    lengths: deque[int] = field(default_factory=lambda: deque(maxlen=_CALLS))  # steps of the last calls
    failure: str | None = None  # why steps of rounds are not replayed
    refused: int = 0  # calls that could have drafted since drafting was found not to pay
    _lock: threading.RLock = field(default_factory=threading.RLock, repr=False)

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

    def wants_drafts(self) -> bool:
        """Whether the next round should draft: steps without drafts are timed first, then rounds are tried until steps
        of each kind have been timed, then the timings decide."""
        with self._lock:
            is_timed = self.is_forced or len(self.seconds[PLAIN]) >= _TIMINGS
            return is_timed and not self.is_hopeless

    def prefers_looking_up(self) -> bool:
        """Whether a round that `wants_drafts` should take tokens that were looked up, by the last rounds that did."""
        with self._lock:
            if len(self.looked_up) < _ROUNDS or not self.seconds[CHECK]:
                return True
            check = statistics.median(self.seconds[CHECK])
            drafting = self.drafts * statistics.median(self.seconds[DRAFT]) if self.seconds[DRAFT] else check
            tokens, others = (1 + statistics.fmean(found or [0]) for found in (self.looked_up, self.recent))
            if tokens / check > others / (drafting + check):
                return True
            self.not_looked_up += 1
            return self.not_looked_up % _RECENT == 0  # the text may have changed

    @property
    def is_hopeless(self) -> bool:
        """Whether drafting has been tried and does not pay, or cannot be done."""
        with self._lock:
            if self.failure:
                return True
            if self.is_forced or len(self.recent) < _ROUNDS:
                return False
            if any(len(found) < _TIMINGS for found in self.seconds.values()):
                return self.rounds >= _MOST_ROUNDS
            return self.gain <= _WORTH

    def may_try(self) -> bool:
        """Whether a call should draft, or try to; asked once for each call. What did not pay is tried again later."""
        with self._lock:
            if not self.is_hopeless:
                return True
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
        """How many times as fast tokens come with drafts as without; needs timings of all kinds, and a round."""
        with self._lock:
            plain, draft, check = (statistics.median(self.seconds[kind]) for kind in (PLAIN, DRAFT, CHECK))
            return plain * (1 + statistics.mean(self.recent)) / (self.drafts * draft + check)

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
