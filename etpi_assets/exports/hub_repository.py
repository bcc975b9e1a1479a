"""A repository of a Hugging Face Hub: sign in, create it, and write a folder to it in one commit.

Every fault of the hub or the network is a `PushError` of one message, which never has the token in it.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Literal

from etpi_resources.lake.lake import LakeError

if TYPE_CHECKING:
    from huggingface_hub import HfApi

MANIFEST = "manifest.json"
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_BRANCH = re.compile(r"(?!.*(\.\.|//|/$))\w[\w./+-]*")
_MAIN = "main"


class PushError(LakeError):
    """Nothing, or not all, was pushed; the message says why and what to do."""


@dataclass(frozen=True)
class Target:
    """The repository and branch to which an export is pushed.

    Attributes:
        repo: OWNER/NAME, or NAME for the user's own.
        revision: the branch; created if it does not exist.
        private: whether a new repository is private; an existing one stays as it is.
    """

    repo: str
    revision: str = _MAIN
    private: bool = False

    @classmethod
    def parse(cls, text: str, private: bool = False) -> Target:
        """Read REPO or REPO@REVISION. Raises PushError for another form."""
        repo, at, revision = text.partition("@")
        if not _NAME.fullmatch(repo) or (at and not _BRANCH.fullmatch(revision)):
            raise PushError(f"--push {text!r} is not of the form OWNER/NAME or OWNER/NAME@BRANCH")
        return cls(repo, revision or _MAIN, private)


class Repository:
    """A repository that the signed-in user may write to.

    Attributes:
        repo: OWNER/NAME.
        user: who is signed in.
    """

    def __init__(self, api: HfApi, target: Target, repo_type: Literal["dataset", "model"], user: str, token: str):
        self._api, self._target, self._type, self._token = api, target, repo_type, token
        self.user = user
        self.repo = target.repo if "/" in target.repo else f"{user}/{target.repo}"

    @classmethod
    def sign_in(cls, target: Target, repo_type: Literal["dataset", "model"]) -> Repository:
        """Sign in at $HF_ENDPOINT (default: huggingface.co) with $HF_TOKEN or the stored login; write nothing.

        Raises:
            PushError: there is no token, the hub refuses it, or the hub cannot be reached.
        """
        from huggingface_hub import HfApi, constants, get_token

        api = HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None, library_name="etpi")
        if constants.is_offline_mode():
            raise PushError("HF_HUB_OFFLINE is set, so nothing can be pushed; unset it and push again")
        token = get_token()
        if token is None:
            raise PushError(f"no token for {api.endpoint}: export HF_TOKEN=..., or sign in once with `hf auth login`")
        with _explained(api.endpoint, target.repo, token, "Nothing was exported."):
            user = api.whoami(token=token)["name"]
        return cls(api, target, repo_type, user, token)

    @property
    def secret(self) -> str:
        """The token, to search files for it."""
        return self._token

    def push(self, folder: Path, message: str, extra: Mapping[str, bytes]) -> str:
        """Create repository and branch if missing, write a folder in one commit, and return the commit's address.

        Files that an earlier push of etpi wrote and this one does not have are deleted; other files stay.

        Args:
            extra: further files, path -> content.
        """
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete
        from huggingface_hub.utils import disable_progress_bars

        if not sys.stderr.isatty():
            disable_progress_bars()

        files = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
        kind, token, branch = self._type, self._token, self._target.revision
        done = "The export itself is complete; the same command pushes it again."
        with _explained(self._api.endpoint, self.repo, token, done):
            # None: the hub applies the organisation's setting.
            private = True if self._target.private else None
            self._api.create_repo(self.repo, token=token, private=private, repo_type=kind, exist_ok=True)
            if branch != _MAIN:
                self._api.create_branch(self.repo, branch=branch, token=token, repo_type=kind, exist_ok=True)
            old = self._earlier_files() - files.keys() - extra.keys()
            operations = [
                *(CommitOperationAdd(name, path) for name, path in files.items()),
                *(CommitOperationAdd(name, data) for name, data in extra.items()),
                *(CommitOperationDelete(name) for name in sorted(old)),
            ]
            commit = self._api.create_commit(
                self.repo, operations, commit_message=message, token=token, repo_type=kind, revision=branch
            )
        return commit.commit_url

    def _earlier_files(self) -> set[str]:
        """Return the files of the repository that its etpi manifest names; empty if there is no manifest."""
        present = set(
            self._api.list_repo_files(
                self.repo, revision=self._target.revision, repo_type=self._type, token=self._token
            )
        )
        if MANIFEST not in present:
            return set()
        try:
            listed = {file["path"] for file in json.loads(self._download(MANIFEST))["files"]}
        except (ValueError, KeyError, TypeError):
            return set()  # not a manifest of etpi
        return present & listed

    def _download(self, name: str) -> bytes:
        with TemporaryDirectory() as folder:
            path = self._api.hf_hub_download(
                self.repo,
                name,
                repo_type=self._type,
                revision=self._target.revision,
                token=self._token,
                local_dir=folder,
            )
            return Path(path).read_bytes()


@contextmanager
def _explained(endpoint: str, repo: str, token: str, done: str) -> Iterator[None]:
    """Turn the client's errors into a PushError of one message without the token; `done`: the finished steps."""
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    try:
        yield
    except PushError:
        raise
    except OfflineModeIsEnabled as error:
        raise PushError("HF_HUB_OFFLINE is set, so nothing can be pushed; unset it and push again") from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        reasons = {
            401: f"{endpoint} refuses the token (401). Make one with write access, then HF_TOKEN or `hf auth login`",
            403: f"the token may not write to {repo} at {endpoint} (403). It needs the role write for that owner",
            404: f"{endpoint} has no repository {repo} that the token may see (404)",
        }
        reason = str(error.server_message or error).split("\n")[0]
        raise PushError(
            _without(token, reasons.get(status, f"{endpoint} refused {repo} ({status}): {reason}"))
        ) from None
    except Exception as error:
        # The client and its storage library raise many unrelated classes for a failed upload.
        cause = f"{type(error).__name__}: {error}"
        text = f"{endpoint} cannot be reached ({cause})" if _is_network(error) else f"{repo} at {endpoint}: {cause}"
        raise PushError(_without(token, f"{text}. {done}")) from None


def _is_network(error: Exception) -> bool:
    """Return whether a connection failed. By name, because versions of the client use httpx or its successor."""
    transport = any(kind.__name__ == "TransportError" for kind in type(error).__mro__)
    return transport or isinstance(error, ConnectionError)


def _without(token: str, text: str) -> str:
    return text.replace(token, "<token>")
