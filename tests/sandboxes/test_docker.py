"""Tests of the container sandbox only; tests of both kinds of sandbox are in `test_sandboxes`."""

from __future__ import annotations

import os
import subprocess
import threading
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from docker.errors import APIError

from etpi_resources.sandboxes import (
    Environment,
    EnvironmentUnavailable,
    Limits,
    SandboxUnavailable,
    docker,
    guest_connection,
)
from etpi_resources.sandboxes.docker import DockerFactory
from etpi_resources.sandboxes.docker_owner import OWNER, owner, reap
from tests.support.container_engine import IMAGE
from tests.support.waiting import until

MIB = 1 << 20
SMALL = Limits(command_seconds=20, file_bytes=16 * MIB, memory_bytes=256 * MIB)


@pytest.fixture
def client(engine):
    with DockerFactory().create({}) as sandbox:
        yield sandbox._engine.client


def start(environment: Environment | None = None) -> None:
    with DockerFactory().create({}, SMALL, environment):
        pass


def dockerfile(folder: Path, *lines: str) -> Environment:
    folder.mkdir(exist_ok=True)
    (folder / "Dockerfile").write_text("\n".join([f"FROM {IMAGE}", *lines, ""]))
    return Environment("/repo", build=folder)


# --- what is missing -----------------------------------------------------------------------------------------------


def test_missing_engine_is_reported_with_the_remedy(monkeypatch):
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")
    with pytest.raises(SandboxUnavailable, match="(?s)podman.*DOCKER_HOST.*bubblewrap"):
        start()


def test_image_that_cannot_be_pulled_is_reported_with_the_remedy(engine, monkeypatch):
    with pytest.raises(EnvironmentUnavailable, match="(?s)localhost:1/absent:1 .*docker pull"):
        start(Environment(image="localhost:1/absent:1"))
    monkeypatch.setenv("ETPI_DOCKER_IMAGE", "localhost:1/absent:2")
    with pytest.raises(SandboxUnavailable, match="(?s)localhost:1/absent:2.*ETPI_DOCKER_IMAGE"):
        start()
    with pytest.raises(EnvironmentUnavailable, match="checkout"):
        start(Environment(checkout=Path("/usr")))


@pytest.mark.parametrize(
    ("message", "remedy"),
    [("write /x: no space left on device", "docker system prune"), ("denied by a policy", "log")],
)
def test_full_or_refusing_engine_is_reported_with_the_remedy(engine, monkeypatch, message, remedy):
    from docker import APIClient
    from docker.errors import APIError

    def refuse(*_: object, **__: object) -> None:
        raise APIError("500 Server Error", explanation=message)

    monkeypatch.setattr(APIClient, "create_container", refuse)
    with pytest.raises(SandboxUnavailable, match=f"(?s){message}.*{remedy}"):
        start()


@pytest.mark.parametrize("again", [False, True])
def test_command_after_the_engine_stops_gives_no_result_of_its_own(engine, again):
    # Leaving it raises too: its container ended, perhaps with the last command.
    with suppress(SandboxUnavailable), DockerFactory().create({}, SMALL) as sandbox:
        assert sandbox.run("echo up").output == "up\n"
        engine.stop()
        try:
            if again:
                engine.start()
            with suppress(SandboxUnavailable):
                assert sandbox.run("echo x").output == "x\n"
        finally:
            if not again:
                engine.start()
    start()


@pytest.mark.parametrize(
    ("events", "is_closed", "own_kills", "stop"),
    [
        ({"start": None, "die": "0"}, True, 0, "its container was ended"),
        ({"die": "1"}, True, 0, ""),
        ({"die": "137"}, True, 0, "SIGKILL"),
        ({"oom": None, "die": "137"}, True, 1, ""),
        ({"oom": None, "die": "137"}, True, 0, "SIGKILL"),
        ({"die": None}, True, 0, "its container was ended"),
        ({}, True, 1, "its connection was cut"),
        ({}, False, 0, ""),
    ],
)
def test_container_that_was_ended_from_outside_is_told_from_a_guest_that_ended(
    monkeypatch, events, is_closed, own_kills, stop
):
    """Engines report a lack of memory of the container and of the machine alike, if at all."""
    monkeypatch.setattr(guest_connection, "GRACE_SECONDS", 0.1)
    sandbox = DockerFactory().create({})
    answers = [{"Action": name, "Actor": {"Attributes": {"exitCode": status}}} for name, status in events.items()]
    sandbox._engine = cast(Any, SimpleNamespace(client=SimpleNamespace(events=lambda **_: answers)))
    sandbox._stream = sandbox._channel = cast(Any, SimpleNamespace(is_closed=lambda: is_closed))
    sandbox._group = cast(Any, SimpleNamespace(kills=lambda: own_kills))
    assert sandbox._stopped_by() == stop


# --- images --------------------------------------------------------------------------------------------------------


def test_image_is_built_once_for_concurrent_sandboxes(engine, tmp_path, monkeypatch):
    from docker import APIClient

    built, build = [], APIClient.build

    def recorded_build(self: APIClient, **options: object) -> object:
        built.append(options["tag"])
        return build(self, **options)

    monkeypatch.setattr(APIClient, "build", recorded_build)
    (tmp_path / "context").mkdir()
    (tmp_path / "context" / "note.txt").write_text("from the image\n")
    environment = dockerfile(tmp_path / "context", "COPY note.txt /repo/note.txt", "ENV COLOUR=green")
    factory, results = DockerFactory(), []

    def work() -> None:
        with factory.create({"own.txt": "own\n"}, SMALL, environment) as sandbox:
            results.append((sandbox.run("pwd; echo $COLOUR; cat note.txt own.txt").output, sandbox.read_files()))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    files = {"note.txt": "from the image\n", "own.txt": "own\n"}
    assert results == [("/repo\ngreen\nfrom the image\nown\n", files)] * 3
    assert len(built) == 1


def test_failed_build_is_reported_with_the_cause(engine, tmp_path):
    with pytest.raises(EnvironmentUnavailable, match="nothing.txt"):
        start(dockerfile(tmp_path / "bad", "COPY nothing.txt /repo/"))
    (tmp_path / "none").mkdir()
    with pytest.raises(EnvironmentUnavailable, match="Dockerfile"):
        start(Environment(build=tmp_path / "none"))


def test_image_without_python_is_reported(engine, tmp_path):
    folder = tmp_path / "bare"
    environment = dockerfile(folder)
    for line in subprocess.run(["ldd", "/bin/sh"], capture_output=True, text=True).stdout.split():
        if line.startswith("/"):
            (folder / "root" / line[1:]).parent.mkdir(parents=True, exist_ok=True)
            (folder / "root" / line[1:]).write_bytes(Path(line).read_bytes())
            (folder / "root" / line[1:]).chmod(0o755)
    (folder / "root" / "bin").mkdir(exist_ok=True)
    (folder / "root" / "bin" / "sh").write_bytes(Path("/bin/sh").read_bytes())
    (folder / "root" / "bin" / "sh").chmod(0o755)
    (folder / "Dockerfile").write_text("FROM scratch\nCOPY root /\n")
    with pytest.raises(EnvironmentUnavailable, match=r"Python 3\.9"):
        start(environment)


# --- a task's own image --------------------------------------------------------------------------------------------


def test_disk_use_in_a_tasks_image_is_bounded(engine, tmp_path):
    environment = dockerfile(tmp_path / "context", "WORKDIR /repo")
    with DockerFactory().create({"a.txt": "a\n"}, SMALL, environment) as sandbox:
        result = sandbox.run("i=0; while :; do i=$((i+1)); head -c 5000000 /dev/zero > fill$i; sleep 0.05; done")
        assert result.exit_code == 137 and "[ended: more than 16 MiB of disk]" in result.output
        assert result.seconds < 10
        assert "16 MiB of disk" in sandbox.run("while :; do head -c 100000 /dev/zero >> fill1; done").output
        assert sandbox.run("rm -f fill*; sleep 0.6; cat a.txt").output == "a\n"
        assert sandbox.run("head -c 5000000 /dev/zero > some; sleep 0.7; echo fits").output == "fits\n"
        assert sandbox.run("head -c 30000000 /dev/zero > one").exit_code != 0


@pytest.mark.parametrize(("failures", "ended"), [(2, False), (1000, True)])
def test_disk_that_cannot_be_measured_for_a_while(engine, tmp_path, monkeypatch, failures, ended):
    """podman fails to measure a container if a file is deleted meanwhile."""
    monkeypatch.setattr(docker, "MOST_UNMEASURED", 4)
    with DockerFactory().create({}, SMALL, dockerfile(tmp_path / "context", "WORKDIR /repo")) as sandbox:
        measure, calls = sandbox._engine.client.containers, []

        def containers(**query):
            calls.append(query)
            if len(calls) <= failures:
                raise APIError("500", explanation="lstat /x/diff/repo/d1/f: no such file or directory")
            return measure(**query)

        monkeypatch.setattr(sandbox._engine.client, "containers", containers)
        result = sandbox.run("sleep 4; echo there")
        assert ("16 MiB of disk" in result.output, result.exit_code) == ((True, 137) if ended else (False, 0)), result
        assert len(calls) > 3


def test_command_in_a_tasks_image_has_no_privileges(engine, tmp_path):
    environment = dockerfile(tmp_path / "context", "WORKDIR /repo")
    with DockerFactory().create({}, SMALL, environment) as sandbox:
        status = sandbox.run("cat /proc/self/status").output
        assert "CapEff:\t0000000000000000" in status and "NoNewPrivs:\t1" in status
        for command in (
            "mount -t tmpfs none /tmp",
            "chroot / true",
            "echo 1 > /proc/sys/vm/swappiness",
            "cat /proc/1/mem",
        ):
            assert sandbox.run(command).exit_code != 0, command
        assert sandbox.run("bomb() { bomb | bomb & }; bomb; sleep 30", timeout=1.5).exit_code != 0
        assert sandbox.run("echo on").output == "on\n"


# --- what is left behind -------------------------------------------------------------------------------------------


def test_start_removes_containers_of_dead_processes_only(client, engine):
    ended = subprocess.Popen(["true"])
    ended.wait()
    this_process = owner()
    prefix = this_process.rsplit(" ", 2)[0]
    host, boot, namespace = prefix.split(" ")
    owners = {
        "dead": f"{prefix} {ended.pid} 1",
        "reused pid": f"{prefix} {os.getpid()} 1",
        "earlier boot": f"{host} another-boot {namespace} 1 1",
        "living": this_process,
        "other host": f"other-host {boot} {namespace} 1 1",
        "other pid namespace": f"{host} {boot} 1 1 1",
    }
    containers = {
        name: client.create_container(IMAGE, labels={OWNER: label}, command=["sleep", "60"])["Id"]
        for name, label in owners.items()
    }
    foreign = client.create_container(IMAGE, command=["sleep", "60"])["Id"]
    try:
        removed = set(reap(client))
        assert {name for name, container in containers.items() if container in removed} == {
            "dead",
            "reused pid",
            "earlier boot",
        }
        start()
        remaining = {container["Id"] for container in client.containers(all=True)}
        assert foreign in remaining
        assert {containers[name] for name in ("living", "other host", "other pid namespace")} <= remaining
    finally:
        for container in client.containers(all=True, filters={"status": "created"}):
            client.remove_container(container["Id"], force=True)


def test_container_has_its_owners_label_and_is_removed_when_left(client, engine):
    before = set(engine.containers())
    with DockerFactory().create({}, SMALL) as sandbox:
        assert client.inspect_container(sandbox._id)["Config"]["Labels"] == {OWNER: owner()}
    until(lambda: set(engine.containers()) <= before, 10)


def test_runtime_that_podman_would_ignore_is_refused(engine, monkeypatch):
    monkeypatch.setenv("ETPI_DOCKER_RUNTIME", "runsc")
    with pytest.raises(SandboxUnavailable, match="podman --runtime runsc"):
        start()
