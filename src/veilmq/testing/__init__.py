"""For users' tests: a local server with a pytest fixture, disordered queues, the client contract, replay.

Strategy: everything here uses the real server or queue, and the test sets the time. What only VeilMQ's own tests need
(the store contract, the reference model, faults) is in `tests/support`. `Disordered` and `LocalServer` are imported at
their first use, so that the pytest plugin costs other tests nothing. What is drawn at random depends on a seed alone.
"""

from random import Random

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from veilmq.testing.disordered import Disordered
    from veilmq.testing.local import LocalServer

__all__ = ["Disordered", "LocalServer", "Random", "chance"]


def chance(seed: int) -> Random:
    """A generator whose draws depend only on the seed."""
    return Random(seed)


def __getattr__(name: str) -> "Any":
    if name == "Disordered":
        from veilmq.testing.disordered import Disordered

        return Disordered
    if name == "LocalServer":
        from veilmq.testing.local import LocalServer

        return LocalServer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
