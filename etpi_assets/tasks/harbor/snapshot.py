"""Copy the working directory of one machine into another: files of any kind, modes, links.

Programs of the agent's machine create the archive, so it is untrusted. It is unpacked only below the working directory,
without owners. Links that lead out of it are removed: in the grading machine they could point at the tests. So are new
modules beside it that a Python started there would import instead of its own or the test runner's. Packaging metadata
beside it, which can name plugins of the test runner, stays as the machine has it.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection

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
known=" $(ls -A | tr '\\n' ' ') "
metadata() {{ find "$1" -mindepth 1 -maxdepth 1 \\( -iname '*.dist-info' -o -iname '*.egg-info' \\) "${{@:2}}"; }}
mkdir /tmp/metadata && metadata . -exec mv -- {{}} /tmp/metadata/ \\; || exit 1
base64 -d {_ARCHIVE} > /tmp/answer.tar.gz && find . -mindepth 1 -maxdepth 1 -exec rm -rf -- {{}} + || exit 1
tar --extract --gzip --no-same-owner --file=/tmp/answer.tar.gz || exit 1
rm -f /tmp/answer.tar.gz
root=$(pwd -P)
leads_out() {{
  local target=$(readlink -- "$1"; echo .) folders=${{1%/*}}
  target=${{target%??}} folders=${{folders//[^\\/]/}}
  case "$target" in
    "$root"/*) target=${{target#"$root"/}} ;;
    /*) return 0 ;;
    *) while [[ "$target/" = ../* ]]; do
         [ -n "$folders" ] || return 0
         folders=${{folders#/}} target=${{target#..}}
         while [[ "$target" = /* ]]; do target=${{target#/}}; done
       done ;;
  esac
  [[ "/$target/" = */../* ]]
}}
find . -type l -print0 > /tmp/links || exit 1
while IFS= read -r -d "" link; do ! leads_out "$link" || rm -f -- "$link" || exit 1; done < /tmp/links
rm -f /tmp/links
find . ! -type f ! -type d ! -type l -delete || exit 1
metadata . -exec rm -rf -- {{}} + || exit 1
metadata /tmp/metadata -exec mv -- {{}} . \\; ; rmdir /tmp/metadata
for entry in *; do
  [[ "$known" != *" $entry "* && " $reserved " = *" ${{entry%%.*}} "* ]] || continue
  if [ -d "$entry" ]; then compgen -G "$entry/__init__.*" > /dev/null || continue
  else [[ "$entry" = *.py || "$entry" = *.pyc || "$entry" = *.so ]] || continue; fi
  rm -rf -- "$entry" || exit 1
done
"""
"""A link stays if no step of its way can leave the working directory: it goes up from its own folder, which is no link,
at most to the working directory, and only down from there. So it reaches no /proc or /dev, whose links depend on the
process that reads them. An archive is refused if something in it cannot be listed or removed, such as the content of a
folder without rights: tar keeps modes, and an unprivileged machine obeys them."""


def take(machine: Sandbox) -> str | None:
    """Return the working directory as a base64 archive, None on failure. The machine is unusable afterwards."""
    done = machine.run(_TAKE, timeout=120.0)
    return None if done.exit_code else machine.read_files().get(_ARCHIVE)


def put(sandbox: Sandbox, answer: str, reserved: Collection[str] = ()) -> str | None:
    """Replace a fresh machine's working directory by the archive. Returns an error message, None on success.

    Args:
        reserved: modules that may not be new in the working directory.

    Raises:
        OSError: the machine does not take the archive.
    """
    sandbox.write_files({_ARCHIVE: answer})
    done = sandbox.run(f"reserved={shlex.quote(' '.join(sorted(reserved)))}\n{_PUT}")
    return f"the agent's files could not be unpacked: {done.output[-300:].strip()}" if done.exit_code else None
