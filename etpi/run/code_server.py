"""The code server of a command: Dagster's run launcher starts the processes of the command's runs in it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import dagster as dg

from etpi.run import CodeServerError
from etpi_resources.process.supervise import descendants, supervised

LOCATION, MODULE = "etpi", "etpi_assets.definitions"
"""The code location's name, as in `etpi/workspace.yaml`, and its module."""
GRACE_SECONDS = 10.0
"""Time for runs to end in order when this process is killed."""
_START_SECONDS = 300.0
_POLL_SECONDS = 0.1
_DAGSTER = (sys.executable, "-m", "dagster")


class CodeServer:
    """A running code server and the runs that it launches."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path, home: Path, env: Mapping[str, str]) -> None:
        self._process, self._home, self._env = process, home, env
        self._workspace = folder / "workspace.yaml"
        place = {"socket": str(folder / "socket"), "location_name": LOCATION}
        self._workspace.write_text(json.dumps({"load_from": [{"grpc_server": place}]}))  # JSON is YAML

    @property
    def ended(self) -> bool:
        """Return whether it has ended, and with it every run that it launched on this machine."""
        return self._process.poll() is not None

    def kill(self) -> None:
        """End it at once: in order, it would wait for seconds. No run may need it any more."""
        for pid in descendants(self._process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()

    def launch(self, job: str, run_id: str, tags: Mapping[str, str], assets: Sequence[str] | None = None) -> None:
        """Have the instance's run launcher start a run of a job, or of the named ones of its assets.

        Raises:
            CodeServerError: it cannot.
        """
        selection = ["--op-selection", ",".join(assets)] if assets else []
        command = ["job", "launch", "-w", str(self._workspace), "-l", LOCATION, "-j", job, *selection]
        # In its home, where no `.env` names another DAGSTER_HOME; in a session of its own, because a Ctrl-C that ended
        # it halfway would leave a run that nobody follows.
        done = subprocess.run(
            [*_DAGSTER, *command, "--tags", json.dumps(tags), "--run-id", run_id],
            cwd=self._home, env=self._env, capture_output=True, text=True, check=False, start_new_session=True,
        )  # fmt: skip
        if done.returncode:
            raise CodeServerError(f"{job} cannot be launched: {_last_line(done.stderr)}")


@contextmanager
def code_server(instance: dg.DagsterInstance, folder: Path, variables: Mapping[str, str]) -> Iterator[CodeServer]:
    """Run a code server while the context lasts. It and the runs that it launched end with this process.

    Args:
        folder: an empty folder for its socket; sockets allow no path of more than 100 characters.
        variables: environment variables that it and its runs get.

    Raises:
        CodeServerError: it does not start.
    """
    home = Path(instance.root_directory)
    env = {**os.environ, **variables, "DAGSTER_HOME": str(home)}
    arguments = ["-m", MODULE, "--location-name", LOCATION, "--socket", str(folder / "socket")]
    command = [*_DAGSTER, "api", "grpc", *arguments, "--use-python-environment-entry-point"]
    log = home / "code_server.log"
    with log.open("ab") as output:
        output.truncate(0)
        process = subprocess.Popen(
            supervised(command, grace=GRACE_SECONDS),
            env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
        )  # fmt: skip
    try:
        deadline = time.monotonic() + _START_SECONDS
        while not (folder / "socket").exists():
            if process.poll() is not None or time.monotonic() > deadline:
                reason = _last_line(log.read_text(errors="replace"))
                raise CodeServerError(f"Dagster's code server did not start: {reason}\nIts log is {log}")
            time.sleep(_POLL_SECONDS)
        yield CodeServer(process, folder, home, env)
    finally:
        process.terminate()
        process.wait()


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "no reason given")
