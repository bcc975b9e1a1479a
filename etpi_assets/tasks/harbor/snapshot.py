"""The working directory of one machine as text, and put into another: files of any kind, their modes, links.

Belongs here: the two commands. Does not belong here: grading.

The archive is made by programs of a machine that an agent worked in, so it is data and nothing more: it is unpacked
below the working directory alone, without owners, and links that lead out of it are removed, for where the tests lie
they would lead to the tests.
"""

from __future__ import annotations

from etpi_resources.sandboxes import Sandbox

_ARCHIVE = "answer.tar.gz.b64"
_TAKE = f"""
cd -P . && rm -rf /tmp/* /tmp/.[!.]* 2>/dev/null
archive=/tmp/$$.tar.gz
/usr/bin/env -i PATH=/usr/bin:/bin tar --create --gzip --one-file-system --file=$archive . || exit 1
find . -mindepth 1 -maxdepth 1 -exec chmod -R u+rwX {{}} + 2>/dev/null
find . -mindepth 1 -maxdepth 1 -exec rm -rf -- {{}} +
base64 -w 0 $archive > {_ARCHIVE}
"""
_PUT = f"""
base64 -d {_ARCHIVE} > /tmp/answer.tar.gz && find . -mindepth 1 -maxdepth 1 -exec rm -rf -- {{}} + || exit 1
tar --extract --gzip --no-same-owner --file=/tmp/answer.tar.gz || exit 1
rm -f /tmp/answer.tar.gz
root=$(pwd -P)
find . -type l -print0 | while IFS= read -r -d "" link; do
  target=$(readlink -m -- "$link")
  case "$target" in "$root"/*) ;; *) rm -f -- "$link" ;; esac
done
find . ! -type f ! -type d ! -type l -delete
"""


def take(machine: Sandbox) -> str | None:
    """The working directory as text; None where the machine cannot give it out. The machine is of no use after it."""
    machine.run(_TAKE, timeout=120.0)
    return machine.read_files().get(_ARCHIVE)


def put(sandbox: Sandbox, answer: str) -> str | None:
    """Make a fresh machine's working directory what was taken. Returns why it could not be unpacked, None where it was.

    Raises:
        OSError: the machine takes no files.
    """
    sandbox.write_files({_ARCHIVE: answer})
    done = sandbox.run(_PUT)
    return f"the agent's files could not be unpacked: {done.output[-300:].strip()}" if done.exit_code else None
