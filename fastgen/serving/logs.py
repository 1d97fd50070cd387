"""The service's log as lines of text or of JSON, where no other program has set it up."""

from __future__ import annotations

import json
import logging
import sys
from datetime import datetime, timezone

from fastgen.serving.observed import FIELDS, LOG

TEXT, JSON = "text", "json"
FORMATS = (TEXT, JSON)


class JsonLines(logging.Formatter):
    """A record as one object of JSON: time, level, message, and the fields of a request if it is about one."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "message": record.getMessage(),
        }
        fields |= {name: getattr(record, name) for name in FIELDS if hasattr(record, name)}
        if record.exc_info:
            fields["error"] = self.formatException(record.exc_info)
        return json.dumps(fields)


class _Lines(logging.Formatter):
    """A record as one line of text, with the request's id before the message."""

    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        return f"{record.levelname} {self.formatTime(record)} {getattr(record, 'request_id', '-')} -- {line}"


def log_to_stderr(form: str) -> None:
    """Send the service's log to standard error, as lines of "text" or of "json"."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if form == JSON else _Lines())
    LOG.handlers, LOG.propagate = [handler], False
    LOG.setLevel(logging.INFO)


def log_others_as_json() -> None:
    """Send what other libraries log, and warnings, to standard error as lines of JSON as well.

    Some have handlers of their own for standard error: those go, so that each record reaches the root logger's, once.
    """
    import torch  # noqa: F401 (sets up loggers, and would again after this)
    import transformers.utils.logging

    transformers.utils.logging.get_logger()
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    for logger in [one for one in logging.root.manager.loggerDict.values() if isinstance(one, logging.Logger)]:
        own = [one for one in logger.handlers if isinstance(one, logging.StreamHandler) and one.stream is sys.stderr]
        if own:
            logger.handlers = [one for one in logger.handlers if one not in own]
            logger.propagate = True
    logging.root.handlers = [handler]
    logging.captureWarnings(True)
