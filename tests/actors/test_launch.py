"""Joining a cluster over Ray Client, whose server now and then loses the process that it starts for a client."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from duo_ray.actors import launch
from duo_ray.types import DuoRayError

ADDRESS = "ray://127.0.0.1:10001"


@pytest.fixture
def starts(monkeypatch):
    """How many times Ray Client's server is asked; it fails until `starts.left` is used up."""

    class Starts:
        count, failures = 0, 0

    def init(**given):
        Starts.count += 1
        if Starts.count <= Starts.failures:
            raise ConnectionAbortedError("Initialization failure\nStarting Ray client server failed.")

    monkeypatch.setattr(launch, "_ping", print)
    monkeypatch.setattr("ray.init", init)
    return Starts


def test_a_client_whose_process_died_at_its_start_asks_again(starts):
    starts.failures = launch.CLIENT_STARTS - 1
    launch.connect(ADDRESS)
    assert starts.count == launch.CLIENT_STARTS


def test_a_server_that_can_start_none_is_an_error_with_its_reason(starts):
    starts.failures = 99
    with pytest.raises(DuoRayError, match=r"10001: Starting Ray client server failed\. Is the cluster"):
        launch.connect(ADDRESS)
    assert starts.count == launch.CLIENT_STARTS


def test_a_cluster_that_is_not_there_is_not_asked_again(starts):
    starts.failures = 99
    with pytest.raises(DuoRayError):
        launch.connect("127.0.0.1:6379")
    assert starts.count == 1


@pytest.mark.parametrize("address", ["127.0.0.1:1", "[::1]:1", "127.0.0.1:port"])
def test_an_address_where_nobody_listens_is_an_error_at_once(address):
    with pytest.raises(DuoRayError, match=rf"^Ray at {re.escape(address)}: .*\. Is the cluster running there"):
        launch.connect(address)


FORKS = """
import subprocess, threading, time
from concurrent import futures
import grpc
answers = {"Answer": grpc.unary_unary_rpc_method_handler(lambda request, context: request)}
server = grpc.server(futures.ThreadPoolExecutor(8))
server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", answers),))
port = server.add_insecure_port("127.0.0.1:0")
server.start()
def talk():
    ask = grpc.insecure_channel(f"127.0.0.1:{port}").unary_unary("/test/Answer")
    while running:
        ask(b"")
        time.sleep(0.001)
running = True
threads = [threading.Thread(target=talk) for _ in range(4)]
for thread in threads:
    thread.start()
# As Ray starts its processes: a function to run before the program means fork in place of vfork.
print(sum(subprocess.run(["true"], preexec_fn=lambda: None).returncode != 0 for _ in range(200)))
running = False
for thread in threads:
    thread.join()
server.stop(None).wait()
"""


def test_a_process_that_ray_starts_while_grpc_works_does_not_die_of_it(monkeypatch):
    monkeypatch.delenv("GRPC_ENABLE_FORK_SUPPORT")
    launch.set_ray_environment()
    done = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, check=True)
    assert done.stdout == "0\n", done.stderr
