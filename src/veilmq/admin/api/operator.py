"""Commands of operators: each changing call is one `Operate` with an id, so that a repeated call acts once.

Strategy: a client gives the id in the header `Idempotency-Key`; without one the server makes it, for the history alone.
What was asked is compared by a digest of operation, target and members, so the same call through another door (the
command line on a directory) counts as the same. Source: draft-ietf-httpapi-idempotency-key-header.
"""

import re
import secrets
from collections.abc import Sequence
from hashlib import sha256
from typing import Any, Final, NamedTuple

import msgspec
from msgspec import UNSET

from veilmq.admin.api import Refused
from veilmq.admin.api.inputs import ChangeInput
from veilmq.model.commands import COMMAND_ID_CHARACTERS_MAX, AnyCommand, Operate, Origin
from veilmq.model.errors import VeilError
from veilmq.model.outcomes import Operated, Outcome

HEADER: Final = "idempotency-key"
REPLAYED: Final = {"idempotent-replayed": "true"}
"""Of an answer that was given before."""
_ASKED_BYTES_MAX: Final = 2_000
_QUOTED: Final = re.compile(r'"((?:[ !#-\[\]-~]|\\["\\])*)"')
"""A string of RFC 9651, 3.3.3."""
_ID: Final = re.compile(rf"[!-~]{{1,{COMMAND_ID_CHARACTERS_MAX}}}")
_JSON: Final = msgspec.json.Encoder(order="deterministic")
_UNTOLD: Final = frozenset({"tags", "message"})
"""Members that may hold anything: the history tells that they were there, but not their values."""
_COUNTED: Final = frozenset({"messages", "handles"})


class Asked(NamedTuple):
    """What an operator asks for."""

    act: str
    target: str
    """The path of what it is done to."""
    members: Any
    """The input, as a struct."""

    @property
    def digest(self) -> bytes:
        """Differs for every other call. Who lost the answer to a change sees another version when they repeat it."""
        is_change = isinstance(self.members, ChangeInput)
        members = msgspec.structs.replace(self.members, if_version=UNSET) if is_change else self.members
        return sha256(_JSON.encode([self.act, self.target, members])).digest()

    def shown(self) -> dict[str, Any]:
        """The members for the history: no bodies, no handles, and no more than fits."""
        given = {name: value for name, value in msgspec.to_builtins(self.members).items() if value is not None}
        shown = {name: _told(self.act, name, value) for name, value in given.items()}
        if len(_JSON.encode(shown)) > _ASKED_BYTES_MAX:
            shown = dict.fromkeys(shown)
        return {"target": self.target} | shown


def _told(act: str, name: str, value: Any) -> Any:
    if name in _UNTOLD:
        return None
    return len(value) if name in _COUNTED and act != "drop" else value


def command_id(given: Sequence[str]) -> str | None:
    """The id in the headers of that name: as a quoted string, as the draft says, or bare. Raises Refused (400)."""
    if not given:
        return None
    text = given[0].strip()
    quoted = _QUOTED.fullmatch(text)
    if len(given) > 1 or (quoted is None and '"' in text):
        raise _no_id()
    return checked_id(text if quoted is None else re.sub(r"\\(.)", r"\1", quoted[1]))


def checked_id(text: str) -> str:
    """The id of a command. Raises Refused (400)."""
    if not _ID.fullmatch(text):
        raise _no_id()
    return text


def _no_id() -> Refused:
    reason = f"Idempotency-Key: expected one id of 1 to {COMMAND_ID_CHARACTERS_MAX} visible ASCII characters"
    return Refused(400, "idempotency_key_invalid", reason)


def operate(origin: Origin, asked: Asked, commands: Sequence[AnyCommand], given: str | None) -> Operate:
    """The commands as one. given: the client's id."""
    return Operate(
        origin=origin,
        id=secrets.token_hex(16) if given is None else given,
        keeps=given is not None,
        digest=asked.digest,
        act=asked.act,
        asked=asked.shown(),
        commands=tuple(commands),
    )


class Done(NamedTuple):
    """What became of an operator's commands."""

    outcomes: list[Outcome]
    repeated: bool


def done(command: Operate, outcome: Outcome) -> Done:
    """The outcomes of the commands. Raises Refused (422) if the id is another command's, and an error of the store."""
    if isinstance(outcome, VeilError):
        raise outcome
    assert isinstance(outcome, Operated)
    if outcome.mismatch:
        words = "this Idempotency-Key was used for another call: a new call needs an id of its own"
        raise Refused(422, "idempotency_key_reused", words, id=command.id)
    return Done(outcome.outcomes, outcome.repeated)
