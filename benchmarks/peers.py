"""Other engines on the same models, each in a process of its own.

`Peer` is our end; run as a program (`python -m benchmarks.peers`) this file is the other: the first line of standard
input describes the peer, every further one asks for an answer, and each is answered by one line of JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.measured import Turn, cpu_seconds, peak_memory
from duo_ray.types import DuoRayError

PEERS = {
    "transformers": "transformers generate",
    "assisted": "transformers assisted generation, the draft dequantised",
    "prompt-lookup": "transformers generate with prompt lookup",
    "llama.cpp": "llama-cpp-python, the target's own GGUF",
    "llama.cpp-lookup": "llama-cpp-python with prompt lookup, the target's own GGUF",
}


class PeerDied(DuoRayError):
    """A peer's process ended; the text says how."""


@dataclass(frozen=True, slots=True)
class PeerSettings:
    """What a peer's process loads."""

    method: str
    target: str
    """Directory for transformers."""
    target_gguf: str | None
    """The GGUF file the target was made from; None where it was made from none."""
    draft: str | None
    """Directory with the dequantised draft, for assisted generation."""
    dtype: str
    device: str
    threads: int
    max_context: int
    eos_ids: tuple[int, ...]


def unavailable(method: str, settings: PeerSettings) -> str | None:
    """Why a peer cannot run these models; None when it can."""
    if method.startswith("llama.cpp") and settings.target_gguf is None:
        return "the target is not a GGUF file"
    if method == "assisted" and settings.draft is None:
        return "there is no draft"
    return None


class Peer:
    """A `Method` in another process; started anew when it died."""

    def __init__(self, settings: PeerSettings) -> None:
        self._settings = settings
        self._process: subprocess.Popen[str] | None = None
        self._about = ""
        self._peak: dict[str, int] = {}
        self._start()

    def _start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.peers"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        try:
            self._about = self._ask(asdict(self._settings))["about"]
        except BaseException:
            self.close()
            raise

    def _ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            raise PeerDied(f"{self._settings.method} is not running")
        try:
            process.stdin.write(json.dumps(message) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self.close()
            raise PeerDied(f"{self._settings.method} ended with exit code {process.returncode}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise DuoRayError(f"{self._settings.method}: {answer['error']}")
        return answer

    def generate(self, ids: Sequence[int], max_tokens: int, *, trace: bool = False) -> Turn:  # noqa: ARG002
        if self._process is None:
            self._start()
        answer = self._ask({"ids": list(ids), "max_tokens": max_tokens})
        self._peak = {self._settings.method: answer["peak_bytes"]}
        return Turn(len(ids), tuple(answer["ids"]), tuple(answer["at"]), answer["cpu_seconds"])

    def between(self) -> None:
        if self._settings.method.startswith("llama.cpp"):  # the others keep nothing
            self.generate((1, 2, 3), 1)

    def peak_bytes(self) -> dict[str, int]:
        return self._peak

    def describe(self) -> str:
        return self._about

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.terminate()  # nothing happens to one that has ended
            process.communicate()


# --- in the peer's process

Engine = Callable[[Sequence[int], int], tuple[list[int], list[float]]]
"""(prompt, most tokens) -> the new tokens, and when each came."""


def _transformers(settings: PeerSettings) -> tuple[Engine, str]:
    import torch  # noqa: PLC0415 - only in the peer's process
    from transformers import AutoModelForCausalLM, GenerationConfig  # noqa: PLC0415
    from transformers.generation.streamers import BaseStreamer  # noqa: PLC0415

    torch.set_num_threads(settings.threads)

    def load(path: str) -> Any:
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, settings.dtype))
        model = model.to(settings.device).eval()
        # The checkpoint's own may ask for sampling; greedy is what everybody does here.
        plain: Any = GenerationConfig
        model.generation_config = plain(eos_token_id=list(settings.eos_ids) or None, pad_token_id=0)
        return model

    model = load(settings.target)
    options: dict[str, Any] = {"do_sample": False}

    class Collect(BaseStreamer):
        """Notes what came when; the first call carries the prompt."""

        def __init__(self) -> None:
            self.tokens: list[int] = []
            self.at: list[float] = []
            self._prompt = True

        def put(self, value: Any) -> None:
            if not self._prompt:
                new = value.flatten().tolist()
                self.tokens += new
                self.at += [time.perf_counter()] * len(new)
            self._prompt = False

        def end(self) -> None:
            """Nothing is held back."""

    def generate(ids: Sequence[int], max_tokens: int) -> tuple[list[int], list[float]]:
        batch, seen = torch.tensor([list(ids)], device=settings.device), Collect()
        model.generate(
            batch, attention_mask=torch.ones_like(batch), max_new_tokens=max_tokens, streamer=seen, **options
        )
        return seen.tokens[:max_tokens], seen.at[:max_tokens]

    about = PEERS[settings.method]
    if settings.method == "prompt-lookup":
        options["prompt_lookup_num_tokens"] = 10
    elif settings.method == "assisted":
        assistant = load(settings.draft or "")
        options["assistant_model"] = assistant
        schedule = _best_schedule(assistant.generation_config, generate)
        about += f", schedule: {schedule}"
    return generate, about


def _best_schedule(config: Any, generate: Engine) -> str:
    """Set the assistant's schedule that is fastest on a short text; its name."""
    schedules = {
        "up to 20 while confident": (20, "constant", 0.4),
        "heuristic": (5, "heuristic", 0.0),
        "5 always": (5, "constant", 0.0),
        "8 always": (8, "constant", 0.0),
    }
    prompt = list(range(20, 60))
    generate(prompt, 4)
    seconds = {}
    for name, (count, schedule, threshold) in schedules.items():
        config.num_assistant_tokens, config.num_assistant_tokens_schedule = count, schedule
        config.assistant_confidence_threshold = threshold
        began = time.perf_counter()
        generate(prompt, 32)
        seconds[name] = time.perf_counter() - began
    best = min(seconds, key=lambda name: seconds[name])
    count, schedule, threshold = schedules[best]
    config.num_assistant_tokens, config.num_assistant_tokens_schedule = count, schedule
    config.assistant_confidence_threshold = threshold
    return best


def _llama_cpp(settings: PeerSettings) -> tuple[Engine, str]:
    import llama_cpp  # noqa: PLC0415 - only in the peer's process
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding  # noqa: PLC0415

    library: Any = llama_cpp.llama_cpp
    defaults = library.llama_model_default_params

    def without_amx() -> Any:
        params = defaults()
        params.use_extra_bufts = False  # AMX kernels crash on processors that have them (llama.cpp issue 20824)
        return params

    library.llama_model_default_params = without_amx
    lookup = settings.method == "llama.cpp-lookup"
    llm = llama_cpp.Llama(
        settings.target_gguf or "",
        n_ctx=settings.max_context,
        n_threads=settings.threads,
        n_threads_batch=settings.threads,
        n_gpu_layers=0 if settings.device == "cpu" else -1,
        # Two tokens: what llama-cpp-python's README recommends without a GPU.
        draft_model=LlamaPromptLookupDecoding(num_pred_tokens=2 if settings.device == "cpu" else 10)
        if lookup
        else None,
        verbose=False,
    )

    def generate(ids: Sequence[int], max_tokens: int) -> tuple[list[int], list[float]]:
        tokens: list[int] = []
        at: list[float] = []
        for token in llm.generate(list(ids), temp=0.0, repeat_penalty=1.0):
            tokens.append(int(token))
            at.append(time.perf_counter())
            if token in settings.eos_ids or len(tokens) == max_tokens:
                break
        return tokens, at

    return generate, PEERS[settings.method]


def serve() -> None:
    """Load what the first line says, then answer line by line."""
    out, sys.stdout = sys.stdout, sys.stderr  # whatever a library prints is no answer
    stored = json.loads(sys.stdin.readline())
    settings = PeerSettings(**{**stored, "eos_ids": tuple(stored["eos_ids"])})
    pid = os.getpid()
    try:
        generate, about = (_llama_cpp if settings.method.startswith("llama.cpp") else _transformers)(settings)
        print(json.dumps({"about": about}), file=out, flush=True)
    except Exception as error:
        print(json.dumps({"error": f"cannot be loaded: {error!r}"}), file=out, flush=True)
        return
    for line in sys.stdin:
        asked = json.loads(line)
        before, began = cpu_seconds([pid]), time.perf_counter()
        try:
            ids, at = generate(asked["ids"], asked["max_tokens"])
        except Exception as error:  # the harness reports it and goes on
            print(json.dumps({"error": repr(error)}), file=out, flush=True)
            continue
        answer = {
            "ids": ids,
            "at": [moment - began for moment in at],
            "cpu_seconds": cpu_seconds([pid]) - before,
            "peak_bytes": peak_memory(pid),
        }
        print(json.dumps(answer), file=out, flush=True)


if __name__ == "__main__":
    serve()
