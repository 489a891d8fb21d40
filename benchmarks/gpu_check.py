"""What a GPU makes of the target backend: exactness, times, memory bandwidth, memory. Needs no Ray and no download.

    python -m benchmarks.gpu_check [--shapes 1B 7B 13B] [--minutes 5.5] [--out gpu_check.json]

Llamas of those shapes with random weights are built on the GPU (on the CPU, where there is none, of a tiny shape, which
only shows that the script works). One table and one JSON object are printed; exit status 1 when the verify pass and
one-token decoding disagree by more than rounding explains.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import platform
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from duo_ray.core.context import IdLog
from duo_ray.models.transformers import TransformersTarget
from duo_ray.types import ContextOverflow, SamplingParams, Verdict, VerifyJob


@dataclass(frozen=True, slots=True)
class Shape:
    """A Llama by its sizes."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    tied: bool = False


SHAPES = {
    "tiny": Shape(64, 128, 2, 4, 2, 256),
    "1B": Shape(2048, 8192, 16, 32, 8, 128256, tied=True),  # Llama 3.2 1B
    "7B": Shape(4096, 11008, 32, 32, 32, 32000),  # Llama 2 7B
    "13B": Shape(5120, 13824, 40, 40, 40, 32000),  # Llama 2 13B
}

BATCHES = (1, 4, 16)
WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
FEW_WIDTHS = (1, 8, 32)
"""Without graphs, and with another attention."""
CONTEXT = 128
"""Tokens behind which a pass is timed."""
CHECKED = 48
"""Tokens decoded one by one and verified in blocks."""
BLOCKS = (1, 3, 7, 15)
PREFILL = 4096
CHUNKS = (128, 1024)

RESOLUTION = {torch.float32: 2.0**-20, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
"""Two logits closer than this share of the largest may change places when a pass has another shape."""

GREEDY = SamplingParams(temperature=0.0)


@dataclass(slots=True)
class Result:
    """Everything measured for one shape; seconds throughout, by `graphs/batch/n`."""

    shape: str
    dtype: str
    parameters: int
    verdicts: dict[str, int] = field(default_factory=dict)
    """Positions whose token is the one-token decode's: equal, tie, different."""
    seconds: dict[str, float] = field(default_factory=dict)
    flash_seconds: dict[str, float] = field(default_factory=dict)
    bytes_per_pass: int = 0
    """Weights and cached keys and values that a pass over one token reads."""
    prefill_seconds: dict[str, float] = field(default_factory=dict)
    """4k tokens, by chunk."""
    peak_bytes: int = 0
    left_out: list[str] = field(default_factory=list)
    """What there was no time or memory for."""


class Request:
    """One request at the target: its ids, and jobs that send only what is new."""

    def __init__(self, name: str, ids: Sequence[int]) -> None:
        self.name = name
        self.log = IdLog(ids)
        self._agreed = 0

    def job(self, block: Sequence[int] = (), sampling: SamplingParams = GREEDY) -> VerifyJob:
        context = self.log.context(self.name, agreed=self._agreed, prompt_length=1)
        self._agreed = len(self.log)
        return VerifyJob(context, tuple(block), sampling)


def build(shape: Shape, device: torch.device, dtype: torch.dtype) -> LlamaForCausalLM:
    """A Llama with random weights, made where it is used."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        vocab_size=shape.vocabulary,
        tie_word_embeddings=shape.tied,
        max_position_embeddings=8192,
        dtype=dtype,
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            return LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)


def target(model: LlamaForCausalLM, *, flash: bool = False, **options: Any) -> TransformersTarget:
    """A target over a model that another one may have used before."""
    model.set_attn_implementation("eager" if flash else "sdpa")
    return TransformersTarget(model, flash_attention=flash, packed=False, **options)


def random_ids(shape: Shape, count: int, seed: int) -> list[int]:
    ids: list[int] = torch.randint(shape.vocabulary, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    return ids


# --- exactness


def compare(model: TransformersTarget, shape: Shape, dtype: torch.dtype) -> Counter[str]:
    """Decode token by token, then let the same tokens be judged in blocks of every size."""
    sampling = SamplingParams(temperature=0.0, logprobs=2)
    one = Request("one by one", random_ids(shape, 32, seed=1))
    gaps: list[float] = []
    start = len(one.log)
    for _ in range(CHECKED):
        (verdict,) = model.verify([one.job(sampling=sampling)], [None]).verdicts
        one.log.extend((_token(verdict),))
        (best, second) = verdict.logprobs[0].top
        gaps.append(best[1] - second[1])
    model.release(one.name)
    ids, size = one.log.ids, _largest_logit(gaps)
    counts: Counter[str] = Counter()
    for block in BLOCKS:
        at = start
        request = Request(f"blocks of {block}", ids[:at])
        while at + block < len(ids):
            (verdict,) = model.verify([request.job(ids[at : at + block])], [None]).verdicts
            emitted = (*ids[at : at + verdict.accepted], _token(verdict))
            for position, token in enumerate(emitted, at):
                same = token == ids[position]
                tie = gaps[position - start] <= RESOLUTION[dtype] * size
                counts["equal" if same else "tie" if tie else "different"] += 1
            at += len(emitted)
            request.log.extend(ids[len(request.log) : at])  # goes on from the reference, whatever was drawn
        model.release(request.name)
    return counts


def _token(verdict: Verdict) -> int:
    if verdict.token is None:
        raise RuntimeError("the target drew no token")
    return verdict.token


def _largest_logit(gaps: Sequence[float]) -> float:
    """Size of the logits of random weights, judged by how far the best two are apart (they are normal)."""
    return max(1.0, 10.0 * median(gaps))


# --- times


def timed(run: Callable[[], object], *, least: int = 3) -> float:
    """Median seconds of a call that ends with its result on the host; the first two are not counted."""
    seconds = 0.25 if torch.cuda.is_available() else 0.02
    for _ in range(2):  # a graph is captured, caches are filled
        run()
    times: list[float] = []
    while len(times) < least or (sum(times) < seconds and len(times) < 50):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return median(times)


def pass_seconds(
    model: TransformersTarget, shape: Shape, batch: int, widths: Sequence[int], context: int, deadline: float
) -> dict[int, float]:
    """T_target by width: `batch` requests of `context` tokens, each judging a block of width - 1."""
    requests = [Request(f"{batch}/{i}", random_ids(shape, context, seed=i)) for i in range(batch)]
    for request in requests:
        model.verify([request.job()], [None])
    seconds = {}
    for width in widths:
        if time.monotonic() > deadline:
            break
        block = random_ids(shape, width - 1, seed=width)
        seconds[width] = timed(lambda block=block: model.verify([r.job(block) for r in requests], [None] * batch))  # type: ignore[misc]
    for request in requests:
        model.release(request.name)
    return seconds


def prefill_seconds(model: TransformersTarget, shape: Shape, tokens: int) -> float:
    ids = random_ids(shape, tokens, seed=3)

    def run() -> None:
        model.verify([Request("long", ids).job()], [None])
        model.release("long")

    run()
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def bytes_per_pass(model: LlamaForCausalLM, context: int) -> int:
    """What a pass over one token must read: all weights (of the input embeddings one row) and the cache."""
    config = model.config
    weights = {id(p): p.nbytes for p in model.parameters()}
    if not config.tie_word_embeddings:
        del weights[id(model.get_input_embeddings().weight)]
    heads = config.num_key_value_heads or config.num_attention_heads
    per_token = 2 * config.num_hidden_layers * heads * (config.hidden_size // config.num_attention_heads)
    return sum(weights.values()) + context * per_token * model.dtype.itemsize


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second of a large copy, reading and writing counted: what the memory gives in practice."""
    size = (1 << 30) if device.type == "cuda" else (1 << 26)
    source = torch.empty(size, dtype=torch.uint8, device=device)
    copy = torch.empty_like(source)

    def run() -> None:
        copy.copy_(source)
        _synchronise(device)

    return 2.0 * size / timed(run)


def peak_bandwidth(device: torch.device) -> float | None:
    """Bytes per second by clock and bus width; None where the device does not say."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    return properties.memory_clock_rate * 1000.0 * 2.0 * properties.memory_bus_width / 8.0 or None


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# --- one shape


def measure(
    name: str, device: torch.device, dtype: torch.dtype, deadline: float, *, exactness_only: bool = False
) -> Result:
    """Everything about one shape, as far as time and memory go."""
    shape, cuda = SHAPES[name], device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    model = build(shape, device, dtype)
    result = Result(name, str(dtype).removeprefix("torch."), sum(p.numel() for p in model.parameters()))
    result.bytes_per_pass = bytes_per_pass(model, CONTEXT)
    verdicts: Counter[str] = Counter()
    for graphs in (True, False) if cuda else (False,):
        label = "graphs" if graphs else "eager"
        short = target(model, slots=max(BATCHES), max_context=CONTEXT + 64, cuda_graphs=graphs)
        verdicts += compare(short, shape, dtype)
        widths = WIDTHS if graphs or not cuda else FEW_WIDTHS
        for batch in () if exactness_only else BATCHES:
            seconds = pass_seconds(short, shape, batch, widths, CONTEXT, deadline)
            result.seconds |= {f"{label}/{batch}/{n}": s for n, s in seconds.items()}
            late = [str(n) for n in widths if n not in seconds]
            result.left_out += [f"{label}, batch {batch}, n = {', '.join(late)}"] if late else []
        del short
    result.verdicts = {verdict: verdicts[verdict] for verdict in ("equal", "tie", "different")}
    if not exactness_only:
        long = PREFILL if cuda else 256
        for chunk in CHUNKS:
            if time.monotonic() > deadline:
                result.left_out.append(f"prefill in chunks of {chunk}")
                continue
            model_of_one = target(model, slots=1, max_context=long + 64, chunk=chunk, cuda_graphs=cuda)
            result.prefill_seconds[str(chunk)] = prefill_seconds(model_of_one, shape, long)
            del model_of_one
        if cuda and importlib.util.find_spec("flash_attn") is not None:
            _measure_flash(model, shape, result, deadline)
        else:
            result.left_out.append("FlashAttention: flash-attn is not installed" if cuda else "FlashAttention: no GPU")
    result.peak_bytes = (
        torch.cuda.max_memory_allocated(device) if cuda else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    )
    return result


def _measure_flash(model: LlamaForCausalLM, shape: Shape, result: Result, deadline: float) -> None:
    """Both kinds of attention behind a long context, where it matters which."""
    context = PREFILL // 2
    for label, flash in (("sdpa", False), ("flash", True)):
        both = target(model, flash=flash, slots=4, max_context=context + 64, chunk=1024, cuda_graphs=True)
        for batch in (1, 4):
            seconds = pass_seconds(both, shape, batch, FEW_WIDTHS, context, deadline)
            result.flash_seconds |= {f"{label}/{batch}/{n}": s for n, s in seconds.items()}
        del both


# --- the whole


def run(shapes: Sequence[str], device: torch.device, minutes: float) -> dict[str, Any]:
    """Measure the shapes in turn, each with its share of the time that is left."""
    ends = time.monotonic() + 60.0 * minutes
    half = torch.bfloat16 if device.type == "cpu" or torch.cuda.is_bf16_supported() else torch.float16
    plans = [(name, half, False) for name in shapes]
    plans.insert(0, (shapes[0], torch.float32, True))  # exact without excuse
    results = []
    for done, (name, dtype, exactness_only) in enumerate(plans):
        now = time.monotonic()
        deadline = now + (ends - now) / (len(plans) - done)
        try:
            results.append(measure(name, device, dtype, deadline, exactness_only=exactness_only))
        except (torch.OutOfMemoryError, ContextOverflow) as error:
            results.append(Result(name, str(dtype).removeprefix("torch."), 0, left_out=[f"no memory: {error}"]))
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "CPU",
        "versions": {name: version(name) for name in ("torch", "transformers")} | {"cuda": torch.version.cuda},
        "bandwidth": {"copy": copy_bandwidth(device), "peak": peak_bandwidth(device)},
        "results": [asdict(result) for result in results],
        "minutes": minutes - (ends - time.monotonic()) / 60.0,
    }


def bandwidth_share(result: dict[str, Any], bandwidth: dict[str, float | None]) -> float | None:
    """Share of the memory's bandwidth that decoding one token reaches, with graphs where there are any."""
    seconds = result["seconds"].get("graphs/1/1") or result["seconds"].get("eager/1/1")
    best = bandwidth["peak"] or bandwidth["copy"]
    return result["bytes_per_pass"] / seconds / best if seconds and best else None


def table(report: dict[str, Any]) -> Table:
    """The report as one table, milliseconds."""
    columns = ("shape", "exact (=, tie, other)", "batch", *(f"T({n})" for n in WIDTHS), "eager T(1)", "bandwidth",
               "prefill 4k", "sdpa, flash T(1)", "GiB")  # fmt: skip
    out = Table(*columns, title=f"{report['device']}, torch {report['versions']['torch']}")

    def ms(times: dict[str, float], key: str) -> str:
        return f"{1000.0 * times[key]:.2f}" if key in times else "-"

    for result in report["results"]:
        share = bandwidth_share(result, report["bandwidth"])
        verdicts = ", ".join(str(count) for count in result["verdicts"].values()) or "-"
        for row, batch in enumerate(BATCHES if result["seconds"] else (0,)):
            times = result["seconds"]
            label = "graphs" if any(key.startswith("graphs") for key in times) else "eager"
            first = row == 0
            out.add_row(
                f"{result['shape']} {result['dtype']}" if first else "",
                verdicts if first else "",
                str(batch or "-"),
                *(ms(times, f"{label}/{batch}/{n}") for n in WIDTHS),
                ms(times, f"eager/{batch}/1"),
                f"{share:.0%}" if first and share is not None else "",
                ", ".join(f"{s:.2f} s" for s in result["prefill_seconds"].values()) if first else "",
                ", ".join(ms(result["flash_seconds"], f"{kind}/{batch}/1") for kind in ("sdpa", "flash")),
                f"{result['peak_bytes'] / 2**30:.1f}" if first else "",
            )
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, help="default: 1B 7B 13B; without a GPU: tiny")
    parser.add_argument("--minutes", type=float, default=5.5, help="stop timing after this long")
    parser.add_argument("--out", type=Path, help="write the JSON object to this file instead of standard output")
    arguments = parser.parse_args()
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        torch.set_num_threads(1)  # threads that wait for each other on a busy machine would be all that is measured
    shapes = arguments.shapes or (["1B", "7B", "13B"] if device.type == "cuda" else ["tiny"])
    report = run(shapes, device, arguments.minutes)
    Console(width=None if sys.stdout.isatty() else 200).print(table(report))
    for result in report["results"]:
        for left_out in result["left_out"]:
            print(f"{result['shape']} {result['dtype']}: not measured: {left_out}")
    if arguments.out:
        arguments.out.write_text(json.dumps(report, indent=1))
    else:
        print(json.dumps(report))
    sys.exit(any(result["verdicts"].get("different") for result in report["results"]))


if __name__ == "__main__":
    main()
