"""The grading phase of all families: call the judge, and attribute its failures to the agent or the infrastructure.

If an agent ended or broke its sandbox, or no judge can process its work, the reward is 0: an agent must not be able to
turn a failure into a dropped rollout. A failure that also happens on the untouched files belongs to the infrastructure
and is raised.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from dataclasses import replace

from etpi_assets.tasks.family import UNPROVEN, WHY_UNPROVEN, Family, JudgesInPlace, Task, Verdict
from etpi_resources.sandboxes import EnvironmentUnavailable, Sandbox, SandboxFactory, SandboxUnavailable

BROKEN = "broken_by_agent"
"""The verdict if the judge fails on the agent's work but not on the untouched files."""

Files = Mapping[str, Mapping[str, str]]
"""Agent id -> files by relative path."""

_OF_MACHINE = (
    errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN,
    errno.ECONNRESET,
)  # fmt: skip


def is_of_machine(error: Exception) -> bool:
    """Return whether an error is this machine's: its disk, memory, limits or proxy. It says nothing about a task."""
    return isinstance(error, OSError) and error.errno in _OF_MACHINE


def grade(
    family: Family,
    task: Task,
    start: Files,
    final: Files,
    machines: Mapping[str, Sandbox],
    sandboxes: SandboxFactory,
) -> Verdict:
    """Return the verdict on the agents' work.

    Args:
        start, final: the files of each agent's workspace before and after its work.
        machines: the agents' sandboxes, still running; JudgesInPlace families copy the answer out of them.

    Raises:
        SandboxUnavailable, EnvironmentUnavailable, and any error that the judge also raises on the untouched files.
    """
    if WHY_UNPROVEN in task.payload:
        return Verdict(None, UNPROVEN, {"why": task.payload[WHY_UNPROVEN][:500]})
    ended = sorted(agent for agent, machine in machines.items() if not final[agent] and has_ended(machine))
    if ended:
        with sandboxes.create({}):  # raises if no sandbox starts at all: then the agent is not to blame
            return Verdict(0.0, BROKEN, {"ended": ended})
    problem: Exception | None = None
    for _ in range(2):  # a transient fault
        try:
            if isinstance(family, JudgesInPlace):
                return _with_trust(family, family.judge_in_place(task, machines, sandboxes))
            return _with_trust(family, family.judge(task, final, sandboxes))
        except (SandboxUnavailable, EnvironmentUnavailable):
            raise
        except Exception as error:  # the control run below decides whose fault it is
            problem = error
    assert problem is not None
    if is_of_machine(problem):  # it may be gone in the control run
        raise problem
    try:
        # A judge may need no sandbox for untouched files, so start one to see whether sandboxes work.
        needs, role = family.needs(task), family.roles(task)[0]
        with sandboxes.create(family.workspace(task, role), needs.limits, needs.environment) as sandbox:
            if has_ended(sandbox):
                raise problem
        family.judge(task, start, sandboxes)
    except Exception:
        raise problem from None
    return Verdict(0.0, BROKEN, {"problem": f"{type(problem).__name__}: {problem}"[:500]})


def _with_trust(family: Family, verdict: Verdict) -> Verdict:
    """Return the verdict with the family's `verdict_trust`, if it has one, among its details."""
    trust = family.verdict_trust
    return replace(verdict, details={"verdict_trust": trust, **verdict.details}) if trust else verdict


def has_ended(machine: Sandbox) -> bool:
    """Return whether a sandbox no longer answers."""
    done = machine.run("exit 7", timeout=10.0)
    return done.exit_code != 7
