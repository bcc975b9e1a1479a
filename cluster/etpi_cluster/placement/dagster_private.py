"""The private names of Dagster that the cluster uses; no other module of it imports `dagster._core`.

An executor that starts each step elsewhere plugs into the classes that Dagster's own executors for Kubernetes and
Docker use. The Dagster version is pinned; `tests/cluster/test_node_executor.py` fails when an upgrade changes a name.
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
