"""Logs: lines for people, or one JSON object a line for programs.

What a request holds is never logged, so that neither form can show it. May import: tracing.
"""

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Literal

from service.tracing import span_ids

LogFormat = Literal["text", "json"]

_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class JsonFormatter(logging.Formatter):
    """Writes a record as one line of JSON.

    `time` (UTC, RFC 3339), `level`, `logger`, `message`; where there are any, `error_id`, which the caller was told,
    `exception` with its traceback, and `trace_id` and `span_id` of the span that was current.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Give the line, without its end."""
        told = {
            "time": _rfc3339(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if error_id := getattr(record, "error_id", ""):
            told["error_id"] = error_id
        if ids := span_ids():
            told["trace_id"], told["span_id"] = ids
        if record.exc_info:
            told["exception"] = self.formatException(record.exc_info)
        return json.dumps(told)


def log_to_stderr(level: str, form: LogFormat) -> None:
    """Send the process's log to stderr, Python's warnings too where programs read it."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else logging.Formatter(_TEXT))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.captureWarnings(form == "json")
    logging.getLogger("grpc._cython.cygrpc").addFilter(_is_ours)


def _is_ours(record: logging.LogRecord) -> bool:
    """Tell whether a record says something of this server, and not of what a client sent or that it left.

    A header that is no UTF-8 may be long, and a secret; an answer to who has left fails with a traceback.
    """
    message = str(record.msg)
    return not message.startswith("Invalid encoding on") and "ExecuteBatchError" not in record.getMessage()


def line(message: str, logger: str, form: LogFormat) -> str:
    """Give a line of the program's own output the form of its log."""
    if form == "text":
        return message
    return JsonFormatter().format(logging.LogRecord(logger, logging.INFO, "", 0, message, (), None))


def last_line(reason: str, logger: str) -> str:
    """Give the line by which a process ends the form of its log."""
    forms = [handler.formatter for handler in logging.getLogger().handlers]
    if not any(isinstance(form, JsonFormatter) for form in forms):
        return f"attencode: {reason}"
    return JsonFormatter().format(logging.LogRecord(logger, logging.CRITICAL, "", 0, reason, (), None))


def _rfc3339(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
