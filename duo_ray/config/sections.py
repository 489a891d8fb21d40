"""The sections of config.yaml as frozen pydantic models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictBool, model_validator

from duo_ray.config import checks
from duo_ray.types import SamplingParams

Auto = Literal["auto"]
_SAMPLING = SamplingParams()

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

    machine: Annotated[str, checks.one_of("this", "cluster")] = "this"
    """this: the cores and GPUs of the machine that starts the pipeline are shared out; cluster: the actors run wherever
    the Ray cluster has room, on as many CPUs as models.*.threads and optimization.draft_actors say."""
    cpu_cores: Annotated[AutoInt, checks.whole(1, 4096, "auto")] = "auto"
    """How many CPU cores the pipeline uses, target and drafts together; auto: all this process may use."""
    gpu_type: Name = "auto"
    """Part of the GPU's name, checked against the GPU found (A800); auto takes any, none forces the CPU."""
    cpu_affinity: Annotated[str, BeforeValidator(checks.affinity_text)] = "auto"
    """The cores to use, as in taskset: "0-3,8"; auto: those this process may use."""

    @property
    def affinity(self) -> tuple[int, ...] | None:
        """The cores `cpu_affinity` names, sorted; None for auto."""
        return None if self.cpu_affinity == "auto" else checks.parse_cores(self.cpu_affinity)


class TargetConfig(_Section):
    """The large model whose output is reproduced."""

    model: Name = "demo"
    """demo, a hub id, a directory with safetensors, or a .gguf file."""
    engine: Annotated[str, checks.one_of("auto", "transformers", "llama_cpp")] = "auto"
    """transformers (a .gguf file is converted once, then cached), llama_cpp (a .gguf file as it is), or auto: llama_cpp
    for a .gguf file on a machine without a GPU where it is the faster there, measured once; else transformers, as for
    demo, whose target is the unpacked model by definition."""
    device: Annotated[str, BeforeValidator(checks.device)] = "auto"
    """auto (the first GPU, else the CPU), cpu, cuda or cuda:N."""
    precision: Annotated[str, checks.one_of("auto", "fp32", "bf16", "fp16")] = "auto"
    """auto, fp32, bf16 or fp16; auto: bf16 where the device computes in it, else fp16 on a GPU, fp32 on a CPU."""
    max_seq_len: Annotated[AutoInt, checks.whole(16, 2**24, "auto")] = "auto"
    """Tokens of prompt and answer one request may hold; auto: the model's context, at most 4096."""
    threads: Annotated[AutoInt, checks.whole(1, 4096, "auto")] = "auto"
    """CPU threads of the target; auto: one for each of its cores."""
    n_gpu_layers: Annotated[AutoInt, checks.whole(0, 10_000, "auto")] = "auto"
    """Layers that llama_cpp computes on the GPU (llama.cpp must be built for it); auto: all where `device` is a GPU."""
    quantization: Annotated[str, checks.one_of("none", "gguf", "int8", "int4")] = "none"
    """Weights of linear layers: none, as they are; int8 (torchao) or int4 (bitsandbytes), made by transformers while
    loading; gguf, packed as in the .gguf file, which llama_cpp computes with."""
    attn_implementation: Annotated[str, checks.one_of("sdpa", "eager", "flash_attention_2")] = "sdpa"
    """transformers' attention: sdpa, eager, or flash_attention_2 (on a GPU, where flash-attn is installed)."""
    chunked_prefill: Annotated[int, checks.whole(8, 65536)] = 128
    """A longer prompt is run through the model in chunks of this many tokens, between other requests' steps."""
    device_map: Annotated[dict[str, int | str] | Auto | None, BeforeValidator(checks.device_map)] = None
    """Spread one model over several GPUs: auto, or a mapping of module names to devices; null: one device."""
    slots: Annotated[int, checks.whole(1, 1024)] = 8
    """How many requests the target holds at once; memory is reserved for each."""
    cuda_graphs: StrictBool = True
    """Replay captured CUDA graphs for the verification passes (GPU only)."""


class DraftConfig(_Section):
    """The small model that guesses, on CPU cores."""

    model: Annotated[Name | None, BeforeValidator(checks.draft_model)] = "demo"
    """demo, a .gguf file, a directory or hub id with .gguf files; null or none: the target alone."""
    device: Annotated[str, BeforeValidator(checks.draft_device)] = "cpu"
    """Always cpu."""
    quant: Annotated[str | None, BeforeValidator(checks.quant)] = None
    """null: the file as it is; a llama.cpp quantisation (Q5_K_M), made once and cached where it is missing; auto:
    several are loaded, as far as memory allows, and a request uses the one that promises the most tokens per second."""
    threads: Annotated[AutoInt, checks.whole(1, 4096, "auto")] = "auto"
    """CPU threads of each draft actor; auto: one for each of its cores."""
    max_seq_len: Annotated[AutoInt, checks.whole(16, 2**24, "auto")] = "auto"
    """Tokens a draft's context holds; auto: the target's, as far as the draft model goes."""
    vocabulary: Annotated[str, checks.one_of("auto", "same", "intersection", "string")] = "auto"
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

    draft_budget: Annotated[AutoInt, checks.whole(1, 128, "auto")] = "auto"
    """gamma: tokens of one block over all its sequences; auto: chosen at each step from measured times."""
    max_sequences: Annotated[int, checks.whole(1, 8)] = 4
    """Sequences one block may hold."""
    warmup_steps: Annotated[int, checks.whole(0, 10_000)] = 6
    """Passes run through each model at the start, to measure it before the first request."""
    draft_actors: Annotated[AutoInt, checks.whole(1, 1024, "auto")] = "auto"
    """Draft processes; auto: one for every 8 draft cores, at least one."""
    gamma_min: Annotated[int, checks.whole(1, 128)] = 1
    """The smallest gamma the controller chooses."""
    gamma_max: Annotated[int, checks.whole(1, 128)] = 32
    """The largest gamma the controller chooses."""
    gamma_scale: Annotated[float, checks.real(0.1, 10.0)] = 1.0
    """Multiplies the controller's gamma."""
    lead: Annotated[AutoInt, checks.whole(0, 128, "auto")] = "auto"
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

    temperature: Annotated[float, checks.real(0.0, 100.0)] = _SAMPLING.temperature
    """0 is greedy."""
    top_k: Annotated[int, checks.whole(0, 2**31 - 1)] = _SAMPLING.top_k
    """Keep the k most probable tokens; 0 keeps all."""
    top_p: Annotated[float, checks.real(0.0, 1.0)] = _SAMPLING.top_p
    """Keep the smallest set of most probable tokens whose mass reaches top_p; above 0."""
    min_p: Annotated[float, checks.real(0.0, 1.0)] = _SAMPLING.min_p
    """Drop tokens less probable than min_p times the most probable one."""
    repetition_penalty: Annotated[float, checks.real(0.01, 100.0)] = _SAMPLING.repetition_penalty
    """Divides positive, multiplies negative logits of ids already seen; 1 is off."""
    presence_penalty: Annotated[float, checks.real(-100.0, 100.0)] = _SAMPLING.presence_penalty
    """Subtracted once from the logit of every id already in the output."""
    frequency_penalty: Annotated[float, checks.real(-100.0, 100.0)] = _SAMPLING.frequency_penalty
    """Subtracted from the logit of an id once for each time it is in the output."""
    max_tokens: Annotated[int, checks.whole(1, 2**24)] = 256
    """Tokens of an answer."""
    stop: Annotated[tuple[str, ...], BeforeValidator(checks.stop_strings)] = ()
    """Texts that end an answer."""
    seed: Annotated[int | None, checks.whole(0, 2**63 - 1, None)] = None
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

    top_k: Annotated[int, checks.whole(0, 2**31 - 1)] = _SAMPLING.acceptance_top_k
    """LOSSY above 0: a drafted token stays when it is among the target's k most probable. 0 is exact."""


class ReplicasConfig(_Section):
    """How many pipelines serve, each a replica with a target and drafts of its own."""

    min: Annotated[int, checks.whole(0, 10_000)] = 1
    """The fewest; 0 lets an idle service go entirely, at the price of a start for the next request."""
    max: Annotated[int, checks.whole(1, 10_000)] = 1
    """The most."""
    upscale_delay_s: Annotated[float, checks.real(0.0, 86_400.0)] = 10.0
    """Another replica starts when there was more to do than the concurrency of all for this long."""
    downscale_delay_s: Annotated[float, checks.real(0.0, 86_400.0)] = 300.0
    """A replica ends when the others could have done the work for this long."""

    @model_validator(mode="after")
    def _ordered(self) -> ReplicasConfig:
        if self.min > self.max:
            raise ValueError(f"min {self.min} must not be above max {self.max}")
        return self


class LimitsConfig(_Section):
    """What one HTTP request may ask for."""

    body_bytes: Annotated[int, checks.whole(1024, 2**31 - 1)] = 4 * 2**20
    """Size of the request's body."""
    tokens: Annotated[int | None, checks.whole(1, 2**24, None)] = None
    """max_tokens of one answer; null: what the context holds."""
    n: Annotated[int, checks.whole(1, 1024)] = 8
    """Answers to one prompt, or prompts in one request."""
    timeout_s: Annotated[float, checks.real(1.0, 86_400.0)] = 600.0
    """Time from its arrival to its last token."""


class ServingConfig(_Section):
    """The Serve application: `serve run deployments:app config=config.yaml`."""

    model_name: Name = "auto"
    """The name clients ask for; auto: the last part of the target's (models.target.model)."""
    replicas: ReplicasConfig = ReplicasConfig()
    """How many pipelines serve."""
    concurrency: Annotated[AutoInt, checks.whole(1, 1024, "auto")] = "auto"
    """Requests one replica works on at the same time; auto: models.target.slots."""
    queue: Annotated[int, checks.whole(0, 100_000)] = 64
    """Requests that wait at one replica for their turn; the next one gets status 503."""
    retry_after_s: Annotated[int, checks.whole(1, 3600)] = 2
    """What a refused client is told to wait (`Retry-After`)."""
    drain_s: Annotated[float, checks.real(0.0, 86_400.0)] = 60.0
    """How long a replica that is to end may go on with the answers it has begun; longer ones are cut then, where
    `limits.timeout_s` is more than this."""
    api_key: Annotated[str | None, BeforeValidator(checks.api_key)] = None
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
