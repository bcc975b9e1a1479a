"""Chat templates of strangers are rendered within bounds before this process renders them."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import trl

from etpi_resources.chat import bounds
from etpi_resources.chat.bounds import TemplateUnbounded, require_bounded
from etpi_resources.chat.format import load_chat_format

SHIPPED = Path(trl.__file__).parent / "chat_templates"
NAMES = ("qwen3", "gemma4", "gptoss", "llama3_1", "nemotron_3_super")


@pytest.mark.slow
@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 'x' * 6000000000 }}",
        "{{ 'x' * 3000000 }}",
        "{{ 'x' * 300000000 }}",  # memory ends while it is compiled
        "{% for a in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
        "{% set n = namespace(x='x') %}{% for a in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
        "{{ '%9000000000d' % 1 }}",
        "{{ 'x'.rjust(9000000000) }}",
        "{{ 9 ** (9 ** 9) }}",
        "{% if messages | length > 100 %}{{ 'x' * 6000000000 }}{% endif %}",
        "{% if messages[-1].role == 'tool' %}{{ 'x' * 6000000000 }}{% endif %}",
        "{% if messages[0].content | length > 20000 %}{{ 'x' * 6000000000 }}{% endif %}",
        "{% if tools | length > 12 %}{{ 'x' * 6000000000 }}{% endif %}",
        "{{ {'a': 1} | tojson(indent=9000000000) }}",
    ],
)
def test_unbounded_template_is_refused(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "SECONDS", 2)
    start = time.monotonic()
    with pytest.raises(TemplateUnbounded):
        require_bounded(template)
    assert time.monotonic() - start < 60


@pytest.mark.parametrize("name", NAMES)
def test_template_that_trl_ships_keeps_within_the_bounds(name: str) -> None:
    require_bounded((SHIPPED / f"{name}.jinja").read_text())


@pytest.mark.parametrize("template", ["{{", "{{ raise_exception('no') }}", "{{ nothing.at.all }}", "", "plain"])
def test_faulty_template_is_left_to_its_reader(template: str) -> None:
    require_bounded(template)


def test_own_templates_keep_within_the_bounds() -> None:
    for name in ("tiny", "terminal"):
        require_bounded(load_chat_format("tiny", name).template)
