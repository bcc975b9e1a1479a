"""The parts of other projects' schemas that the files of deploy/ use, as JSON Schema; unknown keys are errors.

The whole schemas are not here: `tests/command/test_deployment.py` uses them too where the package `check-jsonschema`,
which has Compose's, is installed.
"""

from __future__ import annotations

from typing import Any

TEXT, NUMBER, FLAG, ANY = {"type": "string"}, {"type": "integer"}, {"type": "boolean"}, {}
TEXTS = {"type": "array", "items": TEXT}
TEXT_OF = {"type": "object", "additionalProperties": TEXT}


def _strict(required: str = "", /, **properties: Any) -> dict[str, Any]:
    return {
        "type": "object", "properties": properties, "additionalProperties": False, "required": required.split(),
    }  # fmt: skip


def _several(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": schema}


def _map_of(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": schema}


# --- Compose: compose-spec/compose-spec, schema/compose-spec.json, 00655e22 ------------------------------------------

_CONDITIONS = ["service_started", "service_healthy", "service_completed_successfully"]
_SERVICE = _strict(
    image=TEXT, user=TEXT, restart=TEXT, init=FLAG, shm_size=TEXT, entrypoint=TEXTS, command=TEXTS,
    cap_drop=TEXTS, security_opt=TEXTS, networks=TEXTS, secrets=TEXTS, volumes=TEXTS, ports=TEXTS, environment=TEXT_OF,
    depends_on=_map_of(_strict("condition", condition={"enum": _CONDITIONS})),
    healthcheck=_strict(test=TEXTS, interval=TEXT, retries=NUMBER),
)  # fmt: skip
COMPOSE = {
    **_strict(
        name=TEXT,
        services=_map_of(_SERVICE),
        networks=_map_of(_strict()),
        volumes=_map_of(_strict()),
        secrets=_map_of(_strict(file=TEXT)),
    ),
    "patternProperties": {"^x-": {}},
}
