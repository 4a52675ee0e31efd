"""How a count and a client read in a text: a log line, a report, a table, an error."""

from typing import Final

_AWS_PLATFORM: Final = ("ua/", "os/", "md/", "lang/", "api/", "exec-env/", "cfg/", "m/", "ft/")
"""How the words of an AWS SDK's user agent begin that do not say who it is: the system, settings, features in use."""


def counted(number: int, noun: str) -> str:
    """1 message, 2 messages."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def short_client(client: str) -> str:
    """A user agent without what AWS's SDKs say there of their platform, which is most of it.

    One without their mark `ua/`, or with nothing else, is returned unchanged.
    """
    words = client.split()
    if not any(word.startswith("ua/") for word in words):
        return client
    return " ".join(word for word in words if not word.startswith(_AWS_PLATFORM)) or client
