"""Makes the output lines of fairseq-generate from plain lists, in a worker process.

It imports nothing of fairseq: so a worker that needs neither a tokenizer nor a subword codec starts in a tenth of a
second. Strings are made from lists of ids: `fairseq.data.Dictionary.string` is slow on tensors, which it reads element
by element.
"""

from __future__ import annotations

import numbers
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_SPACES = re.compile(r"\s+")

# The values of `--post-process` that are handled here; a dictionary object of fairseq handles the others.
POST_PROCESSORS: dict[str | None, Callable[[str], str]] = {
    None: lambda text: text,
    "none": lambda text: text,
    "sentencepiece": lambda text: text.replace(" ", "").replace("\u2581", " ").strip(),
    "subword_nmt": lambda text: (text + " ").replace("@@ ", "").rstrip(),
    "@@ ": lambda text: (text + " ").replace("@@ ", "").rstrip(),
    "@@": lambda text: (text + " ").replace("@@", "").rstrip(),
}


@dataclass(frozen=True)
class Symbols:
    """The data of a plain fairseq dictionary that its method `string` needs."""

    symbols: list[str]
    bos: int
    eos: int
    unk: int
    unk_word: str

    def string(
        self,
        ids: Sequence[int],
        post_process: str | None = None,
        escape_unk: bool = False,
        extra_symbols_to_ignore: Collection[int] | None = None,
    ) -> str:
        """The text of `ids`, without bos, eos and `extra_symbols_to_ignore`."""
        ignored = {self.bos, self.eos, *(extra_symbols_to_ignore or ())}
        symbols, known, unknown = self.symbols, len(self.symbols), self.unk_word
        shown = f"<{unknown}>" if escape_unk else unknown
        words = [shown if i == self.unk else symbols[i] if i < known else unknown for i in ids if i not in ignored]
        return POST_PROCESSORS[post_process](" ".join(words))


@dataclass(frozen=True)
class Hypothesis:
    """One hypothesis as plain data."""

    tokens: list[int]
    score: float  # base 2
    positional_scores: list[float]  # base 2
    alignment: list[Any]
    steps: int | None
    history: list[list[int]]


@dataclass(frozen=True)
class Batch:
    """A generated batch as plain data; each list has one entry per sentence."""

    ids: list[int]
    sources: list[list[int]] | None  # may be padded
    targets: list[list[int]] | None  # may be padded
    source_texts: list[str] | None  # the original lines, when unknown words are replaced
    target_texts: list[str] | None
    hypotheses: list[list[Hypothesis]]


@dataclass(frozen=True)
class Scored:
    """The data of one sentence for the scorer: tokens or texts, whichever is scored; the other is empty."""

    target: str
    hypothesis: str
    target_tokens: list[int]
    hypothesis_tokens: list[int]
    texts: list[str]  # of all hypotheses, before detokenising


@dataclass(frozen=True)
class Lines:
    text: str
    scored: list[Scored]


@dataclass(frozen=True)
class Format:
    """The settings of a run that decide how lines look; sent once to each worker."""

    source: Any  # Symbols, a fairseq dictionary, or None
    target: Any  # Symbols or a fairseq dictionary
    pad: int
    unk_word: str
    post_process: str | None
    ignored: frozenset[int]
    subwords: Any  # objects with decode(), or None
    tokenizer: Any
    align_dict: Mapping[str, str] | None
    quiet: bool
    print_alignment: str | None
    print_step: bool
    history: bool

    @property
    def by_words(self) -> bool:
        """Whether words are scored instead of tokens, as subwords were joined or words replaced."""
        return self.align_dict is not None or self.post_process is not None


def build(form: Format) -> Callable[[Batch], Lines]:
    """Make the handler of a worker."""
    return _Writer(form).batch


class _Writer:
    def __init__(self, form: Format) -> None:
        self._form = form

    def batch(self, batch: Batch) -> Lines:
        lines: list[str] = []
        scored: list[Scored] = []
        for i in range(len(batch.ids)):
            self._sentence(batch, i, lines, scored)
        return Lines("".join(f"{line}\n" for line in lines), scored)

    def _sentence(self, batch: Batch, i: int, lines: list[str], scored: list[Scored]) -> None:
        form, name = self._form, batch.ids[i]
        target_tokens = [] if batch.targets is None else [t for t in batch.targets[i] if t != form.pad]
        source = self._decode(self._source(batch, i))
        target = None if batch.targets is None else self._decode(self._target(batch, i, target_tokens))
        if not form.quiet:
            if form.source is not None:
                lines.append(f"S-{name}\t{source}")
            if target is not None:
                lines.append(f"T-{name}\t{target}")
        texts: list[str] = []
        best = ""
        for hypothesis in batch.hypotheses[i]:
            text = form.target.string(hypothesis.tokens, form.post_process, extra_symbols_to_ignore=form.ignored)
            if form.align_dict is not None:
                text = _replace_unknown(text, source, hypothesis.alignment, form.align_dict, form.unk_word)
            plain = self._decode(text)
            if not form.quiet:
                self._hypothesis(name, hypothesis, text, plain, lines)
            if not texts:
                best = plain
            texts.append(text)
        if target is not None and texts:
            if form.by_words:
                scored.append(Scored(target, best, [], [], texts))
            else:
                scored.append(Scored(target, best, target_tokens, batch.hypotheses[i][0].tokens, []))

    def _source(self, batch: Batch, i: int) -> str:
        form = self._form
        if batch.source_texts is not None:
            return batch.source_texts[i]
        if form.source is None or batch.sources is None:
            return ""
        return form.source.string([t for t in batch.sources[i] if t != form.pad], form.post_process)

    def _target(self, batch: Batch, i: int, tokens: list[int]) -> str:
        form = self._form
        if batch.target_texts is not None:
            return batch.target_texts[i]
        return form.target.string(tokens, form.post_process, escape_unk=True, extra_symbols_to_ignore=form.ignored)

    def _hypothesis(self, name: int, hypothesis: Hypothesis, text: str, plain: str, lines: list[str]) -> None:
        form = self._form
        lines.append(f"H-{name}\t{hypothesis.score}\t{text}")
        lines.append(f"D-{name}\t{hypothesis.score}\t{plain}")
        lines.append(f"P-{name}\t" + " ".join([f"{score:.4f}" for score in hypothesis.positional_scores]))
        if form.print_alignment == "hard":
            lines.append(
                f"A-{name}\t"
                + " ".join([f"{source}-{target}" for source, target in filter(_is_pair, hypothesis.alignment)])
            )
        elif form.print_alignment == "soft":
            lines.append(f"A-{name}\t" + " ".join([",".join(weights) for weights in hypothesis.alignment]))
        if form.print_step and hypothesis.steps is not None:  # only models that refine have steps; stock crashes
            lines.append(f"I-{name}\t{hypothesis.steps}")
        if form.history:
            for step, tokens in enumerate(hypothesis.history):
                lines.append(f"E-{name}_{step}\t{form.target.string(tokens)}")

    def _decode(self, text: str) -> str:
        if self._form.subwords is not None:
            text = self._form.subwords.decode(text)
        if self._form.tokenizer is not None:
            text = self._form.tokenizer.decode(text)
        return text


def _is_pair(item: Any) -> bool:
    return isinstance(item, (tuple, list)) and len(item) == 2


def _replace_unknown(text: str, source: str, alignment: list[Any], align_dict: Mapping[str, str], unk_word: str) -> str:
    """Replace unknown words by the translation of the source word they are aligned to, or by that word itself.

    This needs a hard alignment, pairs (source word, target word), or for each target word the source word's place, as
    models that refine have it. Stock raises an IndexError without one and a TypeError with pairs; here an unknown word
    that is not aligned stays.
    """
    words = _SPACES.sub(" ", text).strip().split()
    partners = {pair[1]: pair[0] for pair in alignment if _is_pair(pair)}
    partners |= {place: int(source) for place, source in enumerate(alignment) if isinstance(source, numbers.Integral)}
    source_words = [*_SPACES.sub(" ", source).strip().split(), "<eos>"]
    for i, word in enumerate(words):
        if word == unk_word and (partner := partners.get(i)) is not None and partner < len(source_words):
            words[i] = align_dict.get(source_words[partner], source_words[partner])
    return " ".join(words)
