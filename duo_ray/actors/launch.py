"""A running pipeline: Ray, one placement group, the actors in it, and everything freed again.

One placement group holds one pipeline (the target's bundle, a bundle for each draft, one for the coordinator), so that
Ray schedules, autoscales and frees it as a whole.
"""

from __future__ import annotations

import contextlib
import os
import threading
import uuid
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from duo_ray.actors.coordinator import Coordinator, CoordinatorSettings, PipelineInfo
from duo_ray.actors.draft import DraftActor, DraftSettings
from duo_ray.actors.target import TargetActor, TargetSettings
from duo_ray.types import Delta, DuoRayError, Finished, Request

NAMESPACE = "duo_ray"
CONNECT_LIMIT_S = 10.0
PLACEMENT_LIMIT_S = 60.0
COORDINATOR_MEMORY = 256 * 2**20
"""Bytes its bundle reserves: a bundle must reserve something, and the coordinator needs next to no CPU."""

Progress = Callable[[str], None]
"""Told in a few words what start-up is busy with."""


@dataclass(frozen=True, slots=True)
class PipelineSettings:
    """What each actor of one pipeline needs; made from a `Config` by `actors.prepare`."""

    target: TargetSettings
    drafts: tuple[DraftSettings, ...]
    coordinator: CoordinatorSettings
    target_gpus: int

    def bundles(self) -> list[dict[str, float]]:
        """Resources of the placement group: target, drafts, coordinator."""
        cpus = max(1, len(self.target.cores))
        gpu = {"GPU": self.target_gpus, "target_gpu": self.target_gpus} if self.target_gpus else {}
        drafts = [{"CPU": float(max(1, draft.threads)), "draft_cpu": 1.0} for draft in self.drafts]
        return [{"CPU": float(cpus), **gpu}, *drafts, {"memory": float(COORDINATOR_MEMORY)}]


class Pipeline:
    """A running pipeline. Use it as a context manager, or call `close`: both free every process and resource."""

    def __init__(self, settings: PipelineSettings, *, progress: Progress = lambda _: None) -> None:
        """Start the actors and wait until they are loaded and warm.

        Raises:
            DuoRayError: Ray cannot be reached, lacks the resources, or a model cannot be loaded: one line, and
                nothing is left behind.
        """
        self._cleanup = contextlib.ExitStack()
        try:
            progress("starting Ray")
            self._cleanup.callback(_connect(settings))
            progress("placing the actors")
            group = _place(settings)
            self._cleanup.callback(remove_placement_group, group)
            progress("loading the models")
            self._start_actors(_on_this_node(settings, group), group)
        except BaseException:
            self.close()
            raise

    def _start_actors(self, settings: PipelineSettings, group: PlacementGroup) -> None:
        bundles = settings.bundles()

        def start(kind: type, index: int, *args: object, **options: object) -> Any:
            bundle = dict(bundles[index])
            strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
            handle = (
                ray.remote(kind)
                .options(
                    scheduling_strategy=strategy,
                    num_cpus=bundle.pop("CPU", 0),
                    num_gpus=bundle.pop("GPU", 0),
                    memory=int(bundle.pop("memory", 0)) or None,
                    resources=bundle,
                    **options,
                )
                .remote(*args)
            )
            self._cleanup.callback(ray.kill, handle)
            return handle

        # Models restart by themselves; no call is retried by Ray: the coordinator knows what to send again.
        target = start(TargetActor, 0, settings.target, max_restarts=-1, max_task_retries=0)
        drafts = [
            start(DraftActor, 1 + i, draft, max_restarts=-1, max_task_retries=0)
            for i, draft in enumerate(settings.drafts)
        ]
        self._coordinator = start(
            Coordinator, len(bundles) - 1, settings.coordinator, target, drafts, max_concurrency=1000
        )
        try:
            self.info: PipelineInfo = ray.get(self._coordinator.start.remote())
        except RayError as error:
            raise _plain(error) from error
        self.target, self.drafts = target, drafts

    def stream(self, request: Request) -> Generator[Delta | Finished, None, None]:
        """Tokens of one answer as they become certain, then `Finished`.

        Raises:
            DuoRayError: the request cannot be served, or the pipeline died.
        """
        ended = False
        try:
            for item in self._coordinator.generate.remote(request):
                message = ray.get(item)
                ended = isinstance(message, Finished)
                yield message
        except RayError as error:
            ended = True
            raise _plain(error) from error
        finally:
            if not ended:
                # The reader went away. `ray.cancel` would also cancel calls to the models that other requests share.
                self._coordinator.cancel.remote(request.request_id)

    def describe(self) -> PipelineInfo:
        info: PipelineInfo = ray.get(self._coordinator.describe.remote())
        return info

    def close(self) -> None:
        """Free everything; safe to call twice."""
        self._cleanup.close()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def new_request_id() -> str:
    return uuid.uuid4().hex[:12]


def _connect(settings: PipelineSettings) -> Callable[[], None]:
    """Join the cluster this process is in, the one RAY_ADDRESS names, or start one; returns how to leave it."""
    if ray.is_initialized():
        return _stay
    address = os.environ.get("RAY_ADDRESS")
    if address:
        _init_within_limit(address)
    else:
        start_local(settings.bundles())
    return _leave


def _stay() -> None:
    """The program was in a cluster before: it stays there."""


def _leave() -> None:
    ray.shutdown()


def start_local(bundles: Sequence[dict[str, float]]) -> None:
    """Start a Ray of this process's own with room for these bundles; `ray.shutdown` ends it."""
    # At Ray's default niceness of 15 a call between busy workers takes 10 to 25 ms in place of 1 to 2.
    os.environ.setdefault("RAY_worker_niceness", "0")
    total: dict[str, float] = {}
    for bundle in bundles:
        for name, amount in bundle.items():
            total[name] = total.get(name, 0.0) + amount
    ray.init(
        address="local",
        namespace=NAMESPACE,
        num_cpus=int(total.pop("CPU")),
        num_gpus=int(total.pop("GPU", 0)),
        resources={name: amount for name, amount in total.items() if name != "memory"},
        object_store_memory=512 * 2**20,
        include_dashboard=False,
        logging_level="ERROR",
    )


def _init_within_limit(address: str) -> None:
    """Connect, or say why not: against a cluster that wants a token `ray.init` waits for ever."""
    failure: list[BaseException] = []

    def connect() -> None:
        try:
            ray.init(address=address, namespace=NAMESPACE, logging_level="ERROR")
        except BaseException as error:  # handed to the caller's thread
            failure.append(error)

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(CONNECT_LIMIT_S)
    if thread.is_alive():
        raise DuoRayError(
            f"RAY_ADDRESS={address}: no answer within {CONNECT_LIMIT_S:.0f} s. Is the cluster running there? If it "
            "wants a token, set RAY_AUTH_MODE=token and put the head node's token into ~/.ray/auth_token "
            "(a new one: ray get-auth-token --generate)"
        )
    if failure:
        raise DuoRayError(f"RAY_ADDRESS={address}: {_reason(failure[0])}") from failure[0]


def _place(settings: PipelineSettings) -> PlacementGroup:
    bundles = settings.bundles()
    group = placement_group(bundles, strategy="PACK", name=f"duo_ray-{new_request_id()}")
    if not group.wait(PLACEMENT_LIMIT_S):
        remove_placement_group(group)
        raise DuoRayError(
            f"the cluster has no room for the pipeline after {PLACEMENT_LIMIT_S:.0f} s: it needs {bundles}, free are "
            f"{ray.available_resources()}. Draft nodes start with --resources '{{\"draft_cpu\": N}}', GPU nodes with "
            "--resources '{\"target_gpu\": N}'"
        )
    return group


def _on_this_node(settings: PipelineSettings, group: PlacementGroup) -> PipelineSettings:
    """Pin only actors on this machine: core numbers were read here and mean nothing elsewhere."""
    here = ray.get_runtime_context().get_node_id()
    nodes = placement_group_table(group)["bundles_to_node_id"]
    target = settings.target if nodes[0] == here else replace(settings.target, cores=())
    drafts = tuple(
        draft if nodes[1 + i] == here else replace(draft, cores=()) for i, draft in enumerate(settings.drafts)
    )
    return replace(settings, target=target, drafts=drafts)


def _plain(error: RayError) -> DuoRayError:
    """What went wrong, without Ray's traceback around it."""
    if isinstance(error, DuoRayError):
        return error
    cause = getattr(error, "cause", None)
    if isinstance(cause, DuoRayError):
        return cause
    if isinstance(error, RayActorError):
        return DuoRayError(f"an actor of the pipeline died: {_reason(error)}")
    return DuoRayError(_reason(cause if isinstance(cause, Exception) else error))


def _reason(error: BaseException) -> str:
    """The last line of an error's text: under Ray's tracebacks, the one that says what happened."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
