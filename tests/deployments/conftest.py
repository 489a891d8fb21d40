"""One running service, with token authentication, for all tests that only use it."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest
import ray
import yaml

from tests.actors.conftest import SMALL

START_LIMIT_S = 400
"""Patience costs nothing when all is well, and the machine may be busy."""
QUEUE = 2
"""Requests that may wait beside those that run."""


@dataclass(frozen=True)
class Service:
    """Where the service that all these tests share can be reached."""

    url: str
    ray_address: str
    client_address: str
    directory: Path
    """RAY_TMPDIR of its cluster."""


@dataclass
class Program:
    """A program of this environment that runs, and what it has written."""

    process: subprocess.Popen[bytes]
    log: Path

    def wait_until(self, ready: Callable[[], bool]) -> None:
        """Until the program does what it is for; a program that ends before that fails the test with its output."""
        deadline = time.monotonic() + START_LIMIT_S
        while not ready():
            output = self.log.read_text(errors="replace")
            assert self.process.poll() is None, output
            assert time.monotonic() < deadline, output
            time.sleep(0.2)


@pytest.fixture(scope="session")
def service() -> Iterator[Service]:
    """`serve deploy` with a settings file, onto a cluster of its own that wants a token."""
    gcs, client, http, dashboard = free_ports(4)
    arguments = {**SMALL, "serving.queue": QUEUE, "serving.drain_s": 5.0}
    application = {"name": "default", "import_path": "deployments:app", "args": arguments}
    with ExitStack() as stack:
        directory = stack.enter_context(ray_directory())
        addresses = f"http://127.0.0.1:{http}", f"127.0.0.1:{gcs}", f"ray://127.0.0.1:{client}"
        found = Service(*addresses, directory)
        settings = directory / "serve.yaml"
        settings.write_text(yaml.safe_dump({"http_options": {"port": http}, "applications": [application]}))
        start = ["ray", "start", "--head", "--block", "--num-cpus=2", f"--dashboard-port={dashboard}"]
        start += [f"--port={gcs}", f"--ray-client-server-port={client}", f"--object-store-memory={200 * 2**20}"]
        head = stack.enter_context(running(start, directory))
        head.wait_until(lambda: listening(gcs) and listening(client))
        head.wait_until(lambda: listening(dashboard))
        deploy = ["deploy", f"--address=http://127.0.0.1:{dashboard}", str(settings)]
        done = subprocess.run(
            [str(Path(sys.executable).with_name("serve")), *deploy],
            capture_output=True, text=True, timeout=START_LIMIT_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        head.wait_until(lambda: healthy(found.url))
        yield found


@pytest.fixture(scope="module")
def connected(service: Service) -> Iterator[Service]:
    """This process as a part of the service's cluster."""
    ray.init(address=service.ray_address, logging_level="ERROR", log_to_driver=False)
    yield service
    ray.shutdown()


@contextmanager
def ray_directory() -> Iterator[Path]:
    """Where a Ray keeps its files: nobody else finds it there, and its sockets need a short path."""
    directory = Path(tempfile.mkdtemp(prefix="duo", dir="/tmp"))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def running(command: list[str], directory: Path, **variables: str) -> Iterator[Program]:
    """Run a program; at the end it and all it has started are gone."""
    log = directory / f"{command[0]}.log"
    kept = {name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", "RAY_TMPDIR")}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [str(Path(sys.executable).with_name(command[0])), *command[1:]],
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**kept, "RAY_TMPDIR": str(directory), "RAY_worker_niceness": "0", **variables},
        )
    try:
        yield Program(process, log)
    finally:
        children = descendants(process.pid)
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(60)
        for child in children:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        process.kill()
        process.wait()


def descendants(pid: int) -> list[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).children(recursive=True)
    return []


def free_ports(count: int) -> list[int]:
    """Below the range from which Ray takes its workers' ports, which starts at 10002."""
    ports: list[int] = []
    for port in range(7100 + os.getpid() % 1000, 10_000):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            ports.append(port)
        if len(ports) == count:
            return ports
    raise OSError("no free ports")


def listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def healthy(url: str) -> bool:
    with suppress(httpx.HTTPError):
        return httpx.get(f"{url}/health", timeout=60).status_code == 200
    return False
