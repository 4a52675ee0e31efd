"""A server of a cluster: waits until it owns the shard, serves with the log as its durability, and keeps its lease.

Strategy: following and everything that PostgreSQL may delay runs on threads. Renewals are sent from the loop's clock
about three times a lease. A server that lost the shard ends, and whoever runs it starts it again: it then follows.
"""

import asyncio
import logging
import threading
from contextlib import AsyncExitStack, suppress
from functools import partial
from typing import Final

from veilmq.cluster.member import Member, begins_at
from veilmq.cluster.postgres import Unfit, Unreachable
from veilmq.cluster.postgres.log import PostgresLog
from veilmq.cluster.postgres.ownership import Ownership
from veilmq.engine.directory import STATE_FORMAT, open_directory, open_follower
from veilmq.engine.engine import Engine
from veilmq.model.instant import Instant
from veilmq.server.clock import LeaseClock, boot_ns, wall
from veilmq.server.config.settings import Settings
from veilmq.server.service import ClusterRefused
from veilmq.server.shell import Shell
from veilmq.store import Store
from veilmq.store.log import AppendUnknown, NotAppended, NotOwner

_RENEWALS: Final = 3
"""Renewals in the time of one lease."""

log = logging.getLogger("veilmq.cluster")


class ClusterMember:
    """What `Service` needs of a cluster. Belongs to the loop."""

    def __init__(self, settings: Settings, clock: LeaseClock) -> None:
        """Raises ClusterRefused, OSError."""
        assert settings.cluster is not None
        self._settings = settings
        self._clock = clock
        self._stopping = threading.Event()
        try:
            self._member = Member(
                settings.cluster,
                settings.data,
                partial(open_follower, options=settings.store_options()),
                boot_ns,
                state_format=STATE_FORMAT,
                name=settings.server_name,
                single_copy=settings.single_copy,
            )
        except Unfit as error:
            raise ClusterRefused(str(error)) from error
        self.ownership: Ownership | None = None

    def stop(self) -> None:
        """Wait for the shard no longer."""
        self._stopping.set()

    def holds(self) -> bool:
        """Whether the lease runs."""
        return self.ownership is not None and self.ownership.holds()

    async def open(self, undo: AsyncExitStack) -> tuple[Engine, Store] | None:
        """Follow until this server owns the shard, then open its copy as a store. None: `stop` was called.

        Raises ClusterRefused, and as `open_directory`.
        """
        try:
            return await self._open(undo)
        except (Unfit, Unreachable, NotAppended, AppendUnknown) as error:
            raise ClusterRefused(str(error)) from error

    async def _open(self, undo: AsyncExitStack) -> tuple[Engine, Store] | None:
        log.info("following as %s; serving begins when this server owns the shard", self._settings.server_name)
        self.ownership = ownership = await asyncio.to_thread(self._member.follow, self._stopping)
        if ownership is None:
            return None
        undo.callback(ownership.close)
        undo.push_async_callback(asyncio.to_thread, self._hand_over, ownership)
        taken_ns = boot_ns()
        shared_log = await asyncio.to_thread(PostgresLog, ownership)
        undo.callback(shared_log.close)
        engine, store = await asyncio.to_thread(
            open_directory,
            self._settings.data,
            self._settings.engine_limits(),
            self._settings.store_options(),
            log=shared_log,
        )
        undo.callback(store.close)
        since_us = (boot_ns() - taken_ns) // 1_000
        self._clock.take_over(begins_at(ownership.before, store.mark, wall(), since_us))
        self._log = shared_log
        return engine, store

    def _hand_over(self, ownership: Ownership) -> None:
        """Let another server take over at once."""
        with suppress(NotOwner):
            try:
                ownership.hand_over("", self._clock.now())
            except (Unreachable, Unfit) as error:
                log.warning("not handed over, the lease has to run out: %s", error)

    async def keep(self, shell: Shell) -> None:
        """Renew the lease until cancelled, or until the shard is lost, which ends the shell."""
        ownership = self.ownership
        assert ownership is not None
        pause_s = ownership.shard.lease_us / 1e6 / _RENEWALS
        trouble = ""
        while True:
            try:
                await asyncio.to_thread(self._renew, ownership, self._clock.now())
                if trouble:
                    log.info("the lease is renewed again")
                trouble = ""
            except NotOwner as error:
                shell.abort(str(error))
                return
            except (Unreachable, Unfit) as error:
                if not trouble:
                    log.warning("the lease is not renewed: %s", error)
                trouble = str(error)
            await asyncio.sleep(pause_s)

    def _renew(self, ownership: Ownership, now: Instant) -> None:
        ownership.renew(now)
        self._log.prepare()
