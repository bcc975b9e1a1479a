"""The parts of other projects' schemas that the files of deploy/ use, as JSON Schema; unknown keys are errors.

The whole schemas are not here: `tests/command/test_deployment.py` uses them too where the packages `check-jsonschema`
(which has Compose's) and `kubernetes-validate` are installed.
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

# --- KubeRay: ray-project/kuberay, ray-operator/apis/ray/v1/raycluster_types.go 3275ee09 and the CRD 017710c0 --------

_GROUP = {
    "rayStartParams": TEXT_OF,
    "template": _strict("spec", metadata=ANY, spec={"type": "object", "required": ["containers"]}),
}
_SPEC = _strict(
    "headGroupSpec",
    rayVersion=TEXT,
    enableInTreeAutoscaling=FLAG,
    headGroupSpec=_strict("rayStartParams template", serviceType=TEXT, headService=ANY, enableIngress=FLAG, **_GROUP),
    workerGroupSpecs=_several(
        _strict(
            "groupName minReplicas maxReplicas rayStartParams template",
            groupName=TEXT,
            replicas=NUMBER,
            minReplicas=NUMBER,
            maxReplicas=NUMBER,
            numOfHosts=NUMBER,
            **_GROUP,
        )  # fmt: skip
    ),
)
RAY_CLUSTER = _strict("spec", apiVersion={"const": "ray.io/v1"}, kind={"const": "RayCluster"}, metadata=ANY, spec=_SPEC)

# --- Dagster's chart: dagster-io/dagster, helm/dagster/schema (the models of values.schema.json), 00701070 -----------

_IMAGE = _strict("repository pullPolicy", repository=TEXT, tag=TEXT, pullPolicy={"enum": ["Always", "IfNotPresent"]})
_CLASS = _strict("module class config", **{"module": TEXT, "class": TEXT, "config": {"type": "object"}})
_POD: dict[str, Any] = {
    "image": _IMAGE,
    "env": ANY,
    "envConfigMaps": _several(_strict("name", name=TEXT)),
    "envSecrets": _several(_strict("name", name=TEXT)),
    "podSecurityContext": {"type": "object"},
    "securityContext": {"type": "object"},
    "resources": {"type": "object"},
    "volumes": _several({"type": "object", "required": ["name"]}),
    "volumeMounts": _several({"type": "object", "required": ["name", "mountPath"]}),
}
_SWITCH = _strict("enabled", enabled=FLAG)
DAGSTER_VALUES = _strict(
    **{
        "global": _strict(dagsterHome=TEXT, postgresqlSecretName=TEXT),
        "generatePostgresqlPasswordSecret": FLAG,
        "postgresql": _strict(
            enabled=FLAG, postgresqlHost=TEXT, postgresqlUsername=TEXT, postgresqlDatabase=TEXT, service=ANY
        ),
        "rabbitmq": _SWITCH,
        "redis": _SWITCH,
        "telemetry": _SWITCH,
        "runLauncher": _strict(
            "type config",
            type={"enum": ["CeleryK8sRunLauncher", "K8sRunLauncher", "CustomRunLauncher"]},
            config=_strict("customRunLauncher", customRunLauncher=_CLASS),
        ),
        "computeLogManager": _strict(
            "type config",
            type={"const": "CustomComputeLogManager"},
            config=_strict("customComputeLogManager", customComputeLogManager=_CLASS),
        ),
        "dagsterWebserver": _strict(service=_strict("type port", type=TEXT, port=NUMBER), **_POD),
        "dagsterDaemon": _strict(
            runCoordinator=_strict(
                "enabled type config",
                enabled=FLAG,
                type={"enum": ["QueuedRunCoordinator", "CustomRunCoordinator"]},
                config=_strict(queuedRunCoordinator=_strict(maxConcurrentRuns=NUMBER)),
            ),
            runMonitoring={"type": "object"},
            **_POD,
        ),
        "dagster-user-deployments": _strict(
            enabled=FLAG,
            enableSubchart=FLAG,
            deployments=_several(
                _strict(
                    "name image port",
                    name=TEXT, dagsterApiGrpcArgs=TEXTS, port=NUMBER, includeConfigInLaunchedRuns=_SWITCH, **_POD,
                )  # fmt: skip
            ),
        ),
    }
)  # fmt: skip
