"""Handlers as coroutines, or in threads.

Coroutines: one event loop in a separate thread, with a task for each call of the handler. A feeder thread takes
messages when a task is free, and a small pool makes the blocking calls (guard, delete, release). If all messages of a
call are cancelled, its task is cancelled: that is how coroutines are stopped.

Threads: each of N threads takes messages, calls the handler, settles, and takes the next.
"""

import asyncio
import logging
import os
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, Final

from veilmq.client.shared.lifetimes import InOneProcess
from veilmq.client.shared.threads import DaemonPool
from veilmq.client.worker.job import AsyncJob, Hand, Job
from veilmq.client.worker.job.results import STOPPED, Result, call, of_error, of_return
from veilmq.client.worker.runners.flow import Flow

_BLOCKING_MAX: Final = 32

log = logging.getLogger("veilmq.worker")


class AsyncRunners:
    """Await `handler` on messages of `flow` until its line is closed."""

    def __init__(self, flow: Flow, handler: Callable[[Any], Awaitable[Any]]) -> None:
        self._flow = flow
        self._handler = handler
        self._loop = asyncio.new_event_loop()
        self._free = threading.Semaphore(flow.options["concurrency"])
        self._pool = DaemonPool(min(_BLOCKING_MAX, flow.options["concurrency"]), "veilmq worker settling")
        self._tasks: set[asyncio.Task[None]] = set()
        self._killed = False
        self._closed = False
        self._pid = os.getpid()

    def start(self) -> None:
        """Returns once the handlers can run."""
        threading.Thread(target=self._run_loop, name="veilmq worker loop", daemon=True).start()
        threading.Thread(target=self._feed, name="veilmq worker feeder", daemon=True).start()

    def kill(self) -> None:
        """Cancel the tasks whose handlers still run at shutdown."""
        self._killed = True
        self._loop.call_soon_threadsafe(lambda: [task.cancel() for task in self._tasks])

    def close(self) -> None:
        """Close after the last handler."""
        self._closed = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._pool.shutdown()

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            while not self._closed:  # a handler can stop its loop, and all messages would stay where they are
                try:
                    self._loop.run_forever()
                except (SystemExit, KeyboardInterrupt):  # of a task that a handler started beside itself
                    log.exception("a task that a handler started raised this; the worker goes on")
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        finally:
            self._loop.close()

    def _feed(self) -> None:
        while self._free.acquire() and (hands := self._flow.take()):
            self._loop.call_soon_threadsafe(self._start, hands)

    def _start(self, hands: Sequence[Hand]) -> None:
        task = self._loop.create_task(self._work(hands))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _work(self, hands: Sequence[Hand]) -> None:
        """Like `Flow.work`, with the blocking parts in the pool."""
        flow = self._flow
        try:
            at_once = flow.prepare_at_once(hands)
            if todo := hands if at_once else await self._blocking(lambda: flow.prepare(hands)):
                start = flow.clock.monotonic()
                with flow.spans.around([hand.message for hand in todo]) as span:
                    results = await self._call(todo)
                    flow.spans.record(span, results)
                seconds = flow.clock.monotonic() - start
                await self._blocking(lambda: flow.finish(todo, results, seconds))
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            if self._closed:  # its handler went on after the end of the run, which has given the messages back
                return
            log.exception("a bug in the worker: its messages go back")
            fault = error  # kept: a cancellation leaves this block before the call, and `error` is unbound there
            await self._blocking(lambda: flow.rescue(hands, fault))
        finally:
            flow.done(hands)
            self._free.release()

    async def _blocking(self, call: Callable[[], Any]) -> Any:
        return await asyncio.shield(self._loop.run_in_executor(self._pool, call))

    async def _call(self, hands: Sequence[Hand]) -> list[Result]:
        batch = self._flow.options["batch"] is not None
        jobs = [
            AsyncJob(self._pool, hand.message, hand, hand.cancelled, hand.state, hand.deadline, self._flow.clock)
            for hand in hands
        ]
        # A separate task for the handler: cancelling it must not cancel the settling that follows.
        task = self._loop.create_task(_coroutine(self._pid, self._handler(list(jobs) if batch else jobs[0])))

        def stop() -> None:
            # A keeper of the user's outlives the worker and its loop, and may lose what a shutdown left to its lease.
            if all(hand.cancelled for hand in hands):
                with suppress(RuntimeError):
                    self._loop.call_soon_threadsafe(task.cancel)

        for hand in hands:
            hand.cancelled.on_set(stop)
        try:
            return of_return(jobs, await task, batch)
        except asyncio.CancelledError as error:
            task.cancel()
            # Raised without a cancellation it is a failure: a release without delay would bring the message back at
            # once.
            stopped = self._killed or all(hand.cancelled for hand in hands)
            return [STOPPED if stopped else of_error(error)] * len(hands)
        except Exception as error:  # noqa: BLE001 the handler's edge: what it raises becomes the message's result
            return [of_error(error)] * len(hands)


async def _coroutine(pid: int, awaitable: Awaitable[Any]) -> Any:
    try:
        with InOneProcess(pid):
            return await awaitable
    except (Exception, asyncio.CancelledError):
        raise
    except BaseException as error:
        # SystemExit and KeyboardInterrupt would end the loop and all other handlers; nothing further up handles them.
        if not _runs():
            raise  # not from the handler: the loop has ended, and this coroutine is being discarded
        raise RuntimeError(f"the handler raised {error!r}") from error


def _runs() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


class ThreadRunners:
    """Run `handler` on messages of `flow` until its line is closed."""

    def __init__(self, flow: Flow, handler: Callable[[Any], Any]) -> None:
        self._flow = flow
        self._handler = handler

    def start(self) -> None:
        """Returns once the handlers can run."""
        for number in range(1, self._flow.options["concurrency"] + 1):
            threading.Thread(target=self._run, name=f"veilmq worker {number}", daemon=True).start()

    def kill(self) -> None:
        """Nothing to do at shutdown: threads cannot be killed, they end with the process."""

    def close(self) -> None:
        """Nothing to close."""

    def _run(self) -> None:
        while hands := self._flow.take():
            self._flow.work(hands, self._call)

    def _call(self, hands: Sequence[Hand]) -> list[Result]:
        clock = self._flow.clock
        jobs = [Job(hand.message, hand, hand.cancelled, hand.state, hand.deadline, clock) for hand in hands]
        return call(self._handler, jobs, self._flow.options["batch"] is not None)
