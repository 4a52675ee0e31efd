"""Which arrivals count: the order as a pure function of its state, without a queue."""

from veilmq.client.ordered.numbering import ReceiverState
from veilmq.client.ordered.receiving.reorder import Fate, Gap, Place, Reorder
from veilmq.testing.client_contract import for_each


def reorder(**state: object) -> Reorder[str]:
    return Reorder(ReceiverState(queue="orders", incarnation=None, epoch=7, **state), room=10)  # type: ignore[arg-type]


@for_each("number, fate", [(2, Fate.DUPLICATE), (3, Fate.KEPT), (4, Fate.DUPLICATE), (5, Fate.KEPT)])
def test_what_was_acknowledged_is_a_duplicate_in_turn_or_out_of_it(number: int, fate: Fate) -> None:
    at = reorder(next=3, done=[4])
    assert at.arrive(Place(7, number), "again") == (fate, None)
    assert list(at.held) == [Place(7, number)] * (fate is Fate.KEPT)


@for_each(
    "place, late",
    [
        (Place(6, 9), True),
        (Place(7, 1), False),
        (Place(7, 2), True),
        (Place(7, 3), True),
        (Place(7, 4), False),
        (Place(8, 2), False),
    ],
)
def test_what_belongs_to_an_ended_epoch_or_a_skipped_gap_is_late(place: Place, late: bool) -> None:
    assert (reorder(next=5, skipped=[(2, 3)]).late(place) is not None) is late


def test_a_skipped_gap_leaves_out_what_was_acknowledged_in_it() -> None:
    at = reorder(next=2, done=[3, 5, 7])
    at.arrive(Place(7, 6), "six")
    assert at.gap() == Gap(7, 2, 5)
    at.skip(at.skipped(Gap(7, 2, 5)))
    assert (at.state.next, at.state.done, at.state.skipped) == (6, [7], [(2, 2), (4, 4)])
    assert at.take() == (Place(7, 6), "six")
