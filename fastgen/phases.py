"""The phases of a generation, and marks in the code that say which of them it belongs to.

`fastgen.bench.phases` samples the stack of a running generation and reads the marks. `@marked(CACHE)` marks a function;
`__phase__ = CACHE` in a module marks all functions of the module that have no mark of their own. Marks cost nothing
while the code runs.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType
from typing import Any, NamedTuple, TypeVar

# In the order in which they are shown: the first figure of the paper on FastSeq (Yan et al., ACL 2021) has them before
# and after.
PHASES = (
    ENCODER := "encoder",
    PREFILL := "prefill",  # the decoder's first forward pass
    ATTENTION := "attention",  # of later passes: scores, weights and sums over the stored positions
    CACHE := "cache upkeep",  # storing, copying, reordering and pruning keys and values
    REST := "rest of the decoder",  # products with weights, norms, embeddings and the output head
    CHOICE := "next-token choice",  # logits processors, log-softmax, top-k, and the search's own state
    TEXT := "post-processing",  # tokens to text
    OTHER := "other",
)
# Code in which the phase is decided by what it calls, and if by nothing, is REST and CHOICE.
PASS = "pass"  # a forward pass of the decoder
LOOP = "loop"  # what calls one forward pass after the other
# Classes of attention that compute projections and attention in one function: the source line decides.
BY_LINE = "by line"

FirstPass = Callable[[dict[str, Any]], bool]  # of a loop's local variables: whether the loop's pass is the first
_Function = TypeVar("_Function", bound=Callable[..., Any])


class Mark(NamedTuple):
    phase: str  # one of PHASES, PASS, LOOP or BY_LINE
    first: FirstPass | None = None


_marks: dict[CodeType, Mark] = {}


def marked(phase: str, first: FirstPass | None = None) -> Callable[[_Function], _Function]:
    """A decorator that marks a function, and returns the same function.

    Args:
        phase: one of PHASES, PASS, LOOP or BY_LINE.
        first: of a LOOP whose first pass is the prefill.
    """

    def mark(function: _Function) -> _Function:
        _marks[function.__code__] = Mark(phase, first)
        return function

    return mark


def mark_of(code: CodeType, variables: dict[str, Any]) -> Mark | None:
    """The mark of a function, or else of the module that has these global variables."""
    if code in _marks:
        return _marks[code]
    phase = variables.get("__phase__")
    return Mark(phase) if isinstance(phase, str) else None


def marks() -> dict[CodeType, Mark]:
    """All marks of functions that have been defined so far."""
    return dict(_marks)
