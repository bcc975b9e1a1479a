"""The Containerfile: built by a real engine, then an experiment run in the container with the options it documents."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import container_engine
from tests.support.small_specs import write_small_specs

ROOT = Path(__file__).resolve().parents[2]
SITE = Path(sys.prefix) / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
BASE, IMAGE = "localhost/etpi-test:python", "localhost/etpi-test:etpi"

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        Path("/usr/bin/python3").resolve().name != f"python{sys.version_info[0]}.{sys.version_info[1]}",
        reason="the image's Python is this machine's /usr/bin/python3, which must be of the tests' version",
    ),
]


@pytest.fixture(scope="module")
def engine(_engine_process, tmp_path_factory):
    """The engine, with a base image: this machine's programs, and bubblewrap. Its packages are the tests' own, mounted
    when the image is built and run, so that nothing is fetched."""
    extra = tmp_path_factory.mktemp("extra")
    packages = extra / "usr/lib/python3/dist-packages"
    packages.mkdir(parents=True)
    (packages / "tests_own.pth").write_text("/packages\n")
    if missing := [name for name in ("bwrap", "setpriv") if shutil.which(name) is None]:
        pytest.skip(f"no {' and no '.join(missing)} here")
    programs = [result for name in ("bwrap", "setpriv") if (result := shutil.which(name))]
    # What torch loads of the system: the C++ library and its own relatives, but not itself, which is mounted.
    system = [
        path for path in container_engine.linked(SITE / "torch/lib/libtorch_cpu.so") if "site-packages" not in path
    ]
    settings = ["ENV PIP_NO_BUILD_ISOLATION=0", "ENV PIP_NO_INDEX=1"]
    _engine_process.make_image(BASE, extra, settings, [*programs, *system])
    return _engine_process


def _documented_options() -> list[str]:
    """The options of `podman run` in the Containerfile's head."""
    head = (ROOT / "Containerfile").read_text().split("ARG BASE")[0]
    line = re.sub(r"\\\n#", "", head)
    result = re.search(r"podman run --rm -v etpi:/work (.*) etpi demo", line)
    assert result, "the Containerfile says how to run it"
    return shlex.split(result[1])


@pytest.fixture(scope="module")
def packages(tmp_path_factory) -> list[str]:
    """Options that mount the tests' packages: links to all but etpi at /packages, and what they lead to."""
    links = tmp_path_factory.mktemp("packages")
    links.chmod(0o755)
    for entry in SITE.iterdir():
        if entry.suffix != ".pth" and not entry.name.startswith(("etpi", "__editable__")):
            (links / entry.name).symlink_to(entry)
    return ["--volume", f"{links}:/packages:ro", "--volume", f"{SITE}:{SITE}:ro"]


def test_an_experiment_runs_in_the_container_with_the_documented_privileges(engine, packages, tmp_path):
    engine.podman(
        "build", "--network=none", "--build-arg", f"BASE={BASE}", *packages, "--tag", IMAGE,
        "--file", str(ROOT / "Containerfile"), str(ROOT),
    )  # fmt: skip
    specs = write_small_specs(tmp_path / "specs")
    mounts = [*packages, "--volume", f"{specs}:/specs:ro", "--env", "ETPI_SPECS=/specs"]
    options = _documented_options()
    assert "--cap-drop" in options and not {"--privileged", "--cap-add"} & set(options)
    done = engine.podman("run", "--rm", "--network=none", *mounts, *options, IMAGE, "run", "first")
    assert "-- run_experiment of first: done" in done.stderr
    refused = subprocess.run(
        [*engine.command(), "run", "--rm", "--network=none", *mounts, IMAGE, "run", "first"],
        capture_output=True, text=True, env=engine.environment,
    )  # fmt: skip
    assert refused.returncode == 1, refused.stderr
    assert "container" in refused.stderr and "namespaces" in refused.stderr
    assert all(
        option in refused.stderr for option in ("seccomp=unconfined", "unmask=/proc/*", "systempaths=unconfined")
    )
    assert "-- " not in refused.stderr, "no job was started"
