"""Rollouts by a foreign harness: it runs unmodified in the task's sandbox, and the proxy records its calls.

The sandbox sees one folder of the host: the proxy's socket, the forwarder that makes it a port of the sandbox's own
loopback, and the files with the attempt's key. Nothing else can be reached from it. Budgets, the time limit and the end
are enforced from outside; the workspace is then graded as it is.
"""

from __future__ import annotations

import json
import os
import secrets
import shlex
import shutil
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from etpi_assets.agent.actions import read_actions
from etpi_assets.agent.loop import AgentLoop, AgentState, RolloutJob, RolloutRuntime, run_rollout, start_files
from etpi_assets.agent.think import post_think_tokens, think_tokens
from etpi_assets.specs.harness import HarnessSection
from etpi_assets.specs.paths import expand
from etpi_assets.tasks.family import Role, Verdict
from etpi_assets.trajectories.assemble import Role as Role_
from etpi_assets.trajectories.assemble import assemble
from etpi_assets.trajectories.records import AgentRecord, RolloutRecord
from etpi_resources.capture.conversation import SystemRefused
from etpi_resources.capture.store import CallLog, read_log
from etpi_resources.engines import EngineUnavailable
from etpi_resources.sandboxes import CommandResult, Environment
from etpi_resources.sandboxes.downloads import forward
from etpi_resources.sandboxes.downloads.proxy import SHOWN_AT
from etpi_resources.sandboxes.guest_connection import GuestConnection

if TYPE_CHECKING:
    from etpi_resources.capture.server import Attempt

PORT = 8200
"""The port of the sandbox's loopback that is forwarded to the proxy."""

GRACE_SECONDS = 3.0
"""The time that a harness has to end by itself once its budget is used up."""

TRAINED: Mapping[str, tuple[Role_, ...]] = {
    "record": (),
    "train": ("helper", "summary"),
    "all": ("helper", "summary", "side", "dropped"),
}
"""The roles besides main whose calls are turns. A discarded `retry` had no effect on what the harness did."""

_GIB = 2**30
_PROCESSES, _FILE_BYTES = 256, 256 * 2**20
_TASK_FILE = "/tmp/task.md"
_TAIL = 1500


class _Memory:
    """The memory of this machine. Each attempt in this process takes its limit of it, or waits: a model's server takes
    more attempts at once than may fit."""

    def __init__(self, gib: float) -> None:
        self._gib, self._free, self._changed = gib, gib, threading.Condition()

    @contextmanager
    def reserved(self, gib: float) -> Iterator[None]:
        gib = min(gib, self._gib)
        with self._changed:
            self._changed.wait_for(lambda: self._free >= gib)
            self._free -= gib
        try:
            yield
        finally:
            with self._changed:
                self._free += gib
                self._changed.notify_all()


_MEMORY = _Memory(psutil.virtual_memory().total / _GIB)


def run_harness(job: RolloutJob, runtime: RolloutRuntime, calls: Path | None = None) -> RolloutRecord:
    """Roll the job's task out once by the harness of its agent section, and grade its workspace.

    Args:
        calls: the folder that keeps the logs of calls; None: they are removed with the attempt.

    Raises:
        SandboxUnavailable, EngineUnavailable: every other rollout would fail in the same way, also because the harness
            is missing, or because the student's template refuses its requests.
    """
    return run_rollout(job, runtime, partial(HarnessLoop, calls=calls))


class HarnessLoop(AgentLoop):
    """One attempt of a harness. Its task has one role."""

    def __init__(
        self, job: RolloutJob, runtime: RolloutRuntime, record: RolloutRecord, calls: Path | None = None
    ) -> None:
        super().__init__(job, runtime, record)
        assert job.agent.harness
        self.harness, self.calls = job.agent.harness, calls
        self.folder = require_installed(self.harness)
        if self.harness.later_system and not self.chat.roles.later_system:
            raise EngineUnavailable(
                f"{self.harness.name} sends system messages within a conversation, and the template of "
                f"{self.chat.name!r} takes none there, so a server of the student would refuse its requests. Use "
                "another harness, or a chat template that takes them"
            )
        self.figures: dict[str, Any] = {}
        self.other_roles: set[str] = set()

    def start(self, stack: ExitStack) -> None:
        """Open the sandbox and the proxy."""
        from etpi_resources.capture.server import CaptureServer  # a web server: `etpi status` imports every asset

        family = self.runtime.family
        roles = family.roles(self.task)
        if len(roles) != 1:
            raise EngineUnavailable(
                f"{self.task.task_id} has {len(roles)} agents that work together, and a harness is one; use a suite "
                'whose tasks have one agent, or kind = "live"'
            )
        stack.enter_context(_MEMORY.reserved(self.harness.memory_gib))
        needs, files = family.needs(self.task), family.workspace(self.task, roles[0])
        self.shown = stack.enter_context(_shown_folder())
        self.attempt, log = self._attempt(roles[0])
        stack.callback(log.close)
        stack.enter_context(CaptureServer({self.attempt.name: self.attempt}.get, socket=self.shown / "socket"))
        limits = replace(
            needs.limits,
            memory_bytes=max(needs.limits.memory_bytes, int(self.harness.memory_gib * _GIB)),
            address_bytes=int(self.harness.address_gib * _GIB),
            processes=max(needs.limits.processes, _PROCESSES),
            file_bytes=max(needs.limits.file_bytes, _FILE_BYTES),
        )
        environment = needs.environment or Environment()
        environment = replace(environment, tools=(*environment.tools, self.folder), downloads=self.shown)
        sandbox = stack.enter_context(self.runtime.sandboxes.create(files, limits, environment))
        record = AgentRecord(roles[0].agent_id, roles[0].feature_id, "main", "Error")
        self.record.agents.append(record)
        agent = AgentState(roles[0], sandbox, record, [], [], {})
        self.agents.append(agent)
        agent.start = files if needs.environment is None else start_files(sandbox, needs)

    def run(self) -> None:
        """Run the harness to its end, or end it, and read the calls that it made.

        Raises:
            EngineUnavailable: a call failed in a way in which every other would.
            RuntimeError: a call failed otherwise, the harness made none, or none of its conversations has the task.
        """
        self.stage = "harness"
        (agent,) = self.agents
        self._write_start()
        done = threading.Event()
        watch = threading.Thread(target=self._end_if_over, args=(agent, done), name="harness budget", daemon=True)
        watch.start()
        try:
            result = agent.sandbox.run(f"bash {SHOWN_AT}/start.sh", timeout=self.harness.seconds)
        finally:
            done.set()
            watch.join()
            self.attempt.revoked = True
            self.attempt.log.close()
        self._read_calls(agent)
        if (failure := self.attempt.failure) is not None:
            if isinstance(failure, EngineUnavailable | SystemRefused):
                raise EngineUnavailable(str(failure)) from failure
            raise failure
        if not self.figures["calls"]:
            from etpi_resources.capture.server import HIDDEN

            output = result.output.replace(self.attempt.key, HIDDEN)[-_TAIL:]
            raise RuntimeError(f"{self.harness.name} made no call, exit {result.exit_code}: {output}")
        if not agent.record.turns and "helper" in self.other_roles:
            raise RuntimeError(
                f"{self.harness.name} made {self.figures['calls']} calls, and no conversation contains the task, so "
                "none is the main one; pass the text of {task_file} to the harness unchanged"
            )
        agent.exit = self._exit(result)

    def grade(self) -> Verdict:
        verdict = super().grade()
        return replace(verdict, details={**verdict.details, "capture": self.figures})

    def _exit(self, result: CommandResult) -> str:
        if self.attempt.limit or result.timed_out:
            return "LimitsExceeded"
        return "HarnessError" if result.exit_code else "Submitted"

    def _attempt(self, role: Role) -> tuple[Attempt, CallLog]:
        from etpi_resources.capture.server import Attempt, Budget, new_key

        name = f"{self.record.rollout_id}-{secrets.token_hex(4)}"
        log = CallLog((self.calls or self.shown.parent / "calls") / f"{name}.jsonl")
        budget = Budget(self.section.max_model_len, self.harness.max_calls, self.harness.max_output_tokens)
        attempt = Attempt(
            name,
            new_key(),
            self.engine,
            self.chat,
            log,
            self.sampler,
            budget,
            session=self.record.rollout_id,
            template_kwargs=self.runtime.template_kwargs,
            privileged={"task": self.task, "role": role, "payload": self.task.payload, "form": self.chat.tool_form},
        )
        return attempt, log

    def _write_start(self) -> None:
        """Write the files that the sandbox sees: the harness's own, and the script that starts it."""
        role, harness = self.agents[0].role, self.harness
        values = {
            "folder": str(self.folder),
            "base_url": f"http://127.0.0.1:{PORT}/a/{self.attempt.name}",
            "key": self.attempt.key,
            "task_file": _TASK_FILE,
        }
        files = {path: harness.filled(text, values) for path, text in harness.files.items()}
        lines = [f"python3 -I -S {SHOWN_AT}/forward.py {SHOWN_AT}/socket {PORT} || exit 125"]
        for number, (path, text) in enumerate({_TASK_FILE: role.instruction, **files}.items()):
            self._show(f"file{number}", text)
            lines.append(f"mkdir -p {shlex.quote(str(Path(path).parent))} || exit 125")
            lines.append(f"cat {SHOWN_AT}/file{number} > {shlex.quote(path)} || exit 125")
        lines += [f"export {name}={shlex.quote(harness.filled(text, values))}" for name, text in harness.env.items()]
        lines.append(harness.filled(harness.command, values))
        self._show("start.sh", "\n".join(lines) + "\n")

    def _show(self, name: str, text: str) -> None:
        path = self.shown / name
        path.write_text(text, encoding="utf-8")
        path.chmod(0o644)  # readable by the sandbox's user under any umask

    def _end_if_over(self, agent: AgentState, done: threading.Event) -> None:
        """End the harness once a budget is used up or a call failed."""
        while not done.is_set():
            assert isinstance(agent.sandbox, GuestConnection)
            if self.attempt.over.wait(0.1) and not done.wait(0.0 if self.attempt.failure else GRACE_SECONDS):
                agent.sandbox.end_command()
                done.wait(1.0)

    def _read_calls(self, agent: AgentState) -> None:
        assembled = assemble(
            read_log(self.attempt.log.path),
            agent.role.instruction.strip(),
            partial(read_actions, form=self.chat.tool_form),
            main=agent.record,
            trained=TRAINED[self.harness.helpers],
        )
        self.record.agents[:] = assembled.agents
        self.record.tools, self.figures = assembled.tools, assembled.figures
        self.other_roles = {*self.figures["untrained"], *(record.role for record in assembled.agents[1:])}
        for turn in (turn for record in assembled.agents for turn in record.turns):
            tail = self.chat.tail_form(turn.prompt_ids or [])
            turn.think_tokens = think_tokens(turn.output_ids or [], self.chat, tail)
            turn.post_think_tokens = post_think_tokens(turn.output_ids or [], self.chat, tail)


def require_installed(harness: HarnessSection) -> Path:
    """Return the folder of a harness. Raises EngineUnavailable if its version is not installed there."""
    folder = expand(harness.folder).absolute()
    kind, _, name = harness.package.partition(":")
    if kind == "npm":
        install = f"npm install --prefix {harness.folder} {name}@{harness.version}"
        manifest = folder / "node_modules" / name / "package.json"
        installed = json.loads(manifest.read_text())["version"] if manifest.is_file() else None
    elif kind == "pip":
        python = f"{harness.folder}/venv"
        install = f"/usr/bin/python3 -m venv {python} && {python}/bin/pip install {name}=={harness.version}"
        pattern = f"venv/lib/python*/site-packages/{name.replace('-', '_')}-*.dist-info"
        installed = next(
            (path.name.removesuffix(".dist-info").rpartition("-")[2] for path in folder.glob(pattern)), None
        )
    else:
        install, installed = "install it there", harness.version if folder.is_dir() else None
    if installed != harness.version:
        state = f'has version {installed} (version = "{installed}" runs it)' if installed else "has none"
        raise EngineUnavailable(f"{harness.name} {harness.version} is to run, but {harness.folder} {state}: {install}")
    return folder


@contextmanager
def _shown_folder() -> Iterator[Path]:
    """Create the folder that the sandbox sees, with the key in it, closed to other users.

    Sandboxes that root starts run as separate users, so there only the random name keeps others out.
    """
    private = Path(tempfile.mkdtemp(prefix="etpi-capture-"))
    try:
        private.chmod(0o711 if os.geteuid() == 0 else 0o700)
        shown = private / secrets.token_hex(8)
        shown.mkdir()
        shown.chmod(0o755)
        shutil.copy(str(forward.__file__), shown / "forward.py")
        (shown / "forward.py").chmod(0o644)
        yield shown
    finally:
        shutil.rmtree(private, ignore_errors=True)
