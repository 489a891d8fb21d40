"""Two processes agree on a prefix, or find out that they do not."""

from hypothesis import given
from hypothesis import strategies as st

from duo_ray.core.context import IdLog, common_prefix

IDS = st.lists(st.integers(0, 200_000), max_size=20)


@given(IDS, IDS, st.integers(0, 20))
def test_a_receiver_becomes_what_the_context_describes(held, sent, agreed):
    agreed = min(agreed, len(sent))
    receiver = IdLog(held)
    message = IdLog(sent).context("r", agreed=agreed, prompt_length=1)
    understood = held[:agreed] == sent[:agreed]
    assert receiver.receive(message) == understood
    assert receiver.ids == (sent if understood else held)


def test_a_message_carries_only_what_is_new():
    context = IdLog([1, 2, 3, 4]).context("r", agreed=3, prompt_length=2, extra=(9,))
    assert context.ids == (4, 9)
    assert context.length == 5


def test_the_digest_tells_apart_prefixes_that_begin_with_zero():
    assert len({IdLog([0] * n).digest(n) for n in range(5)}) == 5


def test_cropping_then_extending_gives_the_digest_of_a_fresh_log():
    log = IdLog([1, 2, 3])
    log.crop(1)
    log.extend([7, 8])
    assert log.digest(3) == IdLog([1, 7, 8]).digest(3)


@given(IDS, IDS)
def test_common_prefix(a, b):
    n = common_prefix(a, b)
    assert a[:n] == b[:n]
    assert n == min(len(a), len(b)) or a[n] != b[n]
