"""A wire to a server of this machine, which is slow: ``slow_wire.py PORT SERVER_PORT DELAY_S``."""

import asyncio
import contextlib
import sys

PIECE_BYTES = 1 << 16


async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_s: float) -> None:
    """Carry what comes until its end."""
    with contextlib.suppress(OSError), contextlib.closing(writer):
        while data := await reader.read(PIECE_BYTES):
            await asyncio.sleep(delay_s)
            writer.write(data)
            await writer.drain()


async def main(port: int, server_port: int, delay_s: float) -> None:
    """Wait for clients; what they send is late, and the answers are not."""

    async def joined(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError), contextlib.closing(writer):
            answers, questions = await asyncio.open_connection("127.0.0.1", server_port)
            await asyncio.gather(carry(reader, questions, delay_s), carry(answers, writer, 0.0))

    server = await asyncio.start_server(joined, "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])))
