"""The command `etpi view`: serve the pages until it is stopped."""

from __future__ import annotations

import sys

from etpi.view.app import LOOPBACK, make_app
from etpi_resources.lake.catalog import connect, default_path
from etpi_resources.lake.lake import Lake


def serve(host: str, port: int) -> int:
    """Serve the pages of the lake in the working folder or $ETPI_DATA.

    Raises:
        LakeError: there is no catalog.
    """
    import uvicorn

    lake = Lake.open()
    path = default_path(lake)
    connect(path).close()
    if host not in LOOPBACK:
        print(f"etpi view: everybody who reaches {host} port {port} can read all transcripts", file=sys.stderr)
    address = f"[{host}]" if ":" in host else host
    print(f"etpi view: {path} on http://{address}:{port}; stop it with Ctrl-C", file=sys.stderr)
    uvicorn.run(make_app(lake, path, host), host=host, port=port, log_level="warning")
    return 0
