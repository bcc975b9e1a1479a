r"""Judge mathematical answers: compare the last `\boxed{…}` of a text with the expected answer.

math-verify compares (`equality`); to it `2\sqrt{2}` and `\sqrt{8}` are equal. Words are compared as text.

math-verify also computes what the answer leaves to compute: the question's own sum or integral, put into the box, is
equal to the expected answer. So is the question's own expression where it is to be factored, expanded or simplified.
The grader "hardened" refuses answers with operations that the expected one lacks, expressions of the question
(`copies`, rewritten ones too: `12/8` for `6/4`, `x \cdot x-1` for `x^2-1`), other units, and decimal numbers near an
exact expression (`approximates`); the grader "published" does not.
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
_DOLLAR = re.compile(r"\\?\$")
_GROUPED = re.compile(r"(?<![\d,])\d{1,3}(?:(?:,|\{,\}|,?\\[,! ]|~| )\d{3})+(?![\d,]|\{,|\\[,! ]\d)")
"""A number with its thousands grouped: one space, or a comma without one after it, stands between the groups."""
_MIXED = re.compile(r"(?<![\w.}])(\d+)\s+(\d+)/(\d+)(?![\w.])")
_COMMAS = re.compile(r"[\d,]+")
_DIGITS = re.compile(r"\d+")
_BESIDE = re.compile(r"\d\s+\d")
"""Numbers without an operator between them, which math-verify adds."""
_BLANKS = re.compile(r"(?<!\d)\s+|\s+(?!\d)|\$")
_TYPOGRAPHY = re.compile(r"\\left|\\right|\\[,;:! ]|\s")
_FULL_STOP = re.compile(r"(?<=[\w)}\]])\.$")
_NUMBER = re.compile(r"-?\d{1,50}(?:\.\d{1,50})?")
_WORDS = re.compile(r"[A-Za-z][A-Za-z ]+")
_STYLED = re.compile(r"\\(?:text(?:bf|it|rm)?|mathrm|mbox)\s*\{([^{}]*)\}")
_LONGEST = 2000
"""Characters of an answer; a longer one is wrong."""
_OPERATORS = re.compile(
    r"\\(?:[io]*int|sum|prod|lim(?:sup|inf)?|det|gcd|lcm|max|min|arg|[pb]?mod|d?t?binom|choose|operatorname|partial)"
    r"(?![a-zA-Z])|\\[dt]?frac\{?(?:d|\\mathrm\{?d\}?)[\^}{ ]|(?<!\\)!|[∫∑∏]"
)
"""Operators whose value a simplified answer states; math-verify computes some of them as it reads."""
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
_EXACT_DIGITS, _DOUBLE = 12, 14
"""Digits after the point to which an exact decimal number agrees, and that a double surely has."""
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
    **dict(zip("−–·×⋅÷°", ("-", "-", "\\cdot ", "\\times ", "\\cdot ", "\\div ", "^\\circ"), strict=True)),
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
    inner = boxed(wanted)
    answer, expected = (_FULL_STOP.sub("", text) for text in (answer, wanted if inner is None else inner))
    try:
        why = None
        right = len(answer) <= _LONGEST and equal(answer, expected)
        if len(answer) > _LONGEST:
            why = f"longer than {_LONGEST} characters"
        elif grader == "hardened":
            why = _refusal(answer, expected, question, right=right)
    except Undecided as error:
        right, why = False, str(error)
    details = {"found": answer[:200], **({"why": why} if why else {})}
    passed = right and not why
    return Verdict(float(passed), "passed" if passed else "wrong_answer", details)


def _refusal(answer: str, expected: str, question: str, *, right: bool) -> str | None:
    """Return why the grader "hardened" refuses an answer; None if it does not."""
    if len(units := {unit_of(answer), unit_of(expected)} - {""}) > 1:
        return f"its unit is another: {sorted(units)}"
    if not right or _is_same_text(answer, expected) or (_NUMBER.fullmatch(answer) and _NUMBER.fullmatch(expected)):
        return None
    operators, known = ({match[0] for match in _OPERATORS.finditer(text)} for text in (answer, expected))
    if operators - known or _COMPARER.ask("leaves", _prepared(expected), _prepared(answer)):
        return "equal, but the answer leaves its value to compute"
    if approximates(answer, expected, question):
        return "equal to a few digits, and an exact answer is expected"
    return _COPIED if copies(answer, expected, question) else None


def equal(answer: str, wanted: str, digits: int = 6) -> bool:
    """Return whether two answers are equal: as text, as words or numbers, or to math-verify.

    `100,200` is read as one number, and as two in this order.

    Raises Undecided if they cannot be compared."""
    if _is_same_text(answer, wanted):
        return True
    if (words := _words(wanted)) is not None:
        return words == _bare(answer)
    numbers = [Fraction(text) if _NUMBER.fullmatch(text) else None for text in (answer, wanted)]
    if None not in numbers:
        return numbers[0] == numbers[1]
    readings = [(_prepared(wanted, one), _prepared(answer, one)) for one in (True, False)]
    if readings[0][0] != readings[1][0] and _DIGITS.findall(wanted) != _DIGITS.findall(answer):
        del readings[1]  # lists are equal in any order, a number's groups are not
    readable = (each for each in dict.fromkeys(readings) if not any(map(_BESIDE.search, each)))
    return any(_COMPARER.ask("equal", *reading, digits) for reading in readable)


def _is_same_text(one: str, two: str) -> bool:
    return bool(one) and _BLANKS.sub("", _STYLED.sub(r"\1", one)) == _BLANKS.sub("", _STYLED.sub(r"\1", two))


def _words(text: str) -> str | None:
    """Return an answer that is words, folded; None if it may be mathematics: `\text{…}`, or four letters and more."""
    bare = _bare(text)
    return bare if (_STYLED.search(text) or len(bare) > 3) and _WORDS.fullmatch(bare) else None


def _bare(text: str) -> str:
    return _STYLED.sub(r"\1", text).strip(" $.()").casefold()


def _prepared(text: str, one: bool = True) -> str:
    """Return a text as math-verify reads it. `one`: plain commas between three digits group them too, else they end
    numbers."""

    def grouped(match: re.Match[str]) -> str:
        return re.sub(r"\D", "", match[0]) if one or not _COMMAS.fullmatch(match[0]) else match[0].replace(",", ", ")

    text = _GROUPED.sub(grouped, _DOLLAR.sub("", text.translate(_LATEX)))
    return _MIXED.sub(r"\1\\frac{\2}{\3}", text)


def approximates(answer: str, wanted: str, question: str) -> bool:
    """Return whether an answer, equal to six digits, is a decimal number near the expected, exact expression.

    Raises Undecided as the first comparison does.
    """
    value = _UNIT.sub("", answer).strip("$%\\")
    if _DECIMAL.search(wanted) or not _DECIMAL.fullmatch(value) or _ROUNDED.search(question):
        return False
    digits = len(value.partition(".")[2])
    return digits > _DOUBLE or not equal(answer, wanted, max(_EXACT_DIGITS, digits + 2))


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
    text, expected = _prepared(answer), _prepared(wanted)
    question = question.translate(_LATEX)
    if not _is_expression(text):  # a number to be factored
        named = re.search(rf"(?<![\d.]){re.escape(text)}(?!\d|\.\d)", question)
        return (
            named is not None
            and _NUMBER.fullmatch(text) is not None
            and _ARITHMETIC.search(_TYPOGRAPHY.sub("", expected)) is not None
        )
    for expression in expressions_of(question):
        try:
            if _COMPARER.ask("rewrites", expected, text, expression):
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
    text = _TYPOGRAPHY.sub("", text)
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
