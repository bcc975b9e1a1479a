"""Dagster's private names that etpi uses because no public name does the same; no other module imports `dagster._core`.

An executor that starts each step elsewhere (`placement.executor`) plugs into the classes that Dagster's own executors
for Kubernetes and Docker use. The Dagster version is pinned; `tests/graph/test_dagster_private.py` fails when an
upgrade changes one of these names.
"""

from dagster._core.events import DagsterEvent, EngineEventData
from dagster._core.execution.plan.objects import StepRetryData
from dagster._core.execution.retries import RetryMode
from dagster._core.executor.step_delegating import (
    CheckStepHealthResult,
    StepDelegatingExecutor,
    StepHandler,
    StepHandlerContext,
)

__all__ = [
    "CheckStepHealthResult",
    "DagsterEvent",
    "EngineEventData",
    "RetryMode",
    "StepDelegatingExecutor",
    "StepHandler",
    "StepHandlerContext",
    "StepRetryData",
]
