"""What the console command does: preflight, parallel runs, progress and tables, accepting and explaining versions."""


class CodeServerError(RuntimeError):
    """Dagster's code server did not start, or cannot launch a run; the message has its last line."""
