"""`hf upload` of an export, against a hub on the loopback interface, and the data set that readers get from there."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pyarrow.parquet as pq
import pytest
from datasets import load_dataset

from etpi_assets.exports import export
from etpi_assets.resources import Resources
from tests.support.curation import CurationLake

TOKEN = "hf_" + "loopback" * 4
USER = "tester"
LARGE = (".parquet", ".safetensors", ".gguf")
"""Files with these endings are stored as large files, whatever their size."""

Files = dict[str, bytes]


class HubServer:
    """Repositories as dictionaries; a context manager.

    Attributes:
        repos: "datasets/OWNER/NAME" or "models/OWNER/NAME" -> branch -> path -> content.
        private: the repositories that were created private.
        seen: every request as "METHOD path", without queries.
        answers: path pattern -> (status, message) to give instead of an answer, to any request.
    """

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, Files]] = {}
        self.private: set[str] = set()
        self.commits: list[dict[str, Any]] = []
        self.objects: dict[str, bytes] = {}
        self.seen: list[str] = []
        self.answers: dict[str, tuple[int, str]] = {}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self._server.daemon_threads = True
        self._server.owner = self  # pyright: ignore[reportAttributeAccessIssue]
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> HubServer:
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def hub(self) -> HubServer:
        return self.server.owner  # pyright: ignore[reportAttributeAccessIssue]

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        self._dispatch()

    do_POST = do_PUT = do_HEAD = do_GET

    def _dispatch(self) -> None:
        path = unquote(urlsplit(self.path).path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.hub.seen.append(f"{self.command} {path}")
        for pattern, (status, message) in self.hub.answers.items():
            if re.search(pattern, path):
                return self._answer(status, {"error": message})
        if not path.startswith("/objects/") and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._answer(401, {"error": "Invalid credentials in Authorization header"})
        for pattern, method in _ROUTES:
            if match := re.fullmatch(pattern, path):
                return method(self, body, **match.groupdict())
        self._answer(404, {"error": f"no such route: {self.command} {path}"})

    def _answer(self, status: int, value: Any, headers: dict[str, str] | None = None) -> None:
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        for name, text in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, text)
        if status >= 400 and isinstance(value, dict):
            self.send_header("X-Error-Message", value["error"])
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    # --- routes ------------------------------------------------------------------------------------------------------

    def whoami(self, body: bytes) -> None:
        self._answer(200, {"name": USER, "type": "user", "auth": {"accessToken": {"role": "write"}}})

    def create(self, body: bytes) -> None:
        asked = json.loads(body)
        name = f"{asked.get('type', 'model')}s/{asked.get('organization') or USER}/{asked['name']}"
        place = name.removeprefix("models/")
        if name in self.hub.repos:
            return self._answer(409, {"error": "You already created this repo", "url": f"{self.hub.url}/{place}"})
        self.hub.repos[name] = {"main": {".gitattributes": b"*.parquet filter=lfs\n"}}
        if asked.get("visibility") == "private":
            self.hub.private.add(name)
        self._answer(200, {"url": f"{self.hub.url}/{place}"})

    def branch(self, body: bytes, repo: str, branch: str) -> None:
        branches = self.hub.repos[repo]
        if branch in branches:
            return self._answer(409, {"error": "Reference already exists"})
        branches[branch] = dict(branches["main"])
        self._answer(200, {})

    def info(self, body: bytes, repo: str, branch: str) -> None:
        if repo not in self.hub.repos:
            return self._answer(404, {"error": "Repository not found"})
        files = self.hub.repos[repo][branch]
        self._answer(
            200, {"id": repo.partition("/")[2], "sha": "0" * 40, "siblings": [{"rfilename": f} for f in files]}
        )

    def tree(self, body: bytes, repo: str, branch: str) -> None:
        files = self.hub.repos[repo][branch]
        self._answer(200, [{"type": "file", "path": f, "size": len(d), "oid": "0" * 40} for f, d in files.items()])

    def yaml(self, body: bytes) -> None:
        self._answer(200, {"errors": [], "warnings": []})

    def preupload(self, body: bytes, repo: str, branch: str) -> None:
        files = [
            {"path": f["path"], "uploadMode": "lfs" if f["path"].endswith(LARGE) else "regular", "shouldIgnore": False}
            for f in json.loads(body)["files"]
        ]
        self._answer(200, {"files": files})

    def batch(self, body: bytes, repo: str) -> None:
        objects = []
        for asked in json.loads(body)["objects"]:
            known = asked["oid"] in self.hub.objects
            upload = {"upload": {"href": f"{self.hub.url}/objects/{asked['oid']}"}}
            objects.append(asked if known else asked | {"actions": upload})
        self._answer(200, {"transfer": "basic", "objects": objects}, {"Content-Type": "application/vnd.git-lfs+json"})

    def store(self, body: bytes, oid: str) -> None:
        if hashlib.sha256(body).hexdigest() != oid:
            return self._answer(400, {"error": "the content does not have this sha256"})
        self.hub.objects[oid] = body
        self._answer(200, {})

    def commit(self, body: bytes, repo: str, branch: str) -> None:
        files, header = dict(self.hub.repos[repo][branch]), {}
        for line in body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "header":
                header = value
            elif entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                files[value["path"]] = self.hub.objects[value["oid"]]
            elif entry["key"] == "deletedFile":
                del files[value["path"]]
        self.hub.repos[repo][branch] = files
        self.hub.commits.append({"repo": repo, "branch": branch, **header})
        url = f"{self.hub.url}/{repo.removeprefix('models/')}/commit/{'1' * 40}"
        self._answer(200, {"commitUrl": url, "commitOid": "1" * 40, "hookOutput": ""})

    def resolve(self, body: bytes, repo: str, branch: str, name: str) -> None:
        prefixed = repo if repo.startswith("datasets/") else f"models/{repo}"
        data = self.hub.repos[prefixed][branch].get(name)
        if data is None:
            return self._answer(404, {"error": "Entry not found"}, {"X-Error-Code": "EntryNotFound"})
        etag = hashlib.sha256(data).hexdigest()
        self._answer(200, data, {"ETag": f'"{etag}"', "X-Repo-Commit": "1" * 40})


_REPO = r"(?P<repo>(?:datasets|models)/[\w.-]+/[\w.-]+)"
_ROUTES: list[tuple[str, Callable[..., None]]] = [
    (r"/api/whoami-v2", _Handler.whoami),
    (r"/api/repos/create", _Handler.create),
    (r"/api/validate-yaml", _Handler.yaml),
    (rf"/api/{_REPO}/branch/(?P<branch>[\w.-]+)", _Handler.branch),
    (rf"/api/{_REPO}/revision/(?P<branch>[\w.-]+)", _Handler.info),
    (rf"/api/{_REPO}/tree/(?P<branch>[\w.-]+)", _Handler.tree),
    (rf"/api/{_REPO}/preupload/(?P<branch>[\w.-]+)", _Handler.preupload),
    (rf"/api/{_REPO}/commit/(?P<branch>[\w.-]+)", _Handler.commit),
    (r"/(?P<repo>(?:datasets/)?[\w.-]+/[\w.-]+)\.git/info/lfs/objects/batch", _Handler.batch),
    (r"/objects/(?P<oid>[0-9a-f]{64})", _Handler.store),
    (r"/(?P<repo>(?:datasets/)?[\w.-]+/[\w.-]+)/resolve/(?P<branch>[\w.-]+)/(?P<name>.+)", _Handler.resolve),
]
"""Path -> the method that answers it."""


@pytest.mark.slow
def test_uploaded_export_is_the_folder_and_loads_as_a_data_set(tmp_path: Path):
    curation = CurationLake.with_rollouts(tmp_path / "curation")
    assert curation.failures("clean") == {}
    resources = Resources(lake=curation.lake, specs_folder=curation.folder / "specs")
    folder = tmp_path / "out"
    export("clean", "hub", folder, resources)
    with HubServer() as hub:
        environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1"}
        words = [Path(sys.executable).with_name("hf"), "upload", "lab/data", folder, "--repo-type", "dataset"]
        uploaded = subprocess.run(words, env=environment, capture_output=True, text=True)
        assert uploaded.returncode == 0, uploaded.stderr
        received = {name: data for name, data in hub.repos["datasets/lab/data"]["main"].items() if name[0] != "."}
    files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert received == files
    for name, data in received.items():
        (tmp_path / "back" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "back" / name).write_bytes(data)
    rows = load_dataset(str(tmp_path / "back"), "tokens", split="train", cache_dir=str(tmp_path / "cache"))
    assert rows["input_ids"] == pq.read_table(folder / "tokens/train.parquet")["input_ids"].to_pylist()
    assert "## Lineage" in received["README.md"].decode()
