"""An intake that keeps the case of Azure's metadata header names.

Strategy: header names in HTTP are case-insensitive and `Intake` lower-cases all of them, but Azure "preserves the case
with which they were created" of names that begin with `x-ms-meta-`. Only the Azure port uses this intake, so other
ports do not pay for it. Source: "Setting and retrieving properties and metadata" in the Storage REST API.
"""

from collections.abc import Callable
from typing import Final

from veilmq.server.intake import Intake
from veilmq.server.limits import Limits

_OWN: Final = b"x-ms-meta-"


class HeaderCaseIntake(Intake):
    """Fills `Request.header_case`."""

    __slots__ = ("_header_case",)

    def __init__(self, limits: Limits, peer: str, secure: bool, next_id: Callable[[], str]) -> None:
        self._header_case: dict[bytes, bytes] = {}
        super().__init__(limits, peer, secure, next_id)

    def on_header(self, name: bytes, value: bytes) -> None:
        """As `Intake` has it."""
        small = name.lower()
        if small.startswith(_OWN):
            self._header_case[small] = name
        super().on_header(small, value)

    def on_message_complete(self) -> None:
        """As `Intake` has it."""
        super().on_message_complete()
        if self._header_case and not self._upgrading:
            self.ready[-1][0].header_case = self._header_case
            self._header_case = {}
