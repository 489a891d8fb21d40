"""What a running pipeline does, in figures: fed by the coordinator, read by the page, by Prometheus and by Ray.

`tally` counts, `request` follows one request, `figures` and `exposition` show what was counted to others.
"""

from __future__ import annotations

from duo_ray.metrics.exposition import RayPublisher, prometheus
from duo_ray.metrics.figures import Figures, snapshot
from duo_ray.metrics.request import RequestMeter
from duo_ray.metrics.tally import Tally

__all__ = ["Figures", "Meter", "RequestMeter", "prometheus", "snapshot"]


class Meter:
    """The figures of one pipeline: what the coordinator feeds, and how they reach others.

    Args:
        model: name of the target, the label `model_name` of every series.
        replica: which pipeline this is, the label `replica`.
    """

    def __init__(self, *, model: str = "", replica: str = "") -> None:
        self.tally = Tally()
        self._model, self._replica = model, replica
        self._publisher: RayPublisher | None = None

    def request(self) -> RequestMeter:
        """To follow a request that has just arrived, as a context manager."""
        return RequestMeter(self.tally)

    def publish(self) -> None:
        """Copy the figures to Ray's metrics from now on (in a process that belongs to a cluster)."""
        if self._publisher is None:
            self._publisher = RayPublisher(self.tally, {"model_name": self._model, "replica": self._replica})
            self._publisher.start()

    def figures(self) -> Figures:
        """All of them as they are now, to be shown here or elsewhere."""
        return self.tally.figures(model=self._model, replica=self._replica)
