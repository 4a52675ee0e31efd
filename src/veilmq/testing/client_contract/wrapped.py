"""An adapter whose queues are wrapped in a pattern, as a `ClientAccount`.

Strategy: a pattern is a `Queue`, so it must pass the cases that an adapter passes.
"""

from collections.abc import Callable
from typing import Any

from veilmq.client.queue import Queue
from veilmq.testing.client_contract.stage import ClientAccount


class WrappedClient:
    """See `veilmq.testing.client_contract.ClientAccount`. `wrap` builds the pattern over a queue of the adapter."""

    def __init__(self, brought: ClientAccount, wrap: Callable[[Queue], Queue]) -> None:
        self.account = WrappedAccount(brought.account, wrap)
        self.clock = brought.clock
        self.brief = brought.brief
        self.pass_time = brought.pass_time
        self.name = brought.name


class WrappedAccount:
    """An account that returns wrapped queues, and is otherwise unchanged."""

    def __init__(self, account: Any, wrap: Callable[[Queue], Queue]) -> None:
        self._account, self._wrap = account, wrap

    def queue(self, name: str) -> Queue:
        """See `Account.queue`."""
        return self._wrap(self._account.queue(name))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._account, name)
