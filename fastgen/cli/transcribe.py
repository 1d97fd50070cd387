"""fastgen-transcribe MODEL AUDIO... -o DIR: what is said in files of sound or video, as text or subtitles."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastgen.cli.exits import Parser, exit_code, positive_number, whole_number
from fastgen.pipeline.errors import EXIT_CODES, InputError, tell

if TYPE_CHECKING:
    from fastgen.pipeline.transcription.run import Settings

NAME = "fastgen-transcribe"
FORMATS = ("txt", "vtt", "srt", "tsv", "json")
_LAYOUT = ("highlight_words", "max_line_width", "max_line_count", "max_words_per_line")


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    return exit_code(NAME, lambda: _main(argv))


def _main(argv: Sequence[str] | None) -> int:
    args = parser().parse_args(argv)
    settings = settings_of(args)
    if args.threads:
        import torch

        torch.set_num_threads(args.threads)
    from fastgen.pipeline.transcription.run import run

    return run(settings)


def settings_of(args: argparse.Namespace) -> Settings:
    """What these arguments ask for."""
    from fastgen.pipeline.transcription import silences
    from fastgen.pipeline.transcription.run import Settings

    layout = {name: getattr(args, name) for name in _LAYOUT}
    if not args.word_timestamps and (needless := next((name for name in _LAYOUT if layout[name]), None)):
        raise InputError(f"--{needless} needs --word_timestamps True.")
    if args.max_line_count and not args.max_line_width:
        _say("--max_line_count has no effect without --max_line_width.")
    if args.max_words_per_line and args.max_line_width:
        _say("--max_words_per_line has no effect with --max_line_width.")
    options = {name: getattr(args, name) for name in _OPTIONS}
    options["temperature"] = temperatures(args.temperature, args.temperature_increment_on_fallback)
    device = args.device or _device()
    options["fp16"] = args.fp16 and device != "cpu"
    if args.patience is not None and args.beam_size is None:
        raise InputError("--patience needs --beam_size.")
    if args.beam_size is not None and args.beam_size < 1:
        raise InputError(f"--beam_size {args.beam_size} is not 1 or more: give None for greedy search.")
    if not all(part.strip().removeprefix("-").isdecimal() for part in args.suppress_tokens.split(",") if part):
        raise InputError(f"--suppress_tokens {args.suppress_tokens} is no list of token ids such as 5,6,7.")
    silences.check(args.clip_timestamps, args.batched, args.vad_filter, prefix="--")
    options["language"] = _language_of(args.model, args.language)
    return Settings(
        model=args.model,
        files=tuple(args.audio),
        output=args.output_dir,
        formats=FORMATS if args.output_format == "all" else (args.output_format,),
        options=options,
        layout=layout,
        device=device,
        model_folder=args.model_dir,
        resume=args.resume,
        overwrite=args.overwrite,
        batch_size=args.batch_size,
        batched=args.batched,
        vad_filter=args.vad_filter,
        quiet=args.quiet,
    )


def _language_of(model: str, language: str | None) -> str | None:
    """The language to tell whisper; as in its own command, a model that is called `.en` knows English alone."""
    if not model.endswith(".en") or (language is not None and language.lower() in ("en", "english")):
        return language
    if language is not None:
        _say(f"{model} knows English alone: --language {language} is taken for --language en.")
    return "en"


def _say(text: str) -> None:
    tell(f"{NAME}: {text}")


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def temperatures(first: float, step: float | None) -> list[float]:
    """The temperatures that are tried in turn, up to 1, as whisper's command computes them."""
    if not 0 <= first <= 1:
        raise InputError(f"--temperature {first} is not between 0 and 1.")
    if step is None:
        return [first]
    import numpy as np

    return [float(each) for each in np.arange(first, 1.0 + 1e-6, step)]


def _yes_or_no(text: str) -> bool:
    found = {"true": True, "false": False}.get(text.lower())
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is neither True nor False")
    return found


def _optional(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    def convert(text: str) -> Any:
        return None if text == "None" else kind(text)

    convert.__name__ = kind.__name__.strip("_")  # argparse names it in its messages
    convert.metavar = "N" if kind is int else "X"  # type: ignore[attr-defined]
    return convert


def _number_above_0(text: str) -> float:
    if not (found := float(text)) > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return found


def _language(text: str) -> str:
    return text  # whisper writes it into json as it is given


# whisper's own options, by whisper's names: type, default, what it is.
_OPTIONS: dict[str, tuple[Any, Any, str]] = {
    "task": (str, "transcribe", "transcribe, or translate into English"),
    "language": (_language, None, "what is spoken: a code or a name, such as de or german; found out if left out"),
    "temperature": (float, 0.0, "temperature of the first try; above 0, tokens are drawn"),
    "best_of": (_optional(int), 5, "with a temperature above 0, so many are drawn, and the best is taken"),
    "beam_size": (_optional(int), 5, "beams of the search at a temperature of 0; None: greedy search"),
    "patience": (_optional(float), None, "patience of the beam search (Kasai et al. 2022)"),
    "length_penalty": (_optional(float), None, "penalty for length; None: the mean log-probability decides"),
    "suppress_tokens": (str, "-1", "ids of tokens that are never chosen; -1: what is no speech"),
    "initial_prompt": (str, None, "text before the first window, such as names that will be said"),
    "carry_initial_prompt": (_yes_or_no, False, "put the initial prompt before every window"),
    "condition_on_previous_text": (_yes_or_no, True, "put the last window's text before the next window"),
    "compression_ratio_threshold": (_optional(float), 2.4, "above it, a text repeats itself: the next temperature"),
    "logprob_threshold": (_optional(float), -1.0, "below this mean log-probability: the next temperature"),
    "no_speech_threshold": (_optional(float), 0.6, "above it, if the log-probability is low too, a window is silent"),
    "word_timestamps": (_yes_or_no, False, "find out when each word is said"),
    "fp16": (_yes_or_no, True, "on a GPU, compute in half precision"),
    "prepend_punctuations": (str, "\"'“¿([{-", "with word_timestamps, belongs to the next word"),
    "append_punctuations": (str, "\"'.。,，!！?？:：”)]}、", "with word_timestamps, belongs to the word before"),
    "clip_timestamps": (str, "0", "seconds start,end,start,end,... of what is to be transcribed"),
    "hallucination_silence_threshold": (
        _optional(float),
        None,
        "with word_timestamps, skip longer silences where a text seems made up",
    ),
}


_METAVARS = {str: "TEXT", _language: "LANGUAGE", _yes_or_no: "{True,False}"}


def parser() -> argparse.ArgumentParser:
    result = Parser(
        prog=NAME,
        description="Write down what is said in files of sound or video, by whisper's rules, in whisper's formats.",
        epilog=EXIT_CODES,
    )
    result.add_argument(
        "model",
        metavar="MODEL",
        help="one of whisper's names (tiny, base, turbo, ...), a .pt file, or a folder or hub model of transformers",
    )
    result.add_argument("audio", metavar="AUDIO", type=Path, nargs="+", help="files; - is standard input")
    result.add_argument("-o", *_flags("output_dir"), metavar="DIR", type=Path, required=True, help="where outputs go")
    result.add_argument(
        "-f", *_flags("output_format"), choices=(*FORMATS, "all"), default="all", help="(default: %(default)s)"
    )
    either = result.add_mutually_exclusive_group()
    either.add_argument("--resume", action="store_true", help="go on with a run that was interrupted")
    either.add_argument("--overwrite", action="store_true", help="replace outputs that are there")
    result.add_argument("--quiet", action="store_true", help="no progress line")
    result.add_argument(
        "--threads", type=whole_number, default=0, metavar="N", help="CPU threads; 0: torch's (default: %(default)s)"
    )
    result.add_argument("--device", metavar="DEVICE", help="cpu, cuda, cuda:1, ... (default: cuda if there is one)")
    result.add_argument(*_flags("model_dir"), metavar="DIR", help="where whisper keeps models (default: its cache)")
    _add_ways(result)
    group = result.add_argument_group("whisper's options")
    for name, (kind, default, what) in _OPTIONS.items():
        choices = ("transcribe", "translate") if name == "task" else None
        shown = "" if default is None else " (default: %(default)s)"  # False, too
        metavar = None if choices else _METAVARS.get(kind) or getattr(kind, "metavar", "X")
        group.add_argument(
            *_flags(name), type=kind, default=default, choices=choices, metavar=metavar, help=what + shown
        )
    group.add_argument(
        *_flags("temperature_increment_on_fallback"),
        type=_optional(_number_above_0),
        default=0.2,
        metavar="STEP",
        help="how much higher the next temperature is; None: there is no next (default: %(default)s)",
    )
    _add_choice(group, "highlight_words", "underline each word as it is said, in srt and vtt")
    for name, what in (
        ("max_line_width", "characters of a line, at most"),
        ("max_line_count", "lines of a subtitle, at most"),
        ("max_words_per_line", "words of a line, at most"),
    ):
        group.add_argument(*_flags(name), type=_optional(int), metavar="N", help=what)
    return result


def _add_ways(result: argparse.ArgumentParser) -> None:
    """Add the options that say how whisper is run."""
    result.add_argument(
        *_flags("batch_size"),
        type=positive_number,
        default=8,
        metavar="N",
        help="files, or parts of files, that are transcribed at a time, at most (default: %(default)s)",
    )
    _add_choice(
        result,
        "batched",
        "cut each file at silences into parts, each without what was said before: faster, but the text may differ",
    )
    _add_choice(result, "vad_filter", "leave out where nobody speaks for two seconds or more; the text may differ")


def _add_choice(to: argparse._ActionsContainer, name: str, what: str) -> None:
    """Add an option that is True or False, and False if left out."""
    to.add_argument(*_flags(name), type=_yes_or_no, default=False, metavar="{True,False}", help=what)


def _flags(name: str) -> list[str]:
    """With underscores, as whisper has it, and with hyphens, as our other commands have theirs."""
    return [f"--{each}" for each in dict.fromkeys((name, name.replace("_", "-")))]
