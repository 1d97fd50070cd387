"""Transcribes files one after the other, by `whisper.transcribe`, and writes what whisper's own command writes.

An output appears whole or not at all: it is written elsewhere and moved. The journal has a line for each finished file,
so that a run that was killed goes on where it was.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fastgen.pipeline.errors import DONE, INPUT_ERROR, InputError, counted, first_line, writing
from fastgen.pipeline.resume import other_texts
from fastgen.pipeline.transcription import audio
from fastgen.pipeline.transcription.journal import Journal
from fastgen.pipeline.transcription.load import load
from fastgen.pipeline.transcription.progress import AudioProgress

STANDARD_INPUT = Path("-")
_UNFINISHED = ".fastgen-unfinished-"  # folders of outputs that are being written


@dataclass(frozen=True)
class Settings:
    """What `fastgen-transcribe` was asked for."""

    model: str
    files: tuple[Path, ...]
    output: Path  # a folder
    formats: tuple[str, ...]
    options: dict[str, Any]  # of `whisper.transcribe`
    layout: dict[str, Any]  # options of whisper's writers
    device: str = "cpu"
    model_folder: str | None = None
    resume: bool = False
    overwrite: bool = False
    quiet: bool = False

    def outputs(self, file: Path) -> list[Path]:
        return [self.output / f"{stem(file)}.{form}" for form in self.formats]


def stem(file: Path) -> str:
    """What the outputs of a file are called, as whisper's command calls them."""
    return "stdin" if file == STANDARD_INPUT else file.stem


def run(settings: Settings) -> int:
    """Transcribe all files; returns the command's exit code. Bad files are named, and all others done."""
    with writing(settings.output):
        settings.output.mkdir(parents=True, exist_ok=True)
    _check_names(settings)
    _check_language(settings.options.get("language"))
    with Journal(settings.output, _decisive(settings), settings.resume) as journal:
        left = [file for file in settings.files if not journal.has(file, settings.outputs(file))]
        if not settings.overwrite and not journal.resumes:
            _refuse_existing(settings, left)
        if not left:
            _say(f"{settings.output} is complete: nothing to resume.")
            return DONE
        for folder in settings.output.glob(f"{_UNFINISHED}*/"):  # of a run that was killed
            shutil.rmtree(folder)
        if words := other_texts():
            _say(words)
        model = load(settings.model, settings.device, settings.model_folder)
        failed = _transcribe_all(settings, model, left, journal)
    if failed:
        _say(f"{counted(failed, 'file')} of {len(settings.files)} could not be transcribed.")
    return INPUT_ERROR if failed else DONE


def _transcribe_all(settings: Settings, model: Any, left: list[Path], journal: Journal) -> int:
    """Transcribe these files; returns how many failed."""
    lengths = {file: audio.seconds_of(file) for file in left if file != STANDARD_INPUT}
    known = [length for length in lengths.values() if length is not None]
    progress = AudioProgress(sum(known) if len(known) == len(left) else None, enabled=not settings.quiet)
    failed = 0
    try:
        for file in left:
            try:
                sound = audio.read(sys.stdin.buffer.read() if file == STANDARD_INPUT else file)
                if sound.fault:
                    progress.say(f"{sound.fault}; what comes before is transcribed.")
                with _counted(progress, sound.seconds):
                    result = transcribe(model, sound.samples, **settings.options)
                _write(settings, file, result)
            except InputError as error:
                failed += 1
                progress.say(str(error))
                continue
            journal.add(file, settings.outputs(file))
    finally:
        progress.close()
    return failed


def transcribe(model: Any, samples: Any, **options: Any) -> dict[str, Any]:
    """`whisper.transcribe`; what it can't work with becomes an InputError."""
    import whisper

    try:
        result: dict[str, Any] = whisper.transcribe(model, samples, **options)
    except ValueError as error:
        raise InputError(f"whisper refuses this: {first_line(error)}.") from error
    return result


@contextlib.contextmanager
def _counted(progress: AudioProgress, seconds: float) -> Iterator[None]:
    """Inside the block, whisper's own progress bar counts for ours: it knows where in the sound it is."""
    from whisper.audio import HOP_LENGTH, SAMPLE_RATE

    module: Any = sys.modules["whisper.transcribe"]  # the attribute `whisper.transcribe` is the function
    before, begun = module.tqdm, progress.seconds

    class Bar(contextlib.AbstractContextManager[Any]):
        def __init__(self, **_: Any) -> None:
            pass

        def update(self, frames: int) -> None:
            progress.advance(frames * HOP_LENGTH / SAMPLE_RATE)

        def __exit__(self, *_: Any) -> None:
            pass

    module.tqdm = SimpleNamespace(tqdm=Bar)
    try:
        yield
    finally:
        module.tqdm = before
        progress.advance(begun + seconds - progress.seconds)


def _write(settings: Settings, file: Path, result: dict[str, Any]) -> None:
    from whisper.utils import get_writer

    with writing(settings.output), tempfile.TemporaryDirectory(prefix=_UNFINISHED, dir=settings.output) as folder:
        for form in settings.formats:
            get_writer(form, folder)(result, f"{stem(file)}.wav", settings.layout)
        for path in settings.outputs(file):
            os.replace(Path(folder, path.name), path)


def _decisive(settings: Settings) -> dict[str, Any]:
    """What the outputs depend on besides the sound."""
    return {"model": settings.model, "output_format": list(settings.formats), **settings.options, **settings.layout}


def _check_names(settings: Settings) -> None:
    seen: dict[str, Path] = {}
    for file in settings.files:
        if (other := seen.setdefault(stem(file), file)) is not file:
            raise InputError(
                f"{other} and {file} would both be written to {settings.outputs(file)[0]}: rename one of them."
            )


def _check_language(language: str | None) -> None:
    try:
        from whisper.tokenizer import LANGUAGES, TO_LANGUAGE_CODE
    except ImportError:
        return  # loading the model says so
    if language is not None and language not in LANGUAGES and language not in TO_LANGUAGE_CODE:
        raise InputError(f"--language {language} is no language of whisper's: give a code such as de, or a name.")


def _refuse_existing(settings: Settings, files: list[Path]) -> None:
    for file in files:
        for path in settings.outputs(file):
            if path.exists():
                raise InputError(f"{path} exists, and no journal of a run has it: --overwrite replaces it.")


def _say(text: str) -> None:
    print(text, file=sys.stderr)
