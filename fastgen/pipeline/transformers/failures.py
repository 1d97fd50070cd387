"""Decides what becomes of records that can't be used, and of blank lines: --on-error."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from fastgen.pipeline.errors import InputError
from fastgen.pipeline.transformers.records import TEXT, Record

STOP, BLANK, SKIP = "stop", "blank", "skip"
_TOGETHER = 256  # records that the scan tokenises at once


class Policy(NamedTuple):
    """What to do with each kind of line: STOP, BLANK or SKIP."""

    errors: str  # for lines that can't be used
    blanks: str  # for lines without text

    def problem(self, record: Record) -> str | None:
        """The sentence that ends the run at this record; None if the run goes on."""
        hint = f"--on-error {BLANK} or {SKIP} goes on"
        if record.error is not None:
            return f"{record.error.rstrip('.')}; {hint}." if self.errors == STOP else None
        if record.blank and self.blanks == STOP:
            return f"{record.path}, line {record.line}: the line is blank; {hint}."
        return None

    def leaves_out(self, record: Record) -> bool:
        """Whether the output leaves this record out."""
        return not record.usable and (self.blanks if record.error is None else self.errors) == SKIP


def policy_of(chosen: str | None, form: str) -> Policy:
    """The policy of --on-error for this form of output; by default an error stops a run with text output."""
    if chosen is not None:
        return Policy(chosen, chosen)
    return Policy(STOP if form == TEXT else BLANK, BLANK)


def outputs_of(
    record: Record, found: Iterator[tuple[str, float | None]], per_record: int
) -> list[tuple[str, float | None]]:
    """The next `per_record` texts and scores in `found`, or as many empty ones if the record can't be used."""
    return [next(found) if record.usable else ("", None) for _ in range(per_record)]


class Lengths(NamedTuple):
    """How long an input may be."""

    limit: int  # tokens
    count_tokens: Callable[[list[str]], list[int]]  # counts the tokens of each text


def scan(records: Iterable[Record], policy: Policy, lengths: Lengths | None = None) -> None:
    """Check all records before the model is loaded: a record that would end the run hours later ends it now.

    Texts are tokenised only if they have more bytes than the model has room for tokens: a token has at least a byte, so
    all others fit (except texts with characters that a tokenizer splits: these fail when they are generated).

    Args:
        lengths: the limit; None if there is none.

    Raises:
        InputError: the first record at which the policy stops.
    """
    if STOP not in policy:
        return
    # A prefix and special tokens around a text are counted with the shortest text.
    room = None if lengths is None else lengths.limit - lengths.count_tokens(["a"])[0]
    long: list[Record] = []
    for record in records:
        problem = policy.problem(record)
        if room is not None and problem is None and len(record.text.encode()) > room:
            long.append(record)
        if lengths is not None and long and (problem is not None or len(long) == _TOGETHER):
            _check_lengths(long, policy, lengths)
            long.clear()
        if problem is not None:
            raise InputError(problem)
    if lengths is not None and long:
        _check_lengths(long, policy, lengths)


def _check_lengths(records: list[Record], policy: Policy, lengths: Lengths) -> None:
    for record, count in zip(records, lengths.count_tokens([record.text for record in records]), strict=True):
        if count > lengths.limit:
            refuse_too_long(record, count, lengths.limit)
            if (problem := policy.problem(record)) is not None:
                raise InputError(problem)


def refuse_too_long(record: Record, count: int, limit: int) -> None:
    record.refuse(f"{count} tokens, and the model has room for {limit}; --truncate cuts it")
