"""Downloads of grading: once from package indexes through a proxy, later from a recording on disk.

`recording` keeps responses by request and bodies by content. `proxy` starts mitmproxy with `addon`, which answers from
the recording, and records only where it may and only from the hosts it may. `forward` runs in a sandbox, which has no
network, and connects its loopback with the proxy's socket.
"""
