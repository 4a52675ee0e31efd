"""How a count reads in a text: a log line, a report, an error."""


def counted(number: int, noun: str) -> str:
    """1 message, 2 messages."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
