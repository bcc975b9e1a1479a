"""Parse one Python file into definitions, each with a hash of its meaning and the names that it refers to.

The hash covers a normal form without comments, docstrings and formatting. `codebase` resolves the names to other files.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property

from etpi_assets.planning.versioning.moved import Import, Moves, Scope

BODY = "<module>"
"""The name for top-level statements that define nothing; they run whenever the module is imported."""
MAIN = "<main>"
"""The name for the `if __name__ == "__main__"` block, which runs when the module is the program."""

ATTRIBUTES = frozenset(
    ("property", "cached_property", "staticmethod", "classmethod", "abstractmethod", "contextmanager", "override")
)
"""Decorators under which a method still runs only if code names it."""


@dataclass
class Definition:
    """A top-level function, class or variable, or BODY or MAIN.

    Attributes:
        parts: its statements; for a `shell`, the parts of the class that are not methods.
        scope: the names of its file.
        home: its module, as code versions name it.
        bases: for a class, the dotted names of its base classes.
        annotations: for a class, the dotted names in its fields' annotations.
        methods: for a class, its methods by name.
        shell: for a class, the class without its methods.
        hooks: for a class, the methods that may run although no code names them: `__dunder__` methods, and methods with
            a decorator outside ATTRIBUTES.
        inputs: its parameters that are assets; the asset's own function may have the same name.
    """

    parts: Sequence[ast.AST]
    scope: Scope
    home: str
    bases: list[tuple[str, ...]] = field(default_factory=list)
    annotations: set[tuple[str, ...]] = field(default_factory=set)
    methods: dict[str, Definition] = field(default_factory=dict)
    shell: Definition | None = None
    hooks: set[str] = field(default_factory=set)
    inputs: set[str] = field(default_factory=set)

    @cached_property
    def digest(self) -> str:
        """Hash of its normal form and of the targets of its imported names, 16 hex digits; "" without statements.

        It is computed on first use, because most definitions of a file are never reached.
        """
        if not self.parts:
            return ""
        text: list[str] = []
        for part in self.parts:
            write_normal_form(part, text.append, self.scope)
        bound = sorted(self.scope.bound({name[0] for name in self.names}, self.home))
        return digest_of("".join(text) + "\0" + "\0".join(bound))

    @cached_property
    def _references(self) -> tuple[set[tuple[str, ...]], set[str], set[str]]:
        names, attributes, texts = set[tuple[str, ...]](), set[str](), set[str]()
        for part in self.parts:
            _collect(part, names, attributes, texts)
        return {name for name in names if name[0] not in self.inputs}, attributes, texts

    @property
    def names(self) -> set[tuple[str, ...]]:
        """The dotted names that it refers to, each as a tuple: `a.b.c` is ("a", "b", "c")."""
        return self._references[0]

    @property
    def attributes(self) -> set[str]:
        """Every attribute name that it uses, on any object."""
        return self._references[1]

    @property
    def texts(self) -> set[str]:
        """Its string constants."""
        return self._references[2]


@dataclass
class Source:
    """A parsed file.

    Attributes:
        definitions: name -> definition.
        imports: imported name -> its targets, including imports inside functions.
        imported: the dotted names that are imported when the file is imported.
    """

    definitions: dict[str, Definition]
    imports: dict[str, set[Import]]
    imported: set[str]


def parse(text: str, module: str, is_package: bool, moves: Moves) -> Source:
    """Parse a module's source; its dotted name resolves relative imports. Raises SyntaxError."""
    tree = ast.parse(text)
    imports: dict[str, set[Import]] = {}
    for node in _statements(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for name, target in _bound(node, module, is_package).items():
                imports.setdefault(name, set()).add(target)
    statements: dict[str, list[ast.stmt]] = {BODY: [], MAIN: []}
    imported: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            imported |= {str(target) for target in _bound(node, module, is_package).values()}
        elif _is_docstring(node) or (isinstance(node, ast.If) and _mentions(node.test, "TYPE_CHECKING")):
            continue
        elif isinstance(node, ast.If) and _mentions(node.test, "__name__"):
            statements[MAIN].append(node)
        else:
            for name in _defined(node) or [BODY]:
                statements.setdefault(name, []).append(node)
    scope = Scope(module, frozenset(statements), imports, moves)
    definitions = {name: _definition(nodes, scope, scope.original(name)[0]) for name, nodes in statements.items()}
    return Source(definitions, imports, imported)


# --- the normal form -------------------------------------------------------------------------------------------------


def write_normal_form(node: object, write: Callable[[str], object], scope: Scope) -> None:
    """Write the tree as text, without positions, docstrings and descriptions of spec fields, with earlier names.

    Empty fields are left out too, because they differ between Python versions.
    """
    if isinstance(node, ast.AST):
        write(f"({type(node).__name__}")
        for name in node._fields:
            value = getattr(node, name, None)
            if value is None or value == [] or name in _WITHOUT_MEANING:
                continue
            if name in _BODIES and isinstance(value, list):
                value = [statement for statement in value if not _is_docstring(statement)]
            if name == "keywords" and isinstance(node, ast.Call) and _named(node.func) == "Field":
                value = [keyword for keyword in value if keyword.arg != "description"]
            if isinstance(value, str):
                value = _earlier(node, name, value, scope)
            write(f" {name}=")
            write_normal_form(value, write, scope)
        write(")")
    elif isinstance(node, list):
        write("[")
        for item in node:
            write_normal_form(item, write, scope)
            write(",")
        write("]")
    else:
        write(f"{type(node).__name__}:{node!r}")


def _earlier(node: ast.AST, name: str, value: str, scope: Scope) -> str:
    """Return the text of a syntax node's field, with earlier names in place of today's."""
    if isinstance(node, ast.Constant):
        return scope.moves.original(value)
    is_name = name == "id" or (
        name == "name" and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    )
    return scope.renamed(value) if is_name else value


_WITHOUT_MEANING = frozenset(("ctx", "type_comment", "kind"))
_BODIES = ("body", "orelse", "finalbody", "handlers", "cases")
"""The fields of syntax nodes that contain statements, directly or in handlers and cases."""


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield every statement below a node, at any depth; these include all imports."""
    for name in _BODIES:
        children = getattr(node, name, ())
        for child in children if isinstance(children, list) else ():
            yield child
            yield from _statements(child)


def _definition(statements: Sequence[ast.stmt], scope: Scope, home: str) -> Definition:
    if not any(_declares(decorator) for s in statements for decorator in getattr(s, "decorator_list", ())):
        scope = scope.without("asset")  # where it is no decorator, it is a local variable
    definition = Definition([_as_hashed(s) for s in statements], scope, home)
    definition.inputs |= {name for statement in statements for name in _inputs(statement)}
    for statement in statements:
        if isinstance(statement, ast.ClassDef):
            definition.bases += [
                dotted(base.value if isinstance(base, ast.Subscript) else base) for base in statement.bases
            ]
            methods: dict[str, list[ast.stmt]] = {}
            for node in statement.body:
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    methods.setdefault(node.name, []).append(node)
                    if node.name.startswith("__") or not {*map(_named, node.decorator_list)} <= ATTRIBUTES:
                        definition.hooks.add(node.name)
                elif isinstance(node, ast.AnnAssign):
                    _collect(node.annotation, definition.annotations, set(), set())
            definition.methods |= {name: _definition(parts, scope, home) for name, parts in methods.items()}
            definition.shell = _shell(statement, scope, home)
    return definition


def _shell(statement: ast.ClassDef, scope: Scope, home: str) -> Definition:
    """Return a class without its docstrings and without its methods, which have their own definitions."""
    functions = ast.FunctionDef | ast.AsyncFunctionDef
    rest = [node for node in statement.body if not (isinstance(node, functions) or _is_docstring(node))]
    return Definition([*statement.bases, *statement.keywords, *statement.decorator_list, *rest], scope, home)


def digest_of(text: str) -> str:
    """Return the first 16 hex digits of the sha256 of a text."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _collect(node: ast.AST, names: set[tuple[str, ...]], attributes: set[str], texts: set[str]) -> None:
    """Add the dotted names, attribute names and string constants of a tree to the three sets."""
    if isinstance(node, ast.Attribute):
        attributes.add(node.attr)
        if name := dotted(node):
            names.add(name)
            attributes.update(name[1:])
            return
    elif isinstance(node, ast.Name):
        names.add((node.id,))
        return
    elif _is_docstring(node):
        return
    elif isinstance(node, ast.Constant):
        if isinstance(node.value, str):
            texts.add(node.value)
        return
    for child in ast.iter_child_nodes(node):
        _collect(child, names, attributes, texts)


# --- helpers on syntax trees -----------------------------------------------------------------------------------------


def _bound(node: ast.Import | ast.ImportFrom, module: str, is_package: bool) -> dict[str, Import]:
    if isinstance(node, ast.Import):
        return {
            alias.asname or alias.name.split(".")[0]: Import(alias.name if alias.asname else alias.name.split(".")[0])
            for alias in node.names
        }
    home = module.split(".") if is_package else module.split(".")[:-1]
    prefix = home[: len(home) - node.level + 1] if node.level else []
    source = ".".join([*prefix, *([node.module] if node.module else [])])
    return {alias.asname or alias.name: Import(source, alias.name) for alias in node.names}


def _defined(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AnnAssign):
        targets = [node.target]
    names: list[str] = []
    for target in targets:
        items = target.elts if isinstance(target, ast.Tuple) else [target]
        if not all(isinstance(item, ast.Name) for item in items):
            return []
        names += [item.id for item in items if isinstance(item, ast.Name)]
    return names


def dotted(node: ast.AST) -> tuple[str, ...]:
    """Return `a.b.c` as ("a", "b", "c"); () for other expressions."""
    attributes: list[str] = []
    while isinstance(node, ast.Attribute):
        attributes.append(node.attr)
        node = node.value
    return (node.id, *reversed(attributes)) if isinstance(node, ast.Name) else ()


def _as_hashed(statement: ast.stmt) -> ast.stmt:
    """Return the function of an asset with nothing of its declaration but its name and its checks.

    The other arguments of `@asset` and the inputs are in the input key itself, or decide what runs and when.
    """
    if not isinstance(statement, ast.FunctionDef) or not any(map(_declares, statement.decorator_list)):
        return statement
    decorators: list[ast.expr] = [
        ast.Call(d.func, [ast.Constant(statement.name)], [k for k in d.keywords if k.arg == "checks"])
        if isinstance(d, ast.Call) and _declares(d)
        else d
        for d in statement.decorator_list
    ]
    hashed, hashed.args = copy(statement), copy(statement.args)
    hashed.decorator_list = decorators
    hashed.args.args = [a for a in statement.args.args if a.arg not in _inputs(statement)]
    return hashed


def _declares(decorator: ast.AST) -> bool:
    return isinstance(decorator, ast.Call) and dotted(decorator.func) == ("asset",)


def _inputs(node: ast.AST) -> set[str]:
    arguments = node.args.args if isinstance(node, ast.FunctionDef) else []
    return {a.arg for a in arguments if isinstance(a.annotation, ast.Name) and a.annotation.id == "Input"}


def _named(node: ast.AST) -> str:
    """Return the last name of a dotted name, or of the function that is called."""
    return (dotted(node.func if isinstance(node, ast.Call) else node) or ("",))[-1]


def _mentions(node: ast.AST, name: str) -> bool:
    return any(isinstance(n, ast.Name) and n.id == name for n in ast.walk(node))


def _is_docstring(node: object) -> bool:
    """Return whether a statement is only a string: the docstring of a module, class, function or variable."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
