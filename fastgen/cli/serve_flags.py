"""The flags of fastgen-serve that are for those who run it: with Ray or not, keys, logs, threads, TLS."""

from __future__ import annotations

import argparse
from typing import Any

from fastgen.cli.exits import positive_number


def add_operation_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags; `operation_of` reads them."""
    group = parser.add_argument_group("operation")
    group.add_argument(
        "--local", action="store_true", help="one copy of the model in this process, without Ray: the extra `serve`"
    )
    group.add_argument(
        "--api-key-file", metavar="FILE", help="keys, one a line: requests need one of them as a bearer token"
    )
    group.add_argument(
        "--log-format",
        choices=("text", "json"),
        default="text",
        help="json: each line of the log is an object of JSON (default: %(default)s)",
    )
    group.add_argument(
        "--threads", type=positive_number, metavar="N", help="threads of torch in a replica (default: its CPUs)"
    )
    group.add_argument("--ssl-certfile", metavar="FILE", help="certificate, in PEM, to answer over HTTPS")
    group.add_argument("--ssl-keyfile", metavar="FILE", help="private key of the certificate, in PEM")


def operation_of(args: argparse.Namespace, token: str | None) -> dict[str, Any]:
    """The fields of ServiceSettings that these flags and the environment's token give.

    Raises:
        InputError: a file can't be used.
    """
    from fastgen.serving import certificates
    from fastgen.serving.keys import keys_of

    certificates.check(args.ssl_certfile, args.ssl_keyfile)
    return {
        "token": keys_of(token, args.api_key_file),
        "log_format": args.log_format,
        "threads": args.threads,
        "ssl_certfile": args.ssl_certfile,
        "ssl_keyfile": args.ssl_keyfile,
    }
