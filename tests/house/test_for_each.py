"""A test that goes through many cases fails with all that fail, and only with those."""

import asyncio

import pytest

from veilmq.testing.for_each import for_each


@for_each("given, wanted", [(1, 2), pytest.param(2, 3)])
def test_it_works_beside_fixtures(tmp_path: object, given: int, wanted: int) -> None:
    assert tmp_path
    assert given + 1 == wanted


def test_every_case_that_fails_is_named() -> None:
    seen = []

    @for_each("number", range(5))
    def check(number: int) -> None:
        seen.append(number)
        assert number != 1, "one"
        if number == 2:
            pytest.fail("two")
        with pytest.raises(ZeroDivisionError):
            print(1 // (number - 3) if number == 3 else 1 // 0)
        if number == 4:
            raise OSError("four")

    with pytest.raises(AssertionError) as raised:
        check()
    assert seen == [0, 1, 2, 3, 4]
    first, *failed = str(raised.value).splitlines()
    assert first == "3 of 5 cases failed:"
    for line, named in zip((line for line in failed if line.startswith("  number")), (1, 2, 4), strict=True):
        assert line.startswith(f"  number='{named}': ")


def test_a_coroutine_goes_through_its_cases() -> None:
    @for_each("number", [1, 2, 3])
    async def check(number: int) -> None:
        assert number == 2, "not two"

    with pytest.raises(AssertionError, match="2 of 3 cases failed"):
        asyncio.run(check())


def test_the_fixture_is_renewed_between_cases() -> None:
    class Counted:
        renewed = 0

        def renew(self) -> None:
            self.renewed += 1

    counted = Counted()

    @for_each("number", range(3), fresh="place")
    def check(place: Counted, number: int) -> None:
        assert place.renewed == number

    check(place=counted)
    assert counted.renewed == 2


def test_a_case_that_breaks_the_fixture_is_named_with_its_cause() -> None:
    class Broken:
        def renew(self) -> None:
            raise RuntimeError("broken")

    @for_each("number", range(2), fresh="place")
    def check(place: Broken, number: int) -> None:
        raise OSError("the cause")

    with pytest.raises(AssertionError, match=r"(?s)number='0': OSError: the cause.*number='1': RuntimeError: broken"):
        check(place=Broken())


def test_an_interrupt_ends_it() -> None:
    @for_each("number", [1, 2])
    def check(number: int) -> None:
        raise KeyboardInterrupt(number)

    with pytest.raises(KeyboardInterrupt, match="1"):
        check()


def test_a_case_must_fit() -> None:
    def check(number: int) -> None: ...

    for names, cases in (("other", [1]), ("number", []), ("number, other", [(1,)])):
        with pytest.raises((AssertionError, ValueError)):
            for_each(names, cases)(check)
