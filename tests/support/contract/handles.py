"""Receipt handles: unforgeable, valid for one queue and one incarnation."""

from tests.support.contract.stage import Stage, expect, refused

from veilmq.model.errors import ReceiptInvalid
from veilmq.model.instant import SECOND_US
from veilmq.model.outcomes import Deleted
from veilmq.testing.for_each import for_each


class TestHandles:
    """Receipt handles."""

    def test_a_handle_can_stand_in_a_url(self, stage: Stage) -> None:
        queue = stage.create()
        stage.send(queue)
        handle = stage.take(queue).handle
        assert handle
        assert all(character.isascii() and (character.isalnum() or character in "-_.") for character in handle)

    def test_a_handle_with_any_bit_flipped_is_invalid_and_changes_nothing(self, stage: Stage) -> None:
        queue = stage.create()
        stage.send(queue)
        handle = stage.take(queue).handle
        start = stage.following()
        for place, character in enumerate(handle):
            for bit in range(8):
                other = chr(ord(character) ^ 1 << bit)
                forged = handle[:place] + other + handle[place + 1 :]
                refused(stage.delete(queue, forged), ReceiptInvalid)
                refused(stage.extend(queue, forged, 0), ReceiptInvalid)
        assert stage.events(start) == []
        assert stage.counts(queue) == (0, 0, 1)
        expect(stage.delete(queue, handle), Deleted)

    @for_each("nonsense", ["", "x", "0" * 66, "é" * 66, "\0", "AQEB" * 100, "0" * 100_000], fresh="stage")
    def test_nonsense_is_invalid(self, stage: Stage, nonsense: str) -> None:
        queue = stage.create()
        refused(stage.delete(queue, nonsense), ReceiptInvalid)
        refused(stage.extend(queue, nonsense, SECOND_US), ReceiptInvalid)

    def test_a_handle_cut_or_lengthened_is_invalid(self, stage: Stage) -> None:
        queue = stage.create()
        stage.send(queue)
        handle = stage.take(queue).handle
        for forged in (handle[:-1], handle[1:], handle + "0", " " + handle, handle.upper()):
            if forged != handle:
                refused(stage.delete(queue, forged), ReceiptInvalid)

    def test_a_handle_of_another_queue_is_invalid(self, stage: Stage) -> None:
        one, two = stage.create("one"), stage.create("two")
        stage.send(one)
        stage.send(two)
        handle = stage.take(one).handle
        stage.take(two)
        start = stage.following()
        refused(stage.delete(two, handle), ReceiptInvalid)
        refused(stage.extend(two, handle, 0), ReceiptInvalid)
        assert stage.events(start) == []
        assert stage.counts(two) == (0, 0, 1)

    @for_each("reopened", [False, True], fresh="stage")
    def test_a_queue_created_again_honours_no_old_handle(self, stage: Stage, reopened: bool) -> None:
        queue = stage.create()
        first = stage.describe(queue).incarnation
        stage.send(queue)
        handle = stage.take(queue).handle
        stage.drop(queue)
        if reopened:
            stage.sweep()
            stage.reopen()
        stage.create()
        assert stage.describe(queue).incarnation != first
        stage.send(queue)
        stage.take(queue)
        refused(stage.delete(queue, handle), ReceiptInvalid)
        refused(stage.extend(queue, handle, 0), ReceiptInvalid)
        assert stage.counts(queue) == (0, 0, 1)
