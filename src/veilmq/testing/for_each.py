"""One test case for many inputs that fail in the same way.

Strategy: `for_each` is used like `pytest.mark.parametrize`, but makes one case of all values. It tries every value,
then fails once and lists all that went wrong. Fixtures, a queue and its server are set up once, so no value may depend
on the state that another one leaves behind. Values that stand for different ways to fail, or that need a fixture of
their own, remain separate cases; if only the store must be empty, `fresh` renews it.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import pytest

_TEXT_MAX: Final = 500
_FAILURES: Final = (Exception, pytest.fail.Exception)

Labels = Iterable[str] | Callable[[Any], Any] | None


def for_each(
    names: str | tuple[str, ...], values: Iterable[Any], ids: Labels = None, *, fresh: str = ""
) -> Callable[[Any], Any]:
    """Call the test, a function or a coroutine function, with every one of `values` as the argument `names` (or several
    arguments, separated by commas).

    ids: labels for the report, or a function from value to label; the id of a `pytest.param` is one, too. fresh: a
    fixture of the test whose `renew()` is called between two values.

    Raises AssertionError from the first failure, with a line for each value that failed.
    """
    wanted = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    values = list(values)
    rows = [_row(wanted, value) for value in values]
    assert rows, f"no value of {names}"
    if ids is None or callable(ids):
        labels = [_id_of(value) or _label(row, ids) for value, row in zip(values, rows, strict=True)]
    else:
        labels = list(ids)

    def renew(fixtures: dict[str, Any], number: int) -> None:
        if fresh and number:
            fixtures[fresh].renew()

    def decorate(test: Any) -> Any:
        signature = inspect.signature(test)

        if inspect.iscoroutinefunction(test):

            @functools.wraps(test)
            async def all_cases(*positional: Any, **fixtures: Any) -> None:
                failures = _Failures(len(rows))
                for number, (label, row) in enumerate(zip(labels, rows, strict=True)):
                    with failures.of(label):
                        renew(fixtures, number)
                        await test(*positional, **fixtures, **row)
                failures.report()
        else:

            @functools.wraps(test)
            def all_cases(*positional: Any, **fixtures: Any) -> None:
                failures = _Failures(len(rows))
                for number, (label, row) in enumerate(zip(labels, rows, strict=True)):
                    with failures.of(label):
                        renew(fixtures, number)
                        test(*positional, **fixtures, **row)
                failures.report()

        left = [parameter for name, parameter in signature.parameters.items() if name not in wanted]
        assert len(left) + len(wanted) == len(signature.parameters), f"{test.__name__} does not take all of {names}"
        all_cases.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]
        return all_cases

    return decorate


class _Failures:
    """What failed so far, of so many cases."""

    def __init__(self, cases: int) -> None:
        self._cases = cases
        self._failed: list[tuple[str, BaseException]] = []

    @contextlib.contextmanager
    def of(self, label: str) -> Iterator[None]:
        try:
            yield
        except _FAILURES as error:
            self._failed.append((label, error))

    def report(self) -> None:
        if self._failed:
            lines = [f"  {label}: {type(error).__name__}: {str(error)[:_TEXT_MAX]}" for label, error in self._failed]
            text = "\n".join([f"{len(self._failed)} of {self._cases} cases failed:", *lines])
            raise AssertionError(text) from self._failed[0][1]


def _row(names: list[str], value: Any) -> dict[str, Any]:
    if isinstance(value, type(pytest.param())):
        assert not value.marks, "the values run as one test, so none has marks of its own"
        parts = value.values
    else:
        parts = (value,) if len(names) == 1 else tuple(value)
    return dict(zip(names, parts, strict=True))


def _id_of(value: Any) -> str | None:
    """The id that a `pytest.param` gives."""
    return str(value.id) if isinstance(value, type(pytest.param())) and value.id else None


def _label(row: dict[str, Any], shown: Callable[[Any], Any] | None) -> str:
    if shown is not None:
        return ", ".join(str(shown(value)) for value in row.values())[:_TEXT_MAX]
    return ", ".join(f"{name}={str(value)[:_TEXT_MAX]!r}" for name, value in row.items())
