"""Run a whole program inside a sandbox and print all that it wrote, first to stdout, then to stderr; or one line if it
does not end in time.

`interpreter` starts it with the program's file, the seconds and the bytes of memory as its arguments. It uses only the
standard library, and the host never imports it.
"""

import resource
import subprocess
import sys

UNFINISHED = "no stdout here"


def main(path, seconds, memory):
    """Run the program; return its exit code."""
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    memory = memory if most == resource.RLIM_INFINITY else min(memory, most)
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    command = [sys.executable, "-B", path]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        print(UNFINISHED)
        return 1
    sys.stdout.buffer.write(done.stdout + done.stderr)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3])))
