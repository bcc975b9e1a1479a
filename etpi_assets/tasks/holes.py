"""Replace the values that tests expect by holes, which record what they are compared with; the host compares.

An assertion becomes a call of a function that `pytest_recorder` defines, so no hole flows into tested code:
`assert f(x) == 8` becomes `assert __hole__("key", (f(x)))`, which records the value and is true; `assert f(x)` records
whether it is true. A name is replaced too (by an opaque cell) if it is bound to literals and every read of it is an
expected value: columns of parametrize, loops over literal rows, constants of the module, fixtures of one line.
Comments, messages, docstrings and explicit ids of parameters are withheld; lines keep their numbers. `values` compares
what was recorded.
"""

from __future__ import annotations

import ast
import inspect
import io
import re
import tokenize
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from unittest import TestCase

from etpi_assets.tasks.guessed import DECISIVE, GUESSABLE, called_name, is_strong, needed_parts, says_words
from etpi_assets.tasks.values import CONSTRUCTORS

Function = ast.FunctionDef | ast.AsyncFunctionDef

_OPERATORS: Mapping[type[ast.cmpop], str] = {
    ast.Eq: "==", ast.NotEq: "!=", ast.In: "in", ast.NotIn: "not in", ast.Is: "is", ast.IsNot: "is not",
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=",
}  # fmt: skip
_METHODS: Mapping[str, str] = {
    **{f"assert{kind}Equal": "==" for kind in ("", "List", "Dict", "Tuple", "Set", "MultiLine")},
    "assertEquals": "==", "assertSequenceEqual": "sequence", "assertNotEqual": "!=", "assertIn": "in",
    "assertNotIn": "not in", "assertIs": "is", "assertIsNot": "is not", "assertCountEqual": "count",
    "assertAlmostEqual": "almost", "assertGreater": ">", "assertLess": "<", "assertGreaterEqual": ">=",
    "assertLessEqual": "<=",
}  # fmt: skip
_TRUTHS: Mapping[str, str] = {
    "assertTrue": "true", "assertFalse": "false", "assertIsNone": "none", "assertIsNotNone": "not none",
}  # fmt: skip
_OPPOSITES: Mapping[str, str] = {
    "assertTrue": "assertFalse", "assertIsNone": "assertIsNotNone", "assertIs": "assertIsNot",
    **{f"assert{name}": f"assertNot{name}" for name in ("Equal", "In", "IsInstance", "Regex", "AlmostEqual")},
}  # fmt: skip
_REVERSED_METHODS = {**_OPPOSITES, **{other: name for name, other in _OPPOSITES.items()}}
_RAISES = ("raises", "assertRaises", "assertRaisesRegex")


@dataclass(frozen=True)
class Assertion:
    """An assertion of a test function.

    Attributes:
        place: its line and column, "12_4".
        kind: value (an expected value was replaced), pair (both sides are computed), bit (a truth or an order), weak
            (a value was replaced, but many others satisfy the assertion), or kept (it still holds its literals).
        strong: an answer satisfies it only if it knows the expected value.
        strong_cells: places of the cells with whose literal it is strong: those of some rows, perhaps.
        often: it stands in a loop over something that the tested code may give.
    """

    place: str
    kind: str
    strong: bool = False
    often: bool = False
    strong_cells: frozenset[str] = frozenset()


@dataclass
class Holed:
    """Test files whose expected values are holes. Test functions are named "path::Class::name".

    Attributes:
        files: path -> text.
        holes: key -> the comparison that `values` makes (op, expected, ...).
        cells: key -> the literal that a cell stands for.
        places: key of a hole or cell -> its path, and its line and column. Keys are random, places are the file's own.
        tests: test function -> its assertions.
        reversible: the functions whose assertion can be reversed without showing an expected value.
    """

    files: dict[str, str] = field(default_factory=dict)
    holes: dict[str, dict[str, Any]] = field(default_factory=dict)
    cells: dict[str, str] = field(default_factory=dict)
    places: dict[str, tuple[str, str]] = field(default_factory=dict)
    tests: dict[str, list[Assertion]] = field(default_factory=dict)
    reversible: set[str] = field(default_factory=set)

    def is_blind(self, test: str, comparisons: Iterable[str] | None = None) -> bool:
        """Return whether a test has a strong hole and no literal is kept in it.

        Args:
            comparisons: the holes that one case of the test compares: places, with those of the cells expected there.
        """
        assertions = {each.place: each for each in self.tests.get(test, [])}
        if any(each.kind == "kept" for each in assertions.values()):
            return False
        if comparisons is None:
            return any(each.strong or each.strong_cells for each in assertions.values())
        split = [comparison.split(" ") for comparison in comparisons]
        compared = [(assertions[place], cells) for place, *cells in split if place in assertions]
        return any(each.strong or not each.strong_cells.isdisjoint(cells) for each, cells in compared)


def dig(
    files: Mapping[str, str], tag: str, kept: Mapping[str, Collection[str]] = {}, reverse: Collection[str] = ()
) -> Holed:
    """Return test files with holes; those that Python cannot parse as they are.

    Args:
        files: path -> text.
        tag: a random word, the start of all keys.
        kept: path -> places of assertions that keep their literals, since a hole does not fit them.
        reverse: test functions of `Holed.reversible` in which an assertion is to be reversed.
    """
    holed = Holed()
    for number, (path, text) in enumerate(files.items()):
        try:
            one = _Digger(path, text, f"{tag}{number}_", kept.get(path, ()), reverse).result()
        except (SyntaxError, ValueError, RecursionError, tokenize.TokenError):
            one = Holed({path: text})
        for name, facts in vars(one).items():
            getattr(holed, name).update(facts)
    return holed


def functions_of(tree: ast.Module | ast.ClassDef) -> Iterator[tuple[str, Function]]:
    """Yield ("Class::name", function) for the tests of a module, and for `check` of programs."""
    for node in tree.body:
        if isinstance(node, Function) and (node.name.startswith("test") or node.name == "check"):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from ((f"{node.name}::{name}", function) for name, function in functions_of(node))


def source_of(text: str, name: str) -> str:
    """Return the lines of a test function ("Class::name") of a file, those of its decorators (rows) too."""
    function = dict(functions_of(ast.parse(text)))[name]
    first = min(node.lineno for node in [function, *function.decorator_list])
    return "\n".join(text.split("\n")[first - 1 : function.end_lineno])


@dataclass
class _Site:
    """An assertion in the tree: the expression to replace, its operator, its one or two sides, and their tolerances."""

    at: ast.expr
    op: str
    sides: list[ast.expr]
    options: dict[str, ast.expr] = field(default_factory=dict)


@dataclass
class _Sides:
    """A site's sides by role: the expected one if it has literals, its other parts, and the value that is tested."""

    kind: str
    expected: ast.expr | None = None
    got: ast.expr | None = None
    leaves: list[ast.expr] = field(default_factory=list)


class _Digger:
    def __init__(self, path: str, text: str, tag: str, kept: Collection[str], reverse: Collection[str]) -> None:
        self.path, self.data, self.tag, self.kept, self.reverse = path, text.encode(), tag, kept, reverse
        self.lines = [0]
        for line in self.data.split(b"\n"):
            self.lines.append(self.lines[-1] + len(line) + 1)
        self.tree = ast.parse(text)
        self.parents = {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}
        self.edits: list[tuple[int, int, str]] = []
        self.made: set[ast.AST] = set()
        self.out = Holed()
        self.used: set[tuple[str, int]] = set()
        self.bindings: dict[tuple[str, int], list[ast.expr]] = {}
        self.reads: dict[tuple[str, int], list[ast.Name]] = {}
        self.names: dict[Function, dict[str, tuple[str, int]]] = {}

    def result(self) -> Holed:
        tests = [(name, function, list(self._sites(function))) for name, function in functions_of(self.tree)]
        for _, function, _ in tests:
            self._bind(function)
        banned = self._banned(tests)
        for name, function, sites in tests:
            cells = {key: bound for key, bound in self.names[function].items() if bound not in banned}
            named = f"{self.path}::{name}"
            reversed_at = self._reversal(named, function, sites, cells)
            replaced = [site for site in sites if site.at not in (_conjuncts(reversed_at) if reversed_at else ())]
            self.out.tests[named] = [self._replace(site, cells, self.names[function]) for site in replaced]
        for bound in self.used:
            for literal in self.bindings[bound]:
                key = self._key(_cell_place(literal))
                self.out.cells[key] = ast.unparse(literal)
                self._put(literal, f"__cell__({key!r})")
        self._withhold()
        return self._finished()

    # --- places ---

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self.lines[node.lineno - 1] + node.col_offset, self.lines[node.end_lineno - 1] + node.end_col_offset

    def _source(self, node: ast.expr) -> str:
        return ast.unparse(node) if node in self.made else self.data[slice(*self._span(node))].decode()

    def _put(self, node: ast.expr | ast.stmt, text: str) -> None:
        """Replace a node by a text that ends with a bracket, and keep the lines of the file."""
        start, end = self._span(node)
        missing = self.data[start:end].count(b"\n") - text.count("\n")
        self.edits.append((start, end, text[:-1] + "\n" * missing + text[-1]))

    def _key(self, place: str) -> str:
        self.out.places[self.tag + place] = self.path, place
        return self.tag + place

    # --- assertions ---

    def _sites(self, function: Function) -> Iterator[_Site]:
        for node in ast.walk(function):
            if isinstance(node, ast.Assert):
                for test in _conjuncts(node.test):
                    yield _site(test)
                if node.msg is not None and not isinstance(node.msg, ast.Name):
                    self._put(node.msg, "('m')")
            elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
                yield from self._method_sites(node.value)
            elif isinstance(node, ast.With | ast.AsyncWith):
                for call in (item.context_expr for item in node.items):
                    if isinstance(call, ast.Call) and called_name(call.func) in _RAISES:
                        yield _Site(call, "raises", [])

    def _method_sites(self, call: ast.Call) -> Iterator[_Site]:
        name, arguments = called_name(call.func), _arguments_of(call)
        if arguments is None or name not in {**_METHODS, **_TRUTHS}:
            return
        message = arguments.pop("msg", None)
        if message is not None and not isinstance(message, ast.Name):
            self._put(message, "('m')")
        if name == "assertTrue":
            inner = _site(arguments["expr"])
            yield _Site(call, inner.op, inner.sides)
        elif name in _TRUTHS:
            yield _Site(call, _TRUTHS[name], [*arguments.values()])
        else:
            sides = [arguments.pop(parameter) for parameter in list(arguments)[:2]]
            typed = arguments.pop("seq_type", None)
            yield _Site(call, "==" if typed else _METHODS[name], sides, arguments)

    def _sides(self, site: _Site, cells: Collection[str]) -> _Sides:
        if site.op == "raises":
            return _Sides("value")
        if len(site.sides) == 1:
            return _Sides("bit", got=site.sides[0])
        whole = [self._is_literal(side, cells) for side in site.sides]
        if all(whole) or not all(self._is_literal(option, ()) for option in site.options.values()):
            return _Sides("kept")
        for expected, got in (site.sides[::-1], site.sides) if not whole[0] else (site.sides, site.sides[::-1]):
            leaves, literals = self._parts(expected)[1:]
            if self._is_literal(expected, cells) or (literals and self._is_shape(expected)):
                return _Sides("value", expected, got, leaves)
        if site.op in ("is", "is not"):
            return _Sides("bit", got=site.sides[0])
        return _Sides("pair", site.sides[1], site.sides[0], [site.sides[1]])

    def _replace(self, site: _Site, cells: Mapping[str, tuple[str, int]], literal: Collection[str]) -> Assertion:
        """Replace a site. `cells`: names that become cells; `literal`: all names that are bound to literals."""
        place, sides, often = _place(site.at), self._sides(site, cells), self._is_often(site.at)
        if sides.kind == "kept" or place in self.kept:
            return Assertion(place, "kept" if sides.kind in ("value", "kept") else sides.kind)
        if site.op == "raises":
            return self._replace_raises(site, place, often=often)
        if sides.kind == "bit":
            return self._replace_bit(site, place, often=often)
        assert sides.got is not None and sides.expected is not None
        flip = sides.got is not site.sides[0]
        if sides.kind == "pair":
            expected = "_l[0]"
        else:
            expected = ast.unparse(ast.fix_missing_locations(ast.Expression(self._parts(sides.expected)[0])))
        bound = [cells[leaf.id] for leaf in sides.leaves if isinstance(leaf, ast.Name) and leaf.id in cells]
        self.used.update(bound)
        hole = {"op": site.op, "expected": expected, "flip": flip}
        hole["options"] = {name: ast.unparse(option) for name, option in site.options.items()}
        self._hole(site.at, hole, ", ".join(f"({self._source(each)})" for each in (sides.got, *sides.leaves)))
        if sides.kind == "pair":
            shown = any(isinstance(side, ast.Name) and side.id in literal for side in site.sides)
            return Assertion(place, "kept" if shown else "pair", often=often)
        tested = {leaf for leaf in sides.leaves if not (isinstance(leaf, ast.Name) and leaf.id in cells)}
        needed = list(needed_parts(sides.expected, tested))
        rows = [each for node in needed if isinstance(node, ast.Name) for each in self.bindings[cells[node.id]]]
        strong = any(is_strong(site.op, node, needle=flip) for node in needed)
        strong_cells = frozenset(_cell_place(each) for each in rows if is_strong(site.op, each, needle=flip))
        return Assertion(place, "value" if site.op in DECISIVE else "weak", strong, often, strong_cells)

    def _hole(self, at: ast.expr, hole: dict[str, Any], values: str, function: str = "hole") -> None:
        key = self._key(_place(at))
        self.out.holes[key] = hole
        self._put(at, f"__{function}__({key!r}, {values})")

    def _replace_bit(self, site: _Site, place: str, *, often: bool) -> Assertion:
        whole = len(site.sides) == 2  # of `is` between computed values
        if whole and not isinstance(site.at, ast.Compare):
            return Assertion(place, "bit")
        value = self._source(site.at if whole else site.sides[0])
        value = f"({value}) is None" if site.op.endswith("none") else f"not not ({value})"
        expected = str(whole or site.op not in ("false", "not none"))
        self._hole(site.at, {"op": "is", "expected": expected, "flip": False, "options": {}}, value)
        return Assertion(place, "bit", often=often)

    def _replace_raises(self, site: _Site, place: str, *, often: bool) -> Assertion:
        call = site.at
        assert isinstance(call, ast.Call)
        arguments = _arguments_of(call) or {}
        expected, match = arguments.get("expected_exception"), arguments.get("match")
        if expected is None or (match is not None and not self._is_literal(match, ())):
            return Assertion(place, "kept")
        classes = expected.elts if isinstance(expected, ast.Tuple) else [expected]
        names = [called_name(each) for each in classes]
        hole = {"op": "raises", "expected": ast.unparse(match) if match else "None", "classes": names}
        self._hole(call, hole, "None" if called_name(call.func) == "raises" else "self.assertRaises", "raises")
        strong = isinstance(match, ast.Constant) and says_words(str(match.value))
        return Assertion(place, "value", strong, often)

    # --- reversal ---

    def _reversal(
        self, name: str, function: Function, sites: list[_Site], cells: Mapping[str, tuple[str, int]]
    ) -> ast.expr | None:
        """Reverse an assertion of the test if it is to be, and return the expression."""
        open_ = {}
        for site in sites:
            sides = self._sides(site, cells)
            kept = _place(site.at) in self.kept
            open_[site.at] = site.op != "raises" and (sides.kind != "value" or kept or self._is_guessable(sides))
        for statement in _reached(function.body):
            if isinstance(statement, ast.Assert) and all(open_.get(part) for part in _conjuncts(statement.test)):
                at: ast.expr = statement.test
            elif isinstance(statement, ast.Expr) and _method(statement.value) and open_.get(statement.value):
                at = statement.value
            else:
                continue
            self.out.reversible.add(name)
            if name not in self.reverse:
                return None
            start, end = self._span(at)
            if isinstance(at, ast.Call) and (other := _method(at)):
                name_end = self._span(at.func)[1]
                self.edits.append((name_end - len(called_name(at.func)), name_end, other))
            else:
                self.edits += [(start, start, "not ("), (end, end, ")")]
            return at
        return None

    def _is_guessable(self, sides: _Sides) -> bool:
        return sides.expected is not None and not sides.leaves and ast.unparse(sides.expected) in GUESSABLE

    # --- names that are expected values ---

    @cached_property
    def _index(self) -> dict[str, list[ast.Name]]:
        index: dict[str, list[ast.Name]] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Name):
                index.setdefault(node.id, []).append(node)
        return index

    def _named(self, scope: Function | ast.Module, name: str, *, loads: bool) -> list[ast.Name]:
        inside = range(scope.lineno, (scope.end_lineno or 0) + 1) if isinstance(scope, Function) else None
        nodes = (node for node in self._index.get(name, []) if inside is None or node.lineno in inside)
        return [node for node in nodes if isinstance(node.ctx, ast.Load) == loads]

    def _bind(self, function: Function) -> None:
        """Note the names that a test reads and that are bound to literals alone."""
        arguments = {a.arg for a in [*function.args.args, *function.args.kwonlyargs]}
        local: dict[str, list[ast.expr]] = {}
        for decorator in function.decorator_list:
            if (
                isinstance(decorator, ast.Call)
                and called_name(decorator.func) == "parametrize"
                and len(decorator.args) > 1
            ):
                direct = all(keyword.arg != "indirect" for keyword in decorator.keywords)
                columns = _columns(_parameters(decorator.args[0]), decorator.args[1]) if direct else ()
                local.update((n, c) for n, c in columns if not self._named(function, n, loads=False))
        for node in ast.walk(function):
            if isinstance(node, ast.For):
                targets = node.target.elts if isinstance(node.target, ast.Tuple) else [node.target]
                columns = _columns([getattr(target, "id", "") for target in targets], node.iter)
                local.update((n, c) for n, c in columns if n and len(self._named(function, n, loads=False)) == 1)
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                name = node.targets[0].id
                stores = [self.parents[store] for store in self._named(function, name, loads=False)]
                values = [s.value for s in stores if isinstance(s, ast.Assign) and len(s.targets) == 1]
                if len(values) == len(stores) and name not in arguments:
                    local[name] = values
        names = self.names.setdefault(function, {})
        for name, literals in local.items():
            self._add(names, name, function.lineno, literals, self._named(function, name, loads=True))
        for node in self.tree.body:
            if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                name, stores = node.targets[0].id, self._named(self.tree, node.targets[0].id, loads=False)
                if name not in arguments and len(stores) == 1 and self._named(function, name, loads=True):
                    self._add(names, name, 0, [node.value], self._named(self.tree, name, loads=True))
            elif isinstance(node, ast.FunctionDef) and node.name in arguments and _fixture(node):
                users = [g for g in ast.walk(self.tree) if isinstance(g, Function) and node.name in _arguments(g)]
                if all(g in {f for _, f in functions_of(self.tree)} for g in users):
                    reads = [read for g in users for read in self._named(g, node.name, loads=True)]
                    self._add(names, node.name, 0, [v for v in [_fixture(node)] if v], reads)

    def _add(
        self, names: dict[str, tuple[str, int]], name: str, line: int, literals: list[ast.expr], reads: list[ast.Name]
    ) -> None:
        if literals and all(self._is_literal(literal, ()) for literal in literals):
            names[name] = (name, line)
            self.bindings[name, line], self.reads[name, line] = literals, reads

    def _banned(self, tests: Iterable[tuple[str, Function, list[_Site]]]) -> set[tuple[str, int]]:
        """Return the bindings of which a read is something else than an expected value."""
        banned: set[tuple[str, int]] = set()
        while True:
            expected: set[ast.expr] = set()
            for _, function, sites in tests:
                cells = {name for name, bound in self.names[function].items() if bound not in banned}
                for site in sites:
                    if _place(site.at) not in self.kept:
                        sides = self._sides(site, cells)
                        expected.update(sides.leaves if sides.kind == "value" else ())
            more = {bound for bound, reads in self.reads.items() if any(read not in expected for read in reads)}
            if more <= banned:
                return banned
            banned |= more

    # --- expressions ---

    def _is_shape(self, node: ast.expr) -> bool:
        """Return whether `values` can evaluate an expression from its leaves."""
        if isinstance(node, ast.Call):
            named = all(keyword.arg for keyword in node.keywords)
            return called_name(node.func) in CONSTRUCTORS and bool(node.args or node.keywords) and named
        shapes = (ast.List, ast.Tuple, ast.Set, ast.Dict, ast.BinOp, ast.UnaryOp, ast.JoinedStr, ast.FormattedValue)
        return isinstance(node, (*shapes, ast.Constant, ast.Starred))

    def _is_literal(self, node: ast.expr, cells: Collection[str]) -> bool:
        _, leaves, literals = self._parts(node)
        return all(isinstance(leaf, ast.Name) and leaf.id in cells for leaf in leaves) and bool(literals or leaves)

    def _parts(self, node: ast.expr) -> tuple[ast.expr, list[ast.expr], list[ast.expr]]:
        """Return (a copy in which leaf i, a part that is no literal, is `_l[i]`; the leaves; the literals)."""
        leaves: list[ast.expr] = []
        literals: list[ast.expr] = []

        def part(e: Any) -> Any:
            if isinstance(e, list):
                return [part(each) for each in e]
            if not isinstance(e, ast.expr | ast.keyword):
                return e  # a name, an operator, or None
            if isinstance(e, ast.FormattedValue):  # formatted in the sandbox: a subclass has a format of its own
                text = ast.copy_location(ast.JoinedStr([e]), e)
                self.made.add(text)
                return ast.FormattedValue(part(text), -1)
            if isinstance(e, ast.keyword):
                return ast.keyword(e.arg, part(e.value))
            if e in self.made or not self._is_shape(e):
                leaves.append(e)
                return ast.Subscript(ast.Name("_l", ast.Load()), ast.Constant(len(leaves) - 1), ast.Load())
            empty = (isinstance(e, ast.List | ast.Tuple) and not e.elts) or (isinstance(e, ast.Dict) and not e.values)
            if isinstance(e, ast.Constant) or empty:
                literals.append(e)
            kind: Any = type(e)
            fields = {name: part(value) for name, value in ast.iter_fields(e) if name != "func"}
            return kind(**fields, **({"func": ast.Name(called_name(e.func))} if isinstance(e, ast.Call) else {}))

        return part(node), leaves, literals

    def _is_often(self, node: ast.AST) -> bool:
        """Return whether a loop around the node may run otherwise with another right solution."""
        while not isinstance(node := self.parents[node], Function | ast.Module):
            if isinstance(node, ast.While) or (isinstance(node, ast.For) and not self._is_literal(node.iter, ())):
                return True
        return False

    # --- the rest of the file ---

    def _withhold(self) -> None:
        """Remove docstrings, and explicit ids of parameters."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Module | ast.ClassDef | Function) and ast.get_docstring(node, clean=False):
                self._put(node.body[0], "('d')")
            elif isinstance(node, ast.Call) and called_name(node.func) in ("parametrize", "param"):
                for keyword in node.keywords:
                    if keyword.arg in ("id", "ids") and self._is_literal(keyword.value, ()):
                        self._put(keyword.value, "(None)")

    def _finished(self) -> Holed:
        kept: list[tuple[int, int, str]] = []
        for edit in sorted(self.edits, key=lambda edit: (edit[0], -edit[1])):  # of nested ones the outer wins
            if not kept or edit[0] >= kept[-1][1]:
                kept.append(edit)
        data = self.data
        for start, end, text in reversed(kept):
            data = data[:start] + text.encode() + data[end:]
        self.out.files[self.path] = text = _without_comments(data.decode())
        ast.parse(text)
        return self.out


def _place(node: ast.expr) -> str:
    return f"{node.lineno}_{node.col_offset}"


def _cell_place(literal: ast.expr) -> str:
    return f"c{_place(literal)}"


def _conjuncts(test: ast.expr) -> list[ast.expr]:
    return test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) else [test]


def _site(test: ast.expr) -> _Site:
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        return _Site(test, _OPERATORS[type(test.ops[0])], [test.left, test.comparators[0]])
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _Site(test, "false", [test.operand])
    method = test.func if isinstance(test, ast.Call) and len(test.args) == 1 else None
    if isinstance(method, ast.Attribute) and method.attr in ("startswith", "endswith"):
        assert isinstance(test, ast.Call)
        return _Site(test, method.attr, [method.value, test.args[0]])
    return _Site(test, "true", [test])


def _method(node: ast.expr) -> str:
    """Return the opposite of a unittest method that a statement calls; "" for others."""
    return _REVERSED_METHODS.get(called_name(node.func), "") if isinstance(node, ast.Call) else ""


def _arguments_of(call: ast.Call) -> dict[str, ast.expr] | None:
    """Return the arguments of a unittest method, or of `raises`, by parameter; None if they do not fit it."""
    name = called_name(call.func)
    method = _raises if name in _RAISES else getattr(TestCase, name.replace("Equals", "Equal"), None)
    starred = any(isinstance(each, ast.Starred) for each in call.args) or any(not k.arg for k in call.keywords)
    if method is None or starred:
        return None
    named: dict[str, Any] = {
        str(keyword.arg).replace("expected_regex", "match"): keyword.value for keyword in call.keywords
    }
    try:
        bound = inspect.signature(method).bind(call, *call.args, **named).arguments
    except TypeError:
        return None
    return {parameter: value for parameter, value in bound.items() if parameter != "self"}


def _raises(self: object, expected_exception: object, match: object = None, msg: object = None) -> None:
    """Have the parameters of `raises`, `assertRaises` and `assertRaisesRegex`, used as a context."""


def _reached(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements that every call reaches, and those of `with` that end with it."""
    for statement in body:
        if not isinstance(statement, Function | ast.ClassDef) and any(
            isinstance(node, ast.Return) for node in ast.walk(statement)
        ):
            return
        yield statement
        if isinstance(statement, ast.With | ast.AsyncWith):
            calls = [item.context_expr for item in statement.items if isinstance(item.context_expr, ast.Call)]
            if not any(called_name(call.func) in (*_RAISES, "suppress") for call in calls):
                yield from _reached(statement.body)


def _arguments(function: Function) -> set[str]:
    return {argument.arg for argument in function.args.args}


def _fixture(node: ast.FunctionDef) -> ast.expr | None:
    """Return the value of a fixture of one line."""
    declared = any("fixture" in ast.dump(decorator) for decorator in node.decorator_list)
    only = node.body[0] if len(node.body) == 1 else None
    return only.value if declared and isinstance(only, ast.Return) else None


def _parameters(names: ast.expr) -> list[str]:
    values = names.elts if isinstance(names, ast.List | ast.Tuple) else [names]
    words = [str(value.value).split(",") for value in values if isinstance(value, ast.Constant)]
    return [word.strip() for each in words for word in each if word.strip()]


def _columns(names: list[str], rows: ast.expr) -> Iterator[tuple[str, list[ast.expr]]]:
    """Yield (name, its expression in each row) where all rows have one."""
    if not isinstance(rows, ast.List | ast.Tuple):
        return
    for at, name in enumerate(names):
        cells = [_cell(row, at, len(names)) for row in rows.elts]
        column = [cell for cell in cells if cell is not None]
        if column and len(column) == len(cells):
            yield name, column


def _cell(row: ast.expr, at: int, width: int) -> ast.expr | None:
    if isinstance(row, ast.Call) and called_name(row.func) == "param":
        return row.args[at] if at < len(row.args) else None
    if width == 1:
        return row
    return row.elts[at] if isinstance(row, ast.List | ast.Tuple) and len(row.elts) == width else None


def _without_comments(text: str) -> str:
    lines = text.split("\n")
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and not re.search(r"coding[:=]", token.string):
            row, column = token.start[0] - 1, token.start[1]
            lines[row] = lines[row][:column].rstrip()
    return "\n".join(lines)
