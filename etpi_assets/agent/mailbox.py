"""Messages between the agents of one rollout."""

from __future__ import annotations

from collections.abc import Sequence


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
