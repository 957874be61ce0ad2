"""`python stub_peer.py PORT URL…`: the least that is a router: each connection goes to the next replica, bytes both ways."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
from urllib.parse import urlsplit


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()


async def main(port: int, urls: list[str]) -> None:
    turns = itertools.cycle([urlsplit(url) for url in urls])

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        chosen = next(turns)
        their_reader, their_writer = await asyncio.open_connection(chosen.hostname, chosen.port)
        await asyncio.gather(copy(reader, their_writer), copy(their_reader, writer))

    async with await asyncio.start_server(relay, "127.0.0.1", port) as server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), sys.argv[2:]))
