"""Servers on the loopback address: moto and SeaweedFS of S3's protocol, from PyPI; Azurite of Azure's, from npm."""

from __future__ import annotations

import base64
import contextlib
import hmac
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from email.utils import formatdate
from pathlib import Path

import httpx

from tests.support.container_engine import die_with_parent
from tests.support.waiting import until
from tests.support.web_server import free_port

KINDS = ("moto", "seaweedfs")
_KEYS = {"AWS_ACCESS_KEY_ID": "tests", "AWS_SECRET_ACCESS_KEY": "secret-of-the-tests", "AWS_REGION": "us-east-1"}


@contextlib.contextmanager
def server(kind: str, folder: Path) -> Iterator[Mapping[str, str]]:
    """Run a server with an empty bucket `lakes`; yield the variables that name it, keys included."""
    port = free_port()
    ports = {name: free_port() for name in ("master", "volume", "filer")}
    grpc = {f"{name}.port.grpc": free_port() for name in (*ports, "s3")}
    programs = {
        "moto": ["moto_server", "-H", "127.0.0.1", "-p", str(port)],
        "seaweedfs": ["weed", "-logtostderr=false", f"-logdir={folder}", "server", f"-dir={folder}", "-ip=127.0.0.1",
                      "-s3", f"-s3.port={port}", "-master.volumeSizeLimitMB=64", "-volume.max=0",
                      *(f"-{name}.port={number}" for name, number in ports.items()),
                      *(f"-{name}={number}" for name, number in grpc.items())],
    }  # fmt: skip
    program, *arguments = programs[kind]
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "server.log").open("wb") as log:
        line = [str(Path(sys.executable).parent / program), *arguments]
        process = subprocess.Popen(line, stdout=log, stderr=log, cwd=folder, preexec_fn=die_with_parent)
        try:
            variables = {**_KEYS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}
            _create_bucket(variables)
            yield variables
        finally:
            process.kill()  # SeaweedFS takes 20 s to end by itself
            process.wait()


@contextlib.contextmanager
def azurite(program: str, folder: Path) -> Iterator[Mapping[str, str]]:
    """Run Azurite with an empty container `lakes`, at the emulator's own port; yield the variables that name it."""
    folder.mkdir(parents=True)
    with (folder / "server.log").open("wb") as log:
        line = [program, "--inMemoryPersistence", "--skipApiVersionCheck", "--disableTelemetry"]
        process = subprocess.Popen(line, stdout=log, stderr=log, cwd=folder, preexec_fn=die_with_parent)
        try:
            until(_create_container, ignored=Exception, every=0.2)
            yield {"AZURE_STORAGE_USE_EMULATOR": "true"}
        finally:
            process.kill()
            process.wait()


def _create_container() -> object:
    key = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="  # every emulator's
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-12-02"}
    lines = [f"{name}:{value}" for name, value in headers.items()]
    text = "\n".join(["PUT", *[""] * 11, *lines, "/devstoreaccount1/devstoreaccount1/lakes", "restype:container"])
    signed = base64.b64encode(hmac.digest(base64.b64decode(key), text.encode(), "sha256")).decode()
    url = "http://127.0.0.1:10000/devstoreaccount1/lakes?restype=container"
    authorized = {**headers, "Authorization": f"SharedKey devstoreaccount1:{signed}"}
    return httpx.put(url, headers=authorized).raise_for_status()


def _create_bucket(variables: Mapping[str, str]) -> None:
    import boto3

    client = boto3.client(
        "s3", endpoint_url=variables["AWS_ENDPOINT_URL"], region_name=variables["AWS_REGION"],
        aws_access_key_id=variables["AWS_ACCESS_KEY_ID"], aws_secret_access_key=variables["AWS_SECRET_ACCESS_KEY"],
    )  # fmt: skip

    def create() -> object:
        client.create_bucket(Bucket="lakes")
        return client.put_object(Bucket="lakes", Key="ready", Body=b"")

    until(create, ignored=Exception, every=0.2)


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment with a server's variables, and none of the user's own."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "ETPI_", "DAGSTER_"))}
    return {**own, "AWS_EC2_METADATA_DISABLED": "true", **variables}
