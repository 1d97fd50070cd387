"""The demo's speech: a model of OpenAI's whisper and recordings, both the user's. None of either is shipped."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastgen.demo.comparison import Work
from fastgen.pipeline.errors import InputError, counted, writable
from fastgen.pipeline.transcription import audio

if TYPE_CHECKING:
    import numpy as np

WINDOW = 30 * audio.RATE  # samples: what whisper reads at once
_WARM_UP = 5 * audio.RATE
HOW_TO = (
    "For speech too, give a model and a recording: fastgen-demo --speech MODEL --audio FILE. MODEL is a name that "
    "whisper downloads (tiny, base, ...), a .pt file, or a folder with a Whisper of transformers."
)


def is_installed() -> bool:
    """Whether OpenAI's whisper is."""
    return importlib.util.find_spec("whisper") is not None


@dataclass(frozen=True)
class SpeechJob(Work):
    """Recordings to transcribe, one after the other, with a model of whisper's."""

    name: str
    model: Any
    sources: list[str]  # the files' names
    recordings: list[np.ndarray[Any, Any]]  # float32 [samples] of each, 16 kHz
    beams: int

    host = "whisper"
    call = "transcribe()"
    inputs = "recordings"
    memory_part = "the first 30 seconds of the first recording"
    answers = None

    def shape(self) -> str:
        seconds = sum(map(len, self.recordings)) / audio.RATE
        return (
            f"{counted(len(self.sources), 'recording')}, {seconds:.0f} s, {counted(self.beams, 'beam')}, temperature 0"
        )

    def amount(self) -> tuple[str, float]:
        return "seconds of sound", sum(map(len, self.recordings)) / audio.RATE

    def batches(self) -> list[np.ndarray[Any, Any]]:
        return self.recordings

    def warm_up(self) -> None:
        self.generate(self.recordings[0][:_WARM_UP])

    def generate(self, batch: np.ndarray[Any, Any]) -> dict[str, Any]:
        # Above a temperature of 0 whisper draws, and each side would draw its own.
        found: dict[str, Any] = self.model.transcribe(
            batch, beam_size=self.beams if self.beams > 1 else None, temperature=0.0, fp16=False
        )
        return found

    def new_tokens(self, batch: np.ndarray[Any, Any], output: dict[str, Any]) -> list[list[int]]:
        """Of all segments, with the tokens that say when one begins and ends."""
        return [[token for segment in output["segments"] for token in segment["tokens"]]]

    def texts(self, tokens: list[list[int]]) -> list[str]:
        from whisper.tokenizer import get_tokenizer

        tokenizer = get_tokenizer(self.model.is_multilingual, num_languages=self.model.num_languages)
        return [tokenizer.decode([token for token in row if token < tokenizer.eot]).strip() for row in tokens]

    def for_memory(self, batches: list[Any], longest: int) -> np.ndarray[Any, Any]:
        return self.recordings[0][:WINDOW]


def build_job(model: str, files: list[Path], *, beams: int, device: str) -> SpeechJob:
    """Read the recordings and load the model.

    Raises:
        InputError: the model or a file can't be used, or whisper or PyAV is missing.
    """
    from fastgen.pipeline.transcription.load import load

    recordings = []
    for file in files:
        found = audio.read(file)
        if found.fault:
            raise InputError(f"{found.fault}.")
        recordings.append(found.samples)
    return SpeechJob(
        name=writable(model),
        model=load(model, device),
        sources=[writable(file.name) for file in files],
        recordings=recordings,
        beams=beams,
    )
