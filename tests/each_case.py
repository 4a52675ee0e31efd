"""Many inputs against one rule are one test: it goes through all of them and names every one that fails.

`each_case` is written as `pytest.mark.parametrize` is. What differs: the fixtures are made once for all cases, so no
case may depend on the state that another one leaves behind. Use parametrize where the cases fail in different ways, or
where each needs a fixture of its own; where only the store must be empty, `fresh` renews it.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

_TEXT_MAX = 500
_FAILURES = (Exception, pytest.fail.Exception)


def each_case(
    names: str | tuple[str, ...], cases: Iterable[Any], ids: Any = None, *, fresh: str = ""
) -> Callable[[Any], Any]:
    """Run a test with each case; at the end fail with all that failed, `ids` as in `pytest.mark.parametrize`.

    fresh: a fixture of the test whose `renew()` is called between two cases, so that each starts with an empty store.
    """
    wanted = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    rows = [_row(wanted, case) for case in cases]
    labels = [_label(number, row, ids) for number, row in enumerate(rows)]
    assert rows, f"no case of {names}"

    def _go(fixtures: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        for number, row in enumerate(rows):
            if fresh and number:
                fixtures[fresh].renew()
            yield labels[number], row

    def decorate(test: Any) -> Any:
        signature = inspect.signature(test)

        if inspect.iscoroutinefunction(test):

            @functools.wraps(test)
            async def all_cases(*positional: Any, **fixtures: Any) -> None:
                failures = _Failures(len(rows))
                for label, row in _go(fixtures):
                    with failures.of(label):
                        await test(*positional, **fixtures, **row)
                failures.tell()
        else:

            @functools.wraps(test)
            def all_cases(*positional: Any, **fixtures: Any) -> None:
                failures = _Failures(len(rows))
                for label, row in _go(fixtures):
                    with failures.of(label):
                        test(*positional, **fixtures, **row)
                failures.tell()

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

    def tell(self) -> None:
        if self._failed:
            lines = [f"  {label}: {type(error).__name__}: {str(error)[:_TEXT_MAX]}" for label, error in self._failed]
            text = "\n".join([f"{len(self._failed)} of {self._cases} cases failed:", *lines])
            raise AssertionError(text) from self._failed[0][1]


def _row(names: list[str], case: Any) -> dict[str, Any]:
    if isinstance(case, type(pytest.param())):
        assert not case.marks, "the cases run as one test, so none has marks of its own"
        values = case.values
    else:
        values = (case,) if len(names) == 1 else tuple(case)
    return dict(zip(names, values, strict=True))


def _label(number: int, row: dict[str, Any], ids: Any) -> str:
    if callable(ids):
        return ", ".join(str(ids(value)) for value in row.values())
    if ids is not None:
        return str(list(ids)[number])
    return ", ".join(f"{name}={str(value)[:_TEXT_MAX]!r}" for name, value in row.items())
