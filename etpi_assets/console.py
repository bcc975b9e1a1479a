"""What a run prints: one line for what an asset made, and for a failure the words that help.

Belongs here: the form of log lines on a terminal. Does not belong here: what is logged. The web page has everything.
Dagster uses a logger only where the run's configuration names it, which `cli` does.
"""

from __future__ import annotations

import logging
import sys

import dagster as dg
from dagster._core.log_manager import LOG_RECORD_METADATA_ATTR
from dagster._core.utils import coerce_valid_log_level


class _Lines(logging.Formatter):
    """`12:03:04 message`; a failed step is its own words, with a traceback only where nobody foresaw the error."""

    def format(self, record: logging.LogRecord) -> str:
        meta = getattr(record, LOG_RECORD_METADATA_ATTR, {})
        text = str(meta.get("orig_message") or record.getMessage())
        event = meta.get("dagster_event")
        if event is not None and event.is_step_failure:
            foreseen = event.step_failure_data.user_failure_data
            text = foreseen.description if foreseen else f"{event.step_key} failed\n{event.step_failure_data.error}"
        return f"{self.formatTime(record, '%H:%M:%S')} {text}"


class _OwnLines(logging.Filter):
    """Assets' own lines and failures; not Dagster's account of every step, which is at DEBUG and in its log."""

    def filter(self, record: logging.LogRecord) -> bool:
        event = getattr(record, LOG_RECORD_METADATA_ATTR, {}).get("dagster_event")
        return event is None or event.is_step_failure


@dg.logger(
    {"log_level": dg.Field(str, is_required=False, default_value="INFO", description="the threshold")},
    description="One line for what an asset made.",
)
def console_logger(context: dg.InitLoggerContext) -> logging.Logger:
    """Prints through standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Lines())
    handler.addFilter(_OwnLines())
    logger = logging.Logger("etpi", coerce_valid_log_level(context.logger_config["log_level"]))
    logger.addHandler(handler)
    return logger
