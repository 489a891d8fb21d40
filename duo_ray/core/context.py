"""Ids of a request, with a digest of every prefix: how two processes agree on what they both hold.

There is no rollback message. A sender says "your first `agreed` ids, whose digest is this, then these"; a receiver
crops to the agreed length and appends, or says that it does not hold that prefix. Both cost only the new ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from duo_ray.types import Context, Ids

# A polynomial hash modulo a Mersenne prime; a collision needs the same request id and about 2**30 different prefixes.
_MODULUS = (1 << 61) - 1
_BASE = 0x1F3D5B79A2C4E681 % _MODULUS


class IdLog:
    """An append-only list of token ids that can be cropped, with the digest of each of its prefixes."""

    __slots__ = ("_digests", "ids")

    def __init__(self, ids: Iterable[int] = ()) -> None:
        self.ids: list[int] = []
        self._digests = [0]
        self.extend(ids)

    def __len__(self) -> int:
        return len(self.ids)

    def extend(self, ids: Iterable[int]) -> None:
        digest = self._digests[-1]
        for token in ids:
            digest = _extended(digest, token)
            self._digests.append(digest)
            self.ids.append(token)

    def crop(self, length: int) -> None:
        """Keep the first `length` ids."""
        del self.ids[length:]
        del self._digests[length + 1 :]

    def digest(self, length: int) -> int:
        """Digest of the first `length` ids."""
        return self._digests[length]

    def context(
        self, request_id: str, *, agreed: int, prompt_length: int, end: int | None = None, extra: Ids = ()
    ) -> Context:
        """A message that names the first `agreed` ids and carries those up to `end` (default: all), then `extra`."""
        return Context(request_id, agreed, self.digest(agreed), (*self.ids[agreed:end], *extra), prompt_length)

    def receive(self, context: Context) -> bool:
        """Become what `context` describes. False, changing nothing, when its prefix is not held here."""
        if context.agreed > len(self) or self.digest(context.agreed) != context.digest:
            return False
        self.crop(context.agreed)
        self.extend(context.ids)
        return True


def followed(context: Context, token: int) -> Context:
    """The message that comes after `context`, to one who has taken in all of that: one more id."""
    digest = context.digest
    for each in context.ids:
        digest = _extended(digest, each)
    return replace(context, agreed=context.length, digest=digest, ids=(token,))


def _extended(digest: int, token: int) -> int:
    return (digest * _BASE + token + 1) % _MODULUS


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest prefix that two id lists share."""
    shortest = min(len(a), len(b))
    if a[:shortest] == b[:shortest]:  # the usual case, at C speed
        return shortest
    return next(i for i in range(shortest) if a[i] != b[i])
