"""How many bytes of answers clients have not read, and when receives must wait for them.

Strategy: the listeners count an answer when its client reads too slowly for it, and uncount it when the client has
read it or is gone. While there are too many such bytes, in all or of one account, the engine starts no receives: long
polls stay parked, other receives are refused. Everything else goes on. `near` is False as long as nothing can be
refused, so that a batch usually pays for one comparison.

What is being read from clients has its own bound of the same size (`server.http.Limits`). It also takes from the bound
here, but at most half: clients without any key can send unfinished requests, and must not be able to stop all receives.
"""

from collections.abc import Callable


class Unread:
    """The unread bytes of one server, by account.

    bytes: of all accounts. bytes_max: their bound. account_bytes_max: the bound of one account, half of `bytes_max`.
    near: whether any account may be over a bound. refused: receives and peeks that were refused, since the start.
    reading: returns the bytes of unfinished requests. on_room: called when bytes were read while `near`.
    """

    __slots__ = ("_accounts", "account_bytes_max", "bytes", "bytes_max", "near", "on_room", "reading", "refused")

    def __init__(self, bytes_max: int) -> None:
        self.bytes = 0
        self.bytes_max = bytes_max
        self.account_bytes_max = bytes_max // 2
        self.near = False
        self.refused = 0
        self.reading: Callable[[], int] = lambda: 0
        self.on_room: Callable[[], None] = lambda: None
        self._accounts: dict[str, int] = {}

    def add(self, account: str, size: int) -> None:
        """An answer of that size waits for its client."""
        self.bytes += size
        self._accounts[account] = self._accounts.get(account, 0) + size
        self.near = self.bytes > self.account_bytes_max

    def remove(self, account: str, size: int) -> None:
        """The client has read it, or is gone."""
        self.bytes -= size
        left = self._accounts[account] - size
        if left:
            self._accounts[account] = left
        else:
            del self._accounts[account]
        if self.near:
            self.near = self.bytes > self.account_bytes_max
            self.on_room()

    def refuses(self, account: str) -> bool:
        """Whether messages for this account must wait."""
        if self._accounts.get(account, 0) > self.account_bytes_max:
            return True
        return self.bytes + min(self.reading(), self.account_bytes_max) > self.bytes_max
