"""`etpi export --push`, against a hub on the loopback interface: what arrives, what is refused, and what is said."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import huggingface_hub
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import load_dataset

from etpi.cli import main
from etpi_assets.exports.hub_repository import PushError, Target
from etpi_assets.exports.push import export_and_push, refuse_secrets
from etpi_assets.resources import Resources
from etpi_resources.lake.checks import CheckOutcome
from etpi_resources.lake.lake import BlockedInput
from tests.support.curation import CurationLake
from tests.support.hub_server import TOKEN, USER, Files, HubServer
from tests.support.trained import Trained

TARGET = Target("lab/data")
REPO = "datasets/lab/data"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with HubServer() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
        yield server


@dataclass(frozen=True)
class Curated:
    """An experiment `clean` with a data set; `folder`: its lake and specs."""

    resources: Resources
    folder: Path


@pytest.fixture(scope="module")
def curated(tmp_path_factory: pytest.TempPathFactory) -> Curated:
    curation = CurationLake.with_rollouts(tmp_path_factory.mktemp("curation"))
    assert curation.failures("clean") == {}
    return Curated(Resources(lake=curation.lake, specs_folder=curation.folder / "specs"), curation.folder)


def _files(folder: Path) -> Files:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _received(hub: HubServer, repo: str = REPO, branch: str = "main") -> Files:
    """The files of a repository, without the one that the hub itself writes."""
    return {name: data for name, data in hub.repos[repo][branch].items() if name != ".gitattributes"}


def test_data_set_arrives_byte_for_byte_in_one_commit_and_is_read_back(hub, curated, tmp_path):
    pushed = export_and_push("clean", "hub", tmp_path / "out", curated.resources, TARGET)
    assert pushed.url.startswith(f"{hub.url}/{REPO}/commit/") and not pushed.reused
    assert _received(hub) == _files(tmp_path / "out") and len(hub.commits) == 1
    assert "clean as hub, upweighted_dataset" in hub.commits[0]["summary"] and not hub.private
    assert any(name.startswith("PUT /objects/") for name in hub.seen), "large files go where large files go"
    for name, data in _received(hub).items():
        (tmp_path / "back" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "back" / name).write_bytes(data)
    rows = load_dataset(str(tmp_path / "back"), "tokens", split="train", cache_dir=str(tmp_path / "cache"))
    expected = pq.read_table(tmp_path / "out/tokens/train.parquet")
    assert rows["input_ids"] == expected["input_ids"].to_pylist()
    card = _received(hub)["README.md"].decode()
    versions = json.loads(_received(hub)["manifest.json"])["versions"]
    assert "| experiment | `clean` |" in card and "| teachers | `made` |" in card
    assert all(f"| `{name}` | `{version}` |" in card for name, version in versions.items())


def test_model_goes_to_a_private_repository_of_models_on_its_branch(hub, tmp_path, capsys, monkeypatch):
    trained = Trained(tmp_path)
    saved = tmp_path / "saved"
    saved.mkdir()
    (saved / "config.json").write_text("{}")
    (saved / "model.safetensors").write_bytes(bytes(range(256)) * 4096)
    trained.put("sft", saved)
    trained.put("rl")
    trained.put_card("---\nlicense: mit\n---\n# first\n")
    monkeypatch.setenv("ETPI_DATA", str(trained.lake.root))
    monkeypatch.setenv("ETPI_SPECS", str(tmp_path / "specs"))
    out = tmp_path / "out"
    words = ["export", "first", "--format", "model", "--to", str(out), "--push", "mine@v1", "--private"]
    assert main(words) == 0
    repo = f"models/{USER}/mine"
    assert hub.private == {repo} and _received(hub, repo, "v1") == _files(out) and not _received(hub, repo)
    said = capsys.readouterr()
    assert f"pushed: {hub.url}/{USER}/mine/commit/" in said.out and TOKEN not in said.out + said.err
    assert not any(TOKEN.encode() in data for data in _files(tmp_path).values()), "it is stored nowhere"
    assert main(words) == 0 and "the folder had this export already" in capsys.readouterr().out


def test_format_without_a_card_gets_one_in_the_repository(hub, curated, tmp_path):
    export_and_push("clean", "trl", tmp_path / "out", curated.resources, TARGET)
    received = _received(hub)
    assert {name: data for name, data in received.items() if name != "README.md"} == _files(tmp_path / "out")
    card = received["README.md"].decode()
    assert card.startswith("---\nlicense: ") and "## Lineage" in card and "`upweighted_dataset/clean`" in card


def test_later_push_deletes_what_the_earlier_one_wrote_and_nothing_else(hub, curated, tmp_path):
    export_and_push("clean", "hub", tmp_path / "first", curated.resources, TARGET)
    hub.repos[REPO]["main"]["notes.md"] = b"by hand"
    export_and_push("clean", "trl", tmp_path / "second", curated.resources, TARGET)
    assert _received(hub).keys() == {*_files(tmp_path / "second"), "README.md", "notes.md"}


def test_folder_with_another_or_a_changed_export_is_refused(hub, curated, tmp_path):
    out = tmp_path / "out"
    export_and_push("clean", "hub", out, curated.resources, TARGET)
    (out / "README.md").write_text("changed")
    with pytest.raises(ValueError, match="is not empty"):
        export_and_push("clean", "hub", out, curated.resources, TARGET)


@pytest.mark.parametrize(
    ("path", "status", "says"),
    [
        ("whoami", 401, "refuses the token"), ("repos/create", 403, "may not write to lab/data"),
        ("preupload", 404, "no repository lab/data"), ("commit", 422, "quota is used up"),
    ],
)  # fmt: skip
def test_refusals_of_the_hub_are_one_message_without_the_token(hub, curated, tmp_path, path, status, says):
    hub.answers[path] = (status, f"quota is used up for {TOKEN}")
    with pytest.raises(PushError, match=says) as error:
        export_and_push("clean", "hub", tmp_path / "out", curated.resources, TARGET)
    assert TOKEN not in str(error.value) and hub.url in str(error.value) and "\n" not in str(error.value)
    assert (tmp_path / "out").exists() == (path != "whoami"), "without a login nothing is exported"


def test_no_token_no_network_and_offline_mode_are_said(hub, curated, tmp_path, monkeypatch):
    def push() -> None:
        export_and_push("clean", "hub", tmp_path / "out", curated.resources, TARGET)

    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(PushError, match="127.0.0.1:9 cannot be reached.*Nothing was exported"):
        push()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(PushError, match="HF_HUB_OFFLINE is set"):
        push()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    with pytest.raises(PushError, match="hf auth login"):
        push()
    assert not (tmp_path / "out").exists()


def test_blocked_version_is_refused_before_anyone_signs_in(hub, tmp_path):
    trained = Trained(tmp_path)
    trained.put("rl")
    trained.put("sft", checks=(CheckOutcome("lost", False, "it was", blocking=True),))
    with pytest.raises(BlockedInput):
        export_and_push("first", "gguf", tmp_path / "out", trained.resources, TARGET)
    assert hub.seen == []


def test_key_in_a_nested_message_or_a_file_is_refused(tmp_path, hub, curated, monkeypatch):
    key = "sk-1234567890abcdef"
    messages = [[{"role": "user", "content": f"export KEY={key}", "ids": [1]}]]
    pq.write_table(pa.table({"messages": messages, "n": [1]}), tmp_path / "train.parquet")
    with pytest.raises(PushError, match="train.parquet contains the value of .TEACHER_API_KEY") as error:
        refuse_secrets(tmp_path, {"TEACHER_API_KEY": key})
    assert key not in str(error.value)
    refuse_secrets(tmp_path, {"TEACHER_API_KEY": "sk-another-key"})
    (tmp_path / "big.bin").write_bytes(b"x" * ((1 << 20) - 5) + key.encode())
    with pytest.raises(PushError, match="big.bin"):
        refuse_secrets(tmp_path, {"OTHER": key})
    # A word of the card, as if it were a key.
    monkeypatch.setenv("TEACHER_API_KEY", "upweighted_dataset/clean")
    with pytest.raises(PushError, match="TEACHER_API_KEY"):
        export_and_push("clean", "hub", tmp_path / "out", curated.resources, TARGET)
    assert hub.commits == [] and REPO not in hub.repos


def test_names_of_repositories_are_checked_before_anything_runs():
    assert Target.parse("a/b@x/y", True) == Target("a/b", "x/y", True)
    assert Target.parse("b") == Target("b", "main", False)
    for text in ("", "a/b/c", "a/b@", "a/b@../..", "a/b@x@y", "a/b@x\n", "https://huggingface.co/a/b", "a b"):
        with pytest.raises(PushError, match="OWNER/NAME"):
            Target.parse(text)
