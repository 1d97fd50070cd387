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
from fastgen.pipeline.resume import contents, other_texts
from fastgen.pipeline.transcription import audio
from fastgen.pipeline.transcription.journal import Journal
from fastgen.pipeline.transcription.load import load
from fastgen.pipeline.transcription.progress import AudioProgress
from fastgen.report import FallbackError

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
    within(settings.options.get("clip_timestamps", "0"), 0.0)
    with Journal(settings.output, _decisive(settings), settings.resume) as journal:
        left = [file for file in settings.files if not journal.has(file, settings.outputs(file))]
        if not settings.overwrite:
            _refuse_existing(settings, left, journal)
        if not left:
            _say(f"{settings.output} is complete: nothing to resume.")
            return DONE
        if words := other_texts():
            _say(words)
        model = load(settings.model, settings.device, settings.model_folder)
        journal.begin()
        for folder in settings.output.glob(f"{_UNFINISHED}*/"):  # of a run that was killed
            shutil.rmtree(folder)
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
            source = journal.looks_of(file)
            try:
                result = _transcribed(settings, model, file, progress)
            except InputError as error:
                failed += 1
                progress.say(str(error))
                continue
            journal.note_begun(file)
            _write(settings, file, result)
            journal.note_done(file, source, settings.outputs(file))
    finally:
        progress.close()
    return failed


def _transcribed(settings: Settings, model: Any, file: Path, progress: AudioProgress) -> dict[str, Any]:
    """What `whisper.transcribe` returns for a file; whatever it can't work with becomes an InputError."""
    sound = audio.read(sys.stdin.buffer.read() if file == STANDARD_INPUT else file)
    if sound.fault:
        progress.say(f"{sound.fault}; the rest is transcribed.")
    seconds = sound.seconds
    clips = within(settings.options.get("clip_timestamps", "0"), seconds)
    try:
        with _counted(progress, seconds):
            return transcribe(model, sound.samples, **{**settings.options, "clip_timestamps": clips})
    except FallbackError:  # strict: it is the same for all files
        raise
    except Exception as error:  # hosts raise what they like, and the other files may be fine
        raise InputError(f"{file} could not be transcribed: {type(error).__name__}: {first_line(error)}.") from error


def transcribe(model: Any, samples: Any, **options: Any) -> dict[str, Any]:
    import whisper

    result: dict[str, Any] = whisper.transcribe(model, samples, **options)
    return result


def within(clips: str, seconds: float) -> list[float]:
    """The ends of clips, `start,end,start,end,...`, no later than the end of the sound, where whisper would never end.

    Raises:
        InputError: it is no list of numbers.
    """
    try:
        found = [float(each) for each in clips.split(",")] if clips else []
    except ValueError as error:
        raise InputError(f"--clip_timestamps {clips} is no list of seconds such as 0,30,60,90.") from error
    whole = int(seconds * 100) / 100  # whisper counts in hundredths
    return [min(each, whole) for each in found]


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
    model = Path(settings.model)
    of_file = contents(model) if model.is_file() else {}
    return {
        "model": settings.model,
        **of_file,
        "output_format": list(settings.formats),
        **settings.options,
        **settings.layout,
    }


def _check_names(settings: Settings) -> None:
    seen: dict[str, Path] = {}
    for file in settings.files:
        # Some file systems take A.txt and a.txt for the same file.
        if (other := seen.setdefault(stem(file).casefold(), file)) is not file:
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


def _refuse_existing(settings: Settings, files: list[Path], journal: Journal) -> None:
    """Outputs that are there stay, unless the run that goes on has begun to write them."""
    for file in files:
        is_own = journal.knows(file)
        if is_own and settings.resume:
            continue
        for path in settings.outputs(file):
            if path.exists():
                other = "--resume goes on with the run that wrote it, " if is_own else ""
                raise InputError(f"{path} exists; {other}--overwrite replaces it.")


def _say(text: str) -> None:
    print(text, file=sys.stderr)
