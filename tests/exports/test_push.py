"""`hf upload` of an export, against a hub on the loopback interface, and the data set that readers get from there."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pyarrow.parquet as pq
import pytest
from datasets import load_dataset

from etpi_assets.exports import export
from etpi_assets.resources import Resources
from tests.support.curation import CurationLake
from tests.support.web_server import Handler, WebServer

TOKEN = "hf_" + "loopback" * 4
USER = "tester"
LARGE = (".parquet", ".safetensors", ".gguf")
"""Files with these endings are stored as large files, whatever their size."""

Files = dict[str, bytes]


class HubServer(WebServer):
    """Repositories as dictionaries: "datasets/OWNER/NAME" -> branch -> path -> content."""

    def __init__(self) -> None:
        super().__init__(self.dispatch)
        self.repos: dict[str, dict[str, Files]] = {}
        self.objects: dict[str, bytes] = {}

    def dispatch(self, handler: Handler) -> None:
        path = unquote(urlsplit(handler.path).path)
        if not path.startswith("/objects/") and handler.headers.get("Authorization") != f"Bearer {TOKEN}":
            return handler.reply(401, {"error": "Invalid credentials in Authorization header"})
        for pattern, route in _ROUTES:
            if match := re.fullmatch(pattern, path):
                return handler.reply(200, route(self, handler.content, **match.groupdict()))
        handler.reply(404, {"error": f"no such route: {handler.command} {path}"})

    def whoami(self, body: bytes) -> Any:
        return {"name": USER, "type": "user", "auth": {"accessToken": {"role": "write"}}}

    def create(self, body: bytes) -> Any:
        sent = json.loads(body)
        name = f"{sent.get('type', 'model')}s/{sent.get('organization') or USER}/{sent['name']}"
        self.repos[name] = {"main": {".gitattributes": b"*.parquet filter=lfs\n"}}
        return {"url": f"{self.url}/{name}"}

    def info(self, body: bytes, repo: str, branch: str) -> Any:
        siblings = [{"rfilename": name} for name in self.repos[repo][branch]]
        return {"id": repo.partition("/")[2], "sha": "0" * 40, "siblings": siblings}

    def tree(self, body: bytes, repo: str, branch: str) -> Any:
        files = self.repos[repo][branch].items()
        return [{"type": "file", "path": name, "size": len(data), "oid": "0" * 40} for name, data in files]

    def yaml(self, body: bytes) -> Any:
        return {"errors": [], "warnings": []}

    def preupload(self, body: bytes, repo: str, branch: str) -> Any:
        paths = [file["path"] for file in json.loads(body)["files"]]
        modes = ["lfs" if path.endswith(LARGE) else "regular" for path in paths]
        rows = [{"path": p, "uploadMode": mode, "shouldIgnore": False} for p, mode in zip(paths, modes, strict=True)]
        return {"files": rows}

    def batch(self, body: bytes, repo: str) -> Any:
        objects = json.loads(body)["objects"]
        places = [{"actions": {"upload": {"href": f"{self.url}/objects/{each['oid']}"}}} for each in objects]
        return {"transfer": "basic", "objects": [each | place for each, place in zip(objects, places, strict=True)]}

    def store(self, body: bytes, oid: str) -> Any:
        assert hashlib.sha256(body).hexdigest() == oid
        self.objects[oid] = body
        return {}

    def commit(self, body: bytes, repo: str, branch: str) -> Any:
        files = self.repos[repo][branch]
        for entry in map(json.loads, body.splitlines()):
            value = entry["value"]
            if entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                files[value["path"]] = self.objects[value["oid"]]
        return {"commitUrl": f"{self.url}/{repo}/commit/{'1' * 40}", "commitOid": "1" * 40, "hookOutput": ""}


_REPO = r"(?P<repo>(?:datasets|models)/[\w.-]+/[\w.-]+)"
_ROUTES: list[tuple[str, Callable[..., None]]] = [
    (r"/api/whoami-v2", HubServer.whoami),
    (r"/api/repos/create", HubServer.create),
    (r"/api/validate-yaml", HubServer.yaml),
    (rf"/api/{_REPO}/revision/(?P<branch>[\w.-]+)", HubServer.info),
    (rf"/api/{_REPO}/tree/(?P<branch>[\w.-]+)", HubServer.tree),
    (rf"/api/{_REPO}/preupload/(?P<branch>[\w.-]+)", HubServer.preupload),
    (rf"/api/{_REPO}/commit/(?P<branch>[\w.-]+)", HubServer.commit),
    (r"/(?P<repo>(?:datasets/)?[\w.-]+/[\w.-]+)\.git/info/lfs/objects/batch", HubServer.batch),
    (r"/objects/(?P<oid>[0-9a-f]{64})", HubServer.store),
]
"""Path -> the method whose result answers it."""


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
