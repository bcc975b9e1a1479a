"""What an agent reads after its turn, as text.

Belongs here: the one form of an observation, so that live rollouts, templated transcripts and training data agree to
the byte. Does not belong here: running commands, or delivering messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from etpi_resources.sandboxes import CommandResult


def format_observation(
    result: CommandResult | None = None,
    inbox: Sequence[Mapping[str, str]] = (),
    *,
    sent_to: Sequence[str] = (),
    parse_error: str | None = None,
) -> str:
    """The observation that answers one turn: messages that arrived, then what the turn's own action did.

    Args:
        result: the bash command's outcome, None where the turn ran none.
        inbox: messages that arrived, as {"from", "message"}, in order of arrival.
        sent_to: whom the turn's own messages went to.
        parse_error: why no action could be read from the turn.

    A line a message and a status line for the command; no trailing newline.
    """
    lines = [f"INBOX from {m['from']}: {m['message']}" for m in inbox]
    if parse_error is not None:
        lines.append(f"no action: {parse_error}. Write one command in a <tool_call>, as shown.")
    lines += [f"sent to {agent_id}" for agent_id in sent_to]
    if result is not None:
        status = "time limit" if result.timed_out else f"exit {result.exit_code}"
        lines.append(f"[{status}]")
        if body := result.output.rstrip("\n"):
            lines.append(body)
    return "\n".join(lines)


def format_summary(commands: Sequence[str], observation: str) -> str:
    """What stands for the whole conversation after a compaction: the commands so far, then the last observation."""
    done = "\n".join(f"$ {command}" for command in commands)
    return f"Done so far:\n{done}\n{observation}"
