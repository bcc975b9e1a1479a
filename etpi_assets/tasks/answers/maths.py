r"""Judge mathematical answers: compare the last `\boxed{…}` of a text with the expected answer.

`equal` compares by form: two answers are equal if they are the same text without typography, the same rational number,
or lists whose items are equal in order. Answers of another form are compared by math-verify (`equality`), to which
`2\sqrt{2}` and `\sqrt{8}` are equal.

math-verify also computes what the answer leaves to compute: the question's own sum or integral, put into the box, is
equal to the expected answer. So is the question's own expression where it is to be factored, expanded or simplified.
`leaves_work` and `copies` recognise such answers, rewritten ones too (`12/8` for `6/4`, `x \cdot x-1` for `x^2-1`), and
`approximates` a decimal number for an exact expression; the grader "hardened" refuses them, "published" does not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction
from itertools import islice
from typing import Literal

from etpi_assets.tasks.answers.comparer import Comparer, Undecided
from etpi_assets.tasks.family import Verdict

_BOX = re.compile(r"\\boxed\s*\{")
_GONE = re.compile(
    r"\\left|\\right|\\[,;:! ]|~|\\?\$|\\mathrm|\\displaystyle|\\%|%|°|\^\{?\\circ\}?|\\degree|\\text(?:bf)?"
    r"|(?<!\d)\s|\s(?!\d)"
)
_DOLLAR = re.compile(r"\\?\$")
_FRACTION = re.compile(r"(?<![\w})\]\s-])(-?)\\[dt]?frac\{?(-?\d+)\}?\{?(-?\d+)\}?")
_GROUPED = re.compile(r"(?<![\d,])\d{1,3}(?:(?:,|\{,\}|,?\\[,! ]|~| )\d{3})+(?![\d,]|\{,|\\[,! ]\d)")
"""A number with its thousands grouped: one space, or a comma without one after it, stands between the groups."""
_MIXED = re.compile(r"(?<![\w.}])(\d+)\s+(\d+)/(\d+)(?![\w.])")
_LONGEST = 2000
"""Characters of an answer; a longer one is compared without normalisation, and not by math-verify."""
_OPERATORS = re.compile(
    r"\\(?:[io]*int|sum|prod|lim(?:sup|inf)?|det|gcd|lcm|max|min|arg|[pb]?mod|d?t?binom|choose|operatorname|partial)"
    r"(?![a-zA-Z])|\\[dt]?frac\{?(?:d|\\mathrm\{?d\}?)[\^}{ ]|(?<!\\)!|[∫∑∏]"
)
"""Operators whose value a simplified answer states."""
_ARITHMETIC = re.compile(
    r"(?<=[\w)}\]])[+-]|[*×·]|\\cdot|\\times(?!10\^)|\\div|(?<!(?<!\d)10)\^(?!\{?\\circ)|(?<=[\d)])\("
    r"|\\(?:sqrt|log|ln|lg|exp|(?:arc)?(?:sin|cos|tan)|sec|csc|cot|lfloor|lceil|l?vert|cup|cap)|\|"
)
"""Operations on numbers, in a text without spaces; powers of ten may be scientific notation."""
_DIVISION = re.compile(r"\\[dt]?frac|/")
_DECIMAL = re.compile(r"-?\d*\.\d+")
_ROUNDED = re.compile(r"(?i)decimal|approx|round|nearest|estimat|significant|digits|places|≈")
"""Words of a question that asks for a decimal number."""
_MATHS = re.compile(r"(?<!\$)\$++([^$]++)\$++|\\\(((?:(?!\\[()]).)++)\\\)|\\\[((?:(?!\\[\[\]]).)++)\\\]", re.DOTALL)
_TEXT = re.compile(r"\\text\s*\{[^{}]*\}")
_BETWEEN = re.compile(r"=|[<>]|\\(?:l|g|n)eq?(?![a-z])")
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}|[?;]|[.,:](?=\s|$)")
_EXPRESSIONS = 6
"""The most expressions of a question that an answer is compared with."""
_EXACT_DIGITS = 12
"""Digits after the point to which an exact decimal number agrees; a double has few more."""
_COPIED = "equal, but the answer is an expression of the question in its own form"
_MEASURED = re.compile(
    r"[\d})]\s*(?:\\(?:text(?:rm|bf)?|mathrm|mbox)\s*\{\s*([A-Za-z/ .]+?)\s*\}|\s([A-Za-z][A-Za-z ]*))"
    r"(?:\s*\^\s*\{?(\d)\}?)?[\s.$]*$"
)
_UNIT_NAMES: Mapping[str, str] = {
    "centimeter": "cm", "centimetre": "cm", "degree": "deg", "dollar": "$", "feet": "ft", "foot": "ft", "gram": "g",
    "hour": "h", "hr": "h", "inch": "in", "inches": "in", "kilogram": "kg", "kilometer": "km", "kilometre": "km",
    "liter": "l", "litre": "l", "L": "l", "meter": "m", "metre": "m", "millimeter": "mm", "millimetre": "mm",
    "mile": "mi", "minute": "min", "mins": "min", "second": "s", "sec": "s", "unit": "",
}  # fmt: skip
_UNICODE = {
    **dict(zip("−–·×⋅÷", ("-", "-", "\\cdot ", "\\times ", "\\cdot ", "\\div "), strict=True)),
    **{letter: f"^{digit}" for digit, letter in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")},
}
_LATEX = str.maketrans(_UNICODE)
_UNIT = re.compile(r"\\(?:text(?:rm)?|mathrm|mbox)\s*\{[^{}]*\}(?:\s*\^\s*\{?\d\}?)?|\s")

_COMPARER = Comparer()

Grader = Literal["hardened", "published"]
GRADERS: tuple[Grader, ...] = ("hardened", "published")


def judge(wanted: str, text: str, grader: Grader = "hardened", question: str = "") -> Verdict:
    """Return passed, wrong_answer or no_answer, with the boxed answer in `details`; `why` if it was not compared, or is
    equal and still wrong."""
    answer = boxed(text)
    if answer is None:
        return Verdict(0.0, "no_answer", {"found": None})
    details = {"found": answer[:200]}
    if grader == "hardened" and (units := {unit_of(answer), unit_of(wanted)} - {""}) and len(units) > 1:
        return Verdict(0.0, "wrong_answer", {**details, "why": f"its unit is another: {sorted(units)}"})
    copy = Verdict(0.0, "wrong_answer", {**details, "why": _COPIED})
    if equal(answer, wanted):
        copied = grader == "hardened" and copies(answer, wanted, question)
        return copy if copied else Verdict(1.0, "passed", details)
    if all(number is not None and number.denominator == 1 for number in map(_number, map(_plain, (answer, wanted)))):
        return Verdict(0.0, "wrong_answer", details)  # two integers need no algebra
    if len(answer) > _LONGEST:
        return Verdict(0.0, "wrong_answer", {**details, "why": f"longer than {_LONGEST} characters"})
    inner = boxed(wanted)
    expected = wanted if inner is None else inner
    try:
        right = _same_value(expected, answer)
        rounded = right and grader == "hardened" and approximates(answer, expected, question)
    except Undecided as error:
        return Verdict(0.0, "wrong_answer", {**details, "why": str(error)})
    if right and grader == "hardened" and leaves_work(answer, expected):
        return Verdict(0.0, "wrong_answer", {**details, "why": "equal, but the answer leaves its value to compute"})
    if rounded:
        return Verdict(
            0.0, "wrong_answer", {**details, "why": "equal to a few digits, and an exact answer is expected"}
        )
    if right and grader == "hardened" and copies(answer, wanted, question):
        return copy
    return Verdict(float(right), "passed" if right else "wrong_answer", details)


def leaves_work(answer: str, wanted: str) -> bool:
    """Return whether an answer leaves to compute what the expected one states.

    It contains an operator that the expected one lacks, or arithmetic or a fraction of fractions where that is a plain
    number.
    """
    operators = {match[0] for match in _OPERATORS.finditer(answer)}
    if operators - {match[0] for match in _OPERATORS.finditer(wanted)}:
        return True
    value = _UNIT.sub("", answer).rpartition("=")[2]
    works = _ARITHMETIC.search(value) is not None or len(_DIVISION.findall(value)) > 1
    return works and _number(_plain(wanted)) is not None


def approximates(answer: str, wanted: str, question: str) -> bool:
    """Return whether an answer, equal to six digits, is a decimal number near the expected, exact expression.

    Raises Undecided as the first comparison does.
    """
    value = _plain(_UNIT.sub("", answer))
    exact = _DECIMAL.search(_plain(wanted)) is None and not _same(value, _plain(wanted))
    if not exact or _DECIMAL.fullmatch(value) is None or _ROUNDED.search(question) is not None:
        return False
    return len(value.partition(".")[2]) >= _EXACT_DIGITS or not _same_value(wanted, answer, _EXACT_DIGITS)


def _same_value(wanted: str, answer: str, digits: int = 6) -> bool:
    one, two = (_MIXED.sub(r"\1\\frac{\2}{\3}", _DOLLAR.sub("", text)) for text in (wanted, answer))
    return _COMPARER.equal(one, two, digits)


def unit_of(text: str) -> str:
    """Return the unit after a number, by its common short name ("cm^2"); "" without one, or for "units"."""
    if (match := _MEASURED.search(text[-_LONGEST:])) is None:
        return ""
    name, power = (match[1] or match[2]).strip(" ."), match[3] or ""
    for word, exponent in (("square ", "2"), ("sq ", "2"), ("sq. ", "2"), ("cubic ", "3")):
        if name.startswith(word):
            name, power = name.removeprefix(word), exponent
    short = name if name in _UNIT_NAMES.values() else name.lower() if len(name) > 3 else name
    short = _UNIT_NAMES.get(
        short, _UNIT_NAMES.get(short.removesuffix("s"), short.removesuffix("s") if len(short) > 3 else short)
    )
    return f"{short}^{power}" if short and power else short


def copies(answer: str, wanted: str, question: str) -> bool:
    """Return whether a right answer in another form than the expected one is an expression of the question, rewritten.

    An expression has an operation or a fraction: a value that the question names may be right.
    """
    inner = boxed(wanted)
    text, expected = _plain(answer), _plain(wanted if inner is None else inner)
    if text == expected or len(text) > _LONGEST:
        return False
    question = question.translate(_LATEX)
    if not _is_expression(text):  # a number to be factored
        named = re.search(rf"(?<![\d.]){re.escape(text)}(?!\d|\.\d)", question)
        return named is not None and _number(text) is not None and _ARITHMETIC.search(expected) is not None
    for expression in expressions_of(question):
        try:
            if _COMPARER.rewrites(expected, text, expression):
                return True
        except Undecided:
            continue  # it cannot be proved that this expression is to be brought into another form
    return False


def expressions_of(question: str) -> list[str]:
    """Return the expressions with an operation or a fraction in a question, between `$`, in `\\(` or among words."""
    question = _TEXT.sub(" . ", question)
    inside = [part for match in _MATHS.finditer(question) for part in match.groups() if part]
    outside = [part for text in _MATHS.sub("?", question).split("?") for part in _WORD.split(text)]
    inside = [piece for part in inside for piece in part.split(" . ")]
    parts = [part.strip(" .,:;\n") for text in [*inside, *outside] for part in _BETWEEN.split(text)]
    kept = (part for part in dict.fromkeys(parts) if len(part) <= _LONGEST and _is_expression(part))
    return list(islice(kept, _EXPRESSIONS))


def _is_expression(text: str) -> bool:
    text = _without_typography(text)
    return _ARITHMETIC.search(text) is not None or _DIVISION.search(text) is not None


def as_answer(answer: str) -> str:
    """Return a text from which `boxed` extracts the answer."""
    return answer if boxed(answer) is not None else f"\\boxed{{{answer}}}"


def boxed(text: str) -> str | None:
    """Return the content of the last box; None if there is none, or it is blank or not closed.

    Only the last box counts: earlier ones are guesses."""
    ends = [match.end() for match in _BOX.finditer(text)]
    if not ends:
        return None
    depth = 1
    for at in range(ends[-1], len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if not depth:
            return text[ends[-1] : at].strip() or None
    return None


def equal(answer: str, wanted: str) -> bool:
    """Return whether two answers are equal (see the module)."""
    inner = boxed(wanted)
    return any(
        _equal_lists(_plain(answer, grouped=grouped), _plain(wanted if inner is None else inner, grouped=grouped))
        for grouped in (True, False)
    )


def _equal_lists(one: str, two: str) -> bool:
    if one == two:
        return bool(one)
    first, second = _parts(one), _parts(two)
    return len(first) == len(second) and all(_same(a, b) for a, b in zip(first, second, strict=True))


def _plain(answer: str, *, grouped: bool = True) -> str:
    """Return a text without typography. `grouped`: `100,200` is one number, else two; `100, 200` always is two."""
    if len(answer) > _LONGEST:
        return answer
    text = _GROUPED.sub(lambda m: re.sub(r"\D", "", m[0]), answer) if grouped else answer
    text = _without_typography(text).removesuffix(".")
    # \text{...} leaves its braces; a variable before the value (`x = 3`) is dropped.
    text = re.sub(r"^[a-zA-Z]=", "", text)
    return text[1:-1] if re.fullmatch(r"\{[^{}]*\}", text) and "," not in text else text


def _without_typography(text: str) -> str:
    """Return a text without its typography, and with plain fractions."""
    text = _GONE.sub("", text).replace("\\{", "{").replace("\\}", "}")
    return _FRACTION.sub(r"\1\2/\3", text)


def _parts(text: str) -> list[str]:
    inner = text[1:-1] if len(text) > 1 and text[0] in "([{" and text[-1] in ")]}" else text
    return [text[:1], *inner.split(","), text[-1:]] if "," in inner and inner != text else inner.split(",")


def _same(one: str, two: str) -> bool:
    if one == two:
        return bool(one)
    numbers = _number(one), _number(two)
    return None not in numbers and numbers[0] == numbers[1]


def _number(text: str) -> Fraction | None:
    try:
        return Fraction(text) if len(text) < 100 and "_" not in text and "e" not in text.lower() else None
    except (ValueError, ZeroDivisionError):
        return None
