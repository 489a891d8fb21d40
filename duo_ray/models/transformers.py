"""The target: a Hugging Face causal LM that judges drafted blocks of many requests in one forward pass."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from duo_ray.models.packed import PackedLinear, can_pack, pack_linears
from duo_ray.models.quantization import check_layers, quantization_config
from duo_ray.models.slot_attention import FOLDED_SDPA, KV_CACHE_ATTENTION, Segment
from duo_ray.models.slot_cache import SlotRunner
from duo_ray.models.target_slots import TargetSlots, Work
from duo_ray.models.torch_sampling import TargetRows, check_finite, logprobs, verify, verify_greedy
from duo_ray.types import (
    ContextOverflow,
    DraftProbs,
    DuoRayError,
    NonFiniteLogits,
    SamplingParams,
    Span,
    TargetReply,
    Verdict,
    VerifyJob,
)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_DEFAULT_CONTEXT = 4096  # tokens per slot, unless the model allows fewer or the user asks for another number
_WARM_UP_WIDTHS = (1, 2, 4, 8, 16, 32)
_WARM_UP_CONTEXT = 64


class UnsupportedModel(DuoRayError):
    """The model cannot be verified exactly: its state cannot be cropped, or it does not compute what we ask for."""


class TransformersTarget:
    """A `TargetModel` over an unmodified transformers model. Single-threaded: one call at a time.

    Args:
        model: a causal LM on its device(s), in its final dtype.
        slots: how many requests can be held at once.
        max_context: tokens one request may use; None takes the model's limit, at most 4096.
        packed: prepack the linear layers (CPU only, in place; ignored where oneDNN lacks the dtype).
        chunk: longer contexts are prefilled this many tokens at a time.
        cuda_graphs: capture passes in CUDA graphs (one CUDA device only).
        flash_attention: attend by the package flash-attn instead of the model's own implementation.
        vocab_size: `len(tokenizer)`; ids beyond it pad the embedding and are never emitted. None: no padding.

    Raises:
        UnsupportedModel: see `check_config`; no support for FlashAttention where it was asked for; or a short trial run
            differs from the model's own forward pass.
        NonFiniteLogits: the trial run gave NaN or infinity.
        ContextOverflow: the KV buffer does not fit in memory.
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        model: Any,
        *,
        slots: int = 8,
        max_context: int | None = None,
        packed: bool = True,
        chunk: int = 128,
        cuda_graphs: bool = True,
        flash_attention: bool = False,
        vocab_size: int | None = None,
    ) -> None:
        config = model.config.get_text_config(decoder=True)
        check_config(model.config)
        if model._is_stateful:
            raise UnsupportedModel(
                _refusal(config, "it keeps a recurrent state, from which rejected tokens cannot be removed")
            )
        if flash_attention and not model._supports_flash_attn:
            raise UnsupportedModel(_refusal(config, "it has no FlashAttention 2: use attn_implementation='sdpa'"))
        limit = getattr(config, "max_position_embeddings", None) or _DEFAULT_CONTEXT
        max_context = min(limit, _DEFAULT_CONTEXT) if max_context is None else max_context
        if not 1 <= max_context <= limit:
            raise ValueError(
                f"max_context={max_context} is out of range: 1 to {limit}, the model's max_position_embeddings"
            )
        for name, value in (("slots", slots), ("chunk", chunk), ("vocab_size", vocab_size)):
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        self.slots, self.max_context, self._chunk = slots, max_context, chunk
        self.vocab_size: int = min(vocab_size or config.vocab_size, config.vocab_size)
        self._device: torch.device = model.get_input_embeddings().weight.device
        one_device = len({p.device for p in model.parameters()}) == 1
        self._model = model.eval()
        trial = _Trial(model, self.vocab_size, min(16, max_context))  # before anything about the model is changed
        if flash_attention:
            model.set_attn_implementation(KV_CACHE_ATTENTION)
        elif model.config._attn_implementation == "sdpa":
            model.set_attn_implementation(FOLDED_SDPA)
        if packed and one_device and self._device.type == "cpu" and can_pack(model.dtype):
            pack_linears(model)
        graphs = cuda_graphs and one_device and self._device.type == "cuda"
        self._runner = SlotRunner(model, slots=slots, max_context=max_context, graphs=graphs)
        self._slots = TargetSlots(slots, max_context, self.vocab_size, self._runner.cache.copy)
        try:
            trial.check(self._runner, neighbour=slots > 1)
        except (torch.OutOfMemoryError, MemoryError, OSError) as error:
            raise ContextOverflow(
                f"no memory for a KV buffer of {slots} slots of {max_context} tokens: lower slots or max_context"
            ) from error

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        device: str = "cpu",
        dtype: str = "float32",
        slots: int = 8,
        max_context: int | None = None,
        threads: int | None = None,
        attn_implementation: str = "sdpa",
        packed: bool = True,
        chunk: int = 128,
        device_map: str | dict[str, Any] | None = None,
        cuda_graphs: bool = True,
        vocab_size: int | None = None,
        quantization: str = "none",
    ) -> TransformersTarget:
        """Load a local directory or hub id with safetensors weights.

        Args:
            dtype: float32, bfloat16 or float16.
            threads: CPU threads of torch, for this process; None leaves torch's choice.
            attn_implementation: sdpa; eager (attention with a soft cap, such as Gemma 2's, has no sdpa); or
                flash_attention_2, on CUDA in half precision where the package flash-attn is installed.
            device_map: spread the layers over devices, as transformers' `from_pretrained` does; replaces `device`.
            quantization: none, or int8 or int4 for the linear layers; see `models.quantization`.
        The other arguments and the errors are those of the class.
        """
        if dtype not in _DTYPES:
            raise ValueError(f"dtype={dtype!r} is not one of {', '.join(_DTYPES)}")
        if attn_implementation not in ("sdpa", "eager", "flash_attention_2"):
            raise ValueError(
                f"attn_implementation={attn_implementation!r} is none of sdpa, eager and flash_attention_2"
            )
        flash = attn_implementation == "flash_attention_2"
        if flash and (dtype == "float32" or (device_map is None and torch.device(device).type == "cpu")):
            raise ValueError(
                f"attn_implementation='flash_attention_2' with device={device!r} and dtype={dtype!r}: it is for CUDA "
                "devices in bfloat16 or float16; use sdpa"
            )
        if device_map is None and torch.device(device).type == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"device={device!r}, but torch sees no CUDA device here: use device='cpu'")
        if threads is not None:
            torch.set_num_threads(threads)
        check_config(AutoConfig.from_pretrained(path))  # before reading gigabytes
        model: Any = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=_DTYPES[dtype],
            attn_implementation="eager" if flash else attn_implementation,
            device_map={"": device} if quantization != "none" and device_map is None else device_map,
            quantization_config=quantization_config(quantization, _DTYPES[dtype]),
        )
        if device_map is None and quantization == "none":
            model = model.to(device)
        check_layers(model, quantization)
        return cls(
            model,
            slots=slots,
            max_context=max_context,
            packed=packed,
            chunk=chunk,
            cuda_graphs=cuda_graphs,
            flash_attention=flash,
            vocab_size=vocab_size,
        )

    @torch.inference_mode()
    def verify(self, jobs: Sequence[VerifyJob], probs: Sequence[DraftProbs | None]) -> TargetReply:
        """Judge the blocks of all jobs; see `TargetModel.verify`.

        Raises:
            ValueError: a job makes no sense (an id beyond the vocabulary, two jobs of one request, ...).
        """
        started = time.time()
        work = self._slots.admit(jobs, probs)
        tokens = sum(w.now for w in work)
        self._prefill(work)
        last = sorted((w for w in work if w.now), key=lambda w: w.slot.number)
        whole = [w for w in last if w.whole]
        verdicts = {}
        if last:
            verdicts = self._judge(whole, self._run([(w, w.now, w.tail if w.whole else 0) for w in last]))
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        done = [verdicts.get(w.job.context.request_id, Verdict(w.job.context.request_id, 0, None)) for w in work]
        done = [
            replace(verdict, cached=w.cached) if w.cached else verdict for verdict, w in zip(done, work, strict=True)
        ]
        return TargetReply(tuple(done), Span(started, time.time()), tokens)

    def release(self, request_id: str) -> None:
        """Free the request's slot; unknown ids are ignored. See `TargetSlots.release`."""
        self._slots.release(request_id)

    @torch.inference_mode()
    def warm_up(self, steps: int = 3) -> list[tuple[int, float]]:
        """Median seconds of a pass over n = 1, 2, 4, 8, 16, 32 new tokens behind a short context, `steps` passes each.

        Raises:
            ContextOverflow: every slot is in use.
        """
        if not self._slots.idle:
            raise ContextOverflow(f"all {self.slots} slots are in use: warm up before taking requests")
        context = min(_WARM_UP_CONTEXT, self.max_context // 2)
        timings = []
        for n in (n for n in _WARM_UP_WIDTHS if context + n <= self.max_context):
            segment = Segment(self._slots.idle[0].number, context, [i % self.vocab_size for i in range(n)], n)
            seconds = [self._timed(segment) for _ in range(steps + 1)]
            timings.append((n, median(seconds[1:])))
        return timings

    def logits_along(self, ids: Sequence[int], last: int) -> Iterator[NDArray[np.float32]]:
        """Logits `[vocab_size]` after each of the last `last` ids of a text.

        Raises:
            ContextOverflow: every slot is in use, or the text is longer than `max_context`.
        """
        with self._slots.lent(len(ids)) as slot:
            slot.cached.clear()
            for start in range(0, len(ids), self._chunk):
                part = ids[start : start + self._chunk]
                keep = max(0, min(len(part), start + len(part) - (len(ids) - last)))
                with torch.inference_mode():
                    rows = self._runner.forward([Segment(slot.number, start, part, keep)])
                    rows = rows[:keep, : self.vocab_size].float().cpu()
                yield from rows.numpy()

    def memory_bytes(self) -> int:
        """Bytes of the weights (prepacked ones included) and of the whole KV buffer."""
        weights: dict[int, int] = {id(p): _nbytes(p) for p in (*self._model.parameters(), *self._model.buffers())}
        packed: int = sum(m.nbytes for m in self._model.modules() if isinstance(m, PackedLinear))
        return sum(weights.values()) + packed + self._runner.cache.nbytes

    def _prefill(self, work: Iterable[Work]) -> None:
        """Run all but the last chunk of each job, until what is left for this call fits one pass."""
        while True:
            parts = []
            for w in work:
                spare = w.now - (w.tail if w.whole else 1)
                if w.now > self._chunk and spare > 0:
                    parts.append((w, min(self._chunk, spare), 0))
            if not parts:
                return
            self._run(sorted(parts, key=lambda part: part[0].slot.number))

    def _run(self, parts: Sequence[tuple[Work, int, int]]) -> Tensor:
        """One forward over the next `count` pending ids of each job; logits `[sum of keep, V]` of the last `keep`."""
        segments = [Segment(w.slot.number, len(w.slot.cached), w.pending[:count], keep) for w, count, keep in parts]
        logits = self._runner.forward(segments)
        for w, count, _ in parts:
            w.ran(count)
        return logits[:, : self.vocab_size]

    def _judge(self, group: Sequence[Work], logits: Tensor) -> dict[str, Verdict]:
        """Verdicts of the jobs that were run to their end."""
        plain = [_is_argmax(w.job.sampling) for w in group]
        largest, best = (x.tolist() for x in logits.max(-1)) if any(plain) else ([], [])
        verdicts = {}
        end = 0
        for i, w in enumerate(group):
            start, end = end, end + w.tail
            context, block, params = w.job.context, w.job.block, w.job.sampling
            rows = logits[start:end]
            try:
                if plain[i]:
                    accepted, token = verify_greedy(block, best[start:end], largest[start:end])
                else:
                    ids = [*w.slot.log.ids, *block]
                    at_once = len(rows) if rows.is_cuda else 1
                    p = TargetRows(rows, ids, context.prompt_length, params, at_once)
                    accepted, token = verify(p, block, w.q, params, position=context.length)
            except NonFiniteLogits as error:
                w.slot.cached.clear()
                self._runner.cache.clear(w.slot.number)
                raise NonFiniteLogits(f"request {context.request_id}: {error}") from error
            emitted = (*block[:accepted], token)
            shown = logprobs(rows[: accepted + 1], emitted, params.logprobs) if params.logprobs else ()
            verdicts[context.request_id] = Verdict(context.request_id, accepted, token, shown)
        return verdicts

    def _timed(self, segment: Segment) -> float:
        started = time.perf_counter()
        self._runner.forward([segment])[..., : self.vocab_size].max(-1).indices.tolist()
        return time.perf_counter() - started


class _Trial:
    """Last guard at load: chunks, a crop and a padded neighbour must leave the model's own logits as they are."""

    @torch.inference_mode()
    def __init__(self, model: Any, vocab_size: int, length: int) -> None:
        self._model, self._cut = model, length // 2
        self._ids: list[int] = torch.randint(vocab_size, (length,), generator=torch.Generator().manual_seed(0)).tolist()
        ids = torch.tensor([self._ids], device=model.get_input_embeddings().weight.device)
        self._want = model(input_ids=ids, use_cache=False).logits[0, self._cut :].float()
        check_finite(float(self._want.amax()))

    @torch.inference_mode()
    def check(self, runner: SlotRunner, *, neighbour: bool) -> None:
        """Raise `UnsupportedModel` unless the slots give the same logits."""
        ids, cut = self._ids, self._cut
        rejected = ids[: len(ids) // 4]
        passes = [
            [Segment(0, 0, ids[:cut], 0)],
            [Segment(0, cut, rejected, 0)],
            [Segment(0, cut, ids[cut:], len(ids) - cut)],
        ]
        if neighbour:
            passes[0].append(Segment(1, 0, ids[: cut // 2], 0))
            passes[1].append(Segment(1, cut // 2, ids[cut // 2 :], 0))
            passes[2].append(Segment(1, 0, ids[:1], 0))
        config = self._model.config
        try:
            for segments in passes:
                filled = [s for s in segments if s.ids]
                if filled:
                    logits = runner.forward(filled)
        except torch.OutOfMemoryError:
            raise
        except (
            AttributeError,
            IndexError,
            KeyError,
            RuntimeError,
            TypeError,
            ValueError,
        ) as error:
            hint = " (cuda_graphs=False runs without CUDA graphs)" if runner.graphs else ""
            raise UnsupportedModel(_refusal(config, f"a trial run over cached tokens failed: {error}{hint}")) from error
        off = float((logits.float() - self._want).norm() / self._want.norm())
        if not off <= (1e-3 if self._model.dtype == torch.float32 else 0.1):
            raise UnsupportedModel(
                _refusal(
                    config, f"with cached tokens its logits are off by {off:.2g} of their size from a plain forward"
                )
            )


def _nbytes(tensor: Tensor) -> int:
    """Bytes in memory: a quantised tensor counts itself as what it stands for."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return tensor.nbytes
    return sum(_nbytes(getattr(tensor, name)) for name in flatten()[0])


def check_config(config: PretrainedConfig) -> None:
    """Refuse, by name and reason, an architecture whose rejected tokens cannot be forgotten exactly.

    Raises:
        UnsupportedModel: encoder-decoder, recurrent, hybrid or chunked layers, or RoPE that depends on the longest row.
    """
    if config.is_encoder_decoder:
        raise UnsupportedModel(_refusal(config, "it is an encoder-decoder model"))
    config = config.get_text_config(decoder=True)
    strange = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if strange:
        raise UnsupportedModel(
            _refusal(config, f"its layers of type {', '.join(sorted(strange))} keep a state that cannot be cropped")
        )
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    for parameters in (rope, *rope.values()):
        kind = parameters.get("rope_type", "default") if isinstance(parameters, dict) else "default"
        if kind in ("dynamic", "longrope"):
            raise UnsupportedModel(
                _refusal(config, f"its RoPE type {kind} turns every row by the length of the longest one")
            )


def _refusal(config: PretrainedConfig, reason: str) -> str:
    return f"{config.model_type} cannot be a target: {reason}"


def _is_argmax(params: SamplingParams) -> bool:
    """Whether a token is simply the largest logit of its row."""
    return params.greedy and not (params.penalised or params.logit_bias or params.acceptance_top_k)
