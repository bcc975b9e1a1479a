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
from fractions import Fraction
from itertools import islice
from typing import Literal

from etpi_assets.tasks.answers.comparer import Comparer, Undecided
from etpi_assets.tasks.family import Verdict

_BOX = re.compile(r"\\boxed\s*\{")
_GONE = re.compile(
    r"\\left|\\right|\\[,;:! ]|~|\\?\$|\\mathrm|\\displaystyle|\\%|%|°|\^\{?\\circ\}?|\\degree|\\text(?:bf)?|\s"
)
_DOLLAR = re.compile(r"\\?\$")
_FRACTION = re.compile(r"(-?)\\[dt]?frac\{?(-?\d+)\}?\{?(-?\d+)\}?")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?:\D|$))")
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
_BETWEEN = re.compile(r"=|[<>]|\\(?:l|g|n)eq?(?![a-z])")
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}|[?;]|[.,:](?=\s|$)")
_EXPRESSIONS = 6
"""The most expressions of a question that an answer is compared with."""
_EXACT_DIGITS = 12
"""Digits after the point to which an exact decimal number agrees; a double has few more."""
_COPIED = "equal, but the answer is an expression of the question in its own form"
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
    return _COMPARER.equal(_DOLLAR.sub("", wanted), _DOLLAR.sub("", answer), digits)


def copies(answer: str, wanted: str, question: str) -> bool:
    """Return whether a right answer in another form than the expected one is an expression of the question, rewritten.

    An expression has an operation or a fraction: a value that the question names may be right.
    """
    inner = boxed(wanted)
    text, expected = _plain(answer), _plain(wanted if inner is None else inner)
    if text == expected or len(text) > _LONGEST or not _is_expression(text):
        return False
    for expression in expressions_of(question):
        try:
            if _COMPARER.rewrites(expected, text, expression):
                return True
        except Undecided:
            continue  # it cannot be proved that this expression is to be brought into another form
    return False


def expressions_of(question: str) -> list[str]:
    """Return the expressions with an operation or a fraction in a question, between `$`, in `\\(` or among words."""
    inside = [part for match in _MATHS.finditer(question) for part in match.groups() if part]
    outside = [part for text in _MATHS.sub("?", question).split("?") for part in _WORD.split(text)]
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
    one, two = _plain(answer), _plain(wanted if inner is None else inner)
    if one == two:
        return bool(one)
    first, second = _parts(one), _parts(two)
    return len(first) == len(second) and all(_same(a, b) for a, b in zip(first, second, strict=True))


def _plain(answer: str) -> str:
    if len(answer) > _LONGEST:
        return answer
    text = _without_typography(answer).removesuffix(".")
    # \text{...} leaves its braces; a variable before the value (`x = 3`) is dropped.
    text = re.sub(r"^[a-zA-Z]=", "", text)
    return text[1:-1] if re.fullmatch(r"\{[^{}]*\}", text) and "," not in text else text


def _without_typography(text: str) -> str:
    """Return a text without its typography, and with plain fractions."""
    text = _THOUSANDS.sub("", _GONE.sub("", text)).replace("\\{", "{").replace("\\}", "}")
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
