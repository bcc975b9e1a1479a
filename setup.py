"""Puts the commit that a wheel is built from into it, for lineage; all else is in pyproject.toml."""

import subprocess
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class WithRevision(build_py):
    def run(self) -> None:
        super().run()
        git = ["git", "-C", str(Path(__file__).parent)]
        try:
            commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout
            changed = subprocess.run([*git, "diff", "--quiet", "HEAD"], capture_output=True).returncode
        except (OSError, subprocess.CalledProcessError):
            return
        if not self.editable_mode:
            file = Path(self.build_lib, "etpi_resources", "lake", "git_revision.txt")
            file.write_text(commit.strip() + "+modified" * bool(changed), encoding="utf-8")


setup(cmdclass={"build_py": WithRevision})
