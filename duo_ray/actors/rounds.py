"""Rounds: the steps of all requests begin together, so that one target pass holds the blocks of all.

Requests that came back from the same pass are ready again at slightly different times; whoever went ahead alone would
cost the others nearly a whole pass for one row. What a member waits for is bounded: a pass that runs already, and a
draft's block for as long as its request has patience.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, TypeVar

Member = TypeVar("Member")


class Rounds(Generic[Member]):
    """A barrier for members that come and go. All of it runs in one event loop."""

    def __init__(self, begin: Callable[[Sequence[Member]], Iterable[Member]]) -> None:
        """`begin` plans a round for its members and returns those that draft a lead before the pass."""
        self._begin = begin
        self._members: set[Member] = set()
        self._away: set[Member] = set()
        self._waiting: dict[Member, asyncio.Future[None]] = {}
        self._leading: set[Member] = set()
        self._led: list[asyncio.Future[None]] = []
        self._had_lead = False

    def __len__(self) -> int:
        return len(self._members)

    def enter(self, member: Member) -> None:
        """From now on rounds wait for this member."""
        self._members.add(member)

    def leave(self, member: Member) -> None:
        """The member is waited for no more."""
        for group in (self._members, self._away):
            group.discard(member)
        self._waiting.pop(member, None)
        self.led(member)
        self._start()

    @contextmanager
    def away(self, member: Member) -> Iterator[None]:
        """The member does something long: no round waits for it meanwhile."""
        self._away.add(member)
        self.led(member)
        self._start()
        try:
            yield
        finally:
            self._away.discard(member)

    async def join(self, member: Member) -> None:
        """Wait until all other members are ready too; `begin` has been called when this returns."""
        future = self._waiting[member] = asyncio.get_running_loop().create_future()
        self._start()
        if not future.done():
            await future

    def led(self, member: Member) -> None:
        """The member's lead is there, or will not come."""
        self._leading.discard(member)
        if not self._leading:
            led, self._led = self._led, []
            for future in led:
                if not future.done():
                    future.set_result(None)

    async def all_led(self) -> None:
        """Wait for the leads of this round; all members go on together."""
        if self._leading:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._led.append(future)
            await future
        elif self._had_lead:
            await asyncio.sleep(0)  # the last one to lead does not run ahead of those it has just set free

    def _start(self) -> None:
        if not self._waiting or len(self._waiting) + len(self._away) < len(self._members):
            return
        waiting, self._waiting = self._waiting, {}
        self._leading.update(self._begin(list(waiting)))
        self._had_lead = bool(self._leading)
        for future in waiting.values():
            if not future.done():
                future.set_result(None)
