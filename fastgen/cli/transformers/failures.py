"""What becomes of records that can't be used, and of blank lines: --on-error."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from fastgen.cli.transformers.records import TEXT, Record
from fastgen.pipeline.errors import InputError

STOP, BLANK, SKIP = "stop", "blank", "skip"
_TOGETHER = 256  # records that the scan tokenises at once


class Policy(NamedTuple):
    """One of STOP, BLANK and SKIP each."""

    errors: str
    blanks: str  # lines without text

    def problem(self, record: Record) -> str | None:
        """The sentence that ends the run at this record; None if the run goes on."""
        if record.error is not None:
            return record.error if self.errors == STOP else None
        if record.blank and self.blanks == STOP:
            return f"{record.path}, line {record.line}: the line is blank."
        return None

    def leaves_out(self, record: Record) -> bool:
        """Whether the output has nothing of this record."""
        return not record.usable and (self.blanks if record.error is None else self.errors) == SKIP


def policy_of(chosen: str | None, form: str) -> Policy:
    """As --on-error says, for an output of this form; by default text has no place for an error, and the run stops."""
    if chosen is not None:
        return Policy(chosen, chosen)
    return Policy(STOP if form == TEXT else BLANK, BLANK)


def outputs_of(
    record: Record, found: Iterator[tuple[str, float | None]], per_record: int
) -> list[tuple[str, float | None]]:
    """The next `per_record` texts and scores that were `found`; of a record that can't be used as many empty ones."""
    return [next(found) if record.usable else ("", None) for _ in range(per_record)]


def scan(
    records: Iterable[Record],
    policy: Policy,
    limit: int | None = None,
    count_tokens: Callable[[list[str]], list[int]] = lambda texts: [],
) -> None:
    """See all records before the model is loaded: what would end the run hours later ends it now.

    Texts are tokenised only if they have more bytes than the model has room for tokens: a token has a byte at least, so
    all others fit (but for characters that a tokenizer takes apart: these show when they are generated).

    Args:
        limit: of the tokens of an input; None if there is none, or longer inputs are cut.
        count_tokens: how many tokens each of these texts has; is needed with a limit.

    Raises:
        InputError: the first record at which the policy stops.
    """
    if STOP not in policy:
        return
    long: list[Record] = []

    def check_long() -> None:
        if not long:
            return
        for record, count in zip(long, count_tokens([record.text for record in long]), strict=True):
            if limit is not None and count > limit:
                refuse_too_long(record, count, limit)
                _stop(policy, record)
        long.clear()

    # What surrounds a text, a prefix and special tokens, is counted with the shortest one.
    extra = 0 if limit is None else max(count_tokens(["a"])[0], 1)
    for record in records:
        if policy.problem(record) is not None:
            check_long()  # of the records before
            _stop(policy, record)
        if limit is not None and len(record.text.encode()) + extra > limit:
            long.append(record)
            if len(long) == _TOGETHER:
                check_long()
    check_long()


def refuse_too_long(record: Record, count: int, limit: int) -> None:
    record.refuse(f"{count} tokens, and the model has room for {limit}; --truncate cuts it")


def _stop(policy: Policy, record: Record) -> None:
    if (problem := policy.problem(record)) is not None:
        raise InputError(problem)
