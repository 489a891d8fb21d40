"""Everything that is decided before an actor starts: model files, device, precision, cores, earlier measurements."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from itertools import chain
from pathlib import Path

from duo_ray.actors.choose import DTYPES, choose_engine, choose_layout, gpu_layers
from duo_ray.actors.coordinator import CoordinatorSettings, PipelineInfo
from duo_ray.actors.draft import DraftSettings
from duo_ray.actors.launch import Footprint, PipelineSettings
from duo_ray.actors.target import TargetSettings
from duo_ray.config import Config, DraftConfig
from duo_ray.core.gamma import Policy
from duo_ray.hardware.cores import CoreClaims, show_cores
from duo_ray.hardware.machine import Machine, detect_machine
from duo_ray.hardware.placement import Plan, check_machine, make_plan, target_cores
from duo_ray.models.calibration import Calibration, calibration_file, read_calibration, write_calibration
from duo_ray.models.catalog import (
    TargetFiles,
    context_length,
    draft_quants,
    gguf_target,
    quant_of,
    resolve_draft,
    resolve_gguf_target,
    resolve_target,
)
from duo_ray.models.gguf_header import read_gguf
from duo_ray.models.memory import NEVER_REPACKED, ModelMemory, check_memory, gguf_memory
from duo_ray.models.precision import fastest_dtype
from duo_ray.models.quantization import LINEAR_BYTES
from duo_ray.models.tokenizer import Tokenizer
from duo_ray.models.vocabulary import TokenizerVocabulary, chat_opening

Progress = Callable[[str, float | None], None]
"""Told what start-up is busy with, and how much of it is done (0 to 1, None: unknown)."""

_LEAST_CONTEXT = 256
_WARM_UP_SHAPES = 6
_CALIBRATION = 4
"""Changes when what is kept of a start comes to mean something else."""
_CONTENTION = 0.06
"""Of two models on one CPU: a pass of the target took 0 to 7% longer beside a busy draft (benchmarks/README.md)."""


@dataclass(slots=True)
class Prepared:
    """A configuration made concrete for this machine."""

    config: Config
    machine: Machine
    files: TargetFiles
    draft_path: Path | None
    """The draft's .gguf file; of several quantisations the finest."""
    tokenizer: Tokenizer
    plan: Plan
    settings: PipelineSettings
    calibration_path: Path
    claims: CoreClaims
    """The cores above; to be released when the pipeline has ended."""
    memory: dict[str, ModelMemory]
    """What the target and each draft will take."""
    notes: list[str] = field(default_factory=list)
    """What was chosen, and why, in sentences."""

    def keep_calibration(self, info: PipelineInfo) -> None:
        """Remember what a start measured, unless an earlier start did."""
        if self.settings.coordinator.calibration is None:
            write_calibration(self.calibration_path, Calibration(self.settings.target.dtype, info.calibration))


def prepare(config: Config, *, progress: Progress = lambda _text, _share: None) -> Prepared:
    """Resolve and check everything a pipeline needs, converting and measuring once what is not in the cache.

    Raises:
        ConfigError, DuoRayError: what cannot work, in one line.
    """
    anywhere = config.hardware.machine == "cluster"
    claims = CoreClaims()
    with claims.choosing() as claimed:
        machine = replace(detect_machine(), claimed=claimed)
        notes = [] if anywhere else check_machine(config, machine)
        plan = make_plan(config, machine)
        claims.take(chain(plan.target.cores, *(draft.cores for draft in plan.drafts)))
    if not anywhere:
        check_file(config, plan, machine)
    engine = choose_engine(config, plan, machine, notes, progress)
    resolve = resolve_target if engine == "transformers" else resolve_gguf_target
    files = resolve(config.models.target.model, progress=progress)
    draft = config.models.draft
    drafts = _draft_files(draft, machine, progress)
    draft_path = next(iter(drafts.values()), None)
    tokenizer = Tokenizer.load(files.tokenizer_path, rows=files.vocab_size)
    asked = config.models.target.max_seq_len
    target_context = context_length(None if asked == "auto" else asked, files.context_length)
    notes.append(_placement_note(plan, anywhere=anywhere))

    processors = "cluster" if anywhere else [machine.cpu, *(gpu.name for gpu in machine.gpus)]
    facts = (
        *_stamp(files.path), *chain.from_iterable(map(_stamp, drafts.values() or [None])), processors, plan, engine,
        config.models.target.precision, config.models.target.attn_implementation,
        config.models.target.n_gpu_layers, config.models.target.quantization,
        version("torch"), version("transformers"), version("llama-cpp-python"), _CALIBRATION,
    )  # fmt: skip
    calibration_path = calibration_file(*facts)
    kept = read_calibration(calibration_path)
    if engine == "llama_cpp":
        dtype, repack = read_gguf(files.path).quant or "GGUF", choose_layout(files.path, plan, machine, notes, progress)
    else:
        repack = False
        dtype = _dtype(config, plan, files.path, kept, notes, progress)

    optimization = config.optimization
    target = config.models.target
    opening = chat_opening(TokenizerVocabulary(tokenizer))
    if max(opening, default=0) >= tokenizer.vocab_size:
        opening = ()  # a chat will be refused, not the start
    own, spare = target_cores(config, plan, engine)
    settings = PipelineSettings(
        footprint=_footprint(plan),
        target=TargetSettings(
            path=str(files.path),
            engine=engine,
            model=_anywhere(config.models.target.model),
            device=plan.device,
            dtype=dtype,
            slots=target.slots,
            max_context=target_context,
            vocab_size=tokenizer.vocab_size,
            threads=plan.target.threads,
            cores=own,
            repack=repack,
            spare_cores=spare,
            attn_implementation=target.attn_implementation,
            chunk=target.chunked_prefill,
            device_map=target.device_map,
            cuda_graphs=target.cuda_graphs,
            quantization=target.quantization,
            gpu_layers=gpu_layers(config, plan),
            warmup_steps=max(1, -(-optimization.warmup_steps // _WARM_UP_SHAPES)),
            opening=opening,
            unseen=anywhere,
        ),
        drafts=tuple(
            DraftSettings(
                files=tuple((quant, str(path)) for quant, path in drafts.items()),
                model=_anywhere(draft.model),
                quant=draft.quant,
                threads=share.cpus,
                cores=share.cores,
                max_context=_draft_context(draft.max_seq_len, draft_path, target_context, files.vocab_size),
                slots=target.slots,
                max_sequences=optimization.max_sequences,
                vocabulary=draft.vocabulary,
                warmup_steps=max(1, -(-optimization.warmup_steps // _WARM_UP_SHAPES)),
                unseen=anywhere,
            )
            for share in plan.drafts
            if draft.model is not None and draft_path is not None
        ),
        coordinator=CoordinatorSettings(
            tokenizer_path=str(files.tokenizer_path),
            vocab_size=tokenizer.vocab_size,
            policy=replace(policy(config), contention=_CONTENTION if plan.device == "cpu" and not anywhere else 0.0),
            max_sequences=optimization.max_sequences,
            prefetch=optimization.prefetch,
            chunk=target.chunked_prefill,
            calibration=kept.costs if kept is not None else None,
        ),
    )
    if not anywhere:
        settings = as_many_as_fit(settings, machine, notes)
    memory = estimate_memory(settings)
    if not anywhere:
        check_room(memory, settings, machine)
    settings = replace(settings, summary=_summary(settings, memory))
    return Prepared(
        config, machine, files, draft_path, tokenizer, plan, settings, calibration_path, claims, memory, notes
    )


def estimate_memory(settings: PipelineSettings) -> dict[str, ModelMemory]:
    """Bytes that the target and each draft will take, from their files."""
    drafts = {f"draft {i}": draft.memory() for i, draft in enumerate(settings.drafts)}
    return {"target": settings.target.memory(), **drafts}


def as_many_as_fit(settings: PipelineSettings, machine: Machine, notes: list[str]) -> PipelineSettings:
    """With only as many quantisations of the draft as find room: one, and others in half of what it leaves free."""
    if not settings.drafts or len(settings.drafts[0].files) == 1:
        return settings

    def taken(files: Sequence[tuple[str, str]]) -> int:
        having = _with_files(settings, files)
        return sum(size.total for size in _on_host(estimate_memory(having), having).values())

    files = settings.drafts[0].files
    first, *others = [file for file in files if taken([file]) <= machine.memory_available] or files[-1:]
    kept = [first]
    room = (machine.memory_available + taken(kept)) / 2
    for file in others:
        if taken([*kept, file]) <= room:
            kept.append(file)
    note = f"quantisations of the draft: {', '.join(quant for quant, _ in kept)}"
    if left_out := [quant for quant, path in files if (quant, path) not in kept]:
        note += f"; {', '.join(left_out)} would leave less than half of the memory that one of them leaves"
    notes.append(note)
    return _with_files(settings, kept)


def _with_files(settings: PipelineSettings, files: Sequence[tuple[str, str]]) -> PipelineSettings:
    return replace(settings, drafts=tuple(replace(draft, files=tuple(files)) for draft in settings.drafts))


def check_file(config: Config, plan: Plan, machine: Machine) -> None:
    """Refuse a .gguf target that does not fit whatever runs it, by its header: before it is converted or timed.

    Raises:
        ConfigError: see `models.memory.check_memory`.
    """
    target = config.models.target
    path = gguf_target(target.model)
    if path is None or plan.device != "cpu" or target.quantization not in ("none", "gguf"):
        return
    packed = gguf_memory(read_gguf(path), tokens=_LEAST_CONTEXT, slots=1)
    unpacked = replace(packed, weights=2 * packed.parameters)
    choices = {"llama_cpp": packed, "transformers": unpacked}
    engine = "llama_cpp" if target.quantization == "gguf" else target.engine
    least = choices.get(engine) or min(choices.values(), key=lambda memory: memory.total)
    check_memory({"target": least}, machine.memory_available, "memory")


def check_room(memory: Mapping[str, ModelMemory], settings: PipelineSettings, machine: Machine) -> None:
    """Refuse what does not fit this machine.

    Raises:
        ConfigError: see `models.memory.check_memory`.
    """
    target = settings.target
    if target.device != "cpu" and target.engine == "transformers":  # llama.cpp may leave layers on the host
        # Of several cards Ray chooses one; what the driver does not say is left to the load.
        free = [gpu.memory - gpu.used for gpu in machine.gpus if gpu.memory]
        smaller = {
            f"models.target.quantization: {kind}": replace(target, quantization=kind).memory()
            for kind in (LINEAR_BYTES if target.quantization == "none" else ())
        }
        if free:
            room = sum(free) if target.device_map is not None else max(free)
            check_memory({"target": memory["target"]}, room, "GPU memory", smaller=smaller)
    check_memory(_on_host(memory, settings), machine.memory_available, "memory")


def _on_host(memory: Mapping[str, ModelMemory], settings: PipelineSettings) -> dict[str, ModelMemory]:
    """What is taken of the machine's own memory, where processes share the pages of a file that each of them maps."""
    target = settings.target
    on_host = {name: size for name, size in memory.items() if name != "target" or target.device == "cpu"}
    mapped = set() if target.repack else {target.path}
    for i, draft in enumerate(settings.drafts):
        paths = {path for _, path in draft.files if read_gguf(Path(path)).quant in NEVER_REPACKED}
        size = memory[f"draft {i}"]
        shared = sum(draft.memory_of(path).weights for path in paths & mapped)
        on_host[f"draft {i}"] = replace(size, weights=size.weights - shared)
        mapped |= paths
    return on_host


def _summary(settings: PipelineSettings, memory: Mapping[str, ModelMemory]) -> str:
    target = settings.target
    sizes = ", ".join(f"{name} {size.total / 2**30:.1f} GiB" for name, size in memory.items())
    return f"{sizes}; target in {target.engine}, {target.dtype}"


def plan_footprint(config: Config, machine: Machine) -> Footprint:
    """What a pipeline takes, known before any model is looked at.

    Raises:
        ConfigError: see `hardware.placement.make_plan`.
    """
    return _footprint(make_plan(config, machine))


def _footprint(plan: Plan) -> Footprint:
    return Footprint(plan.target.cpus, plan.gpus, tuple(draft.cpus for draft in plan.drafts))


def policy(config: Config) -> Policy:
    """The controller's freedom under this configuration."""
    optimization = config.optimization
    budget, lead, overlap = optimization.draft_budget, optimization.lead, optimization.overlap
    return Policy(
        draft_budget=None if budget == "auto" else budget,
        gamma_scale=optimization.gamma_scale,
        gamma_min=optimization.gamma_min,
        gamma_max=optimization.gamma_max,
        lead=None if lead == "auto" else lead,
        overlap=None if overlap == "auto" else overlap,
        fallback=optimization.fallback,
    )


def _draft_files(draft: DraftConfig, machine: Machine, progress: Progress) -> dict[str, Path]:
    """The draft's .gguf files by their quantisation, finest first, made where they are not there; none: no draft."""
    if draft.model is None:
        return {}
    threads = max(1, len(machine.cores))
    if draft.quant != "auto":
        path = resolve_draft(draft.model, draft.quant, threads=threads, progress=progress)
        return {draft.quant or quant_of(path): path}
    return {
        quant: resolve_draft(draft.model, quant, threads=threads, progress=progress)
        for quant in draft_quants(draft.model)
    }


def _draft_context(asked: int | str, path: Path, target_context: int, target_vocabulary: int) -> int:
    """Tokens a draft's context holds: what was asked for, else the target's as far as the draft model goes.

    A draft with another vocabulary may need more tokens for the same text.
    """
    header = read_gguf(path)
    if header.vocab_size != target_vocabulary:
        target_context += target_context // 2
    trained = int(header.metadata.get(f"{header.metadata['general.architecture']}.context_length", target_context))
    if isinstance(asked, str):
        return min(target_context, trained)
    return context_length(asked, trained, "models.draft.max_seq_len")


def _anywhere(model: str) -> str:
    """The model's name as another node understands it: a local path in full."""
    path = Path(model).expanduser()
    return str(path.resolve()) if path.exists() else model


def _dtype(
    config: Config,
    plan: Plan,
    path: Path,
    kept: Calibration | None,
    notes: list[str],
    progress: Progress,
) -> str:
    precision = config.models.target.precision
    if precision != "auto":
        return DTYPES[precision]
    if plan.device != "cpu":
        notes.append("precision: bfloat16, the default on a GPU")
        return "bfloat16"
    if not plan.target.cores:
        notes.append("precision: float32, as the CPU is not known yet (models.target.precision: bf16 may be faster)")
        return "float32"
    if kept is not None:
        notes.append(f"precision: {kept.dtype}, the faster one here when it was first measured")
        return kept.dtype
    progress("measuring the faster precision", None)
    dtype, seconds = fastest_dtype(path, plan.target.cores, plan.target.threads or 1)
    measured = ", ".join(f"{name} {value * 500:.1f}" for name, value in seconds.items())
    notes.append(f"precision: {dtype}, the faster one here (mean of T(1) and T(8) of two layers, ms: {measured})")
    return dtype


def _placement_note(plan: Plan, *, anywhere: bool) -> str:
    if anywhere:
        return f"target and {len(plan.drafts)} drafts run wherever the cluster has room for them"
    cores = show_cores(plan.target.cores)
    target = f"cores {cores}" if plan.device == "cpu" else f"{plan.device}, core {cores}"
    drafts = "; ".join(f"cores {show_cores(draft.cores)}" for draft in plan.drafts) or "none"
    return f"target on {target}; drafts: {drafts}"


def _stamp(path: Path | None) -> tuple[object, ...]:
    """What changes when a model's files do."""
    if path is None:
        return ("no draft", platform.machine())
    files = sorted(file for file in (path.iterdir() if path.is_dir() else [path]) if file.is_file())
    return tuple((str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files)
