"""fastgen-serve MODEL: answer requests over HTTP with a Hugging Face model, on Ray Serve."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from fastgen import installing
from fastgen.cli.exits import Parser, exit_code, positive_number, share
from fastgen.pipeline.errors import EXIT_CODES, InputError, first_line

NAME = "fastgen-serve"
TOKEN = "FASTGEN_SERVE_TOKEN"  # environment variable: the bearer token that requests need


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code when the service has been stopped. What goes wrong is a sentence, and 1."""
    return exit_code(NAME, lambda: _main(argv))


def _main(argv: Sequence[str] | None) -> int:
    # Its core writes of its own affairs to the user's terminal, as if they were errors; read when Ray is imported.
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    try:
        import ray.serve  # noqa: F401
        import transformers  # noqa: F401
    except ImportError as error:
        raise InputError(f"Ray Serve is needed: {installing.command('ray')} ({first_line(error)}).") from error
    from fastgen.serving.deployment import run

    return run(parser().parse_args(argv), os.environ.get(TOKEN, "").strip() or None)


def parser() -> argparse.ArgumentParser:
    """The command's flags."""
    from fastgen.cli.transformers import flags
    from fastgen.serving.limits import Limits

    limits = Limits()
    result = Parser(
        prog=NAME,
        description="Answer requests over HTTP with a Hugging Face model: POST /v1/generate; /docs describes it.",
        epilog=f"With {TOKEN} set, requests need that bearer token, but those to /health. {EXIT_CODES}.",
        allow_abbrev=False,
    )
    result.add_argument("model", metavar="MODEL", help="name or folder of the model")
    result.add_argument(
        "--host", default="127.0.0.1", metavar="ADDRESS", help="address to listen at (default: %(default)s)"
    )
    result.add_argument(
        "--port", type=positive_number, default=8000, metavar="N", help="port to listen at (default: %(default)s)"
    )
    flags.add_model_flags(result)
    ray = result.add_argument_group("replicas")
    ray.add_argument(
        "--ray", default="", metavar="ADDRESS", help="cluster to run on (default: RAY_ADDRESS, or this machine alone)"
    )
    ray.add_argument(
        "--replicas", type=positive_number, default=1, metavar="N", help="copies of the model (default: %(default)s)"
    )
    ray.add_argument("--cpus-per-replica", type=share, metavar="X", help="default: 1 beside a GPU, else the node's")
    ray.add_argument("--gpus-per-replica", type=share, metavar="X", help="default: 1 where there are GPUs")
    bounds = result.add_argument_group("limits")
    bounds.add_argument(
        "--max-rows",
        type=positive_number,
        default=limits.rows,
        metavar="N",
        help="inputs times beams that decode together in a replica (default: %(default)s)",
    )
    bounds.add_argument(
        "--max-queued",
        type=positive_number,
        default=512,
        metavar="N",
        help="inputs that wait in a replica; beyond, the answer is 429 (default: %(default)s)",
    )
    bounds.add_argument(
        "--max-inputs",
        type=positive_number,
        default=limits.inputs,
        metavar="N",
        help="inputs of a request (default: %(default)s)",
    )
    bounds.add_argument(
        "--max-input-tokens",
        type=positive_number,
        default=limits.input_tokens,
        metavar="N",
        help="tokens of an input, where the model has room for them (default: %(default)s)",
    )
    bounds.add_argument(
        "--max-new-tokens",
        type=positive_number,
        default=limits.new_tokens,
        metavar="N",
        help="tokens that are generated for an input (default: %(default)s)",
    )
    bounds.add_argument(
        "--max-beams",
        type=positive_number,
        default=limits.beams,
        metavar="N",
        help="beams or samples of an input (default: %(default)s)",
    )
    bounds.add_argument(
        "--max-body",
        type=positive_number,
        default=limits.body_bytes,
        metavar="BYTES",
        help="bytes of a request's body (default: %(default)s)",
    )
    bounds.add_argument(
        "--timeout",
        type=positive_number,
        default=int(limits.seconds),
        metavar="SECONDS",
        help="time for an answer; then the client gets 504 (default: %(default)s)",
    )
    bounds.add_argument(
        "--receive-timeout",
        type=positive_number,
        default=int(limits.receive_seconds),
        metavar="SECONDS",
        help="time for a request's body; then the client gets 408; as long, a connection without a request is kept "
        "(default: %(default)s)",
    )
    bounds.add_argument(
        "--max-receiving",
        type=positive_number,
        default=limits.receiving,
        metavar="N",
        help="bodies that a replica receives at the same time; beyond, the answer is 503 (default: %(default)s)",
    )
    bounds.add_argument(
        "--max-connections",
        type=positive_number,
        default=limits.connections,
        metavar="N",
        help="connections to each machine; beyond, the answer is 503 (default: %(default)s)",
    )
    return result


if __name__ == "__main__":
    sys.exit(main())
