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


class Mailbox:
    """One inbox per agent, messages in the order in which they were sent.

    With `delivers` false all inboxes stay empty, and a sender is told its recipients as usual.
    """

    def __init__(self, agent_ids: Sequence[str], *, delivers: bool = True) -> None:
        self._delivers = delivers
        self._inboxes: dict[str, list[dict[str, str]]] = {agent_id: [] for agent_id in agent_ids}

    def send(self, sender: str, to: str | None, message: str) -> list[str]:
        """Put `message` in the inbox of `to` (None: of every other agent) and return the recipients.

        There are none if `to` is not another agent of this rollout.
        """
        other_agents = [agent_id for agent_id in self._inboxes if agent_id != sender]
        recipients = other_agents if to is None else [agent_id for agent_id in other_agents if agent_id == to]
        for agent_id in recipients if self._delivers else ():
            self._inboxes[agent_id].append({"from": sender, "message": message})
        return recipients

    def take(self, agent_id: str) -> list[dict[str, str]]:
        """Remove and return the agent's messages as {"from", "message"}, oldest first."""
        messages, self._inboxes[agent_id] = self._inboxes[agent_id], []
        return messages

    def has_messages(self, agent_id: str) -> bool:
        """Return whether the agent's inbox holds messages."""
        return bool(self._inboxes[agent_id])
