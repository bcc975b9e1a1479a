"""Paths that strangers wrote: they lead to files of their folder and nowhere else."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from etpi.audit.checkpoint import audit_checkpoint
from etpi.model_facts import _tensors
from etpi_assets.importers.spec import load_user
from etpi_assets.specs.load import _read_document
from etpi_assets.specs.prompts import _read_templates
from etpi_resources.chat.sources import template_source
from etpi_resources.chat.tokenizer_files import copy_tokenizer, misread
from etpi_resources.inside import PathOutside, is_file_inside, open_file, read_inside
from etpi_resources.lake.exchange.bucket import INDEX, Bucket
from etpi_resources.lake.formats import MARKER, require_known
from etpi_resources.lake.lake import _load, folder_hash
from etpi_resources.lake.store import read_pointer
from etpi_resources.outside import read_object
from etpi_resources.rows import count_rows, iter_rows


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


def _socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # the name of a socket has 108 bytes at most
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(path.name)
    os.chdir(here)


KINDS = {
    "FIFO": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "socket": _socket,
    "folder": Path.mkdir,
    "dangling": lambda path: path.symlink_to("nowhere"),
    "missing": lambda path: None,
    "empty": Path.touch,
}


def _row(path: Path) -> None:
    ((_, row),) = iter_rows(path)
    assert count_rows(path) == 1
    raise row


def _template_of_folder(path: Path) -> str:
    return template_source(str(path.parent))


DOORS = {
    "a template": ("t.jinja", lambda path: template_source(str(path)), "dangling missing empty"),
    "a folder's template": ("chat_template.jinja", _template_of_folder, "folder dangling missing empty"),
    "a folder's templates": ("chat_template.json", _template_of_folder, "folder dangling missing empty"),
    "a configuration": ("config.json", read_object, "folder dangling missing empty"),
    "a spec": ("spec.toml", _read_document, "folder dangling missing"),
    "a prompt": ("user.md", lambda path: _read_templates(path.parent), "folder dangling"),
    "a format": ("format.toml", load_user, "folder dangling missing"),
    "lines": ("rows.jsonl", _row, "folder dangling missing empty"),
    "an array": ("rows.json", _row, "folder dangling missing empty"),
    "parquet": ("rows.parquet", _row, "folder dangling missing empty"),
    "arrow": ("rows.arrow", _row, "folder dangling missing empty"),
    "weights": ("model.safetensors", _tensors, "folder dangling missing empty"),
    "a pointer": ("current.json", read_pointer, "folder"),
    "a manifest": ("manifest-1.json", _load, "folder dangling missing empty"),
    "a lake": (MARKER, lambda path: require_known(path.parent), "folder empty"),
    "a bucket": (INDEX, lambda path: Bucket(str(path.parent)).index(), "folder empty"),
    "a bucket's address": (INDEX, lambda path: Bucket(f"file://{path.parent}").index(), "folder empty"),
    "a tokenizer": ("vocab.json", lambda path: copy_tokenizer(path.parent, path.parent), ""),
    "AutoTokenizer": ("vocab.json", lambda path: misread(path.parent), ""),
    "a model": ("model.safetensors", lambda path: list(audit_checkpoint(path.parent, path.parent)), ""),
    "a hash": ("model.safetensors", lambda path: folder_hash(path.parent), ""),
}
"""Reader -> a file's name, its function, and the kinds that it refuses besides a FIFO, a device and a socket."""
REFUSED = [(door, kind) for door in DOORS for kind in ("FIFO", "device", "socket", *DOORS[door][2].split())]


@pytest.mark.parametrize(("door", "kind"), REFUSED)
def test_each_reader_refuses_at_once_what_is_no_file(tmp_path: Path, door: str, kind: str) -> None:
    name, read, _ = DOORS[door]
    path = tmp_path / name
    for beside in ("tokenizer.json", "config.json") if "vocab" in name or "model" in name else ():
        (tmp_path / beside).write_text("{}")
    KINDS[kind](path)
    with pytest.raises(Exception) as refused:
        read(path)
    if kind in ("FIFO", "device", "socket", "folder"):
        assert f"{name} is a {kind}, not a file; " in str(refused.value)


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
