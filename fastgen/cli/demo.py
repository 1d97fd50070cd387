"""fastgen-demo: one beam search job by stock transformers and by fastgen, in turn, compared.

Without arguments a small trained model (fastgen/demo/model) writes figures out in words, offline. With
``--model NAME_OR_PATH --input FILE`` the job is the user's own.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from fastgen.cli.exits import Parser, exit_code, positive_number
from fastgen.demo import page
from fastgen.demo.comparison import Job, compare
from fastgen.demo.job import build_job, read_inputs
from fastgen.pipeline.errors import DIFFERENT, DONE, UNUSABLE

NAME = "fastgen-demo"


def parser() -> argparse.ArgumentParser:
    result = Parser(
        prog=NAME,
        description="Decode with stock transformers and with fastgen, and compare outputs, time and memory.",
        epilog="Exit code: 0 if all outputs are identical, 1 if some differ, 2 if the input is unusable.",
    )
    result.add_argument("--model", metavar="NAME_OR_PATH", help="your seq2seq or causal model (default: a shipped one)")
    result.add_argument("--input", type=Path, metavar="FILE", help="your inputs, one a line")
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
    if args.input:
        read_inputs(args.input, args.limit)  # before the slow imports
    with _settings(args.threads):
        job = job_of(args)
        print(page.header(job), flush=True)
        result = compare(job, progress=not args.quiet)
        print(page.samples(result, args.samples))
        print(page.table(result))
        print(page.what_ran(result))
        print(page.verdict(result))
        return DONE if result.identical == len(job.sources) else DIFFERENT


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code: 0 if all outputs are identical, 1 if some differ, 2 for bad input."""
    return exit_code(NAME, lambda: run(parse(argv)), input_error=UNUSABLE)


if __name__ == "__main__":
    sys.exit(main())
