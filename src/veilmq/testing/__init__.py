"""What a user's tests import: a local server and a pytest fixture, disorder, the client contract, replay.

Strategy: everything here drives the real thing, and time is a value that the test sets. What only VeilMQ's own tests
need (the store contract, the reference model, faults) is in `tests/support`. `Disordered` and `LocalServer` are
imported when they are first used: the pytest plugin must cost other tests nothing.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from veilmq.testing.disordered import Disordered
    from veilmq.testing.local import LocalServer

__all__ = ["Disordered", "LocalServer"]


def __getattr__(name: str) -> "Any":
    if name == "Disordered":
        from veilmq.testing.disordered import Disordered

        return Disordered
    if name == "LocalServer":
        from veilmq.testing.local import LocalServer

        return LocalServer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
