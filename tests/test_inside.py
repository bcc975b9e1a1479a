"""Paths that strangers wrote: they lead to files of their folder and nowhere else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from etpi_resources.inside import PathOutside, is_file_inside, open_file, read_inside


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "folder"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "own.txt").write_text("own")
    (tmp_path / "secret.txt").write_text("secret")
    (tmp_path / "folder2").mkdir()
    (tmp_path / "folder2" / "secret.txt").write_text("secret")
    return folder


@pytest.mark.parametrize(
    "path",
    ["../secret.txt", "sub/../../secret.txt", "sub/../sub/own.txt", "/etc/passwd", "", ".", "own\0.txt", "sub\ud800",
     "../folder2/secret.txt", "//etc/passwd"],
)  # fmt: skip
def test_path_that_leads_out_is_refused(folder: Path, path: str) -> None:
    with pytest.raises(PathOutside):
        read_inside(folder, path)
    assert not is_file_inside(folder, path)


def test_link_is_followed_inside_the_folder_alone(folder: Path, tmp_path: Path) -> None:
    (folder / "link").symlink_to("sub/own.txt")
    (folder / "out").symlink_to(tmp_path / "secret.txt")
    (folder / "dir").symlink_to(tmp_path)
    (folder / "proc").symlink_to("/proc/self/cwd")
    (tmp_path / "root").symlink_to(folder)
    assert read_inside(folder, "link") == read_inside(tmp_path / "root", "sub/own.txt") == b"own"
    for path in ("out", "dir/secret.txt", "proc/secret.txt"):
        with pytest.raises(PathOutside):
            read_inside(folder, path)
        assert not is_file_inside(folder, path)


def test_what_is_no_file_is_refused_at_once(folder: Path) -> None:
    os.mkfifo(folder / "fifo")
    for path in ("fifo", "sub"):
        with pytest.raises(OSError, match=f"{path}"):
            read_inside(folder, path)
    for device in ("/dev/zero", "/dev/stdin"):
        with pytest.raises(OSError):
            open_file(Path(device))


def test_size_is_checked_before_reading(folder: Path) -> None:
    with (folder / "sparse").open("wb") as file:
        file.truncate(3 << 40)
    with pytest.raises(PathOutside, match="bytes"):
        read_inside(folder, "sparse")
    (folder / "exact").write_bytes(b"12345")
    assert read_inside(folder, "exact", 5) == b"12345"
    with pytest.raises(PathOutside):
        read_inside(folder, "exact", 4)


def test_missing_file_is_an_error_of_the_file_system(folder: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_inside(folder, "none")
    with pytest.raises(OSError):
        read_inside(folder, "x" * 5000)
