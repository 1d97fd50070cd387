"""Transcribes files, several at a time, by `whisper.transcribe`, and writes what whisper's own command writes.

An output appears whole or not at all: it is written elsewhere and moved. The journal has a line for each finished file,
so that a run that was killed goes on where it was.
"""

from __future__ import annotations

import functools
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastgen.pipeline.errors import DONE, INPUT_ERROR, InputError, counted, first_line, tell, writing
from fastgen.pipeline.resume import contents, other_texts
from fastgen.pipeline.transcription import audio
from fastgen.pipeline.transcription.journal import STANDARD_INPUT, Journal, stem
from fastgen.pipeline.transcription.load import files_of, load
from fastgen.pipeline.transcription.progress import AudioProgress
from fastgen.pipeline.transcription.together import Recording, transcribe_all, within
from fastgen.report import FallbackError

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
    batch_size: int = 8  # files, or parts of files, that are transcribed at a time
    batched: bool = False  # cut at silences
    vad_filter: bool = False  # leave out silences
    device: str = "cpu"
    model_folder: str | None = None
    resume: bool = False
    overwrite: bool = False
    quiet: bool = False

    def outputs(self, file: Path) -> list[Path]:
        return [self.output / f"{stem(file)}.{form}" for form in self.formats]


def run(settings: Settings) -> int:
    """Transcribe all files; returns the command's exit code. Bad files are named, and all others done."""
    with writing(settings.output):
        settings.output.mkdir(parents=True, exist_ok=True)
    _check_names(settings)
    _check_language(settings.options.get("language"))
    _check_clips(settings.options.get("clip_timestamps", "0"))
    with Journal(settings.output, _decisive(settings), settings.resume) as journal:
        left = [file for file in settings.files if not journal.has(file, settings.outputs(file))]
        if not settings.overwrite:
            _refuse_existing(settings, left, journal)
        if not left:
            tell(f"{settings.output} is complete: nothing to resume.")
            return DONE
        if words := other_texts():
            tell(words)
        model = load(settings.model, settings.device, settings.model_folder)
        _check_model_knows(model, settings)
        journal.begin()
        for folder in settings.output.glob(f"{_UNFINISHED}*/"):  # of a run that was killed
            shutil.rmtree(folder)
        failed = _transcribe_all(settings, model, left, journal)
    if failed:
        tell(f"{counted(failed, 'file')} of {len(settings.files)} could not be transcribed.")
    return INPUT_ERROR if failed else DONE


def _transcribe_all(settings: Settings, model: Any, left: list[Path], journal: Journal) -> int:
    """Transcribe these files; returns how many failed."""
    progress = AudioProgress(None if settings.quiet else _seconds_of(left), enabled=not settings.quiet)
    work = _Files(settings, journal, progress)
    try:
        transcribe_all(
            model,
            work.recordings(left),
            settings.batch_size,
            batched=settings.batched,
            vad_filter=settings.vad_filter,
        )
    finally:
        progress.close()
    return work.failed


def _seconds_of(files: list[Path]) -> float | None:
    """How long files say that they are together; None if one does not say."""
    total = 0.0
    for file in files:
        seconds = None if file == STANDARD_INPUT else audio.seconds_of(file)
        if seconds is None:
            return None
        total += seconds
    return total


class _Files:
    """The files of a run: each is read when there is room, and written when it is transcribed."""

    def __init__(self, settings: Settings, journal: Journal, progress: AudioProgress) -> None:
        self._settings, self._journal, self._progress = settings, journal, progress
        self.failed = 0

    def recordings(self, files: list[Path]) -> Iterator[Recording]:
        for file in files:
            looks = self._journal.looks_of(file)
            try:
                recording = self._read(file)
            except InputError as error:
                self._fail(error)
                continue
            except Exception as error:  # of a library that reads what nobody has foreseen: the other files go on
                self._fail(InputError(f"{file} could not be read: {type(error).__name__}: {first_line(error)}."))
                continue
            recording.done = functools.partial(self._done, file, looks)
            yield recording

    def _read(self, file: Path) -> Recording:
        sound = audio.read(sys.stdin.buffer if file == STANDARD_INPUT else file)
        if sound.fault:
            self._progress.say(f"{sound.fault}; what is there is transcribed.")
        return Recording(sound.samples, dict(self._settings.options), advance=self._progress.advance)

    def _done(self, file: Path, looks: Any, result: dict[str, Any] | None, error: Exception | None) -> None:
        if isinstance(error, (FallbackError, InputError)):  # it is the same for all files
            raise error
        if result is None:
            assert error is not None
            self._fail(InputError(f"{file} could not be transcribed: {type(error).__name__}: {first_line(error)}."))
            return
        self._journal.note_begun(file)
        _write(self._settings, file, result)
        self._journal.note_done(file, looks, self._settings.outputs(file))

    def _fail(self, error: InputError) -> None:
        self.failed += 1
        self._progress.say(str(error))


def _write(settings: Settings, file: Path, result: dict[str, Any]) -> None:
    from whisper.utils import get_writer

    with writing(settings.output), tempfile.TemporaryDirectory(prefix=_UNFINISHED, dir=settings.output) as folder:
        for form in settings.formats:
            told = _for_subtitles(result) if form in ("srt", "vtt") else result
            get_writer(form, folder)(told, f"{stem(file)}.wav", settings.layout)
        for path in settings.outputs(file):
            os.replace(Path(folder, path.name), path)


def _for_subtitles(result: dict[str, Any]) -> dict[str, Any]:
    """The result with words in all segments, or in none.

    Without word timestamps whisper gives a list of words, an empty one, to segments without text alone. Its writers of
    subtitles go by the first segment: if that is one without text, they fail.
    """
    segments = result["segments"]
    if all("words" in one for one in segments):
        return result
    return {**result, "segments": [{key: one[key] for key in one if key != "words"} for one in segments]}


def _decisive(settings: Settings) -> dict[str, Any]:
    """What the outputs depend on besides the sound; wherever a run is started, the same model has the same name."""
    files = files_of(settings.model)
    return {
        "model": os.path.abspath(settings.model) if files else settings.model,
        **contents(*files),
        "batched": settings.batched,
        "vad_filter": settings.vad_filter,
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


def _check_clips(clips: str) -> None:
    """Raise InputError if this is no list of numbers: it would be refused once for each file."""
    try:
        within(clips, 0.0)
    except ValueError as error:
        raise InputError(f"--clip_timestamps {clips} is no list of seconds such as 0,30,60,90.") from error


def _check_language(language: str | None) -> None:
    try:
        from whisper.tokenizer import LANGUAGES, TO_LANGUAGE_CODE
    except ImportError:
        return  # loading the model says so
    if language is not None and language.lower() not in {*LANGUAGES, *TO_LANGUAGE_CODE}:
        raise InputError(f"--language {language} is no language of whisper's: give a code such as de, or a name.")


def _check_model_knows(model: Any, settings: Settings) -> None:
    """Raise InputError if the model has no token for the language: Cantonese came with large-v3."""
    from whisper.tokenizer import LANGUAGES, TO_LANGUAGE_CODE

    language = settings.options.get("language")
    if language is None or not model.is_multilingual:  # a model that knows English alone is not told the language
        return
    code = TO_LANGUAGE_CODE.get(language.lower(), language.lower())
    if code not in list(LANGUAGES)[: model.num_languages]:
        raise InputError(
            f"--language {language} is none of the {model.num_languages} languages of {settings.model}: "
            "choose another one, or a model that has it, such as turbo."
        )


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
