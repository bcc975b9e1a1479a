"""The text of an observation, the same in live rollouts, templated transcripts and training data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from etpi_resources.sandboxes import CommandResult


def format_observation(
    result: CommandResult | None = None,
    inbox: Sequence[Mapping[str, str]] = (),
    *,
    sent_to: Sequence[str] = (),
    parse_error: str | None = None,
    show_status: bool = True,
) -> str:
    """Format the observation of one turn: received messages, then the result of the turn's actions.

    Args:
        result: the result of the turn's bash commands; None if it ran none.
        inbox: received messages, as {"from", "message"}, in order of arrival.
        sent_to: recipients of the turn's messages.
        parse_error: why the turn has no action.
        show_status: whether the output follows a line with the exit code.

    One line per message, a status line for the commands, no trailing newline.
    """
    lines = [f"INBOX from {m['from']}: {m['message']}" for m in inbox]
    if parse_error is not None:
        lines.append(f"no action: {parse_error}. Write one command in a <tool_call>, as shown.")
    lines += [f"sent to {agent_id}" for agent_id in sent_to]
    if result is not None:
        status = "time limit" if result.timed_out else f"exit {result.exit_code}"
        if show_status or result.timed_out:
            lines.append(f"[{status}]")
        if body := result.output.rstrip("\n"):
            lines.append(body)
    return "\n".join(lines)


def format_summary(commands: Sequence[str], observation: str) -> str:
    """Format the summary that replaces the conversation after a compaction: commands, then the last observation."""
    done = "\n".join(f"$ {command}" for command in commands)
    return f"Done so far:\n{done}\n{observation}"
