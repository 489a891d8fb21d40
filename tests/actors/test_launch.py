"""Joining a cluster: what is asked first, what is asked again, and what the processes of a Ray of our own need."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from types import SimpleNamespace

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

    monkeypatch.setattr("ray.init", init)
    return Starts


@pytest.fixture
def answering(monkeypatch):
    """A cluster that says it is there."""
    monkeypatch.setattr(launch, "_ping", lambda _: None)


def test_a_client_whose_process_died_at_its_start_asks_again(starts, answering):
    starts.failures = launch.CLIENT_STARTS - 1
    launch.connect(ADDRESS)
    assert starts.count == launch.CLIENT_STARTS


def test_a_server_that_can_start_none_is_an_error_with_its_reason(starts, answering):
    starts.failures = 99
    with pytest.raises(DuoRayError, match=r"10001 answers, but .* Starting Ray client server failed\. "):
        launch.connect(ADDRESS)
    assert starts.count == launch.CLIENT_STARTS


def test_a_cluster_that_cannot_be_joined_directly_is_not_asked_again(starts, answering):
    starts.failures = 99
    with pytest.raises(DuoRayError):
        launch.connect("127.0.0.1:6379")
    assert starts.count == 1


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("127.0.0.1:1", "refused"),
        ("[::1]:1", "connect"),
        ("ray://127.0.0.1:1", "refused"),
        ("127.0.0.1", "Invalid address"),
        ("127.0.0.1:port", ""),
        ("http://127.0.0.1:8265", "Invalid address"),
    ],
)
def test_an_address_where_nobody_listens_is_an_error_before_ray_tries(address, why, starts):
    with pytest.raises(DuoRayError, match=rf"^Ray at {re.escape(address)}: .*{why}.*\. Is the cluster running there"):
        launch.connect(address)
    assert starts.count == 0


@pytest.mark.parametrize("address", ["", "local"])
def test_where_no_cluster_is_named_one_is_started(address, monkeypatch):
    started = []
    monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setattr(launch, "start_local", started.append)
    launch._join(SimpleNamespace(footprint=launch.Footprint(1, 0, (1,))))
    assert len(started) == 1


FORKS = """
import subprocess, threading, time
from concurrent import futures
import grpc
answers = {"Answer": grpc.unary_unary_rpc_method_handler(lambda request, context: request)}
server = grpc.server(futures.ThreadPoolExecutor(8))
server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", answers),))
port = server.add_insecure_port("127.0.0.1:0")
server.start()
said = []
def talk():
    options = [("grpc.enable_http_proxy", 0)]
    with grpc.insecure_channel(f"127.0.0.1:{port}", options) as channel:
        ask = channel.unary_unary("/test/Answer")
        while running:
            ask(b"", wait_for_ready=True)
            said.append(1)
            time.sleep(0.001)
running = True
threads = [threading.Thread(target=talk) for _ in range(4)]
for thread in threads:
    thread.start()
# As Ray starts its processes: a function to run before the program means fork in place of vfork.
died = sum(subprocess.run(["true"], preexec_fn=lambda: None).returncode != 0 for _ in range(200))
talking = all(thread.is_alive() for thread in threads) and len(said) > 100
running = False
for thread in threads:
    thread.join()
server.stop(None).wait()
print(died, talking)
"""


def test_a_process_that_ray_starts_while_grpc_works_does_not_die_of_it(monkeypatch):
    for name in ("RAY_worker_niceness", "GRPC_ENABLE_FORK_SUPPORT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)  # whatever it is set to, it is as before in the end
    launch.set_ray_environment()
    done = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout == "0 True\n", done.stderr


_CARDS = """
import json, os
import ray
from duo_ray.actors import launch
launch.set_ray_environment()
ray.init(address="local", num_cpus=2, num_gpus=2, include_dashboard=False, logging_level="ERROR")
class Looks:
    def cards(self):
        return os.environ.get("CUDA_VISIBLE_DEVICES", "all")
def seen(device):
    options = {"num_gpus": 1, **launch._showing(device)}
    return ray.get(ray.remote(Looks).options(**options).remote().cards.remote())
print(json.dumps([seen("cuda:0"), seen("cuda:1"), launch._showing("cpu"), launch._showing("cuda")]))
ray.shutdown()
"""


@pytest.mark.ray
def test_a_target_for_the_second_card_finds_it_under_its_number():
    """Ray shows an actor only the cards it chose, as 0, 1, ...: cuda:1 would not be there."""
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    done = subprocess.run([sys.executable, "-c", _CARDS], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == ["0", "all", {}, {}]
