"""The queues of one account and region in a data directory.

Strategy: an account holds the directory's shell until it is closed; its queues end with it. The defaults are the
account and region that a server in development mode shows to every client, so that a directory can be served later.
"""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final
from weakref import WeakSet

from veilmq.client.capabilities import Capabilities
from veilmq.client.client_name import client_name
from veilmq.client.clock import SYSTEM, Clock
from veilmq.client.closing import Closing
from veilmq.client.embedded import directories, limits
from veilmq.client.embedded.queue import EmbeddedQueue, failed
from veilmq.client.embedded.shell import Call
from veilmq.client.embedded.topics import EmbeddedTopics
from veilmq.client.embedded.translation import checked_name, settings_change
from veilmq.client.errors import TransportError
from veilmq.client.messages import Template
from veilmq.model.access import DEVELOPMENT_ACCOUNT, HOME_REGION_DEFAULT
from veilmq.model.commands import AnyCommand, CreateQueue, DeleteQueue, DescribeQueue, ListQueues, Origin
from veilmq.model.errors import ParameterInvalid, VeilError
from veilmq.model.outcomes import QueueCreated, QueueDescribed, QueuesListed
from veilmq.model.queue import FIFO_SUFFIX, QueueKey, QueueSettings
from veilmq.store.options import Options

_PAGE: Final = 1_000
_NO_TEMPLATE: Final = Template()


class EmbeddedAccount(Closing):
    """A data directory in this process; see `veilmq.client.queue.Account`. Any thread."""

    def __init__(
        self,
        directory: Path | str,
        *,
        account: str = DEVELOPMENT_ACCOUNT,
        region: str = HOME_REGION_DEFAULT,
        create: bool = True,
        clock: Clock = SYSTEM,
        options: Options | None = None,
    ) -> None:
        """create: make the directory (0700) if it is missing. clock, options: the same for all users of a directory in
        one process.

        Raises TransportError (held by another process: the reason names it and the URL to use; unsafe or unusable),
        ParameterInvalid.
        """
        if type(account) is not str or not (len(account) == 12 and account.isdecimal() and account.isascii()):
            raise ParameterInvalid(parameter="account", reason=f"must be 12 digits, not {account!r}")
        if type(region) is not str or not 1 <= len(region) <= 64:
            raise ParameterInvalid(parameter="region", reason=f"must be a name of 1 to 64 characters, not {region!r}")
        self.directory = Path(directory)
        self._account, self._region = account, region
        self._origin = Origin("embedded", account, client_name())
        self._queues: WeakSet[EmbeddedQueue] = WeakSet()
        self._lock = threading.Lock()
        self._closed = False
        self._shell = directories.take(self.directory, clock, options, create)

    def queue(self, name: str) -> EmbeddedQueue:
        """See `Account.queue`."""
        key = self._key(name)
        described = self._do(DescribeQueue(queue=key, origin=self._origin), name)
        assert isinstance(described, QueueDescribed)
        queue = EmbeddedQueue(self, self._shell, self._origin, described.info)
        with self._lock:
            if self._closed:
                queue.close()
            self._queues.add(queue)
        return queue

    def capabilities(self, name: str) -> Capabilities:
        """See `Account.capabilities`; with the default largest body."""
        return limits.capabilities_of(QueueSettings(fifo=name.endswith(FIFO_SUFFIX)))

    def create(self, name: str, template: Template | None = None) -> bool:
        """See `Account.create`. Raises ParameterInvalid and RedriveRefused too."""
        key = self._key(name)
        change = settings_change(template or _NO_TEMPLATE, key)
        created = self._do(CreateQueue(queue=key, origin=self._origin, change=change), name)
        assert isinstance(created, QueueCreated)
        return created.created

    def delete(self, name: str) -> None:
        """See `Account.delete`."""
        self._do(DeleteQueue(queue=self._key(name), origin=self._origin), name)

    def names(self, prefix: str = "") -> list[str]:
        """See `Account.names`."""
        found: list[str] = []
        while True:
            after = found[-1] if found else ""
            listed = self._do(
                ListQueues(
                    origin=self._origin, account=self._account, region=self._region, prefix=prefix, after=after,
                    count_max=_PAGE,
                ),
                prefix,
            )  # fmt: skip
            assert isinstance(listed, QueuesListed)
            found += [info.key.name for info in listed.queues]
            if not listed.more:
                return found

    def topics(self) -> EmbeddedTopics:
        """The directory's own topics, for pull topics."""

        def run(commands: Sequence[AnyCommand]) -> list[Any]:
            self._check_open()
            return self._shell.run(Call(commands))

        return EmbeddedTopics(self._account, self._region, self._origin, run)

    def settle(self) -> None:
        """Apply everything that is due, at once: for clocks that tests move. Nobody else needs it."""
        self._check_open()
        self._shell.settle()

    def close(self) -> None:
        """See `Account.close`. The last one to leave a directory in this process closes it; twice is once."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            queues = list(self._queues)
        for queue in queues:
            queue.close()
        directories.give_back(self._shell)

    def __repr__(self) -> str:
        return f"EmbeddedAccount({str(self.directory)!r})"

    def _key(self, name: str) -> QueueKey:
        return QueueKey(self._account, self._region, checked_name(name))

    def _check_open(self) -> None:
        if self._closed:
            raise TransportError(reason="the account was closed", may_have_happened=False)

    def _do(self, command: AnyCommand, name: str) -> Any:
        """The outcome of a command, or its error raised."""
        self._check_open()
        (outcome,) = self._shell.run(Call((command,)))
        if isinstance(outcome, VeilError):
            raise failed(outcome, name)
        return outcome
