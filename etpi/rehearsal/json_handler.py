"""Requests and answers in JSON for the rehearsal's loopback servers."""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler
from typing import Any


class JsonHandler(BaseHTTPRequestHandler):
    """Reads a request's JSON and answers in JSON; logs nothing, since a rehearsal has a log of its own."""

    protocol_version = "HTTP/1.1"

    def read(self) -> dict[str, Any]:
        """Return the request's body, {} if it has none."""
        return json.loads(self.rfile.read(int(self.headers.get("content-length", 0))) or "{}")

    def send(self, status: int, content: Any) -> None:
        """Answer with `content`."""
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def refuse(self, message: str) -> None:
        """Answer with an error, in the form of OpenAI's."""
        self.send(400, {"error": {"message": message, "type": "rehearsal", "code": 400}})

    def log_message(self, format: str, *arguments: Any) -> None:
        """Log nothing."""
