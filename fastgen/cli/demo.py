"""fastgen-demo: one beam search job by the stock host and by fastgen, in turn, compared.

Without arguments a small trained model (fastgen/demo/model) writes figures out in words, offline. With
``--model NAME_OR_PATH --input FILE`` the job is the user's own; with ``--speech MODEL --audio FILE`` OpenAI's whisper
transcribes, too.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import webbrowser
from collections.abc import Iterator, Sequence
from pathlib import Path

from fastgen.cli.exits import Parser, exit_code, positive_number
from fastgen.demo import page, speech
from fastgen.demo.comparison import Job, Result, Work, compare
from fastgen.demo.job import build_job, read_inputs
from fastgen.pipeline.errors import DIFFERENT, DONE, UNUSABLE, InputError, needing, writable, writing

NAME = "fastgen-demo"
REPORT = "fastgen-demo.html"


def parser() -> argparse.ArgumentParser:
    result = Parser(
        prog=NAME,
        description="Decode with the stock host and with fastgen, and compare outputs, time and memory.",
        epilog="Exit code: 0 if all outputs are identical, 1 if some differ, 2 if the input is unusable.",
    )
    result.add_argument("--model", metavar="NAME_OR_PATH", help="your seq2seq or causal model (default: a shipped one)")
    result.add_argument("--input", type=Path, metavar="FILE", help="your inputs, one a line")
    result.add_argument(
        "--speech",
        metavar="MODEL",
        help="OpenAI's whisper transcribes too, with this model: a name (tiny, base, ...), a .pt file, or a folder",
    )
    result.add_argument("--audio", type=Path, nargs="+", metavar="FILE", help="your recordings, for --speech")
    result.add_argument(
        "--beams", type=positive_number, default=5, metavar="N", help="beams of the search (default: %(default)s)"
    )
    result.add_argument(
        "--batch-size",
        type=positive_number,
        default=64,
        metavar="N",
        help="inputs that decode together (default: %(default)s)",
    )
    result.add_argument(
        "--max-new-tokens",
        type=positive_number,
        default=128,
        metavar="N",
        help="of each output, at most (default: %(default)s)",
    )
    result.add_argument("--limit", type=positive_number, metavar="N", help="decode only the first N inputs")
    result.add_argument("--threads", type=positive_number, metavar="N", help="CPU threads (default: torch's)")
    result.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="where to decode (default: %(default)s)"
    )
    result.add_argument(
        "--samples", type=positive_number, default=4, metavar="N", help="outputs to show (default: %(default)s)"
    )
    result.add_argument("--quiet", action="store_true", help="no progress bar")
    result.add_argument(
        "--report",
        type=Path,
        nargs="?",
        const=Path(REPORT),
        metavar="FILE",
        help=f"write a page with the figures, by default {REPORT}, and show it in the browser where there is a display",
    )
    return result


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    return parser().parse_args(argv)


def job_of(args: argparse.Namespace) -> Job:
    """What these arguments ask for."""
    return build_job(
        args.model,
        args.input,
        limit=args.limit,
        beams=args.beams,
        batch_size=args.batch_size,
        max_new_tokens=args.max_new_tokens,
        device=args.device,
    )


def works_of(args: argparse.Namespace) -> list[Work]:
    """Text and, if it is asked for, speech."""
    spoken = speech.build_job(args.speech, args.audio, beams=args.beams, device=args.device) if args.speech else None
    return [job_of(args), *([] if spoken is None else [spoken])]


@contextlib.contextmanager
def _settings(threads: int | None) -> Iterator[None]:
    """Threads as asked, no chatter from transformers; put back afterwards."""
    import torch
    from transformers.utils import logging

    old_threads, old_verbosity = torch.get_num_threads(), logging.get_verbosity()
    old_bars = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if threads:
        torch.set_num_threads(threads)
    try:
        with torch.no_grad():
            yield
    finally:
        torch.set_num_threads(old_threads)
        logging.set_verbosity(old_verbosity)
        if old_bars:
            logging.enable_progress_bar()


def run(args: argparse.Namespace) -> int:
    _check(args)
    with needing("transformers", "transformers"):
        import transformers  # noqa: F401
    results: list[Result] = []
    with _settings(args.threads):
        for work in works_of(args):
            if results:
                print()
            results.append(_compared(work, args))
    if not args.speech and speech.is_installed():
        print(f"\n{speech.HOW_TO}")
    if args.report:
        _report(results, args)
    return DONE if all(result.all_identical for result in results) else DIFFERENT


def _check(args: argparse.Namespace) -> None:
    """Refuse bad arguments before the slow imports."""
    if bool(args.speech) != bool(args.audio):
        raise InputError("--speech MODEL and --audio FILE belong together: give both.")
    if args.input:
        read_inputs(args.input, args.limit)
    if args.report and args.report.is_dir():
        raise InputError(f"--report {args.report} is a folder: give the name of a file.")
    if args.report and not args.report.parent.is_dir():
        raise InputError(f"--report {args.report} can't be written: there is no folder {args.report.parent}.")


def _compared(work: Work, args: argparse.Namespace) -> Result:
    """Compare, and print what was found."""
    print(page.header(work), flush=True)
    result = compare(work, progress=not args.quiet)
    for text in (page.samples(result, args.samples), page.table(result), page.what_ran(result), page.verdict(result)):
        print(text)
    return result


def _report(results: list[Result], args: argparse.Namespace) -> None:
    """Write the page, and open it if there is a display."""
    from fastgen.bench.report.demo import render

    with writing(args.report):
        args.report.write_text(render(results, args.samples), "utf-8")
    print(writable(f"\nThe report is {args.report.resolve()}."))
    if _has_display():
        webbrowser.open(args.report.resolve().as_uri())


def _has_display() -> bool:
    """Without one, a browser of the terminal would take its place."""
    return sys.platform in ("darwin", "win32") or any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY")))


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code: 0 if all outputs are identical, 1 if some differ, 2 for bad input."""
    return exit_code(NAME, lambda: run(parse(argv)), input_error=UNUSABLE)


if __name__ == "__main__":
    sys.exit(main())
