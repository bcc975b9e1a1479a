"""The schemas accept every spec that comes with etpi, and refuse a misspelt key."""

from __future__ import annotations

import tomllib

import pytest
from jsonschema import Draft7Validator

from etpi_assets.specs.folders import FOLDERS
from etpi_assets.specs.json_schema import schema
from etpi_assets.specs.load import SHIPPED


@pytest.mark.parametrize("kind", FOLDERS)
def test_schema_accepts_the_shipped_specs(kind: str) -> None:
    validator = Draft7Validator(schema(kind))
    for file in sorted((SHIPPED / FOLDERS[kind]).rglob("*.toml")):
        errors = [f"{error.json_path}: {error.message[:200]}" for error in
                  validator.iter_errors(tomllib.loads(file.read_text(encoding="utf-8")))]  # fmt: skip
        assert errors == [], file.name


def test_schema_refuses_a_misspelt_key_and_a_wrong_type() -> None:
    validator = Draft7Validator(schema("experiment"))
    for wrong in ({"train": {"epoch": 3}}, {"train": {"epochs": "three"}}, {"preset": "plan_frist"}, {"sedes": [0]}):
        assert list(validator.iter_errors(wrong)), wrong
    assert not list(validator.iter_errors({"train": {"epochs": 3}, "evaluate": "none", "preset": "none"}))
