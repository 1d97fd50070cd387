"""fastgen-generate: fairseq-generate, with reading, generation, post-processing and writing overlapped.

Same flags, same lines in the same order, same summary. Nothing of fairseq is imported before `main`, so that worker
processes, which import this module again, start quickly.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator, Sequence

from fastgen import installing
from fastgen.cli.exits import exit_code, refuse_arguments, whole_number
from fastgen.pipeline.errors import EXIT_CODES, InputError, first_line
from fastgen.pipeline.fairseq.settings import Settings
from fastgen.pipeline.offline import REFILL

NAME = "fastgen-generate"
WORKERS = 2
AUTO = "auto"


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    return exit_code(NAME, lambda: _main(sys.argv[1:] if argv is None else list(argv)))


def _main(arguments: list[str]) -> int:
    try:
        import fairseq  # noqa: F401
    except ImportError as error:
        how = installing.command("fairseq")
        raise InputError(f"fairseq is needed: {how} ({first_line(error)}).") from error
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf

    args, own = parse(arguments)
    if own.stream:
        from fastgen.pipeline.fairseq import streaming

        return streaming.run(convert_namespace_to_omegaconf(args))
    from fastgen.pipeline.fairseq.run import run

    return run(convert_namespace_to_omegaconf(args), own)


def parse(arguments: list[str]) -> tuple[argparse.Namespace, Settings]:
    """The arguments of fairseq's own parser, and fastgen's flags; in `auto` the dest of flags that say so."""
    from fairseq import options

    with _command_line(arguments):
        with _user_dir(arguments):
            parser = options.get_generation_parser()
        # As fairseq-generate's own entry point does, for tasks that read the model's arguments.
        parser.add_argument("--arch", "-a", metavar="ARCH", default="wav2vec2", help="model architecture")
        parser.epilog = EXIT_CODES
        parser.error = refuse_arguments
        for action in parser._actions:
            if action.dest in ("batch_size", "max_tokens"):
                action.type = _count_or_auto
                action.help = f"{action.help or ''} ('{AUTO}': the largest that fits, found by doubling)".strip()
        add_own_flags(parser)
        args = options.parse_args_and_arch(parser, arguments)
    own = Settings(
        workers=args.fastgen_workers,
        resume=args.fastgen_resume,
        overwrite=args.fastgen_overwrite,
        refill=args.fastgen_refill,
        allowed_outputs=args.allowed_outputs,
        stream=args.fastgen_stream,
        auto=[name for name in ("batch_size", "max_tokens") if getattr(args, name) == AUTO],
    )
    for name in ("fastgen_workers", "fastgen_resume", "fastgen_overwrite", "fastgen_refill", "fastgen_stream"):
        delattr(args, name)
    del args.allowed_outputs
    if len(own.auto) == 2:
        raise InputError("Only one of --batch-size and --max-tokens can be auto.")
    for name in own.auto:
        setattr(args, name, None)
        setattr(args, f"{name}_valid", None)
        args.required_batch_size_multiple = 1  # there are no batches of fairseq that would be rounded
    if args.results_path and "://" in args.results_path:
        raise InputError(f"--results-path {args.results_path} is no folder of this machine: results are written there.")
    for flag, given in (("--resume", own.resume), ("--overwrite", own.overwrite)):
        if given and not args.results_path:
            raise InputError(f"{flag} needs --results-path, the folder of the run that it is about.")
    if own.stream:
        _check_stream(args, own)
    return args, own


def _check_stream(args: argparse.Namespace, own: Settings) -> None:
    for flag, is_given in (
        ("--results-path", bool(args.results_path)),
        ("--batch-size auto and --max-tokens auto", bool(own.auto)),
        ("--prefix-size", args.prefix_size > 0),
        ("--score-reference", args.score_reference),
        ("--constraints", bool(args.constraints)),
        ("--replace-unk", args.replace_unk is not None),
    ):
        if is_given:
            raise InputError(f"{flag} is for data: leave it out with --stream, which reads standard input.")
    if args.nbest > 1:
        raise InputError("--stream writes one line for each input: leave out --nbest.")
    if own.allowed_outputs is not None:
        raise InputError("--stream needs plain beam search, which --allowed-outputs is not: leave out one of the two.")


def add_own_flags(parser: argparse.ArgumentParser) -> None:
    """What fastgen-generate has beside fairseq's flags."""
    group = parser.add_argument_group("fastgen")
    group.add_argument(
        "--workers",
        dest="fastgen_workers",
        type=whole_number,
        default=WORKERS,
        metavar="N",
        help="processes for post-processing; 0: none, it runs between batches (default: %(default)s)",
    )
    group.add_argument(
        "--resume",
        dest="fastgen_resume",
        action="store_true",
        help="go on with the killed or interrupted run that wrote to --results-path",
    )
    group.add_argument(
        "--overwrite",
        dest="fastgen_overwrite",
        action="store_true",
        help="replace the results that are in --results-path",
    )
    group.add_argument(
        "--refill",
        dest="fastgen_refill",
        choices=tuple(REFILL),
        default=AUTO,
        help="keep the batch full, waiting sentences in the places of finished ones; "
        "auto: on a GPU without CUDA graphs (default)",
    )
    group.add_argument(
        "--allowed-outputs",
        metavar="FILE",
        help="one a line: each output is one of these; words of the dictionary, unless --tokenizer and --bpe make them",
    )
    group.add_argument(
        "--stream",
        dest="fastgen_stream",
        action="store_true",
        help="answer each line of standard input on standard output, word by word, instead of the data's subset",
    )


def _count_or_auto(text: str) -> int | str:
    try:
        return AUTO if text == AUTO else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a whole number nor {AUTO!r}") from None


@contextlib.contextmanager
def _user_dir(arguments: list[str]) -> Iterator[None]:
    """What goes wrong with --user-dir, which fairseq imports while it builds its parser."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.error = refuse_arguments  # type: ignore[method-assign]
    parser.add_argument("--user-dir")
    folder = parser.parse_known_args(arguments)[0].user_dir
    try:
        yield
    except Exception as error:
        if folder is None:
            raise
        message = f"Cannot import --user-dir {folder}: {first_line(error)} ({type(error).__name__})."
        raise InputError(message) from error


@contextlib.contextmanager
def _command_line(arguments: list[str]) -> Iterator[None]:
    """fairseq reads --user-dir from sys.argv while it builds its parser."""
    before = sys.argv
    sys.argv = [NAME, *arguments]
    try:
        yield
    finally:
        sys.argv = before


if __name__ == "__main__":
    sys.exit(main())
