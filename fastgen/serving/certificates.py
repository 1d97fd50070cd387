"""The certificate that the service speaks TLS with."""

from __future__ import annotations

import ssl

from fastgen.pipeline.errors import InputError, first_line


def check(certfile: str | None, keyfile: str | None) -> None:
    """Raise InputError if only one of the files is given, or a server could not use them."""
    if certfile is None and keyfile is None:
        return
    if certfile is None or keyfile is None:
        missing, given = ("certfile", "keyfile") if certfile is None else ("keyfile", "certfile")
        raise InputError(f"--ssl-{given} needs --ssl-{missing}, too: TLS takes a certificate and its private key.")
    for name, path in (("certfile", certfile), ("keyfile", keyfile)):
        try:
            with open(path, "rb"):
                pass
        except OSError as error:
            raise InputError(f"Cannot read --ssl-{name} {path}: {error.strerror or error}.") from None
    try:
        # A password would be asked for at the terminal of a process that has none.
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(certfile, keyfile, password=lambda: b"")
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise InputError(
            f"Cannot use --ssl-certfile {certfile} with --ssl-keyfile {keyfile}: {first_line(error)}; "
            "they should be PEM files that belong together, the key without a password."
        ) from None
