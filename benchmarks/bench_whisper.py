"""OpenAI's whisper package, stock and with fastgen: verified, then timed in turn.

    python benchmarks/bench_whisper.py                    # random weights, a model of the size "base"
    python benchmarks/bench_whisper.py --whisper DIR --audio FILE.npy     # trained, as transformers saves it; 16 kHz

Needs `pip install -c constraints.txt -e '.[whisper]'`. Timed is `transcribe`, of 30 seconds of sound, with the encoder
and the spectrogram; with random weights `decode` of them, up to a fixed number of tokens, for these end nowhere.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import whisper
from measuring import SIDES, OtherProcesses, aligned, begin, environment, options, ratios, running, write
from tqdm import tqdm
from whisper.decoding import DecodingOptions
from whisper.model import ModelDimensions, Whisper

import fastgen
from fastgen import report
from fastgen.pipeline.transcription.load import of_transformers

BASE = ModelDimensions(80, 1500, 512, 8, 6, 51865, 448, 512, 8, 6)
SECONDS, BEAMS, TOKENS = 30, 5, 100


def random() -> Any:
    torch.manual_seed(0)
    model = Whisper(BASE).eval()
    torch.nn.init.normal_(model.decoder.positional_embedding, std=0.02)
    return model


def job(args: Any) -> tuple[str, Callable[[], Any]]:
    """What is timed, and a function that does it and returns tokens."""
    if args.whisper is None:
        model, sound = random(), torch.randn(SECONDS * 16000, generator=torch.Generator().manual_seed(1)) * 0.1
        mel = whisper.log_mel_spectrogram(whisper.pad_or_trim(sound))
        chosen = DecodingOptions(beam_size=BEAMS, sample_len=TOKENS, language="en", fp16=False)
        return f"random weights, {TOKENS} tokens", lambda: whisper.decode(model, mel, chosen).tokens
    model, sound = of_transformers(str(args.whisper)), np.load(args.audio).astype(np.float32)
    sound = np.resize(sound, SECONDS * 16000)  # again and again

    def transcribed() -> Any:
        torch.manual_seed(0)
        found = whisper.transcribe(model, sound, beam_size=BEAMS, language="en", fp16=False)
        return [(segment["tokens"], segment["temperature"]) for segment in found["segments"]]

    return f"trained, {SECONDS} s of speech", transcribed


def main() -> int:
    parser = options("OpenAI's whisper package, stock and with fastgen: verified, then timed in turn.", rounds=5)
    parser.add_argument("--whisper", type=Path, metavar="DIR", help="Whisper-base as transformers saves it")
    parser.add_argument("--audio", type=Path, metavar="FILE", help="speech at 16 kHz, as numpy saves it")
    args = parser.parse_args()
    if (args.whisper is None) != (args.audio is None):
        parser.error("--whisper and --audio belong together")
    begin(args)
    warnings.simplefilter("ignore")
    what, run = job(args)
    rounds: list[dict[str, float]] = []
    others: list[float | None] = []
    with tqdm(total=2 * (1 + args.rounds), leave=False) as bar:
        outputs = {}
        for side in SIDES:
            with running(side):
                outputs[side] = run()
            bar.update()
        if outputs["stock"] != outputs["fastgen"]:
            print("The outputs differ.", *outputs.items(), sep="\n")
            return 1
        calls = report.calls()
        for number in range(args.rounds):
            one = {}
            for side in SIDES if number % 2 == 0 else SIDES[::-1]:
                watch, started = OtherProcesses(), time.perf_counter()
                with running(side):
                    run()
                one[side] = time.perf_counter() - started
                others.append(watch.cores())
                bar.update()
            rounds.append(one)
    found = ratios(rounds)
    print(
        aligned(
            [
                (f"whisper base, {BEAMS} beams, {what}", "stock s", "fastgen s", "ratio"),
                (
                    "outputs the same",
                    f"{found['stock']:.2f}",
                    f"{found['fastgen']:.2f}",
                    f"{found['ratio']:.2f}x ({found['min']:.2f} to {found['max']:.2f}), aim 1.3x",
                ),
            ]
        )
    )
    document = {
        **environment(whisper, fastgen),
        "what": what,
        "beams": BEAMS,
        "end_to_end": found,
        "rounds": rounds,
        "other_processes": others,
        "calls": [[call.tier, call.beams, call.steps, call.cache_bytes] for call in calls],
    }
    write(args.output, "whisper-trained" if args.whisper else "whisper-random", document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
