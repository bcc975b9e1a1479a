"""Errors that a person can do something about."""

from importlib.util import find_spec


class ExpectedError(Exception):
    """An error whose message is all that a person needs: commands and Dagster show it without a stack trace."""


class PackageMissing(ExpectedError, ModuleNotFoundError):
    """A package of an extra is not installed; the message has the command that installs it."""


def require_torch(purpose: str) -> None:
    """Raise PackageMissing if this interpreter lacks PyTorch, without which etpi reads, imports, audits and exports."""
    if find_spec("torch") is None:
        raise PackageMissing(f"{purpose} needs PyTorch, which is not installed here: pip install 'etpi[train]'")
