"""What tests import, ours and a user's: contracts, reference model, manual clock, faults.

Strategy: everything here drives the real thing. Time is a value that the test sets, a fault is put in through a seam
(the file layer under SQLite, the store's named points), and what must hold is written once and run on every store.
`Disordered` and `LocalServer` are imported when they are first used: the pytest plugin must cost other tests nothing.
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
