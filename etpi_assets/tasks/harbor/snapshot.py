"""Copy the working directory of one machine into another: files of any kind, modes, links.

Programs of the agent's machine create the archive, so it is untrusted. It is unpacked only below the working directory,
without owners, and links that lead out of it are removed: in the grading machine they could point at the tests.
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
    """Return the working directory as a base64 archive, None on failure. The machine is unusable afterwards."""
    machine.run(_TAKE, timeout=120.0)
    return machine.read_files().get(_ARCHIVE)


def put(sandbox: Sandbox, answer: str) -> str | None:
    """Replace a fresh machine's working directory by the archive. Returns an error message, None on success.

    Raises:
        OSError: the machine does not take the archive.
    """
    sandbox.write_files({_ARCHIVE: answer})
    done = sandbox.run(_PUT)
    return f"the agent's files could not be unpacked: {done.output[-300:].strip()}" if done.exit_code else None
