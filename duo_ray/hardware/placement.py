"""Which cores and GPUs target and drafts get, and what is refused on which machine."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from duo_ray.config import Config, ConfigError
from duo_ray.hardware.cores import show_cores
from duo_ray.hardware.gpus import Gpu
from duo_ray.hardware.machine import Machine

_DRAFT_CORES = 8
"""A draft of the intended size gains nothing from more threads than this; further cores go to further drafts."""


@dataclass(frozen=True, slots=True)
class CoreSplit:
    """Cores of the target and of each draft actor."""

    target: tuple[int, ...]
    drafts: tuple[tuple[int, ...], ...]

    @property
    def shared(self) -> bool:
        """Whether target and drafts take turns on a core: there is only one."""
        return any(core in self.target for draft in self.drafts for core in draft)


@dataclass(frozen=True, slots=True)
class Share:
    """What one actor gets of its node."""

    cpus: int
    """CPUs it asks Ray for."""
    threads: int | None
    """Threads the model computes with; None leaves it to the engine (a target on a GPU)."""
    cores: tuple[int, ...] = ()
    """Cores it is pinned to; empty: another machine's, whose numbers nobody knows here."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Device of the target, and what target and drafts get. Known from the settings, before any model is looked at."""

    device: str
    """"cpu" or "cuda:N"."""
    gpus: int
    target: Share
    drafts: tuple[Share, ...]


def split_cores(
    machine: Machine,
    affinity: Sequence[int] | None,
    draft_actors: int | None,
    draft_threads: int | None,
    target_on_gpu: bool,
) -> CoreSplit:
    """Give target and drafts disjoint cores; each draft's cores lie in one NUMA node.

    With a GPU one core drives it and the drafts get the rest; without, the target gets half. A single core is shared.

    Args:
        affinity: the cores to share out; None: all of the machine's.
        draft_actors: None: one up to 8 draft cores, then one for every 8 (or `draft_threads`, if more).
        draft_threads: threads of each draft actor; None: one for each of its cores.

    Raises:
        ConfigError: cores that are not there, or fewer than the draft actors or their threads need.
    """
    cores = machine.cores if affinity is None else tuple(sorted(set(affinity)))
    _check_allowed(machine, cores)
    if len(cores) == 1:
        split = CoreSplit(cores, (cores,) * (draft_actors or 1))
    else:
        nodes = [[core for core in node if core in cores] for node in machine.numa_nodes]
        ordered = [core for node in nodes for core in node]
        target = ordered[: 1 if target_on_gpu else len(ordered) // 2]
        free = [[core for core in node if core not in target] for node in nodes]
        split = CoreSplit(tuple(target), _share_out([node for node in free if node], draft_actors, draft_threads))
    fewest = min(split.drafts, key=len)
    if draft_threads is not None and draft_threads > len(fewest):
        raise ConfigError(
            f"models.draft.threads is {draft_threads}, but a draft actor has {len(fewest)} of the {len(cores)} cores"
            f" ({show_cores(fewest)}): lower it, or set optimization.draft_actors or hardware.cpu_affinity"
        )
    return split


def _share_out(
    nodes: list[list[int]], draft_actors: int | None, draft_threads: int | None
) -> tuple[tuple[int, ...], ...]:
    """Cores for each draft actor out of `nodes`, the free cores of each NUMA node."""
    size = max(_DRAFT_CORES, draft_threads or 0)
    available = sum(map(len, nodes))
    actors = max(1, sum(len(node) // size for node in nodes)) if draft_actors is None else draft_actors
    if actors > available:
        raise ConfigError(
            f"optimization.draft_actors is {actors}, but only {available} cores are left beside the target's"
        )
    counts = [0] * len(nodes)
    for _ in range(actors):
        roomiest = max(range(len(nodes)), key=lambda n: len(nodes[n]) / (counts[n] + 1))
        counts[roomiest] += 1
    drafts: list[tuple[int, ...]] = []
    for node, count in zip(nodes, counts, strict=True):
        bounds = [len(node) * i // count for i in range(count + 1)] if count else [0]
        drafts += [tuple(node[low:high]) for low, high in pairwise(bounds)]
    return tuple(drafts)


def usable_cores(config: Config, machine: Machine) -> tuple[int, ...]:
    """The cores the pipeline shares out: those of `cpu_affinity`, at most `cpu_cores` of them.

    Without either, no more than a container's CPU limit pays for.

    Raises:
        ConfigError: cores that do not exist or are not allowed, or fewer than `cpu_cores`.
    """
    hardware = config.hardware
    affinity, count = hardware.affinity, hardware.cpu_cores
    cores = machine.cores if affinity is None else affinity
    _check_allowed(machine, cores)
    if count == "auto":
        limit = max(1, int(machine.effective_cores)) if affinity is None else len(cores)
        return cores[:limit]
    if count > len(cores):
        has = "this process may use" if affinity is None else "hardware.cpu_affinity names"
        raise ConfigError(f"hardware.cpu_cores is {count}, but {has} {len(cores)} cores: {show_cores(cores)}")
    free_first = sorted(cores, key=lambda core: core in machine.claimed)
    return tuple(sorted(free_first[:count]))


def _check_allowed(machine: Machine, cores: Iterable[int]) -> None:
    if missing := set(cores).difference(machine.present):
        raise ConfigError(
            f"hardware.cpu_affinity names core {show_cores(missing)}, but this machine has"
            f" {show_cores(machine.present)}; change it or set it to auto"
        )
    if barred := set(cores).difference(machine.cores):
        raise ConfigError(
            f"hardware.cpu_affinity names core {show_cores(barred)}, but this process may use only"
            f" {show_cores(machine.cores)} (taskset or container); change it or set it to auto"
        )


def target_device(config: Config, machine: Machine) -> str:
    """Where the target runs: "cpu" or "cuda:N", with `auto` resolved.

    Raises:
        ConfigError: a CUDA device that is not there, is forbidden by gpu_type: none, or has another name than gpu_type.
    """
    device, gpu_type = config.models.target.device, config.hardware.gpu_type
    forced_off = gpu_type.lower() == "none"
    if device == "cpu" or (device == "auto" and (forced_off or not machine.gpus)):
        return "cpu"
    if forced_off:
        raise ConfigError(f"models.target.device is {device}, but hardware.gpu_type is none: change one of them")
    if not machine.gpus:
        raise ConfigError(
            f"models.target.device is {device}, but no NVIDIA GPU with a driver was found; set it to cpu or auto"
        )
    index = int(device.partition(":")[2] or 0) if device != "auto" else 0
    if index >= len(machine.gpus):
        raise ConfigError(
            f"models.target.device is {device}, but there are {len(machine.gpus)} GPUs: use cuda:0 to"
            f" cuda:{len(machine.gpus) - 1}"
        )
    name = machine.gpus[index].name
    if gpu_type.lower() != "auto" and gpu_type.lower() not in name.lower():
        raise ConfigError(f"hardware.gpu_type is {gpu_type}, but cuda:{index} is {name}; change it or set it to auto")
    return f"cuda:{index}"


def plan_cores(config: Config, machine: Machine) -> CoreSplit:
    """`split_cores` by the configuration; without a draft all cores are the target's.

    Raises:
        ConfigError: see `usable_cores`, `target_device`, `split_cores`.
    """
    cores = usable_cores(config, machine)
    if config.models.draft.model is None:
        return CoreSplit(cores, ())
    actors, threads = config.optimization.draft_actors, config.models.draft.threads
    return split_cores(
        machine,
        cores,
        None if actors == "auto" else actors,
        None if threads == "auto" else threads,
        target_device(config, machine) != "cpu",
    )


def make_plan(config: Config, machine: Machine) -> Plan:
    """Who gets what: of `machine`, or, with `hardware.machine: cluster`, of nodes that nobody has seen yet.

    Raises:
        ConfigError: see `check_machine`; on a cluster, a setting that is about this machine or is missing.
    """
    target, draft, actors = config.models.target, config.models.draft, config.optimization.draft_actors
    if config.hardware.machine == "cluster":
        _check_cluster(config)
        threads = _DRAFT_CORES if draft.threads == "auto" else draft.threads
        count = 0 if draft.model is None else 1 if actors == "auto" else actors
        drafts = (Share(threads, threads),) * count
        if target.device == "cpu":
            target_threads = _DRAFT_CORES if target.threads == "auto" else target.threads
            return Plan("cpu", 0, Share(target_threads, target_threads), drafts)
        asked = None if target.threads == "auto" else target.threads
        return Plan("cuda:0", _gpu_count(config, ()), Share(asked or 1, asked), drafts)
    device, split = target_device(config, machine), plan_cores(config, machine)
    own = max(1, len(split.target)) if device == "cpu" else None
    share = Share(max(1, len(split.target)), own if target.threads == "auto" else target.threads, split.target)
    shares = []
    for cores in split.drafts:
        threads = len(cores) if draft.threads == "auto" else draft.threads
        shares.append(Share(threads, threads, cores))
    return Plan(device, 0 if device == "cpu" else _gpu_count(config, machine.gpus), share, tuple(shares))


def target_cores(config: Config, plan: Plan, engine: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The target's own cores, and more for passes that they make faster.

    A target in llama.cpp that has threads as it likes may have the drafts' while none of them works. Without a draft it
    leaves one to the rest of the pipeline in passes of few tokens, which are as fast so.
    """
    own = plan.target.cores
    if engine != "llama_cpp" or plan.device != "cpu" or config.models.target.threads != "auto" or not own:
        return own, ()
    if not plan.drafts and len(own) > 1:
        return own[:-1], own[-1:]
    return own, tuple(sorted({core for draft in plan.drafts for core in draft.cores} - set(own)))


def _check_cluster(config: Config) -> None:
    hardware, target = config.hardware, config.models.target
    for name in ("cpu_cores", "cpu_affinity", "gpu_type"):
        if (value := getattr(hardware, name)) != "auto":
            raise ConfigError(
                f"hardware.{name} is {value}, which is about this machine, but hardware.machine is cluster:"
                " remove one of them"
            )
    if target.device not in ("cpu", "cuda"):
        raise ConfigError(
            f"models.target.device is {target.device}, but hardware.machine is cluster: set it to cuda (which GPU is"
            " Ray's choice) or cpu"
        )
    if target.device_map == "auto":
        raise ConfigError(
            "models.target.device_map is auto, but hardware.machine is cluster, whose GPUs are not known yet: give the"
            " mapping of module names to devices"
        )
    if target.device == "cpu" and target.precision == "fp16":
        raise ConfigError("models.target.precision is fp16, which is for GPUs; on a CPU use bf16 or fp32")


def _gpu_count(config: Config, gpus: Sequence[Gpu]) -> int:
    """GPUs that the target is spread over."""
    spread = config.models.target.device_map
    if isinstance(spread, dict):
        return max(1, len({place for place in spread.values() if place not in ("cpu", "disk")}))
    return len(gpus) if spread == "auto" else 1


def check_machine(config: Config, machine: Machine) -> list[str]:
    """Notes on what works but not well here.

    Raises:
        ConfigError: what cannot work here: a GPU or cores that are not there, more threads than cores, fp16 on a CPU.
    """
    device, target = target_device(config, machine), config.models.target
    on_cpu = device == "cpu"
    if on_cpu and target.precision == "fp16":
        raise ConfigError("models.target.precision is fp16, which is for GPUs; on a CPU use bf16, fp32 or auto")
    if target.attn_implementation == "flash_attention_2":
        _check_flash_attention(target.precision, on_cpu=on_cpu)
    split = plan_cores(config, machine)
    if on_cpu and target.threads != "auto" and target.threads > len(split.target):
        raise ConfigError(
            f"models.target.threads is {target.threads}, but the target has {len(split.target)} cores"
            f" ({show_cores(split.target)}): lower it or set it to auto"
        )
    notes = []
    gpu_type = config.hardware.gpu_type
    if on_cpu and gpu_type.lower() not in ("auto", "none"):
        notes.append(f"hardware.gpu_type is {gpu_type}, but the target runs on the CPU")
    if split.shared:
        notes.append(f"target and draft share core {show_cores(split.target)}: they cannot work at the same time")
    if on_cpu and target.precision == "bf16" and "bf16" not in machine.isa:
        notes.append("models.target.precision is bf16, which this CPU only emulates: fp32 is probably faster")
    used = len({*split.target, *(core for draft in split.drafts for core in draft)})
    if machine.cpu_limit is not None and used > machine.cpu_limit:
        notes.append(
            f"{used} cores are used, but the container's CPU limit is {machine.cpu_limit:g}: expect throttling"
        )
    return notes


def _check_flash_attention(precision: str, *, on_cpu: bool) -> None:
    asked = "models.target.attn_implementation is flash_attention_2"
    if on_cpu:
        raise ConfigError(f"{asked}, which is for GPUs; on a CPU use sdpa")
    if precision == "fp32":
        raise ConfigError(f"{asked}, which is for half precision: set models.target.precision to bf16 or fp16")
    if importlib.util.find_spec("flash_attn") is None:
        raise ConfigError(f"{asked}, but its package is not installed: pip install flash-attn, or use sdpa")
