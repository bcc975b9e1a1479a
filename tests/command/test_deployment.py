"""deploy/: nothing listens beyond its private network, no secret is in an environment, sandboxes are strict."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from etpi.cli import main
from tests.support.cluster_services import compose_command

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
OWN = [name for name, service in COMPOSE["services"].items() if name != "postgres"]
_SECRET = re.compile("PASSWORD$|TOKEN$|KEY$")
TEXT, NUMBER, FLAG, ANY = {"type": "string"}, {"type": "integer"}, {"type": "boolean"}, {}
TEXTS = {"type": "array", "items": TEXT}
TEXT_OF = {"type": "object", "additionalProperties": TEXT}


def _strict(required: str = "", /, **properties: Any) -> dict[str, Any]:
    return {
        "type": "object", "properties": properties, "additionalProperties": False, "required": required.split(),
    }  # fmt: skip


def _map_of(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": schema}


_CONDITIONS = ["service_started", "service_healthy", "service_completed_successfully"]
_SERVICE = _strict(
    image=TEXT, user=TEXT, restart=TEXT, init=FLAG, shm_size=TEXT, entrypoint=TEXTS, command=TEXTS,
    cap_drop=TEXTS, security_opt=TEXTS, networks=TEXTS, secrets=TEXTS, volumes=TEXTS, ports=TEXTS, environment=TEXT_OF,
    depends_on=_map_of(_strict("condition", condition={"enum": _CONDITIONS})),
    healthcheck=_strict(test=TEXTS, interval=TEXT, retries=NUMBER),
)  # fmt: skip
SCHEMA = {
    **_strict(
        name=TEXT,
        services=_map_of(_SERVICE),
        networks=_map_of(_strict()),
        volumes=_map_of(_strict()),
        secrets=_map_of(_strict(file=TEXT)),
    ),
    "patternProperties": {"^x-": {}},
}
"""The parts of compose-spec/compose-spec's schema (00655e22) that deploy/ uses; unknown keys are errors."""


def test_files_are_of_their_schema():
    jsonschema.Draft202012Validator(SCHEMA).validate(COMPOSE)


def test_compose_file_is_of_the_whole_compose_schema():
    checker = pytest.importorskip("check_jsonschema", reason="pip install check-jsonschema")
    folder = Path(checker.__file__).parent / "builtin_schemas" / "vendor"
    schema = json.loads((folder / "compose-spec.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(COMPOSE)


def test_published_ports_are_on_loopback():
    ports = [port for service in COMPOSE["services"].values() for port in service.get("ports", [])]
    assert ports and all(port.startswith("127.0.0.1:") for port in ports)


def test_no_service_listens_on_all_interfaces():
    text = (DEPLOY / "compose.yaml").read_text()
    assert not re.search(r"0\.0\.0\.0|::|listen_addresses=\*", text)
    for service in ("head", "worker", "web"):
        assert "$(hostname -i)" in compose_command(service)
    assert "listen_addresses=postgres" in COMPOSE["services"]["postgres"]["command"]
    assert all(service.get("network_mode") is None for service in COMPOSE["services"].values())


@pytest.mark.parametrize("name", OWN)
def test_services_are_an_ordinary_user_without_capabilities(name):
    service = COMPOSE["services"][name]
    assert service["cap_drop"] == ["ALL"] and "privileged" not in service and "cap_add" not in service
    assert service["user"] == "1000:1000" and "no-new-privileges:true" in service["security_opt"]
    loosened = {option for option in service["security_opt"] if option != "no-new-privileges:true"}
    page = (ROOT / "docs" / "install.md").read_text()
    assert all(option in page for option in loosened), "only what docs/install.md documents"
    assert bool(loosened) == (name == "worker")


def test_no_secret_is_in_an_environment():
    for service in COMPOSE["services"].values():
        assert not [name for name in service.get("environment", {}) if _SECRET.search(name)]
    assert COMPOSE["services"]["worker"]["environment"]["RAY_AUTH_MODE"] == "token"


def test_secrets_are_written_once_for_their_owner_alone(tmp_path):
    folder = tmp_path / "secrets"
    for _ in range(2):
        subprocess.run(["sh", DEPLOY / "secrets.sh", folder, "db"], check=True, capture_output=True)
        content = {path.name: path.read_text() for path in folder.iterdir()}
    assert set(content) == {Path(secret["file"]).name for secret in COMPOSE["secrets"].values()}
    assert len({content["postgres_password"], content["etpi_password"], content["ray_token"]}) == 3
    assert content["pgpass"].strip() == f"db:5432:etpi:etpi:{content['etpi_password']}"
    assert len(content["ray_token"]) == 64
    modes = {path.name: stat.S_IMODE(os.stat(path).st_mode) for path in (folder, *folder.iterdir())}
    # The official image runs role.sh as its user postgres, who is not the containers' user 1000.
    assert modes == {**dict.fromkeys(content, 0o600), "etpi_password": 0o644, "secrets": 0o700}


def test_commands_that_init_prints_ask_for_a_token_and_name_an_address(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("ETPI_CLUSTER", raising=False)
    main(["cluster", "init", "--lake", str(tmp_path), "--postgres", "postgresql://etpi@127.0.0.1:1/etpi",
          "--ray", "127.0.0.1:2", "--jobs", "http://127.0.0.1:3"])  # fmt: skip
    printed = capsys.readouterr().out
    assert "0.0.0.0" not in printed and printed.count("RAY_AUTH_MODE=token") == 2
    assert "--node-ip-address=127.0.0.1 --dashboard-host=127.0.0.1" in printed
