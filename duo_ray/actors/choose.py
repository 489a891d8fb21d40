"""Which engine runs the target, before its files are made ready for it."""

from __future__ import annotations

from collections.abc import Callable, MutableSequence
from importlib.metadata import version
from pathlib import Path

from duo_ray.config import Config, ConfigError, TargetConfig
from duo_ray.hardware.machine import Machine
from duo_ray.hardware.placement import Plan
from duo_ray.models.calibration import calibration_file, read_seconds, write_seconds
from duo_ray.models.catalog import gguf_target
from duo_ray.models.engine import layout_seconds, transformers_seconds
from duo_ray.models.gguf_header import read_gguf
from duo_ray.models.precision import CPU_DTYPES
from duo_ray.models.quantization import check_quantization
from duo_ray.types import DuoRayError

Progress = Callable[[str, float | None], None]

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""`models.target.precision` -> torch's name."""

_ALL_LAYERS = 10_000
_TRANSFORMERS_ONLY = ("precision", "attn_implementation", "device_map", "quantization")


def choose_engine(config: Config, plan: Plan, machine: Machine, notes: MutableSequence[str], progress: Progress) -> str:
    """transformers or llama_cpp, by `models.target.engine`; `auto` measures both once for a .gguf file on a CPU.

    A choice is explained in `notes`.

    Raises:
        ConfigError: llama_cpp with a setting that only transformers has, or for a GPU without a build for it; packed
            weights in transformers, or of what is no .gguf file.
        DuoRayError: neither engine runs the model.
    """
    target = config.models.target
    check_quantization(target.quantization)
    if target.n_gpu_layers not in ("auto", 0) and plan.device == "cpu":
        raise ConfigError(
            f"models.target.n_gpu_layers is {target.n_gpu_layers}, but the target runs on the CPU: remove it"
        )
    only = [name for name in _TRANSFORMERS_ONLY if getattr(target, name) != TargetConfig.model_fields[name].default]
    if packed := target.quantization == "gguf":
        _check_packed(target)
        only.remove("quantization")
    if packed or target.engine == "llama_cpp":
        if only:
            raise ConfigError(
                f"models.target.{only[0]} is {getattr(target, only[0])}, but models.target.engine is llama_cpp, which"
                " has no such setting: remove one of them"
            )
        _check_gpu_build(config, plan)
        return "llama_cpp"
    if target.engine != "auto":
        return target.engine
    if target.model == "demo" or plan.device != "cpu" or not plan.target.cores or only:
        return "transformers"
    path = gguf_target(target.model)
    if path is None:
        return "transformers"
    unpacked = 4 * read_gguf(path).parameters
    if unpacked > machine.memory_available:
        notes.append(
            f"engine: llama_cpp, as unpacking the weights for transformers would take {unpacked / 2**30:.1f} GiB; "
            f"{machine.memory_available / 2**30:.1f} are free"
        )
        return "llama_cpp"
    layouts = _layouts(path, plan, machine, progress)
    seconds = {"llama_cpp": min(layouts.values())} if layouts else {}
    kept = _kept("transformers", path, plan, machine)
    in_transformers = read_seconds(kept)
    if in_transformers is None:
        progress("measuring the faster engine", None)
        measured = transformers_seconds(path, plan.target.cores, plan.target.threads or 1, CPU_DTYPES)
        in_transformers = {} if measured is None else {"transformers": measured}
        if in_transformers:  # a failure may have been the machine's
            write_seconds(kept, in_transformers)
    seconds |= in_transformers
    if not seconds:
        raise DuoRayError(f"{path} runs neither in llama.cpp nor, converted, in transformers: use another target")
    engine = min(seconds, key=lambda name: seconds[name])
    shown = ", ".join(f"{name} {value * 500:.1f}" for name, value in sorted(seconds.items()))
    reason = "the faster one here" if len(seconds) > 1 else "the one that runs this model"
    notes.append(f"engine: {engine}, {reason} (mean of T(1) and T(8), ms: {shown}); models.target.engine changes it")
    return engine


def _check_packed(target: TargetConfig) -> None:
    asked = "models.target.quantization is gguf"
    if target.engine == "transformers":
        raise ConfigError(
            f"{asked}, but models.target.engine is transformers, which unpacks the weights of such models when it loads"
            " them: remove one of them (llama_cpp computes with packed ones), or set quantization to int8 or int4"
        )
    if gguf_target(target.model) is None:
        raise ConfigError(
            f"{asked}, but models.target.model {target.model} is no .gguf file on this disk: give one, or set"
            " quantization to int8 or int4"
        )


def choose_layout(path: Path, plan: Plan, machine: Machine, notes: MutableSequence[str], progress: Progress) -> bool:
    """Whether llama.cpp repacks a target's weights for this CPU: measured once, and said in `notes`.

    Not on a GPU, nor on a cluster whose CPUs nobody knows yet.
    """
    if plan.device != "cpu" or not plan.target.cores:
        return False
    seconds = _layouts(path, plan, machine, progress)
    if len(seconds) < 2:
        return False
    layout = min(seconds, key=lambda name: seconds[name])
    shown = ", ".join(f"{name} {value * 500:.1f}" for name, value in sorted(seconds.items()))
    notes.append(f"weights in llama.cpp: {layout}, the faster layout here (mean of T(1) and T(8), ms: {shown})")
    return layout == "repacked"


def _layouts(path: Path, plan: Plan, machine: Machine, progress: Progress) -> dict[str, float]:
    kept = _kept("layout", path, plan, machine)
    seconds = read_seconds(kept)
    if seconds is None:
        progress("measuring the faster layout of the weights", None)
        fits = path.stat().st_size <= machine.memory_available  # repacked weights are no mapped pages
        seconds = layout_seconds(path, plan.target.cores, plan.target.threads or 1, repacked=fits)
        if seconds:
            write_seconds(kept, seconds)
    return seconds


def _kept(what: str, path: Path, plan: Plan, machine: Machine) -> Path:
    """Where the times of what was to be chosen among are kept."""
    status = path.stat()
    return calibration_file(
        what, str(path), status.st_size, status.st_mtime_ns, machine.cpu, plan.target,
        version("torch"), version("transformers"), version("llama-cpp-python"),
    )  # fmt: skip


def gpu_layers(config: Config, plan: Plan) -> int:
    """Layers that llama.cpp computes on the GPU."""
    if plan.device == "cpu":
        return 0
    asked = config.models.target.n_gpu_layers
    return _ALL_LAYERS if asked == "auto" else asked


def _check_gpu_build(config: Config, plan: Plan) -> None:
    if not gpu_layers(config, plan) or config.hardware.machine == "cluster":
        return  # of a cluster only the node that runs the target knows
    from llama_cpp import llama_cpp as ll  # noqa: PLC0415 (only where a GPU is to run it)

    from duo_ray.models.llama_library import NO_GPU_BUILD  # noqa: PLC0415

    if not ll.llama_supports_gpu_offload():
        raise ConfigError(
            f"models.target.engine is llama_cpp on {plan.device}, but {NO_GPU_BUILD}; or set"
            " models.target.device to cpu"
        )
