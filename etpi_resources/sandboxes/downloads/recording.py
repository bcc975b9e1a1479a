"""Recorded HTTP responses on disk: bodies by their SHA-256, and one file for each request.

    objects/<first two digits>/<sha256>     a body
    requests/<key>.json                     {"request": [method, URL, Accept, Range], "status", "headers", "sha256",
                                             "bytes"}

A request is recorded once and never changes, so a recording is a snapshot of the indexes it was made from. Standard
library only: the proxy's interpreter is another one.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Request = tuple[str, str, str, str]
"""Method, URL and the headers Accept and Range ("" without): what the response depends on."""

_KEPT_HEADERS = (
    "accept-ranges", "content-range", "content-type", "etag", "last-modified", "location", "x-pypi-last-serial",
)  # fmt: skip


@dataclass(frozen=True)
class Response:
    """A recorded response: status, the headers that clients need, and the file with the body."""

    status: int
    headers: Mapping[str, str]
    body: Path


class Recording:
    """The recording in a folder; safe with several writers."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def find(self, request: Request) -> Response | None:
        """Return the recorded response to a request, or None."""
        try:
            entry = json.loads(self._request_file(request).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        return Response(entry["status"], entry["headers"], self._object_file(entry["sha256"]))

    def body(self) -> Body:
        """Return a new body to write to."""
        return Body(self.root)

    def put(self, request: Request, status: int, headers: Mapping[str, str], body: Body) -> None:
        """Record a response, unless the request is recorded already. `headers` have lower-case names."""
        sha256 = body.keep(self._object_file)
        kept = {name: headers[name] for name in _KEPT_HEADERS if name in headers}
        if request[0] == "HEAD" and "content-length" in headers:
            kept["content-length"] = headers["content-length"]
        entry = {"request": request, "status": status, "headers": kept, "sha256": sha256, "bytes": body.size}
        _install(self._request_file(request), entry)

    def size(self) -> int:
        """Return the bytes of all bodies."""
        return sum(file.stat().st_size for file in (self.root / "objects").glob("*/*"))

    def _request_file(self, request: Request) -> Path:
        return self.root / "requests" / f"{hashlib.sha256(json.dumps(request).encode()).hexdigest()}.json"

    def _object_file(self, sha256: str) -> Path:
        return self.root / "objects" / sha256[:2] / sha256


class Body:
    """A body while it arrives."""

    def __init__(self, root: Path) -> None:
        root.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=".body-", dir=root)
        self._file, self._path, self._digest = os.fdopen(descriptor, "wb"), Path(name), hashlib.sha256()
        self.size = 0

    def write(self, data: bytes) -> None:
        """Append bytes."""
        self._file.write(data)
        self._digest.update(data)
        self.size += len(data)

    def keep(self, place: Callable[[str], Path]) -> str:
        """Move the body to `place(sha256)`; return the hash."""
        self._file.close()
        sha256 = self._digest.hexdigest()
        target = place(sha256)
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(self._path, target)
        return sha256

    def drop(self) -> None:
        """Delete the body."""
        self._file.close()
        self._path.unlink(missing_ok=True)


def _install(target: Path, entry: Mapping[str, Any]) -> None:
    """Write an entry whole, unless it exists."""
    target.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=".request-", dir=target.parent)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump(entry, file, sort_keys=True)
    try:
        os.link(name, target)
    except FileExistsError:
        pass
    finally:
        os.unlink(name)
