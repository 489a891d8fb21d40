"""A running pipeline: Ray, one placement group, the actors in it, and everything freed again.

One placement group holds one pipeline (the target's bundle, a bundle for each draft, one for the coordinator), so that
Ray schedules, autoscales and frees it as a whole.
"""

from __future__ import annotations

import contextlib
import os
import threading
import uuid
from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import grpc
import ray
from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available
from ray._private.grpc_utils import init_grpc_channel
from ray._private.ray_constants import GLOBAL_GRPC_OPTIONS
from ray._private.services import canonicalize_bootstrap_address_or_die
from ray._private.state import state as cluster_state
from ray.actor import ActorHandle
from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc, ray_client_pb2, ray_client_pb2_grpc
from ray.exceptions import RayActorError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from duo_ray.actors.coordinator import Coordinator, CoordinatorSettings, PipelineInfo
from duo_ray.actors.draft import DraftActor, DraftSettings
from duo_ray.actors.node import node_id
from duo_ray.actors.target import TargetActor, TargetSettings
from duo_ray.closing import Closing
from duo_ray.types import Delta, DuoRayError, Finished, Request

NAMESPACE = "duo_ray"
CONNECT_LIMIT_S = 10.0
"""For a cluster to say that it is there and takes our token."""
JOIN_LIMIT_S = 90.0
"""To join it then: Ray Client's server starts a process for us, which takes a busy machine its time."""
CLIENT_STARTS = 3
"""How often: a server without `GRPC_ENABLE_FORK_SUPPORT=0` loses one such process in fifteen."""
PLACEMENT_LIMIT_S = 60.0
COORDINATOR_MEMORY = 256 * 2**20
"""Bytes its bundle reserves: a bundle must reserve something, and the coordinator needs next to no CPU."""
TAGS = frozenset({"target_gpu", "draft_cpu"})
"""Custom resources by which a cluster says which nodes are for the target and which for drafts."""

Progress = Callable[[str], None]
"""Told in a few words what start-up is busy with."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """What one pipeline takes of a cluster."""

    target_cpus: int
    target_gpus: int
    draft_cpus: tuple[int, ...]
    """For each draft actor."""

    def bundles(self, tags: Collection[str]) -> list[dict[str, float]]:
        """Resources of the placement group: coordinator, target, each draft; of `TAGS` only those in `tags`."""
        target = {"CPU": float(self.target_cpus)}
        if self.target_gpus:
            target |= {"GPU": float(self.target_gpus), "target_gpu": float(self.target_gpus)}
        drafts = [{"CPU": float(cpus), "draft_cpu": 1.0} for cpus in self.draft_cpus]
        coordinator = {"memory": float(COORDINATOR_MEMORY)}
        return [
            {name: amount for name, amount in bundle.items() if name not in TAGS or name in tags}
            for bundle in (coordinator, target, *drafts)
        ]


@dataclass(frozen=True, slots=True)
class PipelineSettings:
    """What each actor of one pipeline needs; made from a `Config` by `actors.prepare`."""

    footprint: Footprint
    target: TargetSettings
    drafts: tuple[DraftSettings, ...]
    coordinator: CoordinatorSettings
    summary: str = ""
    """What is loaded, for people."""


@dataclass(frozen=True, slots=True)
class Reader:
    """The way to a running pipeline's answers, from any process of its cluster."""

    coordinator: ActorHandle

    def stream(self, request: Request) -> Generator[Delta | Finished, None, None]:
        """Tokens of one answer as they become certain, then `Finished`.

        Raises:
            DuoRayError: the request cannot be served, or the pipeline died.
        """
        ended = False
        try:
            for item in self.coordinator.generate.remote(request):
                message = ray.get(item)
                ended = isinstance(message, Finished)
                yield message
        except RayError as error:
            ended = True
            raise plain_error(error) from error
        finally:
            if not ended:
                # The reader went away. `ray.cancel` would also cancel calls to the models that other requests share.
                self.cancel(request)

    def cancel(self, request: Request) -> None:
        """End an answer, whoever reads it; that of an unknown request is ignored."""
        self.coordinator.cancel.remote(request.request_id)


class Pipeline(Closing):
    """A running pipeline; closing it frees every process and resource."""

    def __init__(self, settings: PipelineSettings, *, progress: Progress = lambda _: None) -> None:
        """Start the actors and wait until they are loaded and warm.

        Raises:
            DuoRayError: Ray cannot be reached, lacks the resources, or a model cannot be loaded: one line, and
                nothing is left behind.
        """
        self._cleanup = contextlib.ExitStack()
        try:
            progress("starting Ray")
            self._cleanup.callback(_join(settings))
            progress("placing the actors")
            bundles = settings.footprint.bundles(tags_of_cluster())
            self.group = group = _place(bundles)
            self._cleanup.callback(remove_placement_group, group)
            progress(f"loading {settings.summary or 'the models'}")
            self.target, self.drafts = start_models(settings, group, bundles)
            for handle in (self.target, *self.drafts):
                self._cleanup.callback(ray.kill, handle)
            coordinator = _start(
                Coordinator, group, 0, bundles[0], settings.coordinator, self.target, self.drafts, max_concurrency=1000
            )
            self._cleanup.callback(ray.kill, coordinator)
            self.info: PipelineInfo = ray.get(coordinator.start.remote())
            self.reader = Reader(coordinator)
        except RayError as error:
            self.close()
            raise plain_error(error) from error
        except BaseException:
            self.close()
            raise

    def stream(self, request: Request) -> Generator[Delta | Finished, None, None]:
        """See `Reader.stream`."""
        return self.reader.stream(request)

    def describe(self) -> PipelineInfo:
        info: PipelineInfo = ray.get(self.reader.coordinator.describe.remote())
        return info

    def close(self) -> None:
        """Free everything; safe to call twice."""
        self._cleanup.close()


def start_models(
    settings: PipelineSettings, group: PlacementGroup, bundles: Sequence[dict[str, float]]
) -> tuple[ActorHandle, list[ActorHandle]]:
    """Start target and drafts, on their way to being loaded and warm, in the bundles of a placement group.

    Models restart by themselves; no call is retried by Ray: the coordinator knows what to send again.
    """
    settings = _from_this_node(settings)
    # Thousands of calls a minute: their events keep Ray's head and its agents busy for longer than the calls took.
    always: dict[str, Any] = {"max_restarts": -1, "max_task_retries": 0, "enable_task_events": False}
    target = _start(TargetActor, group, 1, bundles[1], settings.target, **always, **_showing(settings.target.device))
    drafts = [
        _start(DraftActor, group, index, bundles[index], draft, **always)
        for index, draft in enumerate(settings.drafts, start=2)
    ]
    return target, drafts


def _showing(device: str) -> dict[str, Any]:
    """Options of an actor that is to find this device under its number.

    Ray shows an actor the cards it chose for it, the first of them as number 0; whoever asks for another number means
    that card.
    """
    if device.partition(":")[2] in ("", "0"):
        return {}
    return {"runtime_env": {"env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}}}


def _start(
    kind: type, group: PlacementGroup, index: int, bundle: dict[str, float], *args: object, **options: Any
) -> ActorHandle:
    tags = {name: amount for name, amount in bundle.items() if name in TAGS}
    return (
        ray.remote(kind)
        .options(
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
            num_cpus=bundle.get("CPU", 0),
            num_gpus=bundle.get("GPU", 0),
            memory=int(bundle.get("memory", 0)) or None,
            resources=tags,
            **options,
        )
        .remote(*args)
    )


def tags_of_cluster() -> frozenset[str]:
    """Those of `TAGS` that nodes of this cluster have, or nodes that its autoscaler may start."""
    found = TAGS & set(ray.cluster_resources())
    if ray.util.client.ray.is_connected():
        return found  # from outside a cluster its autoscaler cannot be asked
    return found | TAGS & set(cluster_state.get_max_resources_from_cluster_config() or {})


def new_request_id() -> str:
    return uuid.uuid4().hex[:12]


def _join(settings: PipelineSettings) -> Callable[[], None]:
    """Join the cluster this process is in, the one RAY_ADDRESS names, or start one; returns how to leave it."""
    if ray.is_initialized():
        return _stay
    address = os.environ.get("RAY_ADDRESS") or "local"
    if address != "local":
        connect(address)
    else:
        try:
            start_local(settings.footprint.bundles(TAGS))
        except BaseException:  # Ctrl-C in the middle of it too
            _leave()
            raise
    return _leave


def _stay() -> None:
    """The program was in a cluster before: it stays there."""


def _leave() -> None:
    ray.shutdown()


def start_local(bundles: Sequence[dict[str, float]]) -> None:
    """Start a Ray of this process's own with room for these bundles; `ray.shutdown` ends it."""
    set_ray_environment()
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


def set_ray_environment() -> None:
    """What the processes of a Ray that this process starts later need in their environment, unless it says otherwise.

    RAY_worker_niceness: at Ray's default of 15 a call between busy workers takes 10 to 25 ms in place of 1 to 2.
    GRPC_ENABLE_FORK_SUPPORT: gRPC's own handlers abort the child in one fork of fifteen while other threads use gRPC
    (ray-project/ray#63202); Ray's own processes only fork to run another program, which needs no such handlers.
    """
    os.environ.setdefault("RAY_worker_niceness", "0")
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")


def connect(address: str) -> None:
    """Join a cluster, after one question whether it is there and takes our token.

    `ray.init` by itself retries long where nobody listens, and waits for ever where another token is wanted.

    Args:
        address: "host:port", "ray://host:port", or "auto" for the one RAY_ADDRESS names or that runs on this machine.

    Raises:
        DuoRayError: no cluster there or a refusal, within `CONNECT_LIMIT_S`; or it cannot be joined in `JOIN_LIMIT_S`.
    """
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS") or address
    _ping(address)
    for _ in range(CLIENT_STARTS if address.startswith("ray://") else 1):
        failure = _init(address)
        if not isinstance(failure, ConnectionError):
            break
    if failure:
        raise DuoRayError(
            f"Ray at {address} answers, but this process cannot join it: {_reason(failure).rstrip('.')}. From a machine"
            " that is not one of its nodes, use the head's Ray Client port: ray://HEAD:10001"
        ) from failure


def _init(address: str) -> BaseException | None:
    """`ray.init`, and what went wrong: above all, no end of it after `JOIN_LIMIT_S`."""
    failure: list[BaseException] = []
    abandoned = threading.Event()

    def init() -> None:
        try:
            ray.init(address=address, namespace=NAMESPACE, logging_level="ERROR")
            if abandoned.is_set():
                ray.shutdown()
        except BaseException as error:  # handed to the caller's thread
            failure.append(error)

    thread = threading.Thread(target=init, daemon=True)
    thread.start()
    try:
        thread.join(JOIN_LIMIT_S)
    finally:  # Ctrl-C too
        if thread.is_alive():
            abandoned.set()
    if abandoned.is_set():
        return TimeoutError(f"no end of it after {JOIN_LIMIT_S:.0f} s")
    return failure[0] if failure else None


def _ping(address: str) -> None:
    """Whether a cluster is there and takes our token."""
    if address == "auto":
        maybe_enable_token_auth_if_token_available(warn_if_disabled=False)  # `ray.init` does so for "auto" alone
    through_client = address.startswith("ray://")
    try:
        host = address.removeprefix("ray://") if through_client else canonicalize_bootstrap_address_or_die(address)
        channel = init_grpc_channel(host, GLOBAL_GRPC_OPTIONS)
    except (ValueError, ConnectionError, RuntimeError) as error:
        raise _no_way_in(address, str(error)) from error
    try:
        if through_client:
            ping = ray_client_pb2.ClusterInfoRequest(type=ray_client_pb2.ClusterInfoType.PING)
            ray_client_pb2_grpc.RayletDriverStub(channel).ClusterInfo(ping, timeout=CONNECT_LIMIT_S)
        else:
            gcs = gcs_service_pb2_grpc.NodeInfoGcsServiceStub(channel)
            gcs.CheckAlive(gcs_service_pb2.CheckAliveRequest(), timeout=CONNECT_LIMIT_S)
    except grpc.RpcError as error:
        raise _no_way_in(address, error.details() or error.code().name) from error
    finally:
        channel.close()


def _no_way_in(address: str, why: str) -> DuoRayError:
    return DuoRayError(
        f"Ray at {address}: {why.rstrip('.')}. Is the cluster running there? If it wants a token, set "
        "RAY_AUTH_MODE=token and put the head node's token into ~/.ray/auth_token (a new one: ray get-auth-token "
        "--generate)"
    )


def _place(bundles: Sequence[dict[str, float]]) -> PlacementGroup:
    group = placement_group(list(bundles), strategy="PACK", name=f"duo_ray-{new_request_id()}")
    try:
        if not group.wait(PLACEMENT_LIMIT_S):
            raise DuoRayError(
                f"the cluster has no room for the pipeline after {PLACEMENT_LIMIT_S:.0f} s: it needs {bundles}, free"
                f" are {ray.available_resources()}. Draft nodes start with --resources '{{\"draft_cpu\": N}}', GPU"
                " nodes with --resources '{\"target_gpu\": N}'"
            )
    except BaseException:
        remove_placement_group(group)
        raise
    return group


def _from_this_node(settings: PipelineSettings) -> PipelineSettings:
    """Say whose paths and core numbers these are: they were read here, and actors may run elsewhere."""
    here = node_id()
    drafts = tuple(replace(draft, node=here) for draft in settings.drafts)
    return replace(settings, target=replace(settings.target, node=here), drafts=drafts)


def plain_error(error: RayError) -> DuoRayError:
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
