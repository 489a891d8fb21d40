"""What the HTTP side needs of a running pipeline: the seam between text over HTTP and token ids in actors."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from duo_ray.config import Config
from duo_ray.metrics import Figures
from duo_ray.models.tokenizer import Tokenizer
from duo_ray.types import Delta, Finished, Request


class Engine(Protocol):
    """One pipeline that answers requests. Of its attributes only `last_token` changes while it runs."""

    config: Config
    tokenizer: Tokenizer
    """The target's."""
    max_context: int
    """Tokens of prompt and answer one request may hold."""
    last_token: float
    """When it last gave anybody a token, by `time.monotonic`; 0 before the first."""
    model_name: str
    """What `/v1/models` lists and requests name."""

    def stream(self, request: Request, /) -> AsyncGenerator[Delta | Finished, None]:
        """Tokens of one answer as they become certain, then `Finished`.

        Closing the generator (`aclose`) ends the work of target and draft within one step and frees both slots.

        Raises:
            Overloaded: the queue is full (status 503, with `retry_after_s`).
            ContextOverflow: the prompt does not fit.
            DuoRayError: the request cannot be served; the text says why.
        """
        ...

    async def check_health(self) -> None:
        """Whether the pipeline can work at all.

        Raises:
            DuoRayError: it cannot, with the reason.
        """
        ...

    async def figures(self) -> Sequence[Figures]:
        """Those of every pipeline that serves this model, this one's first."""
        ...
