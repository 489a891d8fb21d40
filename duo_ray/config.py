"""The settings of a pipeline: config.yaml as frozen pydantic models.

Every key has a default, a description and a check; an unknown key is refused with the name of the nearest known one.
What depends on the machine is checked in `duo_ray.hardware`, what depends on a model in `duo_ray.models.catalog`.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictBool, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from duo_ray.types import DuoRayError, SamplingParams

Auto = Literal["auto"]

QUANT_TYPES: Mapping[str, int] = {
    "F32": 0, "F16": 1, "BF16": 32, "Q8_0": 7, "Q6_K": 18, "Q5_K_M": 17, "Q5_K_S": 16, "Q5_1": 9, "Q5_0": 8,
    "Q4_K_M": 15, "Q4_K_S": 14, "Q4_1": 3, "Q4_0": 2, "IQ4_NL": 25, "IQ4_XS": 30, "MXFP4_MOE": 38, "NVFP4": 39,
    "Q3_K_L": 13, "Q3_K_M": 12, "Q3_K_S": 11, "IQ3_M": 27, "IQ3_S": 26, "IQ3_XS": 22, "IQ3_XXS": 23,
    "Q2_K": 10, "Q2_K_S": 21, "IQ2_M": 29, "IQ2_S": 28, "IQ2_XS": 20, "IQ2_XXS": 19, "TQ2_0": 37, "TQ1_0": 36,
    "IQ1_M": 31, "IQ1_S": 24,
}  # fmt: skip
"""Names of llama.cpp's quantisations with the number a GGUF states as its `general.file_type`."""

_SAMPLING = SamplingParams()


class ConfigError(DuoRayError):
    """A setting that cannot work; the text is one line: where it stands, its value, what is allowed."""


def parse_cores(text: object) -> tuple[int, ...]:
    """Core list as in `taskset -c`: "0-3,8" -> (0, 1, 2, 3, 8), sorted, each core once.

    Raises:
        ValueError: not a core list.
    """
    cores: set[int] = set()
    for part in str(text).split(","):
        first, dash, last = part.strip().partition("-")
        if not (first.isascii() and first.isdigit()) or (dash and not (last.isascii() and last.isdigit())):
            raise ValueError(f'must be auto or a core list such as "0-3,8", got {text!r}')
        low, high = int(first), int(last or first)
        if high < low or high >= 4096:
            raise ValueError(f"has a range that runs backwards or past core 4095: {part.strip()!r}")
        cores.update(range(low, high + 1))
    return tuple(sorted(cores))


def _whole(low: int, high: int, *other: str | None) -> BeforeValidator:
    """A whole number in [low, high], or one of the `other` values."""

    def check(value: object) -> object:
        if value in other:
            return value
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            words = "".join(f"{choice or 'null'} or " for choice in other)
            raise ValueError(f"must be {words}{low} to {high}, got {_shown(value)}")
        return value

    return BeforeValidator(check)


def _real(low: float, high: float) -> BeforeValidator:
    def check(value: object) -> object:
        number = math.nan
        if isinstance(value, int | float | str) and not isinstance(value, bool):
            try:
                number = float(value)  # YAML reads 1e-3 as text
            except ValueError:
                number = math.nan
        if not low <= number <= high:
            raise ValueError(f"must be {low:g} to {high:g}, got {_shown(value)}")
        return number

    return BeforeValidator(check)


def _one_of(*choices: str) -> BeforeValidator:
    def check(value: object) -> object:
        if value not in choices:
            raise ValueError(f"must be {' or '.join((', '.join(choices[:-1]), choices[-1]))}, got {_shown(value)}")
        return value

    return BeforeValidator(check)


def _affinity(value: object) -> object:
    if value == "auto":
        return value
    parse_cores(value)
    return str(value)


def _device(value: object) -> object:
    name = value if isinstance(value, str) else ""
    if name in ("auto", "cpu", "cuda") or (name.startswith("cuda:") and name[5:].isascii() and name[5:].isdigit()):
        return value
    raise ValueError(f"must be auto, cpu, cuda or cuda:N, got {_shown(value)}")


def _draft_device(value: object) -> object:
    if value != "cpu":
        raise ValueError(f"must be cpu (the draft runs beside the target, on CPU cores), got {_shown(value)}")
    return value


def _device_map(value: object) -> object:
    if value is None or value == "auto":
        return value
    if isinstance(value, Mapping) and value and all(isinstance(place, int | str) for place in value.values()):
        return {str(module): place for module, place in value.items()}
    raise ValueError(f"must be null, auto or a mapping of module names to devices, got {_shown(value)}")


def _quant(value: object) -> object:
    if value is None:
        return None
    name = value.upper() if isinstance(value, str) else ""
    if name == "AUTO":
        return "auto"
    if name not in QUANT_TYPES:
        near = difflib.get_close_matches(name, QUANT_TYPES, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else f"known: auto, {', '.join(QUANT_TYPES)}"
        raise ValueError(f"must be null, auto or a llama.cpp quantisation, got {_shown(value)}; {hint}")
    return name


def _draft_model(value: object) -> object:
    return None if isinstance(value, str) and value.lower() == "none" else value


def _stop(value: object) -> object:
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list | tuple) or not all(isinstance(text, str) and text for text in strings):
        raise ValueError(f"must be a list of texts that are not empty, got {_shown(value)}")
    return tuple(strings)


def _api_key(value: object) -> object:
    """An error must not repeat a key."""
    if value is None or (isinstance(value, str) and value.isascii() and value.isprintable() and value.strip()):
        return value
    raise ValueError("must be null, env:NAME or a text of printable ASCII characters")


def _shown(value: object) -> str:
    return repr(value) if isinstance(value, str) else "null" if value is None else str(value)


Name = Annotated[str, Field(min_length=1)]
AutoInt = int | Auto


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _empty(cls, data: object) -> object:
        return {} if data is None else data  # a section whose every line is commented out


class HardwareConfig(_Section):
    """What of this machine may be used."""

    machine: Annotated[str, _one_of("this", "cluster")] = "this"
    """this: the cores and GPUs of the machine that starts the pipeline are shared out; cluster: the actors run wherever
    the Ray cluster has room, on as many CPUs as models.*.threads and optimization.draft_actors say."""
    cpu_cores: Annotated[AutoInt, _whole(1, 4096, "auto")] = "auto"
    """How many CPU cores the pipeline uses, target and drafts together; auto: all this process may use."""
    gpu_type: Name = "auto"
    """Part of the GPU's name, checked against the GPU found (A800); auto takes any, none forces the CPU."""
    cpu_affinity: Annotated[str, BeforeValidator(_affinity)] = "auto"
    """The cores to use, as in taskset: "0-3,8"; auto: those this process may use."""

    @property
    def affinity(self) -> tuple[int, ...] | None:
        """The cores `cpu_affinity` names, sorted; None for auto."""
        return None if self.cpu_affinity == "auto" else parse_cores(self.cpu_affinity)


class TargetConfig(_Section):
    """The large model whose output is reproduced."""

    model: Name = "demo"
    """demo, a hub id, a directory with safetensors, or a .gguf file."""
    engine: Annotated[str, _one_of("auto", "transformers", "llama_cpp")] = "auto"
    """transformers (a .gguf file is converted once, then cached), llama_cpp (a .gguf file as it is), or auto: llama_cpp
    for a .gguf file on a machine without a GPU where it is the faster there, measured once; else transformers."""
    device: Annotated[str, BeforeValidator(_device)] = "auto"
    """auto (the first GPU, else the CPU), cpu, cuda or cuda:N."""
    precision: Annotated[str, _one_of("auto", "fp32", "bf16", "fp16")] = "auto"
    """auto, fp32, bf16 or fp16; auto: bf16 where the device computes in it, else fp16 on a GPU, fp32 on a CPU."""
    max_seq_len: Annotated[AutoInt, _whole(16, 2**24, "auto")] = "auto"
    """Tokens of prompt and answer one request may hold; auto: the model's context, at most 4096."""
    threads: Annotated[AutoInt, _whole(1, 4096, "auto")] = "auto"
    """CPU threads of the target; auto: one for each of its cores."""
    n_gpu_layers: Annotated[AutoInt, _whole(0, 10_000, "auto")] = "auto"
    """Layers that llama_cpp computes on the GPU (llama.cpp must be built for it); auto: all where `device` is a GPU."""
    quantization: Annotated[str, _one_of("none", "gguf", "int8", "int4")] = "none"
    """Weights of linear layers in transformers: int8 (torchao) or int4 (bitsandbytes), made while loading; none: as
    they are. gguf (packed) is what engine llama_cpp is for."""
    attn_implementation: Annotated[str, _one_of("sdpa", "eager", "flash_attention_2")] = "sdpa"
    """transformers' attention: sdpa, eager, or flash_attention_2 (on a GPU, where flash-attn is installed)."""
    chunked_prefill: Annotated[int, _whole(8, 65536)] = 128
    """A longer prompt is run through the model in chunks of this many tokens, between other requests' steps."""
    device_map: Annotated[dict[str, int | str] | Auto | None, BeforeValidator(_device_map)] = None
    """Spread one model over several GPUs: auto, or a mapping of module names to devices; null: one device."""
    slots: Annotated[int, _whole(1, 1024)] = 8
    """How many requests the target holds at once; memory is reserved for each."""
    cuda_graphs: StrictBool = True
    """Replay captured CUDA graphs for the verification passes (GPU only)."""


class DraftConfig(_Section):
    """The small model that guesses, on CPU cores."""

    model: Annotated[Name | None, BeforeValidator(_draft_model)] = "demo"
    """demo, a .gguf file, a directory or hub id with .gguf files; null or none: the target alone."""
    device: Annotated[str, BeforeValidator(_draft_device)] = "cpu"
    """Always cpu."""
    quant: Annotated[str | None, BeforeValidator(_quant)] = None
    """null: the file as it is; a llama.cpp quantisation (Q5_K_M), made once and cached where it is missing; auto:
    several are loaded, as far as memory allows, and a request uses the one that promises the most tokens per second."""
    threads: Annotated[AutoInt, _whole(1, 4096, "auto")] = "auto"
    """CPU threads of each draft actor; auto: one for each of its cores."""
    max_seq_len: Annotated[AutoInt, _whole(16, 2**24, "auto")] = "auto"
    """Tokens a draft's context holds; auto: the target's, as far as the draft model goes."""
    vocabulary: Annotated[str, _one_of("auto", "same", "intersection", "string")] = "auto"
    """How a draft with another tokenizer is used: its tokens that the target has too (intersection), or its text,
    encoded again (string); auto: same where all ids are the same, else whichever fits, measured."""


class ModelsConfig(_Section):
    """The two models."""

    target: TargetConfig = TargetConfig()
    """The large model whose output is reproduced."""
    draft: DraftConfig = DraftConfig()
    """The small model that guesses."""


class OptimizationConfig(_Section):
    """How much is drafted, and when."""

    draft_budget: Annotated[AutoInt, _whole(1, 128, "auto")] = "auto"
    """gamma: tokens of one block over all its sequences; auto: chosen at each step from measured times."""
    max_sequences: Annotated[int, _whole(1, 8)] = 4
    """Sequences one block may hold."""
    warmup_steps: Annotated[int, _whole(0, 10_000)] = 6
    """Passes run through each model at the start, to measure it before the first request."""
    draft_actors: Annotated[AutoInt, _whole(1, 1024, "auto")] = "auto"
    """Draft processes; auto: one for every 8 draft cores, at least one."""
    gamma_min: Annotated[int, _whole(1, 128)] = 1
    """The smallest gamma the controller chooses."""
    gamma_max: Annotated[int, _whole(1, 128)] = 32
    """The largest gamma the controller chooses."""
    gamma_scale: Annotated[float, _real(0.1, 10.0)] = 1.0
    """Multiplies the controller's gamma."""
    lead: Annotated[AutoInt, _whole(0, 128, "auto")] = "auto"
    """Tokens drafted before the target starts when there is no block to verify; 0 is the published loop."""
    overlap: StrictBool | Auto = "auto"
    """Draft while the target verifies: true, false (one after the other), or auto (measured)."""
    fallback: StrictBool = True
    """Stop drafting for a request while measurements say that it costs more than it saves."""
    prefetch: StrictBool = True
    """Run a prompt through the draft while the target is still prefilling it."""

    @model_validator(mode="after")
    def _ordered(self) -> OptimizationConfig:
        if self.gamma_min > self.gamma_max:
            raise ValueError(f"gamma_min {self.gamma_min} must not be above gamma_max {self.gamma_max}")
        return self


class SamplingConfig(_Section):
    """What a request that says nothing else gets."""

    temperature: Annotated[float, _real(0.0, 100.0)] = _SAMPLING.temperature
    """0 is greedy."""
    top_k: Annotated[int, _whole(0, 2**31 - 1)] = _SAMPLING.top_k
    """Keep the k most probable tokens; 0 keeps all."""
    top_p: Annotated[float, _real(0.0, 1.0)] = _SAMPLING.top_p
    """Keep the smallest set of most probable tokens whose mass reaches top_p; above 0."""
    min_p: Annotated[float, _real(0.0, 1.0)] = _SAMPLING.min_p
    """Drop tokens less probable than min_p times the most probable one."""
    repetition_penalty: Annotated[float, _real(0.01, 100.0)] = _SAMPLING.repetition_penalty
    """Divides positive, multiplies negative logits of ids already seen; 1 is off."""
    presence_penalty: Annotated[float, _real(-100.0, 100.0)] = _SAMPLING.presence_penalty
    """Subtracted once from the logit of every id already in the output."""
    frequency_penalty: Annotated[float, _real(-100.0, 100.0)] = _SAMPLING.frequency_penalty
    """Subtracted from the logit of an id once for each time it is in the output."""
    max_tokens: Annotated[int, _whole(1, 2**24)] = 256
    """Tokens of an answer."""
    stop: Annotated[tuple[str, ...], BeforeValidator(_stop)] = ()
    """Texts that end an answer."""
    seed: Annotated[int | None, _whole(0, 2**63 - 1, None)] = None
    """Key of the random numbers; null: another one for each request."""

    @model_validator(mode="after")
    def _in_range(self) -> SamplingConfig:
        self.params(seed=0 if self.seed is None else self.seed)
        return self

    def params(self, *, seed: int, acceptance_top_k: int = 0) -> SamplingParams:
        """The defaults as a request's parameters."""
        return SamplingParams(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            seed=seed,
            acceptance_top_k=acceptance_top_k,
        )


class AcceptanceConfig(_Section):
    """Departures from the exact rule."""

    top_k: Annotated[int, _whole(0, 2**31 - 1)] = _SAMPLING.acceptance_top_k
    """LOSSY above 0: a drafted token stays when it is among the target's k most probable. 0 is exact."""


class ReplicasConfig(_Section):
    """How many pipelines serve, each a replica with a target and drafts of its own."""

    min: Annotated[int, _whole(0, 10_000)] = 1
    """The fewest; 0 lets an idle service go entirely, at the price of a start for the next request."""
    max: Annotated[int, _whole(1, 10_000)] = 1
    """The most."""
    upscale_delay_s: Annotated[float, _real(0.0, 86_400.0)] = 10.0
    """Another replica starts when there was more to do than the concurrency of all for this long."""
    downscale_delay_s: Annotated[float, _real(0.0, 86_400.0)] = 300.0
    """A replica ends when the others could have done the work for this long."""

    @model_validator(mode="after")
    def _ordered(self) -> ReplicasConfig:
        if self.min > self.max:
            raise ValueError(f"min {self.min} must not be above max {self.max}")
        return self


class LimitsConfig(_Section):
    """What one HTTP request may ask for."""

    body_bytes: Annotated[int, _whole(1024, 2**31 - 1)] = 4 * 2**20
    """Size of the request's body."""
    tokens: Annotated[int | None, _whole(1, 2**24, None)] = None
    """max_tokens of one answer; null: what the context holds."""
    n: Annotated[int, _whole(1, 1024)] = 8
    """Answers to one prompt, or prompts in one request."""
    timeout_s: Annotated[float, _real(1.0, 86_400.0)] = 600.0
    """Time from its arrival to its last token."""


class ServingConfig(_Section):
    """The Serve application: `serve run deployments:app config=config.yaml`."""

    model_name: Name = "auto"
    """The name clients ask for; auto: the last part of the target's (models.target.model)."""
    replicas: ReplicasConfig = ReplicasConfig()
    """How many pipelines serve."""
    concurrency: Annotated[AutoInt, _whole(1, 1024, "auto")] = "auto"
    """Requests one replica works on at the same time; auto: models.target.slots."""
    queue: Annotated[int, _whole(0, 100_000)] = 64
    """Requests that wait at one replica for their turn; the next one gets status 503."""
    retry_after_s: Annotated[int, _whole(1, 3600)] = 2
    """What a refused client is told to wait (`Retry-After`)."""
    drain_s: Annotated[float, _real(0.0, 86_400.0)] = 60.0
    """How long a replica that is to end may go on with the answers it has begun."""
    api_key: Annotated[str | None, BeforeValidator(_api_key)] = None
    """What clients send as `Authorization: Bearer KEY`; env:NAME reads it from that variable where the replica runs;
    null: everyone may ask."""
    limits: LimitsConfig = LimitsConfig()
    """What one HTTP request may ask for."""


class Config(_Section):
    """All settings of one pipeline, and of the service around it."""

    hardware: HardwareConfig = HardwareConfig()
    """What of this machine may be used."""
    models: ModelsConfig = ModelsConfig()
    """The two models."""
    optimization: OptimizationConfig = OptimizationConfig()
    """How much is drafted, and when."""
    sampling: SamplingConfig = SamplingConfig()
    """What a request that says nothing else gets."""
    acceptance: AcceptanceConfig = AcceptanceConfig()
    """Departures from the exact rule."""
    serving: ServingConfig = ServingConfig()
    """The Serve application around the pipeline."""

    @property
    def model_name(self) -> str:
        """The name clients ask for."""
        if self.serving.model_name != "auto":
            return self.serving.model_name
        return Path(self.models.target.model).name.removesuffix(".gguf")

    def sampling_params(self, *, seed: int) -> SamplingParams:
        """Parameters of a request that sets nothing itself; `seed` counts where the configuration leaves it open."""
        chosen = seed if self.sampling.seed is None else self.sampling.seed
        return self.sampling.params(seed=chosen, acceptance_top_k=self.acceptance.top_k)


def load_config(path: str | Path | None = None, overrides: Mapping[str, object] | None = None) -> Config:
    """Read config.yaml (None: defaults only), with `overrides` of dotted keys laid over it.

    An override that is a text is read as YAML, as it would be in the file: "8" is a number, "null" nothing.

    Raises:
        ConfigError: one line that names the file, the setting, its value and what is allowed.
    """
    source = "config" if path is None else Path(path).name
    data = {} if path is None else _read_yaml(Path(path))
    overridden = dict(overrides or {})
    for key, value in overridden.items():
        _lay_over(data, key, _parse(value, key) if isinstance(value, str) else value)
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        details = error.errors(include_url=False)
        path_of_first = _dotted(details[0])
        where = "override" if any(_within(path_of_first, key) for key in overridden) else source
        others = len({_dotted(detail) for detail in details}) - 1
        more = f" (and {others} more)" if others else ""
        raise ConfigError(f"{where}: {_describe(details[0])}{more}") from None


class _UniqueKeys(yaml.SafeLoader):
    """YAML in which a key given twice is an error, not a silent choice of the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[object] = set()
        for key, _ in node.value:
            name = key.value
            if name in seen and name != "<<":
                raise yaml.constructor.ConstructorError(None, None, f"{name} is given twice", key.start_mark)
            seen.add(name)
        return super().construct_mapping(node, deep=deep)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    data = _parse(text, path.name)
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"{path.name}: must be a mapping of settings such as `models:`, got {type(data).__name__}")
    return data


def _parse(text: str, source: str) -> Any:
    try:
        return yaml.load(text, Loader=_UniqueKeys)
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"{source}{line}: {error.problem or 'not YAML'}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: not YAML: {' '.join(str(error).split())}") from None


def _lay_over(data: dict[str, Any], key: str, value: object) -> None:
    *sections, name = key.split(".")
    for section in sections:
        if data.get(section) is None:
            data[section] = {}
        data = data[section]
        if not isinstance(data, dict):
            raise ConfigError(f"override: {key} is not a setting: {section} is a value, not a section")
    data[name] = value


def _describe(error: ErrorDetails) -> str:
    """One validation error of pydantic as half a sentence that starts with the setting's dotted name."""
    name, value = _dotted(error), _shown(error["input"])
    match error["type"]:
        case "extra_forbidden":
            text = f" is not a setting; {_nearest(name)}"
        case "value_error":
            # What concerns several settings of a section names them itself.
            text = f"{':' if name in _sections() else ''} {error['ctx']['error']}"
        case "model_type":
            text = f" must be a mapping of settings, got {value}"
        case "bool_type" | "literal_error":
            text = f" must be true or false{' or auto' if name == 'optimization.overlap' else ''}, got {value}"
        case "string_type":
            text = f" must be a text, got {value}"
        case "string_too_short":
            text = " must not be empty"
        case _:
            text = f": {error['msg']}, got {value}"
    return name + text


def _dotted(error: ErrorDetails) -> str:
    """The setting's name: a union adds the tried member to pydantic's location, which is no part of it."""
    parts: list[str] = []
    section: type[BaseModel] | None = Config
    for part in error["loc"]:
        parts.append(str(part))
        field = section.model_fields.get(str(part)) if section is not None else None
        section = _section_of(field) if field is not None else None
        if section is None:
            break
    return ".".join(parts)


def _section_of(field: FieldInfo) -> type[BaseModel] | None:
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _settings(section: type[BaseModel] = Config, prefix: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        inner = _section_of(field)
        yield prefix + name
        if inner is not None:
            yield from _settings(inner, f"{prefix}{name}.")


def _sections() -> set[str]:
    names = list(_settings())
    return {name for name in names if any(other.startswith(f"{name}.") for other in names)}


def _nearest(name: str) -> str:
    """A hint: the most similar setting of the same section, else one of that name elsewhere, else all known ones."""
    section, _, last = name.rpartition(".")
    names = list(_settings())
    siblings = [other.rpartition(".")[2] for other in names if other.rpartition(".")[0] == section]
    near = difflib.get_close_matches(last, siblings, n=1)
    if near:
        return f"did you mean {near[0]}?"
    leaves = {other.rpartition(".")[2]: other for other in names}
    near = difflib.get_close_matches(last, leaves, n=1, cutoff=0.8)
    if near:
        return f"did you mean {leaves[near[0]]}?"
    return f"known: {', '.join(siblings)}"


def _within(name: str, key: str) -> bool:
    return name == key or name.startswith(f"{key}.") or key.startswith(f"{name}.")
