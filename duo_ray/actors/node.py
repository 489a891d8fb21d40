"""Settings on nodes other than the one that made them: paths and core numbers mean nothing there."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import ray
from ray.util import get_node_ip_address

from duo_ray.hardware.gpus import list_gpus
from duo_ray.hardware.machine import detect_machine
from duo_ray.models.catalog import CatalogError
from duo_ray.models.memory import ModelMemory, check_memory

T = TypeVar("T")


def node_id() -> str:
    """Ray's id of the node this process runs on."""
    name: str = ray.get_runtime_context().get_node_id()
    return name


def find_here(resolve: Callable[..., T], *model: str | None) -> T:
    """Find a model on this node, fetching or converting it where needed.

    Raises:
        CatalogError: it is not here; the text names the node.
    """
    try:
        return resolve(*model)
    except CatalogError as error:
        raise CatalogError(
            f"{error} (on node {get_node_ip_address()}; a local model must be at the same path on every node)"
        ) from None


def check_room_here(name: str, memory: ModelMemory, *, on_gpu: bool) -> None:
    """Refuse a model that does not fit this node, before it is loaded. Ray shows an actor the GPUs that are its own.

    Raises:
        ConfigError: see `models.memory.check_memory`; the text names the node.
    """
    if on_gpu:
        room = sum(gpu.memory - gpu.used for gpu in list_gpus() if gpu.memory)
    else:
        room = detect_machine().memory_available
    if room:  # else the driver does not say
        place = "GPU memory" if on_gpu else "memory"
        check_memory({name: memory}, room, f"{place} on node {get_node_ip_address()}")
