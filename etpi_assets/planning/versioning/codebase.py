"""The project's sources as a graph of definitions: resolve references, and hash the code that a definition reaches.

`source` parses one file; `choices` says which alternatives a spec selects.

References lead from definition to definition, not from file to file, so an edit of one function does not affect code
that uses only the other functions of its module. A module that is passed around as a value, or started by its name
(`"etpi_resources.trainers.workers.sft_worker"`), cannot be analysed further and counts as a whole.
"""

from __future__ import annotations

import gc
import json
import re
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from etpi_assets.planning.versioning.definitions import BODY, MAIN, Definition, Source, digest_of, parse
from etpi_assets.planning.versioning.moved import REWRITTEN, Import, Moves

PACKAGES = ("etpi_assets", "etpi_resources")
ROOT = Path(__file__).resolve().parents[3]
SQL_IN_WHEEL = "etpi_resources/sql/"
DATA_SUFFIXES = (".sql", ".jinja", ".md", ".toml", ".json", ".txt", ".css", ".html")
SECTION = "etpi_assets.specs.section:Section"
"""The base class of spec tables. The hash of the resolved spec covers their fields, so only their methods count."""
SPEC_HOOKS = ("model_validator", "field_validator", "model_serializer", "field_serializer")

CALLED_ELSEWHERE = {"etpi_resources.engines.slots:SlotView": "transformers uses it as the cache of its layers"}
"""Classes without a base from another package whose methods another package calls anyway, with the reason."""
_PLAIN_BASES = {"Protocol", "Generic", "ABC", "NamedTuple", "Exception", "RuntimeError", "ValueError"}
"""Base classes from other packages that call only methods with two underscores."""

Target = str
"""The target of a reference: "module:name" (a definition), "module:*" (a whole module), "module:!" (a module run as a
program), or a path from the root (a data file)."""


@dataclass(frozen=True)
class CodeVersion:
    """The code that something depends on.

    Attributes:
        definitions: {module or data file: {definition: digest}}, by their earlier names (`moved`); a data file has one,
            named "".
    """

    definitions: Mapping[str, Mapping[str, str]]

    @cached_property
    def modules(self) -> dict[str, str]:
        """{module or data file: 16 hex digits}, sorted."""
        return {
            name: digest_of(json.dumps(self.definitions[name], sort_keys=True)) for name in sorted(self.definitions)
        }

    @cached_property
    def digest(self) -> str:
        """16 hex digits over `modules`."""
        return digest_of(json.dumps(self.modules))


class LaterVersion(CodeVersion):
    """A version whose digest is known; its definitions are computed when they are read."""

    def __init__(self, digest: str, compute: Callable[[], CodeVersion]) -> None:
        self.__dict__ |= {"digest": digest, "_compute": compute}

    @cached_property
    def definitions(self) -> Mapping[str, Mapping[str, str]]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.__dict__["_compute"]().definitions


@dataclass
class Filter:
    """Restrict a walk over the references.

    Attributes:
        leaves_out: whether the walk does not enter a module.
        edges: (definition, the targets of its references) -> the targets to follow.
        dotted: the end of a dotted name, such as ("resources", "sandboxes") -> targets to add if reached code has it.
    """

    leaves_out: Callable[[str], bool] = lambda module: False
    edges: Callable[[Target, set[Target]], Iterable[Target]] = lambda definition, targets: targets
    dotted: Mapping[tuple[str, ...], Iterable[Target]] = field(default_factory=dict)


class Codebase:
    """The sources of packages below a root folder. Each file is read once, when it is first reached."""

    def __init__(self, root: Path = ROOT, packages: Sequence[str] = PACKAGES, moves: Moves | None = None) -> None:
        self.root, self.packages, self.moves = root, tuple(packages), moves or Moves()
        self._sources: dict[str, Source | None] = {}
        self._edges: dict[Target, set[Target]] = {}
        self._files: dict[str, str] = {}
        self._paths: dict[str, Path | None] = {}
        self._methods: dict[Target, dict[str, Target]] = {}
        self._by_method: dict[Target, bool] = {}

    # --- files -----------------------------------------------------------------------------------------------------

    def path(self, module: str) -> Path | None:
        """Return the file of a first-party module."""
        if module not in self._paths:
            base = self.root.joinpath(*module.split("."))
            files = (base.with_suffix(".py"), base / "__init__.py") if module.split(".")[0] in self.packages else ()
            self._paths[module] = next((path for path in files if path.is_file()), None)
        return self._paths[module]

    def source(self, module: str) -> Source | None:
        """Return the parsed file of a first-party module; None for any other name."""
        if module not in self._sources:
            path = self.path(module)
            self._sources[module] = path and parse(
                path.read_text("utf-8"), module, path.name == "__init__.py", self.moves
            )
        return self._sources[module]

    @cached_property
    def modules(self) -> list[str]:
        """Every first-party module, sorted."""
        paths = [p.relative_to(self.root) for package in self.packages for p in (self.root / package).rglob("*.py")]
        return sorted(".".join((p.parent if p.name == "__init__.py" else p.with_suffix("")).parts) for p in paths)

    @cached_property
    def data(self) -> list[str]:
        """Every data file of the packages except specs, and the SQL files as sql/..., as sorted paths from the root."""
        specs, sql = self.root / "etpi_assets" / "specs", self.file("sql")
        paths = [p for name in self.packages for p in (self.root / name).rglob("*") if p.suffix in DATA_SUFFIXES]
        data = [p for p in paths if p.is_file() and specs not in p.parents and SQL_IN_WHEEL not in p.as_posix()]
        queries = [f"sql/{p.relative_to(sql).as_posix()}" for p in sql.rglob("*.sql")]
        return sorted([*(p.relative_to(self.root).as_posix() for p in data), *queries])

    def file(self, path: str) -> Path:
        """Return the path of a data file; an installed wheel has sql/ inside a package."""
        place = self.root / path
        return place if place.exists() or not path.startswith("sql") else self.root / "etpi_resources" / path

    def file_digest(self, path: str) -> str:
        """Return the digest of a data file in its normal form."""
        if path not in self._files:
            self._files[path] = digest_of(normal_text(path, self.file(path).read_text("utf-8")))
        return self._files[path]

    # --- walking ---------------------------------------------------------------------------------------------------

    def reach(self, roots: Iterable[Target], narrowed: Filter | None = None) -> CodeVersion:
        """Return the code that the roots refer to, directly or indirectly.

        Raises:
            KeyError: a root is not in the code.
        """
        walk = _Walk(self, narrowed or Filter())
        with _no_garbage_collection():
            for root in roots:
                if not self.exists(root):
                    raise KeyError(f"{root} is not in the code; it was renamed or removed")
                walk.add(root)
            return walk.version()

    def exists(self, target: Target) -> bool:
        module, colon, name = target.partition(":")
        if not colon:
            return self.file(target).is_file()
        source = self.source(module)
        return source is not None and (name in ("*", "!") or name in source.definitions)

    def definition(self, target: Target) -> Definition:
        """Return the definition that "module:name" names; "module:Class.method" is one of a class."""
        module, _, name = target.partition(":")
        source = self.source(module)
        assert source is not None, target
        head, _, method = name.partition(".")
        return source.definitions[head].methods[method] if method else source.definitions[head]

    def edges(self, target: Target) -> set[Target]:
        """Return the targets of a definition's references."""
        if target not in self._edges:
            module, counted = target.split(":")[0], self.counted(target)
            if self.is_section(target):
                names, texts = self.definition(target).annotations, set[str]()
            else:
                names, texts = counted.names, counted.texts
            targets = {t for name in names for t in self.resolve(module, name)}
            targets |= {t for text in texts for t in self._named(module, text)}
            self._edges[target] = targets - {target}
        return self._edges[target]

    def is_section(self, target: Target) -> bool:
        """Return whether a definition is a table of a spec."""
        module, _, name = target.partition(":")
        if target == SECTION or "." in name:
            return target == SECTION
        bases = self.definition(target).bases
        return any(
            self.is_section(t) for base in bases for t in self.resolve(module, base) if ":" in t and t[-1] != "*"
        )

    def by_method(self, target: Target) -> bool:
        """Return whether each method of a class counts only if reached code names it.

        This holds for classes whose bases are in this project, unless another package may call their methods, as etpi
        calls those of a plugin.
        """
        if target not in self._by_method:
            module, _, name = target.partition(":")
            definition = self.definition(target)
            self._by_method[target] = (
                self.packages == PACKAGES
                and "." not in name
                and target not in CALLED_ELSEWHERE
                and definition.shell is not None
                and not self.is_section(target)
                and all(self._own_base(module, base) for base in definition.bases)
            )
        return self._by_method[target]

    def _own_base(self, module: str, base: tuple[str, ...]) -> bool:
        targets = self.resolve(module, base)
        return not _PLAIN_BASES.isdisjoint(base[-1:]) or (
            bool(targets) and all(":" in t and t[-1] not in "*!" and self.by_method(t) for t in targets)
        )

    def counted(self, target: Target) -> Definition:
        """Return the part of a definition that is hashed where it is reached; for a class, all but methods."""
        definition = self.definition(target)
        return definition.shell if definition.shell and self.by_method(target) else definition

    def methods(self, target: Target) -> dict[str, Target]:
        """Return the methods of a class by name, except those that pydantic calls to build the resolved spec."""
        if target not in self._methods:
            methods = self.definition(target).methods
            if self.is_section(target):
                methods = {n: m for n, m in methods.items() if {name[0] for name in m.names}.isdisjoint(SPEC_HOOKS)}
            self._methods[target] = {name: f"{target}.{name}" for name in methods}
        return self._methods[target]

    def resolve(self, module: str, name: tuple[str, ...]) -> set[Target]:
        """Return the targets of a dotted name in a module; none for local variables, builtins and other packages."""
        source = self.source(module)
        if source is None:
            return set()
        head, rest = name[0], name[1:]
        if head in source.definitions:
            return {f"{module}:{head}"}
        return {target for imported in source.imports.get(head, ()) for target in self._imported(imported, rest)}

    def _imported(self, imported: Import, rest: tuple[str, ...]) -> set[Target]:
        if self.path(imported.module) is None:
            return set()
        if imported.attribute is not None:
            return self._member(imported.module, (imported.attribute, *rest))
        return self._member(imported.module, rest)

    def _member(self, module: str, rest: tuple[str, ...]) -> set[Target]:
        """Return the targets of `rest` in a module: a definition, a submodule, or a name that the module imports."""
        if not rest:
            return {f"{module}:*"}
        source = self.source(module)
        assert source is not None
        if rest[0] in source.definitions:
            return {f"{module}:{rest[0]}"}
        if self.path(f"{module}.{rest[0]}") is not None:
            return self._member(f"{module}.{rest[0]}", rest[1:])
        if rest[0] in source.imports:
            return {t for imported in source.imports[rest[0]] for t in self._imported(imported, rest[1:])}
        return {f"{module}:*"}

    def _named(self, module: str, text: str) -> Iterable[Target]:
        """Return the targets that a string constant names: a module to run, or a data file in or below the folder."""
        if text.split(".")[0] in self.packages and self.path(text) is not None:
            return [f"{text}:!"]
        if not re.fullmatch(r"[\w./-]+\.\w+", text):
            return []
        path = self.path(module)
        assert path is not None
        if text.endswith(".py") and (path.parent / text).is_file():
            inner = ".".join((path.parent / text).relative_to(self.root).with_suffix("").parts)
            return [f"{inner}:*", f"{inner}:!"]
        home = path.parent.relative_to(self.root).as_posix()
        below = [p for p in self.data if p.endswith(f"/{text}") and p.startswith((f"{home}/", "sql/"))]
        return below


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Turn garbage collection off: for syntax trees it takes as long as parsing, and they have no cycles."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class _Walk:
    """One traversal. A method is reached when reached code uses an attribute of its name, on any object."""

    def __init__(self, code: Codebase, narrowed: Filter) -> None:
        self._code, self._narrowed = code, narrowed
        self._reached: dict[Target, str] = {}
        self._todo: list[Target] = []
        self._attributes: set[str] = set()
        self._waiting: dict[str, list[Target]] = {}
        self._modules: set[str] = set()

    def add(self, target: Target) -> None:
        if ":" in target and self._narrowed.leaves_out(target.split(":")[0]):
            return
        if target not in self._reached:
            self._reached[target] = ""
            self._todo.append(target)

    def version(self) -> CodeVersion:
        while self._todo:
            self._visit(self._todo.pop())
        definitions: dict[str, dict[str, str]] = {}
        for target, digest in self._reached.items():
            original = self._code.moves.original(target)
            recorded = REWRITTEN.get((original, digest), {original: digest}) if digest else {}
            for definition, version in recorded.items():
                module, _, name = definition.partition(":")
                definitions.setdefault(module, {})[name] = version
        return CodeVersion(definitions)

    def _visit(self, target: Target) -> None:
        module, colon, name = target.partition(":")
        if not colon:
            self._reached[target] = self._code.file_digest(target)
            return
        self._enter(module)
        if name == "*":
            source = self._code.source(module)
            assert source is not None
            for other in source.definitions:
                if other != MAIN:
                    self.add(f"{module}:{other}")
        elif name == "!":
            self.add(f"{module}:{MAIN}")
        else:
            section = self._code.is_section(target)
            for other in self._narrowed.edges(target, self._code.edges(target)):
                self.add(other)
            if not section:
                counted = self._code.counted(target)
                self._reached[target] = counted.digest
                self._read(counted)
            if section or self._code.by_method(target):
                self._offer(self._code.methods(target), () if section else self._code.definition(target).hooks)

    def _read(self, definition: Definition) -> None:
        """Record the attributes that reached code uses, and reach the methods of these names."""
        for end, targets in self._narrowed.dotted.items():
            # The first test is cheap and excludes most definitions.
            if definition.attributes.issuperset(end[1:]) and any(name[-len(end) :] == end for name in definition.names):
                for other in targets:
                    self.add(other)
        # A string may be an argument of getattr.
        for name in (definition.attributes | definition.texts) - self._attributes:
            self._attributes.add(name)
            for method in self._waiting.pop(name, ()):
                self.add(method)

    def _offer(self, methods: Mapping[str, Target], hooks: Collection[str] = ()) -> None:
        """Reach the methods of a class that reached code names, now or later."""
        for name, method in methods.items():
            if name in self._attributes or name in hooks:
                self.add(method)
            else:
                self._waiting.setdefault(name, []).append(method)

    def _enter(self, module: str) -> None:
        """Reach the top-level statements of a module and of its imports, which run when it is imported."""
        if module in self._modules or self._narrowed.leaves_out(module):
            return
        self._modules.add(module)
        source = self._code.source(module)
        if source is None:
            return
        self.add(f"{module}:{BODY}")
        parents = {module.rpartition(".")[0]} - {""}
        for name in source.imported | parents:
            if self._code.path(name) is not None:
                self._enter(name)
            elif self._code.path(name.rpartition(".")[0]) is not None:
                self._enter(name.rpartition(".")[0])


def normal_text(path: str, text: str) -> str:
    """Return a data file without the parts that cannot affect a result.

    These are comments and layout in SQL, and comments in Jinja and TOML. All other files are returned unchanged.
    """
    if path.endswith(".sql"):
        parts = re.findall(r"'(?:[^']|'')*'|\"[^\"]*\"|--[^\n]*|/\*.*?\*/|\s+|[^\s'\"/-]+|.", text, re.DOTALL)
        words = [" " if part.isspace() or part.startswith(("--", "/*")) else part for part in parts]
        return re.sub(r" +", " ", "".join(words)).strip()
    if path.endswith(".jinja"):
        return re.sub(r"\{#.*?#\}", "", text, flags=re.DOTALL)
    if path.endswith(".toml"):
        return json.dumps(tomllib.loads(text), sort_keys=True, default=str)
    return text
