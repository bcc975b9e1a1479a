"""One cell of a Python session inside a sandbox: what earlier cells defined is there, and what this one defines stays.

Belongs here: what runs beside the code of a cell. Does not belong here: starting it (`interpreter`), isolation. Started
with the session's folder as its argument, whose `cell.py` is the code; never imported by the host, standard library
alone. No process outlives a command in a sandbox, so a session is kept in a file: imports, functions and classes as
source that is run again, every other name as the value it had. What cannot be kept is named at the end of the output.

As at a prompt, the value of a last expression is shown.
"""

import _ast
import io
import marshal
import os
import sys
import types

FILE = "<cell>"
# What marshal gives back as it was; of other types it keeps some as bytes (a bytearray), so those are pickled.
SCALARS = (type(None), bool, int, float, complex, str, bytes)
PATH = list(sys.path)


def main(folder):
    with open(os.path.join(folder, "cell.py"), encoding="utf-8") as file:
        code = file.read()
    main_module = types.ModuleType("__main__")
    # Classes and functions are pickled by their module's name, so the session is that module.
    sys.modules["__main__"] = main_module
    names = main_module.__dict__
    state = os.path.join(folder, "state")
    kept = {"sources": {}, "scalars": {}, "pickled": {}}
    if os.path.exists(state):
        with open(state, "rb") as file:
            kept = marshal.load(file)
    restore(names, kept)
    failed = run(code, names)
    lost = save(state, names, kept["sources"], code)
    sys.stdout.flush()
    if lost:
        print(f"[not kept for the next call: {', '.join(lost)}]")
    return failed


def restore(names, kept):
    """Definitions first, since values may be of their classes; those that need values once more after them."""
    waiting = [source for source in kept["sources"].values() if not quietly(source, names)]
    names.update(kept["scalars"])
    for name, data in kept["pickled"].items():
        try:
            names[name] = library("pickle").loads(data)
        except Exception:
            continue
    for source in waiting:
        quietly(source, names)


def parsed(code):
    tree = compile(code, FILE, "exec", _ast.PyCF_ONLY_AST)
    assert isinstance(tree, _ast.Module)
    return tree


def library(name):
    """A module of the standard library, not of the workspace, once it is needed: those used here take longer to import
    than Python takes to start, and most cells need none of them."""
    path, sys.path[:] = list(sys.path), PATH
    try:
        return __import__(name)
    finally:
        sys.path[:] = path


def quietly(source, names):
    try:
        exec(compile(source, FILE, "exec"), names)
    except Exception:
        return False
    return True


def run(code, names):
    """Run a cell's code; whether it failed, which has then been said as Python says it."""
    try:
        tree = parsed(code)
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
        traceback = library("traceback")
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == FILE]
        if frames:
            print("Traceback (most recent call last):")
            print("".join(f"  line {frame.lineno}, in {frame.name}\n" for frame in frames), end="")
        print("".join(traceback.format_exception_only(type(error), error)), end="")
        return True
    return False


def save(state, names, known, code):
    """Write the session down; the names that could not be kept, sorted."""
    try:
        body = parsed(code).body
    except SyntaxError:
        body = []
    sources = dict(known)
    for node in body:
        for name in defined(node):
            if name in names:
                sources[name] = whole(code, node) if decorated(node) else library("ast").get_source_segment(code, node)
    scalars, pickled, lost = {}, {}, []
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
            pickled[name] = library("pickle").dumps(value)
        except Exception:
            lost.append(name)
    for name in [name for name in sources if name not in names]:
        del sources[name]
    with open(state + ".new", "wb") as file:
        marshal.dump({"sources": sources, "scalars": scalars, "pickled": pickled}, file)
    os.replace(state + ".new", state)
    return sorted(lost)


def defined(node):
    """The names that a statement defines as source."""
    if isinstance(node, (_ast.Import, _ast.ImportFrom)):
        return [(alias.asname or alias.name).split(".")[0] for alias in node.names]
    if isinstance(node, (_ast.FunctionDef, _ast.AsyncFunctionDef, _ast.ClassDef)):
        return [node.name]
    if isinstance(node, _ast.Assign) and isinstance(node.value, _ast.Lambda):
        return [target.id for target in node.targets if isinstance(target, _ast.Name)]
    return []


def decorated(node):
    return bool(getattr(node, "decorator_list", None))


def whole(code, node):
    """A definition's source with its decorators."""
    lines = code.split("\n")
    return "\n".join(lines[node.decorator_list[0].lineno - 1 : node.end_lineno])


def is_definition(value):
    return callable(value) or isinstance(value, type)


if __name__ == "__main__":
    sys.stdout = io.TextIOWrapper(sys.stdout.buffer, encoding="utf-8", errors="replace", line_buffering=True)
    sys.path.insert(0, "")  # what the session writes into the workspace can be imported
    sys.exit(main(sys.argv[1]))
