"""Messages between the agents of one rollout.

Belongs here: who gets what, in order. Does not belong here: how a message is written (`commands`) or shown
(`observation`).
"""

from __future__ import annotations

from collections.abc import Sequence


class Mailbox:
    """One inbox an agent. Messages stand in the order they were sent; taking them empties the inbox."""

    def __init__(self, agent_ids: Sequence[str]) -> None:
        self._inboxes: dict[str, list[dict[str, str]]] = {agent_id: [] for agent_id in agent_ids}

    def send(self, sender: str, to: str | None, message: str) -> list[str]:
        """Put `message` in the inbox of `to` (None: of everybody else) and return who got it: nobody where `to` is no
        other agent of this rollout."""
        others = [agent_id for agent_id in self._inboxes if agent_id != sender]
        recipients = others if to is None else [agent_id for agent_id in others if agent_id == to]
        for agent_id in recipients:
            self._inboxes[agent_id].append({"from": sender, "message": message})
        return recipients

    def take(self, agent_id: str) -> list[dict[str, str]]:
        """The agent's messages as {"from", "message"}, oldest first; the inbox is empty afterwards."""
        messages, self._inboxes[agent_id] = self._inboxes[agent_id], []
        return messages

    def holds_for(self, agent_id: str) -> bool:
        """Whether the agent's inbox holds anything."""
        return bool(self._inboxes[agent_id])
