"""fastgen-serve MODEL: answer requests over HTTP with a Hugging Face model, on Ray Serve or, with --local, without."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fastgen.cli.exits import Parser, exit_code, positive_number, refuse_arguments, share, whole_number
from fastgen.pipeline.errors import EXIT_CODES, needing

if TYPE_CHECKING:
    from fastgen.serving.settings import ServiceSettings

NAME = "fastgen-serve"
TOKEN = "FASTGEN_SERVE_TOKEN"  # environment variable: the bearer token that requests need


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code when the service has been stopped. What goes wrong is a sentence, and 1."""
    return exit_code(NAME, lambda: _main(argv))


def _main(argv: Sequence[str] | None) -> int:
    args = parser().parse_args(argv)
    token = os.environ.get(TOKEN, "").strip() or None
    if args.local:
        check_local(args)
        with needing("FastAPI and uvicorn", "serve"):
            import transformers
            import uvicorn  # noqa: F401
        from fastgen.serving import logs

        if args.log_format == logs.JSON:
            logs.log_others_as_json()  # before the imports below load libraries that warn of something
        from fastgen.serving import local

        return local.run(settings_of(args, token))
    # Its core writes of its own affairs to the user's terminal, as if they were errors; read when Ray is imported.
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    with needing("Ray Serve", "ray"):
        import ray.serve  # noqa: F401
        import transformers  # noqa: F401
    from fastgen.serving.deployment import run

    return run(settings_of(args, token))


def check_local(args: argparse.Namespace) -> None:
    """Refuse flags of replicas, of which there are none without Ray."""
    given = {
        "--ray": args.ray,
        "--replicas": args.replicas > 1,
        "--cpus-per-replica": args.cpus_per_replica is not None,
        "--gpus-per-replica": args.gpus_per_replica is not None,
    }
    if names := [name for name, is_given in given.items() if is_given]:
        refuse_arguments(f"--local is one copy of the model without Ray: leave out {' and '.join(names)}")


def settings_of(args: argparse.Namespace, token: str | None) -> ServiceSettings:
    """What these arguments ask for."""
    from fastgen.cli import flags, serve_flags
    from fastgen.pipeline.transformers.settings import ModelSettings
    from fastgen.serving.limits import Limits
    from fastgen.serving.settings import ServiceSettings

    limits = Limits(
        body_bytes=args.max_body,
        inputs=args.max_inputs,
        input_tokens=args.max_input_tokens,
        new_tokens=args.max_new_tokens,
        beams=args.max_beams,
        rows=args.max_rows,
        seconds=float(args.timeout),
        receive_seconds=float(args.receive_timeout),
        receiving=args.max_receiving,
        connections=args.max_connections,
    )
    return ServiceSettings(
        model=flags.settings_of(args, ModelSettings),
        limits=limits,
        most_queued=args.max_queued,
        prefix_cache=args.prefix_cache,
        **serve_flags.operation_of(args, token),
        host=args.host,
        port=args.port,
        ray=args.ray,
        replicas=args.replicas,
        cpus_per_replica=args.cpus_per_replica,
        gpus_per_replica=args.gpus_per_replica,
    )


def parser() -> argparse.ArgumentParser:
    """The command's flags."""
    from fastgen.cli import flags, serve_flags
    from fastgen.serving.limits import Limits

    limits = Limits()
    result = Parser(
        prog=NAME,
        description="Answer requests over HTTP with a Hugging Face model: POST /v1/generate, or OpenAI's endpoints; "
        "/docs describes them.",
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
    serve_flags.add_operation_flags(result)
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
    for flag, default, unit, what in (
        ("--max-rows", limits.rows, "N", "inputs times beams that decode together in a replica"),
        ("--max-queued", 512, "N", "inputs that wait in a replica; beyond, the answer is 429"),
        ("--max-inputs", limits.inputs, "N", "inputs of a request"),
        ("--max-input-tokens", limits.input_tokens, "N", "tokens of an input, where the model has room for them"),
        ("--max-new-tokens", limits.new_tokens, "N", "tokens that are generated for an input"),
        ("--max-beams", limits.beams, "N", "beams or samples of an input"),
        ("--max-body", limits.body_bytes, "BYTES", "bytes of a request's body"),
        ("--timeout", int(limits.seconds), "SECONDS", "time for an answer; then the client gets 504"),
        (
            "--receive-timeout",
            int(limits.receive_seconds),
            "SECONDS",
            "time for a request's body; then the client gets 408; as long, a connection without a request is kept",
        ),
        (
            "--max-receiving",
            limits.receiving,
            "N",
            "bodies that a replica receives at the same time; beyond, the answer is 503",
        ),
        ("--max-connections", limits.connections, "N", "connections to each machine; beyond, the answer is 503"),
    ):
        text = f"{what} (default: %(default)s)"
        bounds.add_argument(flag, type=positive_number, default=default, metavar=unit, help=text)
    _add_prefix_cache(bounds)
    return result


def _add_prefix_cache(bounds: argparse._ArgumentGroup) -> None:
    from fastgen.serving.settings import ServiceSettings

    bounds.add_argument(
        "--prefix-cache",
        type=whole_number,
        default=ServiceSettings.prefix_cache,
        metavar="BYTES",
        help="bytes in a replica for what prompts begin with, or 0 (default: %(default)s)",
    )


if __name__ == "__main__":
    sys.exit(main())
