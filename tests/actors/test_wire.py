"""The socket between actors of one node: order, errors, loss."""

import asyncio
import threading

import pytest

from duo_ray.actors import wire
from duo_ray.types import UnknownPrefix


def echo(argument, parts):
    return argument, parts


def fail(argument, _parts):
    raise UnknownPrefix(argument)


def connected(scenario, handlers=None, posts=None):
    path = wire.listen(handlers or {"echo": echo, "fail": fail}, posts or {})

    async def run():
        link = await wire.Link.open(path)
        try:
            return await scenario(link)
        finally:
            link.close()

    return asyncio.run(run())


@pytest.mark.parametrize("size", [0, 1, 70_000, 3_000_000])
def test_a_message_and_its_parts_come_back_whole(size):
    async def scenario(link):
        return await link.call("echo", {"n": [1, 2]}, [b"x" * size, b"", b"yz"])

    assert connected(scenario) == ({"n": [1, 2]}, (b"x" * size, b"", b"yz"))


def test_an_error_is_raised_at_the_caller_and_the_connection_goes_on():
    async def scenario(link):
        with pytest.raises(UnknownPrefix) as caught:
            await link.call("fail", ["a", "b"])
        assert caught.value.request_ids == ("a", "b")
        return (await link.call("echo", 5))[0]

    assert connected(scenario) == 5


def test_posts_keep_their_order_among_calls():
    seen = []

    async def scenario(link):
        for i in range(5):
            link.post("note", i)
            await link.call("echo", i)
        link.post("note", "last")
        await link.call("echo", None)
        return list(seen)

    assert connected(scenario, posts={"note": seen.append}) == [0, 1, 2, 3, 4, "last"]


def test_a_lost_connection_is_an_error_of_its_own():
    release = threading.Event()

    def leave(_argument, _parts):
        raise SystemExit  # ends the serving thread, as the death of its process would

    async def scenario(link):
        with pytest.raises(wire.LinkLostError):
            await link.call("leave", None)
        link.post("note", 1)  # nobody there: no error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading, "excepthook", lambda _: release.set())
        connected(scenario, handlers={"leave": leave})
        assert release.wait(60)


def test_the_socket_leaves_no_file_behind(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    async def scenario(link):
        return await link.call("echo", 1)

    connected(scenario)
    assert list(tmp_path.iterdir()) == []
