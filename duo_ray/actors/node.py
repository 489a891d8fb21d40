"""Settings on nodes other than the one that made them: paths and core numbers mean nothing there."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import ray
from ray.util import get_node_ip_address

from duo_ray.models.catalog import CatalogError

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
