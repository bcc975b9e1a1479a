"""Runs inside a sandbox: call functions of the patched trees and print their values. The caller compares them.

Usage: `python3 hidden_tests.py NONCE SECONDS`. The file `plan` beside it is a Python literal: [{job, tree, calls: {key:
[path, function, arguments]}}], each key quoted as JSON. Each job runs in a child process and prints
`NONCE JOB {key: values or null}` as JSON; a job whose child process dies or times out prints no values.

It does not import `json`, which imports `re`: both take nearly as long as the interpreter's start, in every verdict.
"""

import os
import select
import sys
import time

SIGKILL = 9
"""signal.SIGKILL; importing `signal` would take longer than most tests."""


def load(path):
    """Return the names that a module defines. Uses exec: in a child process an import costs more than the tests."""
    with open(path, encoding="utf-8") as file:
        code = compile(file.read(), path, "exec")
    names = {"__name__": "tested", "__file__": path}
    exec(code, names)
    return names


def child(job, output):
    """Run a job in the forked child, with stdin, stdout and stderr on /dev/null; write the report to `output`."""
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.chdir(job["tree"])
    sys.path.insert(0, os.getcwd())
    report = {}
    for feature, (path, function, arguments) in job["calls"].items():
        try:
            call = load(path)[function]
            values = [call(argument) for argument in arguments]
            report[feature] = values if all(type(value) is int for value in values) else "null"
        except Exception:
            report[feature] = "null"
    # The repr of a list of integers is its JSON, and the keys are quoted already.
    lines = [f"{feature}: {values}" for feature, values in report.items()]
    os.write(output, ("{" + ", ".join(lines) + "}").encode())


def collect(job, seconds):
    """Fork the job's child process and return its report; empty if there is none within `seconds`."""
    readable, writable = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(readable)
        try:
            os.setsid()
            child(job, writable)
        finally:
            os._exit(0)
    os.close(writable)
    report, deadline = b"", time.monotonic() + seconds
    while len(report) < 1 << 16:
        ready, _, _ = select.select([readable], [], [], max(0.0, deadline - time.monotonic()))
        chunk = os.read(readable, 1 << 16) if ready else b""
        if not chunk:
            break
        report += chunk
    os.close(readable)
    try:  # noqa: SIM105 - contextlib is one more import
        os.killpg(pid, SIGKILL)
    except ProcessLookupError:
        pass
    os.waitpid(pid, 0)
    return report


def main(nonce, seconds):
    with open("plan", encoding="utf-8") as file:
        plan = eval(file.read(), {"__builtins__": {}})  # the host wrote it; no tested code has run here yet
    for job in plan:
        report = collect(job, seconds).decode(errors="replace").replace("\n", " ")
        print(nonce, job["job"], report, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
