"""Whatever has to be closed is closed at the end of its `with` block."""

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


class Closing(ABC):
    """A context manager whose exit is `close()`."""

    __slots__ = ()

    @abstractmethod
    def close(self) -> None:
        """Let go of what is held. A second time does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
