"""Questions to the catalog: the files of `sql/reports`, and the variables that a query reads."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import takewhile

from etpi_resources.lake.catalog import sql_folder

_READ = re.compile(r"getvariable\('(\w+)'\)", re.IGNORECASE)
_SET = re.compile(r"^\s*SET VARIABLE (\w+) =", re.IGNORECASE | re.MULTILINE)


@dataclass(frozen=True)
class Question:
    """SQL to run on the catalog.

    Attributes:
        name: for messages: the report's name, the file, or "-c".
        text: one or several statements; the last one has the result.
    """

    name: str
    text: str

    @property
    def variables(self) -> tuple[str, ...]:
        """The variables that a person may set, in the order in which the text reads them."""
        code = "\n".join(line for line in self.text.splitlines() if not line.lstrip().startswith("--"))
        set_here = set(_SET.findall(code))
        return tuple(name for name in dict.fromkeys(_READ.findall(code)) if name not in set_here)

    @property
    def title(self) -> str:
        """The first line of its comment; if a sentence goes on after that line, the first sentence alone."""
        lines = [line[3:].strip() for line in takewhile(lambda line: line.startswith("-- "), self.text.splitlines())]
        if not lines or lines[0].endswith((".", "?")):
            return lines[0] if lines else ""
        sentence = re.match(r".+?[.?](?= |$)", " ".join(lines))
        return sentence[0] if sentence else lines[0]


def reports() -> dict[str, Question]:
    """Return the reports of `sql/reports` by name, sorted."""
    files = sorted((sql_folder() / "reports").glob("*.sql"))
    return {file.stem: Question(file.stem, file.read_text(encoding="utf-8")) for file in files}
