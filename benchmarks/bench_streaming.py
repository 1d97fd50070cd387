"""How far what is decided lags behind the beams: a trained translation model, beams that stream.

    python benchmarks/bench_streaming.py --shared ../shared

The lag is counted after each decode step: the tokens of the live beams that the streamer has not been given yet. Greedy
search has none. Each output is compared with stock's, and with what was streamed.
"""

from __future__ import annotations

import argparse
import collections
import json
import statistics
import sys
from pathlib import Path
from typing import Any, ClassVar

import measuring
import torch
import transformers
from tqdm import tqdm

import fastgen
from fastgen.optimizer.transformers import streaming
from fastgen.optimizer.transformers.generate import beam_search

MAX_NEW = 120


class _Streamer:
    """Collects tokens."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        """Nothing is kept back."""


class _Counting(streaming.BeamStream):
    """Counts, after each step of a search, the tokens that were not told."""

    lags: ClassVar[list[int]] = []

    def follow(self, search: Any) -> None:
        super().follow(search)
        self.lags.append(search.length - self._streaming._front.length)


def _load(shared: Path, sentences: int) -> tuple[Any, list[torch.Tensor]]:
    """The model, and the sources of the test set, int64 `[1, N]` each."""
    import sentencepiece

    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(shared / "models/ddtp-en-de/hf").eval()
    numbers = json.loads((shared / "models/ddtp-en-de/vocab.json").read_text("utf-8"))
    numbers = {token: number for number, token in enumerate(numbers)} if isinstance(numbers, list) else numbers
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(shared / "data/ddtp-en-de/spm.model"))
    lines = (shared / "data/ddtp-en-de/test.en").read_text("utf-8").splitlines()[:sentences]
    unknown, end = numbers["<unk>"], numbers["</s>"]
    rows = [[*(numbers.get(piece, unknown) for piece in pieces.encode(line, out_type=str)), end] for line in lines]
    return model, [torch.tensor([row]) for row in rows]


def _measure(model: Any, sources: list[torch.Tensor], options: dict[str, Any]) -> dict[str, Any]:
    lags: list[int] = []
    worst: list[int] = []
    first: list[int] = []
    for source in tqdm(sources, desc=str(options), unit="sentence", leave=False):
        streamer = _Streamer()
        _Counting.lags.clear()
        tokens = model.generate(source, max_new_tokens=MAX_NEW, streamer=streamer, **options)[0].tolist()
        with fastgen.disabled():
            expected = model.generate(source, max_new_tokens=MAX_NEW, **options)[0].tolist()
        if not tokens == expected == streamer.tokens:
            raise SystemExit(f"{options}: {streamer.tokens} was streamed, stock has {expected}")
        lags += _Counting.lags
        worst.append(max(_Counting.lags, default=0))
        told = [step for step, lag in enumerate(_Counting.lags, 1) if lag < step]
        first.append(min([*told, len(_Counting.lags) + 1]))
    counts = collections.Counter(lags)
    return {
        "options": options,
        "steps": len(lags),
        "lag": {"median": statistics.median(lags), "mean": statistics.mean(lags), "worst": max(lags)},
        "worst_of_a_sentence": {"median": statistics.median(worst), "worst": max(worst)},
        "steps_by_lag": {str(lag): counts[lag] for lag in sorted(counts)},
        "first_token_at_step": {"median": statistics.median(first), "worst": max(first)},
    }


def main() -> int:
    parser = measuring.options(__doc__ or "")
    parser.add_argument("--shared", type=Path, required=True, help="folder with `data` and `models`")
    parser.add_argument("--sentences", type=int, default=200, help="default: %(default)s")
    parser.add_argument("--beams", type=int, nargs="*", default=[2, 5, 10], help="default: 2 5 10")
    args: argparse.Namespace = parser.parse_args()
    measuring.quieten()
    measuring.begin(args)
    model, sources = _load(args.shared, args.sentences)
    cases = [dict(num_beams=beams, early_stopping=early) for beams in args.beams for early in (True, False)]
    beam_search.BeamStream = _Counting  # type: ignore[misc]
    with torch.inference_mode():
        found = [_measure(model, sources, options) for options in cases]
    rows = [("beams", "early stopping", "median lag", "worst lag", "worst of a sentence", "first token at step")]
    for one in found:
        options, lag = one["options"], one["lag"]
        of_sentences = one["worst_of_a_sentence"]["median"], one["first_token_at_step"]["median"]
        cells = (lag["median"], lag["worst"], *of_sentences)
        rows.append((str(options["num_beams"]), str(options["early_stopping"]), *map(str, cells)))
    print(measuring.aligned(rows))
    document = {**measuring.environment(transformers), "sentences": len(sources), "cases": found}
    print(measuring.write(args.output, "streaming", document))
    return 0


if __name__ == "__main__":
    sys.exit(main())
