"""DuoClient: on the cluster, from afar, closed streams, and every way not to reach a service."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys

import pytest
import ray

from duo_ray import DuoClient
from duo_ray.types import ContextOverflow, DuoRayError, Finished, InvalidRequest, Token
from tests.deployments.test_app import LONG, one_cancelled, stats

pytestmark = [pytest.mark.ray, pytest.mark.models]

ASK = {"temperature": 0.0, "max_tokens": 12}
CHAT = [{"role": "system", "content": "Answer briefly."}, {"role": "user", "content": "Name three colours."}]


@pytest.fixture(scope="module", params=["direct", "ray client"])
def client(request, service):
    """The same client on the cluster and from outside of it."""
    with DuoClient(service.ray_address if request.param == "direct" else service.client_address) as running:
        yield running
    assert not ray.is_initialized()


def test_generate_and_stream_give_the_same_text(client):
    answer = client.generate(CHAT, **ASK)
    pieces = list(client.stream(CHAT, **ASK))
    assert answer.completion_tokens == 12
    assert isinstance(pieces[-1], Finished)
    assert "".join(piece.text for piece in pieces if isinstance(piece, Token)) == answer.text


def test_the_asynchronous_methods_do_what_the_others_do(client):
    async def both():
        pieces = [piece async for piece in client.astream(CHAT, **ASK)]
        answers = await asyncio.gather(*(client.agenerate(CHAT, **ASK) for _ in range(3)))
        return pieces, answers

    pieces, answers = asyncio.run(both())
    wanted = client.generate(CHAT, **ASK).text
    assert [answer.text for answer in answers] == [wanted] * 3
    assert "".join(piece.text for piece in pieces[:-1]) == wanted


def test_a_closed_stream_ends_the_work_on_it(client, service):
    with one_cancelled(service.url):
        stream = client.stream("Tell a long story.", **LONG)
        assert isinstance(next(stream), Token)
        stream.close()


def test_a_cancelled_task_ends_the_work_on_it(client, service):
    async def cancelled():
        task = asyncio.create_task(client.agenerate("Tell a long story.", **LONG))
        while not stats(service.url)["running"]:
            await asyncio.sleep(0.1)
        task.cancel()
        await asyncio.wait([task])

    with one_cancelled(service.url):
        asyncio.run(cancelled())


def test_what_is_wrong_with_a_request_is_raised_as_what_it_is(client):
    with pytest.raises(InvalidRequest, match="did you mean temperature"):
        client.generate("Hi", temprature=1.0)
    with pytest.raises(ContextOverflow, match=r"\d+ tokens.*640"):
        client.generate("word " * 2000)
    with pytest.raises(ContextOverflow):
        asyncio.run(client.agenerate("word " * 2000))


def test_an_application_that_does_not_run_is_named_with_the_way_to_start_it(client):
    with pytest.raises(DuoRayError, match=r"no application 'other' .*serve run deployments:app"):
        DuoClient(app_name="other")


def test_a_second_address_in_one_process_is_refused(client):
    with pytest.raises(DuoRayError, match="in a Ray cluster already"):
        DuoClient("127.0.0.1:1")


CLIENT = """
import sys
from duo_ray import DuoClient
with DuoClient(sys.argv[1]) as client:
    for item in client.stream("Tell a long story.", max_tokens=560, temperature=0.0, ignore_eos=True):
        print("token", flush=True)
"""
HANDLE = """
import sys
import ray
from ray import serve
ray.init(sys.argv[1], logging_level="ERROR")
handle = serve.get_app_handle("default").options(stream=True)
for item in handle.stream.remote("Tell a long story.", max_tokens=560, temperature=0.0, ignore_eos=True):
    print("token", flush=True)
"""


@pytest.mark.parametrize(
    ("code", "way"), [(CLIENT, "ray_address"), (CLIENT, "client_address"), (HANDLE, "ray_address")]
)
def test_a_program_that_is_killed_leaves_no_work_behind(service, code, way):
    """Case 18: nobody is left to cancel."""
    with (
        one_cancelled(service.url),
        subprocess.Popen(
            [sys.executable, "-c", code, getattr(service, way)],
            stdout=subprocess.PIPE,
            env={**os.environ, "RAY_CLIENT_RECONNECT_GRACE_PERIOD": "0"},  # Ray Client's own wait, 30 s
        ) as program,
    ):
        assert program.stdout.readline() == b"token\n"
        program.send_signal(signal.SIGKILL)


OUTSIDE = """
import sys
import ray
from ray import serve
ray.init(sys.argv[1], logging_level="ERROR")
answer = serve.get_app_handle("default").generate.remote("Hi", temperature=0.0, max_tokens=4).result()
print(len(answer["token_ids"]))
"""


def test_a_handle_works_over_ray_client(service):
    done = subprocess.run(
        [sys.executable, "-c", OUTSIDE, service.client_address], capture_output=True, timeout=300, check=False
    )
    assert done.stdout == b"4\n", done.stderr


REFUSED = """
import sys
from duo_ray import DuoClient, DuoRayError
try:
    DuoClient(sys.argv[1])
except DuoRayError as error:
    print(error)
"""


def refusal(address, home, **variables):
    """How a process of its own, which has no token but one of `variables`, fails to connect."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = subprocess.run(
        [sys.executable, "-c", REFUSED, address],
        env={**kept, "HOME": str(home), **variables}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.stdout.count("\n") == 1, done.stderr
    return done.stdout


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1"])
def test_an_address_where_nobody_answers_is_an_error_that_names_it(address, tmp_path):
    assert refusal(address, tmp_path).startswith(f"Ray at {address}: ")


@pytest.mark.parametrize("way", ["", "ray://"])
def test_an_address_that_takes_connections_and_says_nothing_is_no_hang(way, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"{way}127.0.0.1:{silent.getsockname()[1]}"
        assert refusal(address, tmp_path).startswith(f"Ray at {address}: ")


@pytest.mark.parametrize("way", ["ray_address", "client_address"])
@pytest.mark.parametrize("variables", [{}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}], ids=["no", "wrong"])
def test_a_cluster_that_wants_another_token_is_an_error_that_says_how_to_get_it(service, way, variables, tmp_path):
    said = refusal(getattr(service, way), tmp_path, **variables)
    assert "token" in said.partition("Is the cluster running")[0]
    assert "RAY_AUTH_MODE=token" in said


def test_on_the_clusters_own_machine_the_token_in_the_users_home_is_enough(service, tmp_path):
    """As `ray start --head` does: it wants a token where there is one, without being told to."""
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text(os.environ["RAY_AUTH_TOKEN"])
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = subprocess.run(
        [sys.executable, "-c", "from duo_ray import DuoClient\nprint(DuoClient().generate('Hi', max_tokens=2).text)"],
        env={**kept, "HOME": str(tmp_path), "RAY_TMPDIR": str(service.directory)},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.stdout.strip(), done.stderr
