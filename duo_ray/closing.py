"""What holds processes or connections, and gives them back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


class Closing(ABC):
    """Use it as a context manager, or call `close`: both free everything."""

    @abstractmethod
    def close(self) -> None:
        """Free everything; safe to call twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
