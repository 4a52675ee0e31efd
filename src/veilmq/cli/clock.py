"""`veilmq clock`: accept a step of the machine's clock.

Strategy: a function of the context (`Asked`), to which cli/remote adds the common options.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from veilmq.cli.remote import Asked


def accept_clock(asked: "Asked") -> None:
    """Say that the machine's clock is right: what only its step has kept from expiring now expires."""
    from veilmq.cli.output import duration, print_json

    shown = asked.access.accept_clock()
    if asked.as_json:
        print_json(shown)
    elif shown["accepted_us"]:
        print(f"accepted a step of {duration(shown['accepted_us'])}")
    else:
        print("there was nothing to accept")
