"""One test case for many inputs that fail in the same way.

Strategy: `for_each` is used like `pytest.mark.parametrize`, but makes one case of all values. It tries every value,
then fails once and lists all that went wrong. So fixtures, a queue and its server are set up once. Values that stand
for different ways to fail remain separate cases.
"""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, Final

import pytest

_LABEL_MAX: Final = 80

Test = Callable[..., None]
Labels = Iterable[str] | Callable[[Any], Any] | None


def for_each(names: str, values: Iterable[Any], *, ids: Labels = None) -> Callable[[Test], Test]:
    """Call the test with every one of `values` as the argument `names` (or several arguments, separated by commas).
    `ids`: labels for the report, or a function from value to label. Raises AssertionError from the first failure, with
    a line for each value that failed."""
    given = [name.strip() for name in names.split(",")]
    rows = [tuple(value) if len(given) > 1 else (value,) for value in values]
    assert rows, "a test of nothing"
    labels = [_label(row, ids or repr) for row in rows] if ids is None or callable(ids) else list(ids)

    def decorate(test: Test) -> Test:
        signature = inspect.signature(test)

        @functools.wraps(test)
        def tried(*args: Any, **fixtures: Any) -> None:
            failed: list[str] = []
            first: BaseException | None = None
            for label, row in zip(labels, rows, strict=True):
                try:
                    test(*args, **fixtures, **dict(zip(given, row, strict=True)))
                except (Exception, pytest.fail.Exception) as error:  # noqa: BLE001 - reported below, with the others
                    first = first or error
                    failed.append(f"{label}: {type(error).__name__}: {error}")
            if failed:
                raise AssertionError(f"{len(failed)} of {len(rows)}:\n" + "\n".join(failed)) from first

        kept = [parameter for name, parameter in signature.parameters.items() if name not in given]
        tried.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
        return tried

    return decorate


def _label(row: tuple[Any, ...], say: Callable[[Any], Any]) -> str:
    text = ", ".join(str(say(value)) for value in row)
    return text if len(text) <= _LABEL_MAX else f"{text[:_LABEL_MAX]}..."
