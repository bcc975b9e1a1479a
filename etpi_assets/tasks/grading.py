"""Grading as a phase of its own, for all families: agents' work comes in as data, and faults have an owner.

Belongs here: what a rollout's judge is given, and who caused a fault of it. A policy of the grading phase (its network)
belongs here too once there is one. Does not belong here: any family's verdict.

A sandbox that its agent ended or broke, and work that no judge can take, are failures with reward 0: an agent must not
be able to erase them. Faults that happen without the agent's work too are of the infrastructure and are raised.
"""

from __future__ import annotations

from collections.abc import Mapping

from etpi_assets.tasks.family import Family, JudgesInPlace, Task, Verdict
from etpi_resources.sandboxes import EnvironmentUnavailable, Sandbox, SandboxFactory, SandboxUnavailable

BROKEN = "broken_by_agent"
"""The verdict on work that the judge cannot take, where it takes the untouched files."""

Files = Mapping[str, Mapping[str, str]]
"""Agent id -> files by relative path."""


def grade(
    family: Family,
    task: Task,
    start: Files,
    final: Files,
    machines: Mapping[str, Sandbox],
    sandboxes: SandboxFactory,
) -> Verdict:
    """The verdict on what agents leave.

    Args:
        start, final: the files of each agent's workspace before and after its work.
        machines: the sandboxes they worked in, still entered; a family that judges machines copies its answer out.

    Raises:
        Whatever the judge raises on the untouched files too, or SandboxUnavailable, EnvironmentUnavailable: the
        infrastructure's faults.
    """
    ended = sorted(agent for agent, machine in machines.items() if not final[agent] and has_ended(machine))
    if ended:
        with sandboxes.create({}):  # raises where no sandbox starts any more: then no agent ended this one
            return Verdict(0.0, BROKEN, {"ended": ended})
    problem: Exception | None = None
    for _ in range(2):  # a fault that passes is nobody's
        try:
            if isinstance(family, JudgesInPlace):
                return family.judge_in_place(task, machines, sandboxes)
            return family.judge(task, final, sandboxes)
        except (SandboxUnavailable, EnvironmentUnavailable):
            raise
        except Exception as error:  # judged by the control below, whatever it is
            problem = error
    assert problem is not None
    try:
        # Untouched files can be judged without a sandbox, so that one is started here too.
        needs, role = family.needs(task), family.roles(task)[0]
        with sandboxes.create(family.workspace(task, role), needs.limits, needs.environment) as sandbox:
            if has_ended(sandbox):
                raise problem
        family.judge(task, start, sandboxes)
    except Exception:
        raise problem from None
    return Verdict(0.0, BROKEN, {"problem": f"{type(problem).__name__}: {problem}"[:500]})


def has_ended(machine: Sandbox) -> bool:
    """Whether a sandbox that ran before answers no more."""
    done = machine.run("exit 7", timeout=10.0)
    return done.exit_code != 7
