"""Hours of speech, transcribed by the stock host and with fastgen: text, tokens and times must be the same.

    python benchmarks/speech_soak.py heard.jsonl --whisper DIR --texts ../shared/data/docs.txt --hours 2

espeak-ng speaks sentences of a text; how many, in which voice, how fast, and with which options the recording is
transcribed are drawn by its number. Each recording adds a line to the file; a run goes on behind the last line. Exit
code 1 says that a recording differs. No timing: other processes may run beside it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import random
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from bench_speech import sentences, speak
from measuring import aligned, quieten
from tqdm import tqdm

import fastgen
from fastgen.bench import speech
from fastgen.pipeline.transcription import audio
from fastgen.pipeline.transcription.load import of_transformers

VOICES = ("en-us", "en-gb", "en-us+f3", "en-us+m3", "en-gb-scotland", "en-us+whisper")
WHISPER: dict[str, dict[str, Any]] = {
    "beams": {"beam_size": 5},
    "greedy": {},
    "patience": {"beam_size": 3, "patience": 2.0},
    "words": {"beam_size": 5, "word_timestamps": True},
    "fallback": {"beam_size": 3, "best_of": 3, "logprob_threshold": -0.1, "temperature": (0.0, 0.4)},
    "alone": {"beam_size": 5, "condition_on_previous_text": False},
    "prompt": {"beam_size": 5, "initial_prompt": "Minutes of a meeting on free software."},
    "translate": {"beam_size": 5, "task": "translate", "language": "de"},
}
TRANSFORMERS: dict[str, dict[str, Any]] = {
    "beams": {"num_beams": 5},
    "greedy": {"num_beams": 1},
    "fallback": {"num_beams": 3, "logprob_threshold": -0.1, "temperature": (0.0, 0.4), "no_speech_threshold": 0.6},
    "prompted": {"num_beams": 5, "condition_on_prev_tokens": True},
}


def spoken(chance: random.Random, texts: list[str], folder: str) -> Any:
    """Float32 `[samples]` of some sentences."""
    said = " ".join(chance.sample(texts, chance.choice([1, 2, 4, 8, 16, 40])))
    path = Path(folder, "spoken.wav")
    speak(said, path, chance.choice(VOICES), chance.randrange(120, 220))
    return audio.read(path).samples


def hosts(path: Path) -> dict[str, tuple[dict[str, dict[str, Any]], Callable[[Any, dict[str, Any]], Any]]]:
    """By host: the options to draw from, and what transcribes a recording."""
    import whisper

    model, pipeline = of_transformers(str(path)), speech.pipeline(path)

    def by_whisper(samples: Any, chosen: dict[str, Any]) -> Any:
        return whisper.transcribe(model, samples, **{"language": "en", "fp16": False, **chosen})

    def by_transformers(samples: Any, chosen: dict[str, Any]) -> Any:
        known = {"language": "en", "task": "transcribe", **chosen}
        return pipeline(samples.copy(), return_timestamps=True, generate_kwargs=known)

    return {"whisper": (WHISPER, by_whisper), "transformers": (TRANSFORMERS, by_transformers)}


def differences(one: Any, other: Any, where: str = "") -> Iterator[str]:
    """Where two results differ; numbers that are no tokens nor times may round otherwise."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        for name in one:
            yield from differences(one[name], other[name], f"{where}.{name}")
    elif isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)) and len(one) == len(other):
        for number, pair in enumerate(zip(one, other, strict=True)):
            yield from differences(*pair, f"{where}[{number}]")
    elif where.endswith(("logprob", "probability", "no_speech_prob")):
        if not math.isclose(one, other, abs_tol=1e-4):
            yield f"{where}: {one!r}, {other!r}"
    elif one != other:
        yield f"{where}: {one!r}, {other!r}"


def heard(number: int, texts: list[str], known: dict[str, Any], folder: str) -> dict[str, Any]:
    """Transcribe a recording by both sides, and say where they differ and how many calls fastgen left to the host."""
    chance = random.Random(number)
    host = "transformers" if number % 3 == 2 else "whisper"
    kinds, transcribe = known[host]
    kind, samples = chance.choice([*kinds]), spoken(chance, texts, folder)
    found, left = [], Counter[str]()
    for side in (fastgen.disabled(), contextlib.nullcontext()):
        with side:
            torch.manual_seed(number)
            before = fastgen.status().counters
            found.append(transcribe(samples, kinds[kind]))
            left = Counter(fastgen.status().counters) - Counter(before)
    about = {"number": number, "host": host, "kind": kind, "seconds": len(samples) / audio.RATE, "calls": dict(left)}
    return {**about, "differs": [*differences(*found)]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, metavar="FILE", help="a line of JSON for each recording")
    parser.add_argument("--whisper", type=Path, metavar="DIR", required=True, help="Whisper as transformers saves it")
    parser.add_argument("--texts", type=Path, metavar="FILE", required=True, help="what is spoken")
    parser.add_argument("--threads", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--hours", type=float, default=1.0, help="of speech, with what the file has; default: 1")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    warnings.simplefilter("ignore")
    quieten()
    done = [json.loads(line) for line in args.file.read_text().splitlines()] if args.file.exists() else []
    texts, known, wanted = sorted(set(sentences(args.texts))), hosts(args.whisper), round(3600 * args.hours)
    seconds = sum(one["seconds"] for one in done)
    with (
        tempfile.TemporaryDirectory() as folder,
        args.file.open("a") as file,
        tqdm(total=wanted, initial=round(seconds), unit="s", desc="of speech") as bar,
    ):
        while seconds < wanted:
            done.append(heard(len(done), texts, known, folder))
            print(json.dumps(done[-1]), file=file, flush=True)
            seconds += done[-1]["seconds"]
            bar.update(round(done[-1]["seconds"]))
    rows = [("host", "options", "recordings", "seconds", "different")]
    for host, kind in sorted({(one["host"], one["kind"]) for one in done}):
        these = [one for one in done if (one["host"], one["kind"]) == (host, kind)]
        count, length = len(these), sum(one["seconds"] for one in these)
        rows.append((host, kind, str(count), f"{length:.0f}", str(sum(bool(one["differs"]) for one in these))))
    print(aligned(rows))
    return int(any(one["differs"] for one in done))


if __name__ == "__main__":
    sys.exit(main())
