"""The output file, in the order of the input."""

from __future__ import annotations

import sys

from fastgen.cli.transformers import records
from fastgen.cli.transformers.failures import Policy, outputs_of
from fastgen.cli.transformers.records import Prefix
from fastgen.pipeline.resume import Journal

_SHOWN_ERRORS = 10


class Writer:
    """Puts results back into the order of the input; runs in the writing thread.

    What can't be written yet, because an earlier record is still to come, is kept in the journal.
    """

    def __init__(self, form: str, policy: Policy, journal: Journal) -> None:
        """Goes on from what the journal's earlier run noted, if there was one."""
        self._form, self._policy, self._journal = form, policy, journal
        self.next = self.failed = self.errors_shown = 0
        self.read = Prefix(0, 0)  # the input, up to the last record that need not be done again
        self._held: dict[int, str] = {}
        with journal.earlier() as notes:
            for note in notes:
                self._held.update({int(index): str(text) for index, text in note["held"]})
                for index in range(self.next, int(note["next"])):
                    self._held.pop(index, None)
                self.next, self.failed = int(note["next"]), int(note["failed"])
                self.read = Prefix(*map(int, note["input"]))
        self._note_facts()

    @property
    def done(self) -> int:
        """The number of records that need not be done again."""
        return self.next + len(self._held)

    def finished(self, first: int) -> set[int]:
        """Of the records from `first` on, those that need not be done again."""
        return {*range(first, self.next), *self._held}

    def write(self, texts: list[str], note: tuple[list[records.Record], list[float | None], int]) -> None:
        """`texts` of a batch, `per_record` for each record that can be used."""
        batch, scores, per_record = note
        pairs = iter(zip(texts, scores, strict=True))
        new: list[tuple[int, str]] = []
        for record in batch:
            outputs = outputs_of(record, pairs, per_record)
            if record.index < self.next or record.index in self._held:
                continue  # of an earlier run
            self._show(record)
            self.failed += record.error is not None
            is_out = self._policy.leaves_out(record)
            new.append((record.index, "" if is_out else records.render(record, outputs, self._form)))
            if record.ends is not None and record.ends.bytes > self.read.bytes:
                self.read = record.ends
        self._held.update(new)
        ready: list[str] = []
        while (text := self._held.pop(self.next, None)) is not None:
            ready.append(text)
            self.next += 1
        self._note_facts()
        self._journal.write("".join(ready))
        held = [entry for entry in new if entry[0] >= self.next]
        self._journal.batch(next=self.next, held=held, failed=self.failed, input=self.read)

    def _note_facts(self) -> None:
        self._journal.facts = {"failed": self.failed, "input": self.read}

    def _show(self, record: records.Record) -> None:
        if record.error is not None and self.errors_shown <= _SHOWN_ERRORS:
            more = self.errors_shown == _SHOWN_ERRORS
            print(
                f"fastgen-generate-transformers: {'more errors are in the output' if more else record.error}",
                file=sys.stderr,
            )
            self.errors_shown += 1
