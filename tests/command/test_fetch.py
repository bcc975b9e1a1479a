"""`etpi fetch`: pinned data sets from a hub on the loopback interface, and what to do without one."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from etpi.fetch import needed
from etpi_assets.specs.load import load_shipped
from tests.support.web_server import Handler, WebServer

pytestmark = pytest.mark.slow
COMMIT = "a" * 40
FILES = {"README.md": b"# rows\n", "rows.jsonl": b'{"prompt": "?"}\n'}


def answer(handler: Handler) -> None:
    path = handler.path.partition("?")[0]
    body: Any = FILES.get(path.rpartition("/")[2])
    if path.startswith("/api/datasets/"):
        files = [{"type": "file", "path": f, "size": len(d), "oid": "0" * 40} for f, d in FILES.items()]
        info = {"id": "y-ohtani/open_agentrl_grpo_2k", "sha": COMMIT, "siblings": [{"rfilename": f} for f in FILES]}
        body = json.dumps(files if "/tree/" in path else info).encode()
    handler.reply(200, body, **{"ETag": f'"{hashlib.sha256(body).hexdigest()}"', "X-Repo-Commit": COMMIT})


@pytest.fixture
def hub() -> Iterator[str]:
    with WebServer(answer) as server:
        yield server.url


def fetch(home: Path, name: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return etpi(home, "fetch", name, **environment)


def etpi(home: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("ETPI_", "HF_"))}
    values = {**kept, "ETPI_DATA": str(home / "data"), "HF_HOME": str(home / "hf"), **environment}
    command = [sys.executable, "-m", "etpi", *arguments]
    return subprocess.run(command, env=values, cwd=home, capture_output=True, text=True, timeout=300)


def test_first_fetch_pins_revision_and_files_and_a_changed_file_is_refused(tmp_path, hub):
    done = fetch(tmp_path, "open_agentrl", HF_ENDPOINT=hub, HF_HUB_DISABLE_XET="1")
    assert done.returncode == 0 and f"is pinned at {COMMIT}" in done.stdout, done.stderr[-2000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("export ETPI_OPEN_AGENTRL="))
    folder = Path(line.partition("=")[2])
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == FILES
    (lock,) = (tmp_path / "data").rglob("fetched.json")
    assert json.loads(lock.read_text())["y-ohtani/open_agentrl_grpo_2k"]["revision"] == COMMIT
    (folder / "rows.jsonl").unlink()
    (folder / "rows.jsonl").write_text("other\n")
    again = fetch(tmp_path, "open_agentrl", HF_HUB_OFFLINE="1")
    assert again.returncode == 1 and "rows.jsonl differ from" in again.stdout


def test_offline_fetch_says_what_to_put_where(tmp_path):
    done = fetch(tmp_path, "open_agentrl", HF_HUB_OFFLINE="1")
    assert done.returncode == 1 and "hf download y-ohtani/open_agentrl_grpo_2k --repo-type dataset" in done.stdout
    assert "ETPI_OPEN_AGENTRL=FOLDER" in done.stdout and "Traceback" not in done.stdout
    done = fetch(tmp_path, "cooperbench", HF_HUB_OFFLINE="1")
    assert "hf download CooperBench/cooperbench-dataset --repo-type dataset --local-dir" in done.stdout


@pytest.mark.parametrize("name", ["grpo_tcr_4b", "plan_first_v1", "etpi_phase1"])
def test_everything_that_is_missing_is_listed_and_a_dry_run_names_it_all(tmp_path, name):
    done = fetch(tmp_path, name, HF_HUB_OFFLINE="1")
    specs = load_shipped()
    wanted = [each.name for each in needed([name], specs)]
    assert done.returncode == 1 and len(wanted) > 1 and done.stdout.count("LEFT:") == len(wanted)
    assert all(f"{each}\n" in done.stdout for each in wanted)
    dry = etpi(tmp_path, "run", name, "--dry-run", HF_HUB_OFFLINE="1")
    assert dry.returncode == 1 and "Traceback" not in dry.stderr
    assert all(each in dry.stderr for each in wanted) and f"etpi fetch {name}" in dry.stderr


def test_a_known_revision_and_its_split_are_named_and_other_bytes_are_refused(tmp_path, hub):
    done = fetch(tmp_path, "r2e_gym_lite", HF_HUB_OFFLINE="1")
    assert "--revision 8d3163011f01f9393bb3dc7700497a79a8686ae5 --include 'data/train-*.parquet'" in done.stdout
    done = fetch(tmp_path, "terminal_bench", HF_HUB_OFFLINE="1")
    assert done.returncode == 1 and "checkout 69671fbaac6d67a7ef0dfec016cc38a64ef7a77c" in done.stdout
    done = fetch(tmp_path, "swe_bench_verified", HF_ENDPOINT=hub, HF_HUB_DISABLE_XET="1")
    assert done.returncode == 1 and "data/test-00000-of-00001.parquet differ from the published ones" in done.stdout


def test_variable_that_names_no_folder_is_missing(tmp_path):
    values = {"HF_HUB_OFFLINE": "1", "ETPI_TERMINAL_BENCH": str(tmp_path / "absent")}
    done = fetch(tmp_path, "terminal_bench", **values)
    assert done.returncode == 1 and "LEFT:" in done.stdout and "ETPI_TERMINAL_BENCH=FOLDER" in done.stdout
    (tmp_path / "absent").mkdir()
    assert fetch(tmp_path, "terminal_bench", **values).returncode == 0


def test_specs_without_downloads_are_named(tmp_path):
    done = fetch(tmp_path, "plan_first_tiny")
    assert done.returncode == 0 and done.stdout.startswith("plan_first_tiny: ")
