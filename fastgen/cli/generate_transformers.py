"""fastgen-generate-transformers MODEL INPUT OUTPUT: generate from a file with a Hugging Face model.

Nothing of transformers is imported before `main`, so that worker processes, which import this module again, start
quickly.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fastgen import installing
from fastgen.cli.exits import Parser, exit_code, share, whole_number
from fastgen.pipeline import remote
from fastgen.pipeline.errors import EXIT_CODES, INPUT_ERROR, InputError, first_line
from fastgen.pipeline.offline import REFILL

if TYPE_CHECKING:
    from fastgen.pipeline.transformers.settings import RunSettings

NAME = "fastgen-generate-transformers"
AUTO = "auto"
_DEVICES = (Path("/dev"), Path("/dev/fd"), Path("/proc/self/fd"))


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    return exit_code(NAME, lambda: _main(argv))


def _main(argv: Sequence[str] | None) -> int:
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        how = installing.command("transformers")
        raise InputError(f"transformers is needed: {how} ({first_line(error)}).") from error
    from fastgen.cli.flags import settings_of
    from fastgen.pipeline.transformers.settings import RunSettings

    args = parser().parse_args(argv)
    settings = settings_of(args, RunSettings)
    if args.stream:
        return _stream(settings)
    if settings.ray is not None:
        return _on_ray(settings)
    _refuse_rays(settings)
    from fastgen.pipeline.transformers.run import run

    _check_files(settings.input, settings.output)
    return run(settings)


def _stream(settings: RunSettings) -> int:
    from fastgen.pipeline.transformers import streaming
    from fastgen.pipeline.transformers.run import say

    if (settings.input, settings.output) != ("-", "-"):
        raise InputError("--stream reads standard input and writes standard output: give - for INPUT and - for OUTPUT.")
    for name in ("resume", "overwrite", "references", "ray", "input_format", "output_format", "on_error"):
        if getattr(settings, name) not in (None, False):
            raise InputError(f"--{name.replace('_', '-')} is for files: leave it out with --stream.")
    return streaming.run(settings, say)


def _on_ray(settings: RunSettings) -> int:
    if settings.allowed_outputs is not None:
        raise InputError("--allowed-outputs reads a file of this machine: it is not for --ray.")
    # Its core writes of its own affairs to the user's terminal, as if they were errors; read when Ray is imported.
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    try:
        import pyarrow  # noqa: F401
        import ray  # noqa: F401
    except ImportError as error:
        raise InputError(f"--ray needs Ray: {installing.command('ray')} ({first_line(error)}).") from error
    from fastgen.distributed.run import run

    return run(settings)


def _refuse_rays(settings: RunSettings) -> None:
    """What needs Ray, and is given without."""
    from fastgen.pipeline.transformers import records

    for name in ("actors", "cpus_per_actor", "gpus_per_actor", "shards"):
        if getattr(settings, name):
            raise InputError(f"--{name.replace('_', '-')} needs --ray.")
    forms = (
        settings.input_format or records.format_of(remote.shown(settings.input)),
        settings.output_format or records.format_of(remote.shown(settings.output)),
    )
    if records.PARQUET in forms:
        raise InputError(f"Parquet is read and written with --ray alone: {installing.command('ray')}.")


def _check_files(source: str, output: str) -> None:
    """Both are opened more than once: the input is counted first, the output is read at the end."""
    for path in (Path(name) for name in (source, output) if not remote.is_remote(name)):
        if str(path) == "-":
            raise InputError(f"{path} stands for a pipe: this command needs the names of files.")
        if path.exists() and not path.is_file():
            raise InputError(f"{path} is no regular file: this command needs files, not folders, pipes or devices.")
    if Path(output).absolute().parent in _DEVICES:  # a journal would be put beside it
        raise InputError(f"{output} stands for an open file: name the file itself.")


def parser() -> argparse.ArgumentParser:
    """The command's flags, one for every field of GenerationConfig among them."""
    from fastgen.cli import flags
    from fastgen.pipeline.transformers import failures, metrics, records
    from fastgen.pipeline.transformers.run import WORKERS

    result = Parser(
        prog=NAME,
        description="Generate text for every line of a file with a Hugging Face model, accelerated by fastgen.",
        epilog=f"{EXIT_CODES}. A record that fails becomes an error record in JSONL output: the others are done, the "
        f"failures are counted, and the exit code is {INPUT_ERROR}. Text output has no place for it: see --on-error.",
        allow_abbrev=False,
    )
    result.add_argument("model", metavar="MODEL", help="name or folder of the model")
    result.add_argument("input", metavar="INPUT", help="text, one input a line, or .jsonl; a file, or a URI")
    result.add_argument("output", metavar="OUTPUT", help="text, or .jsonl for all hypotheses and scores")
    forms = (records.TEXT, records.JSONL, records.PARQUET)
    result.add_argument("--input-format", choices=forms, help="default: by the name of the file")
    result.add_argument("--output-format", choices=forms, help="default: by the name of the file")
    result.add_argument("--text-field", default="text", metavar="NAME", help="of JSONL input (default: %(default)s)")
    flags.add_model_flags(result)
    sizes = result.add_mutually_exclusive_group()
    sizes.add_argument(
        "--batch-size", type=_size, default=32, metavar="N|auto", help="records in a batch (default: %(default)s)"
    )
    sizes.add_argument("--max-tokens", type=_size, metavar="N|auto", help="padded input tokens in a batch")
    result.add_argument(
        "--refill",
        choices=tuple(REFILL),
        default=AUTO,
        help="keep the batch full, waiting records in the places of finished ones; "
        "auto: on a GPU without CUDA graphs (default)",
    )
    result.add_argument("--allowed-outputs", metavar="FILE", help="one a line: each output is one of these texts")
    result.add_argument("--truncate", action="store_true", help="cut inputs that are too long instead of refusing them")
    result.add_argument("--no-scores", action="store_true", help="no scores in JSONL: fastgen is faster without")
    result.add_argument("--seed", type=whole_number, default=1, metavar="N", help="of sampling (default: %(default)s)")
    result.add_argument("--references", type=_local, metavar="FILE", help="one a line: metrics are shown at the end")
    result.add_argument(
        "--metrics", default=",".join(metrics.METRICS), metavar="LIST", help="with --references (default: %(default)s)"
    )
    result.add_argument(
        "--workers",
        type=whole_number,
        metavar="N",
        help=f"processes that tokenise and detokenise; 0: none (default: {WORKERS}; with --ray, of each actor: 0)",
    )
    result.add_argument(
        "--on-error",
        choices=(failures.STOP, failures.BLANK, failures.SKIP),
        help="a line that is blank or can't be used ends the run, has a blank output (in JSONL its error), or none "
        "(default: text output stops at lines that can't be used; blank otherwise)",
    )
    result.add_argument("--resume", action="store_true", help="go on with the killed run that wrote OUTPUT")
    result.add_argument("--overwrite", action="store_true", help="replace an OUTPUT that is there")
    result.add_argument("--quiet", action="store_true", help="no progress line")
    _add_stream(result)
    _add_ray(result)
    flags.add_flags(result)
    return result


def _add_stream(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--stream",
        action="store_true",
        help="answer each line of standard input on standard output, word by word: with - for INPUT and for OUTPUT",
    )


def _add_ray(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "many machines", "On Ray, from the extra `ray`: INPUT may be a folder or a URI, and .parquet."
    )
    group.add_argument(
        "--ray",
        nargs="?",
        const="",
        metavar="ADDRESS",
        help="run on the cluster there; without ADDRESS on that of RAY_ADDRESS, or one of this machine alone",
    )
    group.add_argument(
        "--actors", metavar="N|MIN:MAX", help="copies of the model (default: one for each GPU, or each node)"
    )
    group.add_argument("--cpus-per-actor", type=share, metavar="X", help="(default: 1 beside a GPU, else the node's)")
    group.add_argument("--gpus-per-actor", type=share, metavar="X", help="(default: 1 where there are GPUs)")
    group.add_argument(
        "--shards", action="store_true", help="leave OUTPUT a folder of parts of 4096 records (jsonl, or parquet)"
    )


def _local(text: str) -> Path:
    if remote.is_remote(text):
        raise argparse.ArgumentTypeError(f"{remote.shown(text)} is no file of this machine")
    return Path(text)


def _size(text: str) -> int | str:
    if text == AUTO:
        return AUTO
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a whole number above 0 nor {AUTO!r}")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
