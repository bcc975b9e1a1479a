"""The base class of errors that a person can do something about."""


class ExpectedError(Exception):
    """An error whose message is all that a person needs: commands and Dagster show it without a stack trace."""
