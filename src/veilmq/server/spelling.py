"""An intake that keeps how the names of Azure's metadata headers were spelled.

Strategy: HTTP has no case in a header's name and `Intake` makes all of them small; Azure "preserves the case with which
they were created" of names that begin with `x-ms-meta-`. So the port that speaks Azure reads by this one, and the
others do not pay for it. Source: "Setting and retrieving properties and metadata" in the Storage REST API.
"""

from collections.abc import Callable
from typing import Final

from veilmq.server.intake import Intake
from veilmq.server.limits import Limits

_OWN: Final = b"x-ms-meta-"


class SpellingIntake(Intake):
    """Fills `Request.spelled`."""

    __slots__ = ("_spelled",)

    def __init__(self, limits: Limits, peer: str, secure: bool, next_id: Callable[[], str]) -> None:
        self._spelled: dict[bytes, bytes] = {}
        super().__init__(limits, peer, secure, next_id)

    def on_header(self, name: bytes, value: bytes) -> None:
        """As `Intake` has it."""
        small = name.lower()
        if small.startswith(_OWN):
            self._spelled[small] = name
        super().on_header(small, value)

    def on_message_complete(self) -> None:
        """As `Intake` has it."""
        super().on_message_complete()
        if self._spelled and not self._upgrading:
            self.ready[-1][0].spelled = self._spelled
            self._spelled = {}
