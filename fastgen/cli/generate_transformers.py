"""fastgen-generate-transformers MODEL INPUT OUTPUT: generate from a file with a Hugging Face model.

Nothing of transformers is imported before `main`, so that worker processes, which import this module again, start
quickly.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from fastgen.cli.exits import exit_code, refuse_arguments, whole_number
from fastgen.pipeline.errors import EXIT_CODES, INPUT_ERROR, InputError, first_line
from fastgen.pipeline.offline import REFILL

NAME = "fastgen-generate-transformers"
WORKERS = 2
AUTO = "auto"
_DEVICES = (Path("/dev"), Path("/dev/fd"), Path("/proc/self/fd"))


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    return exit_code(NAME, lambda: _main(argv))


def _main(argv: Sequence[str] | None) -> int:
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        message = f"transformers is needed: pip install 'fastgen[transformers]' ({first_line(error)})."
        raise InputError(message) from error
    from fastgen.cli.transformers.run import run

    args = parser().parse_args(argv)
    _check_files(args.input, args.output)
    return run(args)


def _check_files(source: Path, output: Path) -> None:
    """Both are opened more than once: the input is counted first, the output is read at the end."""
    for path in (source, output):
        if path.exists() and not path.is_file():
            raise InputError(f"{path} is no regular file: this command needs files, not folders, pipes or devices.")
    if output.absolute().parent in _DEVICES:  # a journal would be put beside it
        raise InputError(f"{output} stands for an open file: name the file itself.")


def parser() -> argparse.ArgumentParser:
    """The command's flags, one for every field of GenerationConfig among them."""
    from fastgen.cli.transformers import flags, metrics, records

    result = _Parser(
        prog=NAME,
        description="Generate text for every line of a file with a Hugging Face model, accelerated by fastgen.",
        epilog=f"{EXIT_CODES}. A record that fails becomes an error record in JSONL output: the others are done, the "
        f"failures are counted, and the exit code is {INPUT_ERROR}. With text output the run stops there.",
        allow_abbrev=False,
    )
    result.add_argument("model", metavar="MODEL", help="name or folder of the model")
    result.add_argument("input", metavar="INPUT", type=Path, help="text, one input a line, or .jsonl")
    result.add_argument("output", metavar="OUTPUT", type=Path, help="text, or .jsonl for all hypotheses and scores")
    forms = (records.TEXT, records.JSONL)
    result.add_argument("--input-format", choices=forms, help="default: by the name of the file")
    result.add_argument("--output-format", choices=forms, help="default: by the name of the file")
    result.add_argument("--text-field", default="text", metavar="NAME", help="of JSONL input (default: %(default)s)")
    result.add_argument("--tokenizer", metavar="NAME", help="default: the model's")
    result.add_argument("--task-prefix", default="", metavar="TEXT", help="put before each input, as T5 needs")
    result.add_argument("--source-lang", metavar="LANG", help="as the tokenizer calls it: en, en_XX, eng_Latn, ...")
    result.add_argument("--target-lang", metavar="LANG", help="the same, of the output")
    result.add_argument(
        "--dtype",
        choices=("auto", "float32", "float16", "bfloat16"),
        default="auto",
        help="auto: as the model was saved (default)",
    )
    result.add_argument("--device", metavar="DEVICE", help="cpu, cuda, cuda:1, ... (default: cuda if there is one)")
    sizes = result.add_mutually_exclusive_group()
    sizes.add_argument(
        "--batch-size", type=_size, default=32, metavar="N|auto", help="records in a batch (default: %(default)s)"
    )
    sizes.add_argument("--max-tokens", type=_size, metavar="N|auto", help="padded input tokens in a batch")
    result.add_argument(
        "--refill",
        choices=tuple(REFILL),
        default=AUTO,
        help="keep the batch full, waiting records in the places of finished ones; auto: on a GPU (default)",
    )
    result.add_argument("--truncate", action="store_true", help="cut inputs that are too long instead of refusing them")
    result.add_argument("--no-scores", action="store_true", help="no scores in JSONL: fastgen is faster without")
    result.add_argument("--seed", type=whole_number, default=1, metavar="N", help="of sampling (default: %(default)s)")
    result.add_argument("--references", type=Path, metavar="FILE", help="one a line: metrics are shown at the end")
    result.add_argument(
        "--metrics", default=",".join(metrics.METRICS), metavar="LIST", help="with --references (default: %(default)s)"
    )
    result.add_argument(
        "--workers",
        type=whole_number,
        default=WORKERS,
        metavar="N",
        help="processes that tokenise and detokenise; 0: none (default: %(default)s)",
    )
    result.add_argument("--resume", action="store_true", help="go on with the killed run that wrote OUTPUT")
    result.add_argument("--quiet", action="store_true", help="no progress line")
    flags.add_flags(result)
    return result


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        refuse_arguments(message)


def _size(text: str) -> int | str:
    if text == AUTO:
        return AUTO
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a whole number above 0 nor {AUTO!r}")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
