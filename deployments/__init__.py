"""The Serve application: one replica is one pipeline behind an OpenAI-compatible API.

    serve run deployments:app
    serve run deployments:app config=config.yaml models.draft.threads=4
    serve deploy serve.yaml
    serve build deployments:default_app

The arguments of `app` are those of `duo-ray --config FILE --set section.key=value`; in a YAML file sections may nest.
"""

# No `from __future__ import annotations` here: Serve looks at the builder's annotation and needs the class itself.
import json
import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import ray
from pydantic import BaseModel, ConfigDict
from ray import serve
from ray._private.services import canonicalize_bootstrap_address
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, RequestRouterConfig

from deployments.replica import Replica
from deployments.routing import Router
from duo_ray.actors.launch import COORDINATOR_MEMORY, connect, set_ray_environment, tags_of_cluster
from duo_ray.actors.prepare import plan_footprint
from duo_ray.config import Config, load_config
from duo_ray.hardware.machine import detect_machine

LIGHT_REQUESTS = 1000
"""How many requests that generate nothing get through while all places are taken: health, metrics, the page, what is to
be refused, and those whose body is still on its way."""
METRICS_INTERVAL_S = 2.0
"""How often running requests are reported to the autoscaler; Ray's 10 s would be most of the delay before a replica."""
LOOK_BACK_S = 6.0


class Arguments(BaseModel):
    """Arguments of `app`: a settings file, and any setting by its dotted name."""

    model_config = ConfigDict(extra="allow")

    config: Path | None = None

    def load(self) -> Config:
        """Raises ConfigError: an unknown setting, with the name of the nearest known one, or one that cannot work."""
        config = load_config(self.config, dict(_dotted(self.model_extra or {})))
        if config.serving.concurrency != "auto":
            target = config.models.target.model_copy(update={"slots": config.serving.concurrency})
            config = config.model_copy(update={"models": config.models.model_copy(update={"target": target})})
        return config


def app(arguments: Arguments) -> Application:
    """Build the application; `serve run deployments:app` calls it.

    Raises:
        ConfigError, DuoRayError: what cannot work, in one line, before anything is started.
    """
    config = arguments.load()
    serving, slots = config.serving, config.models.target.slots
    bundles = plan_footprint(config, detect_machine()).bundles(_tags())
    deployment = serve.deployment(serve.ingress()(Replica), name="pipeline")
    return deployment.options(
        placement_group_bundles=bundles,
        placement_group_strategy="PACK",
        ray_actor_options={"num_cpus": 0, "memory": COORDINATOR_MEMORY},
        # Requests wait in the replica, in the order they came; the router's queue serves while no replica is ready.
        max_ongoing_requests=slots + serving.queue + LIGHT_REQUESTS,
        request_router_config=RequestRouterConfig(
            request_router_class=Router,
            request_router_kwargs={"queue": slots + serving.queue, "retry_after_s": serving.retry_after_s},
        ),
        graceful_shutdown_timeout_s=serving.drain_s,
        graceful_shutdown_wait_loop_s=0.5,
        max_constructor_retry_count=2,
        **_replicas(config, slots),
    ).bind(config)


def __getattr__(name: str) -> Application:
    """`default_app` is built when it is asked for: building looks at the machine and the cluster."""
    if name == "default_app":
        return app(Arguments())
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _replicas(config: Config, slots: int) -> dict[str, Any]:
    replicas = config.serving.replicas
    if replicas.min == replicas.max:
        return {"num_replicas": replicas.max}
    with warnings.catch_warnings():
        # The variables that are to replace the interval would have to be set on every node.
        warnings.simplefilter("ignore", DeprecationWarning)
        return {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=replicas.min,
                max_replicas=replicas.max,
                target_ongoing_requests=slots,
                upscale_delay_s=replicas.upscale_delay_s,
                downscale_delay_s=replicas.downscale_delay_s,
                metrics_interval_s=METRICS_INTERVAL_S,
                look_back_period_s=LOOK_BACK_S,
            )
        }


def _tags() -> frozenset[str]:
    """Which tags the cluster has that the application is for; `serve run` joins or starts it only after this."""
    if ray.is_initialized():
        return tags_of_cluster()
    set_ray_environment()
    command = click.get_current_context(silent=True)
    address = (command and command.params.get("address")) or os.environ.get("RAY_ADDRESS") or None
    if address in (None, "local") and canonicalize_bootstrap_address(address) is None:
        return frozenset()  # it will be a Ray of this machine alone
    connect(address or "auto")
    try:
        return tags_of_cluster()
    finally:
        ray.shutdown()


def _dotted(settings: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _dotted(value, f"{prefix}{name}.")
        else:
            # Dotted arguments come from a command line and are read as YAML; nested ones were read already.
            yield prefix + name, json.dumps(value) if prefix and isinstance(value, str) else value
