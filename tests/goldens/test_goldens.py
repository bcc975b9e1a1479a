"""The results of each component's cases are the stored ones; a refactoring changes none of them."""

from __future__ import annotations

import pytest

from etpi_assets.planning.versions import COMPONENTS
from etpi_assets.tasks.families import known_families
from tests.goldens.golden import OF_LAB, Case, fault, load_cases, read_goldens, unpinned, values_of

CASES = load_cases()
WITHOUT_CASES = {
    "engine.openai": "a server answers",
    "engine.transformers": "a model samples",
    "engine.vllm": "a model samples",
    "model_card": "sentences, which tests/reports compares with the tables",
    "sandbox.docker": "needs a container engine",
}
"""Components without a case, and the reason."""


@pytest.fixture(scope="module")
def goldens():
    return read_goldens()


def _parameter(case: Case):
    family, marks = case.component.partition(".")[2], []
    if family in OF_LAB:
        marks = [pytest.mark.lab, pytest.mark.skipif(family not in known_families(), reason="needs the lab")]
    return pytest.param(case, id=f"{case.component}-{case.name}".replace(" ", "_"), marks=marks)


@pytest.mark.parametrize("case", map(_parameter, CASES.values()))
def test_result_is_its_golden(case: Case, goldens) -> None:
    problem = fault(case.key, goldens.get(case.key), values_of(case.compute()), COMPONENTS)
    if problem:
        pytest.fail(problem, pytrace=False)


def test_goldens_are_of_cases(goldens) -> None:
    assert not goldens.keys() - CASES.keys(), "cases are gone: `make goldens` removes their goldens"


def test_every_component_has_a_case_or_a_reason() -> None:
    assert not list(unpinned(COMPONENTS, CASES, WITHOUT_CASES))
