"""A TCP proxy between clients and server that cuts, stalls and swallows, in a thread of its own.

Strategy: one port before each of the server's. A connection is two tasks that copy. `mode` says what becomes of the
next piece: passed on; the connection cut; held back for a while; or, of an answer, thrown away and the connection cut,
so that the client cannot know what happened.
"""

import asyncio
import contextlib
import threading

from veilmq.testing import Random

_PIECE_BYTES = 65_536
_STALL_SECONDS = 1.5


class Proxy:
    """Closed by `close`."""

    def __init__(self, targets: list[int], chance: Random) -> None:
        self._targets = targets
        self._chance = chance
        self.mode = "pass"
        """`pass`, `cut`, `stall` or `swallow`."""
        self.struck = 0
        self.ports: list[int] = []
        self._open: set[asyncio.StreamWriter] = set()
        self._servers: list[asyncio.Server] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result()

    async def _listen(self) -> None:
        for target in self._targets:
            server = await asyncio.start_server(
                lambda reader, writer, target=target: self._connected(reader, writer, target), "127.0.0.1", 0
            )
            self._servers.append(server)
            self.ports.append(server.sockets[0].getsockname()[1])

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, target: int) -> None:
        try:
            to_reader, to_writer = await asyncio.open_connection("127.0.0.1", target)
        except OSError:
            writer.transport.abort()
            return
        both = (writer, to_writer)
        self._open.update(both)
        await asyncio.gather(
            self._copy(reader, to_writer, both, "request"), self._copy(to_reader, writer, both, "answer")
        )
        self._open.difference_update(both)

    async def _copy(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        both: tuple[asyncio.StreamWriter, ...],
        what: str,
    ) -> None:
        with contextlib.suppress(OSError):
            while piece := await reader.read(_PIECE_BYTES):
                if self.mode != "pass" and self._chance.random() < 0.1:
                    self.struck += 1
                    if self.mode == "stall":
                        await asyncio.sleep(self._chance.uniform(0, _STALL_SECONDS))
                    elif self.mode == "cut" or what == "answer":
                        break
                writer.write(piece)
                await writer.drain()
        for each in both:
            each.transport.abort()

    def cut_all(self) -> None:
        """End every connection at once."""

        def cut() -> None:
            for each in list(self._open):
                each.transport.abort()

        self._loop.call_soon_threadsafe(cut)

    def close(self) -> None:
        """End all connections and the thread."""
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        for server in self._servers:
            server.close()
        for each in list(self._open):
            each.transport.abort()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
