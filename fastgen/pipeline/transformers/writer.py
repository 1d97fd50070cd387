"""Writes the output file, in the order of the input."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from fastgen.pipeline.errors import tell
from fastgen.pipeline.resume import Journal
from fastgen.pipeline.transformers import records
from fastgen.pipeline.transformers.failures import Policy, outputs_of

_SHOWN_ERRORS = 10


class Writer:
    """Puts results back into the order of the input; runs in the writing thread.

    Results that can't be written yet, as an earlier record is missing, are kept in the journal.
    """

    def __init__(self, form: str, policy: Policy, journal: Journal) -> None:
        """Restores the state that an earlier run noted in `journal`, if there was one."""
        self._form, self.policy, self._journal = form, policy, journal
        self.next = self.failed = self.errors_shown = 0
        self._crc = 0  # of the input's lines before `next`
        self._held: dict[int, tuple[str, int]] = {}  # text, and CRC of the input's line
        with journal.earlier() as notes:
            for note in notes:
                self._held.update({int(index): (str(text), int(crc)) for index, text, crc in note["held"]})
                for index in range(self.next, int(note["next"])):
                    self._held.pop(index, None)
                self.next, self.failed, self._crc = int(note["next"]), int(note["failed"]), int(note["input"])
        self._note_facts()

    def knows(self, lines: Iterable[bytes]) -> bool:
        """Whether the input lines that an earlier run has done are unchanged."""
        rest = iter(lines)
        if records.lines_crc(islice(rest, self.next)) != self._crc:
            return False
        missing = set(self._held)
        for index, line in enumerate(islice(rest, max(missing, default=self.next - 1) + 1 - self.next), self.next):
            if index in missing and records.line_crc(line) == self._held[index][1]:
                missing.remove(index)
        return not missing

    @property
    def done(self) -> int:
        """The number of records that need not be done again."""
        return self.next + len(self._held)

    def finished(self, first: int) -> set[int]:
        """The records from `first` on that need not be done again."""
        return {*range(first, self.next), *self._held}

    def write(self, texts: list[str], note: tuple[list[records.Record], list[float | None], int]) -> None:
        """Write a batch: `texts` are `per_record` for each record that can be used."""
        batch, scores, per_record = note
        pairs = iter(zip(texts, scores, strict=True))
        new: list[tuple[int, str, int]] = []
        for record in batch:
            outputs = outputs_of(record, pairs, per_record)
            if record.index < self.next or record.index in self._held:
                continue  # an earlier run has it
            self._show(record)
            self.failed += record.error is not None
            is_out = self.policy.leaves_out(record)
            text = "" if is_out else records.render(record, outputs, self._form)
            new.append((record.index, text, record.crc))
        self._held.update({index: (text, crc) for index, text, crc in new})
        ready: list[str] = []
        while (entry := self._held.pop(self.next, None)) is not None:
            ready.append(entry[0])
            self._crc = records.chained(self._crc, entry[1])
            self.next += 1
        self._note_facts()
        self._journal.write("".join(ready))
        held = [entry for entry in new if entry[0] >= self.next]
        self._journal.batch(next=self.next, held=held, failed=self.failed, input=self._crc)

    def _note_facts(self) -> None:
        self._journal.facts = {"failed": self.failed, "records": self.next, "input": self._crc}

    def _show(self, record: records.Record) -> None:
        if record.error is not None and self.errors_shown <= _SHOWN_ERRORS:
            more = "more lines can't be used: the end says how many."
            text = more if self.errors_shown == _SHOWN_ERRORS else record.error
            tell(f"fastgen-generate-transformers: {text}")
            self.errors_shown += 1
