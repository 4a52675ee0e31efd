"""The pictures of docs/concepts.md, drawn as bench/pictures.py draws the others.

python bench/concept_pictures.py
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from pictures import IMAGES, INK, LEASE, LOST, NEXT, PALE, WIDTH, WORK, Canvas

sys.path.pop(0)


def visibility() -> str:
    """A message whose worker dies, and one whose worker is too slow for its lease."""
    canvas = Canvas(WIDTH, 330, "A visibility timeout of 30 s: a worker that dies, and one that is too slow")
    left, scale = 120, 8.6

    def at(seconds: float) -> float:
        return left + scale * seconds

    for seconds in range(0, 71, 10):
        canvas.line((at(seconds), 34), (at(seconds), 310), colour="#dddddd")
        canvas.text(at(seconds), 24, f"{seconds} s", anchor="middle", size=12)

    def lane(top: float, name: str, start: float, end: float, lease: float) -> None:
        canvas.text(8, top + 13, name, bold=True)
        canvas.bar(at(start), at(end), top, 16, WORK)
        canvas.bar(at(start), at(lease), top + 19, 7, LEASE)

    canvas.text(8, 52, "dies", colour=LOST, bold=True)
    lane(60, "worker 1", 0, 12, 30)
    canvas.line((at(12) - 6, 57), (at(12) + 6, 79), colour=LOST, width=3)
    canvas.line((at(12) - 6, 79), (at(12) + 6, 57), colour=LOST, width=3)
    canvas.text(at(13.5), 73, "the message stays veiled until the lease ends", size=12)
    lane(104, "worker 2", 30, 46, 46)
    canvas.text(at(47), 117, "deleted: done once", size=12)
    canvas.line((at(12), 150), (at(12), 156), (at(30), 156), (at(30), 150), colour=LOST)
    canvas.text(at(21), 171, "recovery delay", anchor="middle", colour=LOST, size=12)

    canvas.text(8, 204, "too slow", colour=LOST, bold=True)
    lane(212, "worker 1", 0, 40, 30)
    canvas.text(at(41), 225, "its delete is refused: the handle is stale", colour=LOST, size=12)
    lane(256, "worker 2", 30, 60, 60)
    canvas.text(at(61), 269, "deleted", size=12)
    canvas.line((at(30), 294), (at(30), 300), (at(40), 300), (at(40), 294), colour=LOST)
    canvas.text(at(35), 316, "work done twice", anchor="middle", colour=LOST, size=12)
    return canvas.svg()


def dead_letters() -> str:
    """Three receives that fail, and the move to the dead-letter queue."""
    canvas = Canvas(WIDTH, 220, "A message that fails three times goes to the dead-letter queue")
    canvas.text(8, 26, "queue orders, receives at most 3", bold=True)
    for number in range(3):
        x = 20 + 150 * number
        canvas.bar(x, x + 84, 50, 30, WORK, faded=True)
        canvas.text(x + 42, 70, f"receive {number + 1}", anchor="middle", size=12)
        canvas.text(x + 42, 100, "fails", anchor="middle", size=12, colour=LOST)
        canvas.arrow((x + 84, 65), (x + 150, 65))
    canvas.text(104 + 33, 58, "back", anchor="middle", size=11)
    canvas.text(254 + 33, 58, "back", anchor="middle", size=11)
    canvas.bar(470, 735, 44, 42, LOST, faded=True)
    canvas.text(602, 62, "dead-letter queue failed", anchor="middle", bold=True)
    canvas.text(602, 79, "keeps count and last error", anchor="middle", size=12)
    canvas.line((602, 86), (602, 150), (62, 150), colour=NEXT)
    canvas.arrow((62, 150), (62, 110), NEXT)
    canvas.text(
        330, 143, "veilmq moves start failed, when the workers are mended", anchor="middle", size=12, colour=NEXT
    )
    canvas.text(
        8, 190, "The move is one transaction: after a crash at any point the message is in one of the queues.", size=12
    )
    canvas.text(8, 208, "There it stays for as long as that queue keeps messages.", size=12)
    return canvas.svg()


def groups() -> str:
    """A FIFO queue: a group whose first message is in flight is locked, others go on."""
    canvas = Canvas(WIDTH, 230, "A FIFO queue: the groups take turns, and each keeps its order")
    for row, (name, states, said) in enumerate(
        (
            ("group A", (LEASE, PALE, PALE), "A1 is in flight: A2 and A3 wait"),
            ("group B", (NEXT, PALE, None), "B1 can be received now"),
            ("group C", (LEASE, LEASE, PALE), "C1 and C2 came in one receive: C3 waits for both"),
        )
    ):
        top = 40 + 52 * row
        canvas.text(8, top + 20, name, bold=True)
        for place, colour in enumerate(states):
            if colour is not None:
                x = 100 + 70 * place
                canvas.bar(x, x + 56, top, 30, colour, faded=True)
                canvas.text(x + 28, top + 20, f"{name[-1]}{place + 1}", anchor="middle", bold=True)
        canvas.text(330, top + 20, said, size=12)
    canvas.text(100, 26, "the oldest first", size=11)
    for x, colour, text in (
        (100, LEASE, "in flight"),
        (220, NEXT, "receivable"),
        (350, PALE, "locked by an earlier one"),
    ):
        canvas.bar(x, x + 18, 204, 14, colour, faded=True)
        canvas.text(x + 24, 216, text, size=12)
    return canvas.svg()


def cluster() -> str:
    """Three servers, of which one owns the queues; the log in PostgreSQL and its standby."""
    canvas = Canvas(WIDTH, 330, "A cluster: any server answers, one owns the queues, the log is in PostgreSQL")

    def box(x: float, y: float, width: float, name: str, text: str, fill: str) -> None:
        canvas.bar(x, x + width, y, 46, fill, faded=True)
        canvas.text(x + width / 2, y + 20, name, anchor="middle", bold=True)
        canvas.text(x + width / 2, y + 37, text, anchor="middle", size=11)

    box(280, 10, 200, "clients", "any SDK, any server", PALE)
    for x, name, text, fill in (
        (30, "server one", "follows the log", WORK),
        (280, "server two", "owns the queues", NEXT),
        (530, "server three", "follows the log", WORK),
    ):
        box(x, 118, 200, name, text, fill)
        canvas.arrow((380, 56) if x == 280 else (320 if x < 280 else 440, 56), (x + 100, 118))
    for start, end in (((230, 141), (280, 141)), ((530, 141), (480, 141))):
        canvas.arrow(start, end)
    canvas.text(255, 134, "calls", anchor="middle", size=11)
    canvas.text(505, 134, "calls", anchor="middle", size=11)
    box(280, 232, 200, "PostgreSQL", "the log: a commit is an append", LEASE)
    box(530, 232, 200, "standby", "confirms each commit", LEASE)
    canvas.arrow((380, 164), (380, 232), NEXT)
    canvas.text(388, 202, "append, then answer", size=12, colour=NEXT)
    canvas.arrow((480, 255), (530, 255))
    canvas.line((280, 255), (130, 255), colour=INK, dashed=True)
    canvas.arrow((130, 255), (130, 164))
    canvas.text(138, 248, "reads every record", size=11)
    canvas.text(
        8,
        312,
        "If the owner is silent for its lease, a follower that has every record takes over; handles stay good.",
        size=12,
    )
    return canvas.svg()


PICTURES = {"visibility": visibility, "dead-letters": dead_letters, "groups": groups, "cluster": cluster}


def main() -> None:
    for name, make in PICTURES.items():
        (IMAGES / f"{name}.svg").write_text(make())


if __name__ == "__main__":
    main()
