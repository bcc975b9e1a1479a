"""Run one cell of a Python session inside a sandbox, with the names that earlier cells defined.

`interpreter` starts it with the session's folder as its argument; the code is in `cell.py` there. It uses only the
standard library, and the host never imports it. Because no process outlives a command in a sandbox, a file carries the
session: imports, functions and classes as source that every cell executes again, other names as their values. The last
line of the output lists the names that could not be saved. As at a Python prompt, the value of a last expression is
printed.
"""

import _ast
import io
import marshal
import os
import sys
import types

FILE = "<cell>"
# Types that marshal restores exactly. It turns some others into bytes (a bytearray, for example), so those are pickled.
SCALARS = (type(None), bool, int, float, complex, str, bytes)
PATH = list(sys.path)


def main(folder):
    """Run the folder's cell; return whether it failed."""
    with open(os.path.join(folder, "cell.py"), encoding="utf-8") as file:
        code = file.read()
    main_module = types.ModuleType("__main__")
    # Classes and functions are pickled by the name of their module, so the session has to be that module.
    sys.modules["__main__"] = main_module
    names = main_module.__dict__
    path = os.path.join(folder, "state")
    state = {"sources": {}, "scalars": {}, "pickled": {}}
    if os.path.exists(path):
        with open(path, "rb") as file:
            state = marshal.load(file)
    restore(names, state)
    failed = run(code, names)
    unsaved = save(path, names, state["sources"], code)
    sys.stdout.flush()
    if unsaved:
        print(f"[not kept for the next call: {', '.join(unsaved)}]")
    return failed


def restore(names, state):
    """Restore the session's names: definitions first, because values may be instances of their classes.

    A definition that fails because it needs a value is executed again after the values.
    """
    waiting = [source for source in state["sources"].values() if not execute(source, names)]
    names.update(state["scalars"])
    for name, data in state["pickled"].items():
        try:
            names[name] = standard_library("pickle").loads(data)
        except Exception:
            continue
    for source in waiting:
        execute(source, names)


def parse(code):
    tree = compile(code, FILE, "exec", _ast.PyCF_ONLY_AST)
    assert isinstance(tree, _ast.Module)
    return tree


def standard_library(name):
    """Import a module of the standard library, even if the workspace has a file of that name.

    It is imported only when needed: these modules take longer to import than Python takes to start, and most cells need
    none of them.
    """
    path, sys.path[:] = list(sys.path), PATH
    try:
        return __import__(name)
    finally:
        sys.path[:] = path


def execute(source, names):
    """Execute a definition; return whether it succeeded."""
    try:
        exec(compile(source, FILE, "exec"), names)
    except Exception:
        return False
    return True


def run(code, names):
    """Run a cell's code and print an error as Python does; return whether it failed."""
    try:
        tree = parse(code)
        last = tree.body[-1] if tree.body else None
        if isinstance(last, _ast.Expr):
            tree.body.pop()
        exec(compile(tree, FILE, "exec"), names)
        if isinstance(last, _ast.Expr):
            value = eval(compile(_ast.Expression(last.value), FILE, "eval"), names)
            if value is not None:
                print(repr(value))
    except SystemExit as end:
        return bool(end.code)
    except BaseException as error:
        sys.stdout.flush()
        traceback = standard_library("traceback")
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == FILE]
        if frames:
            print("Traceback (most recent call last):")
            print("".join(f"  line {frame.lineno}, in {frame.name}\n" for frame in frames), end="")
        print("".join(traceback.format_exception_only(type(error), error)), end="")
        return True
    return False


def save(path, names, earlier_sources, code):
    """Write the session to `path`; return the names that could not be saved, sorted."""
    try:
        body = parse(code).body
    except SyntaxError:
        body = []
    sources = dict(earlier_sources)
    for node in body:
        for name in defined(node):
            if name in names:
                sources[name] = source_of(code, node)
    scalars, pickled, unsaved = {}, {}, []
    for name, value in names.items():
        if name.startswith("__") or isinstance(value, types.ModuleType):
            continue
        if name in sources and is_definition(value):
            continue
        sources.pop(name, None)
        if type(value) in SCALARS:
            scalars[name] = value
            continue
        try:
            pickled[name] = standard_library("pickle").dumps(value)
        except Exception:
            unsaved.append(name)
    for name in [name for name in sources if name not in names]:
        del sources[name]
    with open(path + ".new", "wb") as file:
        marshal.dump({"sources": sources, "scalars": scalars, "pickled": pickled}, file)
    os.replace(path + ".new", path)
    return sorted(unsaved)


def defined(node):
    """Return the names that a statement defines and that are saved as source."""
    if isinstance(node, (_ast.Import, _ast.ImportFrom)):
        return [(alias.asname or alias.name).split(".")[0] for alias in node.names]
    if isinstance(node, (_ast.FunctionDef, _ast.AsyncFunctionDef, _ast.ClassDef)):
        return [node.name]
    if isinstance(node, _ast.Assign) and isinstance(node.value, _ast.Lambda):
        return [target.id for target in node.targets if isinstance(target, _ast.Name)]
    return []


def source_of(code, node):
    """Return a statement's source, with its decorators."""
    if not getattr(node, "decorator_list", None):
        return standard_library("ast").get_source_segment(code, node)
    lines = code.split("\n")
    return "\n".join(lines[node.decorator_list[0].lineno - 1 : node.end_lineno])


def is_definition(value):
    return callable(value) or isinstance(value, type)


if __name__ == "__main__":
    sys.stdout = io.TextIOWrapper(sys.stdout.buffer, encoding="utf-8", errors="replace", line_buffering=True)
    sys.path.insert(0, "")  # cells can import modules that the session wrote into the workspace
    sys.exit(main(sys.argv[1]))
