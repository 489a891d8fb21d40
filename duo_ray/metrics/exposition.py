"""A tally shown to others: as Prometheus' text, and through Ray's metrics agents."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString
from ray.util import metrics as ray_metrics

from duo_ray.metrics.figures import Figures
from duo_ray.metrics.series import SERIES, Kind, Labels, Series, ray_name
from duo_ray.metrics.tally import Tally

logger = logging.getLogger(__name__)

PUBLISH_S = 1.0


def prometheus(pipelines: Sequence[Figures]) -> bytes:
    """Every series of every pipeline in Prometheus' text format, version 0.0.4, told apart by the label `replica`.

    Sums are left to the query: a sum made here would fall when a replica ends, which Prometheus takes for a restart.
    """
    registry = CollectorRegistry()
    registry.register(_Exposition(pipelines))
    return generate_latest(registry)


class _Exposition(Collector):
    """Figures as prometheus_client wants to read them."""

    def __init__(self, pipelines: Sequence[Figures]) -> None:
        self._pipelines = pipelines

    def collect(self) -> Iterator[Metric]:
        for series in SERIES:
            names = ["model_name", "replica", *series.labels]
            family = _FAMILIES[series.kind](series.name, series.help, labels=names)
            for pipeline in self._pipelines:
                _add(family, series, pipeline)
            yield family


_FAMILIES: dict[Kind, Any] = {
    Kind.COUNTER: CounterMetricFamily,
    Kind.GAUGE: GaugeMetricFamily,
    Kind.HISTOGRAM: HistogramMetricFamily,
}


def _add(family: Any, series: Series, pipeline: Figures) -> None:
    common = [pipeline.model_name, pipeline.replica]
    if series.kind is Kind.HISTOGRAM:
        counts, total = pipeline.histograms[series.name]
        bounds = [*map(floatToGoString, series.bounds), "+Inf"]
        family.add_metric(common, list(zip(bounds, accumulate(counts), strict=True)), total)
        return
    values = pipeline.counters if series.kind is Kind.COUNTER else pipeline.gauges
    for (name, labels), value in values.items():
        if name == series.name:
            family.add_metric([*common, *labels], value)


class RayPublisher:
    """Copies a tally to `ray.util.metrics` every second, in its own thread: an agent that hangs stops nothing else."""

    def __init__(self, tally: Tally, labels: Mapping[str, str], *, period: float = PUBLISH_S) -> None:
        self._tally = tally
        self._period = period
        self._told: dict[tuple[str, Labels], float] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="duo_ray-metrics", daemon=True)
        self._series = {series.name: series for series in SERIES}
        self._metrics = {series.name: _ray_metric(series, labels) for series in SERIES}

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End the thread; one that hangs is left alone."""
        self._stop.set()
        self._thread.join(timeout=self._period)

    def _run(self) -> None:
        failed = False
        while not self._stop.wait(self._period):
            try:
                self.publish()
            except Exception as error:  # figures are not worth a request
                if not failed:
                    logger.warning("Ray's metrics: %s; trying on", error)
                failed = True

    def publish(self) -> None:
        """Tell Ray what is new."""
        for (name, labels), value in self._tally.counters().items():
            more = value - self._told.get((name, labels), 0.0)
            if more > 0:
                self._metrics[name].inc(more, self._tags(name, labels))
                self._told[name, labels] = value
        for (name, labels), value in self._tally.gauges().items():
            self._metrics[name].set(value, self._tags(name, labels))
        for name, values in self._tally.take_values().items():
            for each in values:
                self._metrics[name].observe(each)

    def _tags(self, name: str, labels: Labels) -> dict[str, str]:
        return dict(zip(self._series[name].labels, labels, strict=True))


def _ray_metric(series: Series, labels: Mapping[str, str]) -> Any:
    name, keys = ray_name(series.name), (*labels, *series.labels)
    metric: ray_metrics.Metric
    match series.kind:
        case Kind.COUNTER:
            metric = ray_metrics.Counter(name, series.help, keys)
        case Kind.GAUGE:
            metric = ray_metrics.Gauge(name, series.help, keys)
        case Kind.HISTOGRAM:
            metric = ray_metrics.Histogram(name, series.help, list(series.bounds), keys)
    return metric.set_default_tags(dict(labels))
