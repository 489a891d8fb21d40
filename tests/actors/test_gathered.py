"""Tokens of a stream, put together into messages."""

from __future__ import annotations

import asyncio

import pytest

from duo_ray.actors.coordinator import gathered
from duo_ray.types import Delta, Finished, FinishReason, Origin, Token

END = Finished(FinishReason.LENGTH, 1, 3, {})


def delta(*ids: int) -> Delta:
    return Delta(tuple(Token(i, str(i), Origin.PLAIN, 0) for i in ids))


def ids_of(items: list[Delta | Finished]) -> list[list[int] | Finished]:
    return [[token.id for token in item.tokens] if isinstance(item, Delta) else item for item in items]


async def told(interval: float, *given: Delta | Finished | None) -> list[Delta | Finished]:
    queue: asyncio.Queue[Delta | Finished | None] = asyncio.Queue()
    for item in given:
        queue.put_nowait(item)
    return [item async for item in gathered(queue, interval)]


def test_tokens_that_are_there_come_together_and_the_end_behind_them() -> None:
    items = asyncio.run(told(60.0, delta(1), delta(2, 3), END, None))
    assert ids_of(items) == [[1, 2, 3], END]


@pytest.mark.parametrize("end", [(None,), (END, None)])
def test_a_stream_without_tokens_only_ends(end: tuple[Finished | None, ...]) -> None:
    assert ids_of(asyncio.run(told(60.0, *end))) == list(end[:-1])


def test_the_first_tokens_come_at_once_and_later_ones_no_later_than_the_end() -> None:
    async def stream() -> list[list[int] | Finished]:
        queue: asyncio.Queue[Delta | Finished | None] = asyncio.Queue()
        items = gathered(queue, 3600.0)
        queue.put_nowait(delta(1))
        found = [await anext(items)]
        for item in (delta(2), delta(3)):
            queue.put_nowait(item)
        waiting = asyncio.ensure_future(anext(items))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        queue.put_nowait(END)
        queue.put_nowait(None)
        found += [await waiting, await anext(items)]
        with pytest.raises(StopAsyncIteration):
            await anext(items)
        return ids_of(found)

    assert asyncio.run(stream()) == [[1], [2, 3], END]


def test_what_has_waited_for_the_interval_comes_without_more() -> None:
    async def stream() -> list[list[int] | Finished]:
        queue: asyncio.Queue[Delta | Finished | None] = asyncio.Queue()
        items = gathered(queue, 0.01)
        found = []
        for i in range(3):
            queue.put_nowait(delta(i))
            found.append(await anext(items))
        await items.aclose()
        return ids_of(found)

    assert asyncio.run(stream()) == [[0], [1], [2]]


def test_behind_the_first_a_message_leaves_the_loop_to_what_is_waiting_for_it() -> None:
    """Tokens wake both the message and the step that follows, which asks the models for more."""

    async def stream() -> list[str]:
        queue: asyncio.Queue[Delta | Finished | None] = asyncio.Queue()
        items, done = gathered(queue, 0.0), []
        queue.put_nowait(delta(1))
        await anext(items)

        async def ask() -> None:
            for _ in range(3):  # whatever it takes until the models are asked
                await asyncio.sleep(0)
            done.append("models asked")

        async def tell() -> None:
            await anext(items)
            done.append("told")

        queue.put_nowait(delta(2))
        await asyncio.gather(tell(), ask())
        await items.aclose()
        return done

    assert asyncio.run(stream()) == ["models asked", "told"]
