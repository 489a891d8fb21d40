"""What a running pipeline does, in figures: fed by the coordinator, read by the page, by Prometheus and by Ray.

`tally` counts, `request` follows one request, `exposition` shows the series of `series` to others.
"""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, generate_latest

from duo_ray.metrics.exposition import Exposition, RayPublisher
from duo_ray.metrics.request import RequestMeter
from duo_ray.metrics.tally import StepTimes, Tally

__all__ = ["Meter", "RequestMeter", "StepTimes"]


class Meter:
    """The figures of one pipeline: what the coordinator feeds, and all the ways to read them.

    Args:
        model: name of the target, the label `model_name` of every series.
        replica: which pipeline this is, the label `replica`.
    """

    def __init__(self, *, model: str = "", replica: str = "") -> None:
        self.tally = Tally()
        self._labels = {"model_name": model, "replica": replica}
        self._registry = CollectorRegistry()
        self._registry.register(Exposition(self.tally, self._labels))
        self._publisher: RayPublisher | None = None

    def request(self) -> RequestMeter:
        """To follow a request that has just arrived, as a context manager."""
        return RequestMeter(self.tally)

    def publish(self) -> None:
        """Copy the figures to Ray's metrics from now on (in a process that belongs to a cluster)."""
        if self._publisher is None:
            self._publisher = RayPublisher(self.tally, self._labels)
            self._publisher.start()

    def snapshot(self) -> dict[str, Any]:
        """Live figures for people, JSON-ready: see `Tally.snapshot`."""
        return {**self._labels, **self.tally.snapshot()}

    def prometheus(self) -> bytes:
        """Every series in Prometheus' text format, version 0.0.4."""
        return generate_latest(self._registry)
