"""The gateway's own messages as JSON lines, for collectors of logs."""

from __future__ import annotations

import logging
import time

import msgspec

__all__ = ["JsonFormatter"]

_MAX_CHARS = 8192
"""Of a message or a traceback: enough to find the place, too little to fill a disk."""


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage()[:_MAX_CHARS],
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)[-_MAX_CHARS:]
        return msgspec.json.encode(line).decode()
