"""Scores outputs against references: BLEU and chrF (sacrebleu), ROUGE (rouge-score)."""

from __future__ import annotations

import importlib
from pathlib import Path

from fastgen import installing
from fastgen.pipeline.errors import InputError, counted
from fastgen.pipeline.transformers.records import read_lines

METRICS = ("bleu", "chrf", "rouge")
_PACKAGES = {"bleu": "sacrebleu", "chrf": "sacrebleu", "rouge": "rouge_score"}
_ROUGE = {"rouge1": "ROUGE-1", "rouge2": "ROUGE-2", "rougeL": "ROUGE-L"}


def check(metrics: list[str]) -> None:
    """Raise InputError, before the run, for unknown metrics and missing packages."""
    for metric in metrics:
        if metric not in METRICS:
            raise InputError(f"Unknown metric {metric!r}: choose from {', '.join(METRICS)}.")
        try:
            importlib.import_module(_PACKAGES[metric])
        except ImportError:
            name = _PACKAGES[metric].replace("_", "-")
            raise InputError(f"The metric {metric} needs {name}: {installing.command('metrics')}.") from None


def read_references(path: Path, expected: int) -> list[str]:
    """Read references, one a line, as many as there are inputs."""
    lines = read_lines(path)
    if len(lines) != expected:
        raise InputError(f"{path} has {counted(len(lines), 'reference')} for {counted(expected, 'input')}.")
    return lines


def score(outputs: list[str], references: list[str], metrics: list[str]) -> list[str]:
    """A line for each metric: BLEU and chrF as sacrebleu prints them, ROUGE as mean F1 with stemming."""
    lines: list[str] = []
    if "bleu" in metrics:
        from sacrebleu.metrics import BLEU

        lines.append(str(BLEU().corpus_score(outputs, [references])))
    if "chrf" in metrics:
        from sacrebleu.metrics import CHRF

        lines.append(str(CHRF().corpus_score(outputs, [references])))
    if "rouge" in metrics:
        from rouge_score.rouge_scorer import RougeScorer

        scorer = RougeScorer(list(_ROUGE), use_stemmer=True)
        scores = [scorer.score(reference, output) for output, reference in zip(outputs, references, strict=True)]
        for kind, name in _ROUGE.items():
            lines.append(f"{name} = {100 * sum(one[kind].fmeasure for one in scores) / len(scores):.2f}")
    return lines
