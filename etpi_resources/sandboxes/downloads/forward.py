"""Connect a sandbox's loopback with the proxy's socket: run as a program in the sandbox, it returns once it listens.

The sandbox ends it with the command that started it.
"""

import asyncio
import os
import socket
import sys

CHUNK = 1 << 16


async def serve(listener, path):
    async def forward(reader, writer):
        try:
            there, back = await asyncio.open_unix_connection(path)
        except OSError:
            writer.close()
            return
        await asyncio.gather(pump(reader, back), pump(there, writer))

    server = await asyncio.start_server(forward, sock=listener)
    async with server:
        await server.serve_forever()


async def pump(reader, writer):
    try:
        while True:
            data = await reader.read(CHUNK)
            if not data:
                break
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()


def main(path, port):
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen(64)
    if os.fork():
        return
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(null, descriptor)
    asyncio.run(serve(listener, path))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
