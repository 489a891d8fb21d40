"""What the target answers, with its most probable tokens at every place: the data a student is trained on.

The pipeline writes it: a request's log probabilities are the target's own at temperature 1, whatever drafted, and cost
no pass beside those that make the text. (Running the target along finished texts would read every text twice, and on a
cluster need another copy of the target here.) Every answer is a shard of its own, so an interrupted run loses no more
than the answers being written, and which ones are there is known from the names of the files.

On a cluster several pipelines answer at once. A Ray task beside each of them reads an answer and sends it whole: one
process could not read so many streams of 64 probabilities a token.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from threading import Event
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from duo_ray.actors.launch import Reader, plain_error
from duo_ray.config import Config
from duo_ray.core.costs import Costs
from duo_ray.distillation.workspace import DistillationError
from duo_ray.equivalence import parse_prompt, read_lines
from duo_ray.models.tokenizer import Tokenizer
from duo_ray.session import Duo, Prompt, build_request, unpacked
from duo_ray.types import DuoRayError, Finished, Request, Token

TOP = 64
"""Tokens whose probability is kept: as many as a pipeline's draft samples from."""

_TOKEN_BYTES = 4 + TOP * (4 + 2)
_SHOWN = 10
"""Bad lines named one by one."""
_HELD_OUT_EVERY = 10
_MOST_HELD_OUT = 24
_STOP_SECONDS = 0.5
"""So often a reader of other nodes' answers looks whether it is to stop."""
_DISK_LEFT = 2**28
"""Bytes that are left free."""
LEAST = 16
"""Answers that are written however long they take."""

Progress = Callable[[str, float | None], None]
"""Told what is being done, and the share of it that is; None: unknown."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer, the target's or the student's `own`.

    `top_ids` `[N, TOP]` (int32) and `top_probs` `[N, TOP]` (float16) are the target's most probable tokens at the place
    of each of the N ids of `answer`, best first.
    """

    prompt: NDArray[np.int32]
    answer: NDArray[np.int32]
    top_ids: NDArray[np.int32]
    top_probs: NDArray[np.float16]
    own: bool = False

    @classmethod
    def load(cls, path: Path) -> Answer:
        with np.load(path) as arrays:
            kept = {name: arrays[name] for name in ("prompt", "answer", "top_ids", "top_probs")}
            return cls(**kept, own=bool(arrays["own"]) if "own" in arrays else False)

    @classmethod
    def of(cls, prompt: Sequence[int], tokens: Sequence[Token]) -> Answer:
        """From tokens that carry `TOP` log probabilities."""
        tops = [token.logprobs.top for token in tokens if token.logprobs is not None]
        return cls(
            np.array(prompt, np.int32),
            np.array([token.id for token in tokens], np.int32),
            np.array([[i for i, _ in top] for top in tops], np.int32),
            np.exp([[logprob for _, logprob in top] for top in tops]).astype(np.float16),
        )

    def save(self, path: Path) -> None:
        part = path.with_suffix(".part")
        with part.open("wb") as file:
            np.savez(
                file, prompt=self.prompt, answer=self.answer, top_ids=self.top_ids, top_probs=self.top_probs,
                own=np.bool_(self.own),
            )  # fmt: skip
        part.rename(path)


@dataclass(frozen=True, slots=True)
class Questions:
    """Prompts, checked, and how they are to be answered."""

    prompts: tuple[Prompt, ...]
    raw: bool
    max_tokens: int
    samples: int
    """Sampled answers to each prompt, beside the greedy one."""

    @property
    def held_out(self) -> frozenset[int]:
        """Numbers of the prompts that nothing is trained on: every tenth, `_MOST_HELD_OUT` at most, one at least."""
        count = len(self.prompts)
        step = max(_HELD_OUT_EVERY, -(-count // _MOST_HELD_OUT))
        return frozenset(range(step - 1, count, step)) or frozenset({count - 1})

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self.prompts).encode()).hexdigest()[:16]

    def shards(self, folder: Path) -> list[tuple[int, int, Path]]:
        """(sample, prompt, file) of all answers, in the order they are asked for; sample 0 is greedy.

        One in ten is of a held-out prompt, while there are any: the time may end anywhere. Once sampled is enough for
        them.
        """
        held, count, size = self.held_out, len(self.prompts), _HELD_OUT_EVERY - 1
        first = sorted(held)
        others = [number for number in range(count) if number not in held]
        order = [number for i in range(count) for number in (*first[i : i + 1], *others[size * i : size * (i + 1)])]
        return [
            (sample, number, folder / f"{sample}-{number:06}.npz")
            for sample in range(self.samples + 1)
            for number in order
            if sample < 2 or number not in held
        ]

    def split(self, folder: Path) -> tuple[list[Path], list[Path]]:
        """Files of the answers that are there: to train on, and held out.

        Raises:
            DistillationError: none of one kind.
        """
        held = self.held_out
        there = [(number, path) for _, number, path in self.shards(folder) if path.is_file()]
        training = [path for number, path in there if number not in held]
        testing = [path for number, path in there if number in held]
        if not (training and testing):
            raise DistillationError(
                f"only {len(there)} answers were written in the time there was: give more of it (--minutes), or ask "
                "for shorter answers (--max-tokens)"
            )
        return training, testing


def _words(prompt: Prompt) -> bool:
    """Whether anything is said in it."""
    if isinstance(prompt, str):
        return bool(prompt.strip())
    return any(not isinstance(message, Mapping) or str(message.get("content") or "").strip() for message in prompt)


def read_questions(
    path: Path, config: Config, tokenizer: Tokenizer, *, context: int, raw: bool, max_tokens: int, samples: int
) -> Questions:
    """Read a JSONL file of prompts as `equivalence.read_prompts` does, and check every line. Repeated ones count once.

    Args:
        context: tokens that target and student hold, prompt and answer.

    Raises:
        DistillationError: lines that cannot be used, by their numbers, or fewer than two prompts.
    """
    bad: list[str] = []
    prompts: dict[tuple[int, ...], Prompt] = {}
    for number, line in read_lines(path):
        try:
            prompt = parse_prompt(line)
            if not _words(prompt):
                raise DistillationError("the prompt is empty")
            ids = build_request(config, tokenizer, prompt, raw=raw).prompt
            if len(ids) + max_tokens > context:
                raise DistillationError(
                    f"{len(ids)} tokens and {max_tokens} of the answer are more than the {context} that target and "
                    "student hold"
                )
        except DuoRayError as error:
            bad.append(f"line {number}: {error}")
        else:
            prompts.setdefault(ids, prompt)
    if bad:
        more = f"; and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
        raise DistillationError(f"{path}: {'; '.join(bad[:_SHOWN])}{more}. Mend or remove them")
    if len(prompts) < 2:
        raise DistillationError(f"{path}: {len(prompts)} prompts; give at least 2, some hundred are better")
    return Questions(tuple(prompts.values()), raw, max_tokens, samples)


def write_answers(
    duos: Sequence[Duo], questions: Questions, folder: Path, *, until: Callable[[], bool], progress: Progress
) -> None:
    """Let pipelines write the answers that are not there yet, as many at once as they have slots.

    Args:
        duos: all with the same target.
        until: asked before each answer; True ends the work, but not before there is something to train with.

    Raises:
        DuoRayError: a pipeline failed, or the disk is full.
    """
    shards = questions.shards(folder)
    missing = [shard for shard in shards if not shard[2].is_file()]
    before, done, tokens = len(shards) - len(missing), 0, 0
    begun: list[Path] = []
    stop = Event()
    read = _read_here if len(duos) == 1 else _read_there
    slots = duos[0].prepared.settings.target.slots
    free: SimpleQueue[Duo] = SimpleQueue()
    for duo in [*duos] * slots:
        free.put(duo)

    def write(sample: int, number: int, path: Path) -> int:
        if stop.is_set() or (before + len(begun) >= LEAST and until()):
            return 0
        if shutil.disk_usage(folder).free < _DISK_LEFT:
            raise DistillationError(f"{folder}: the disk is nearly full; make room and go on with --resume")
        begun.append(path)
        duo = free.get()
        try:
            answer = read(duo, _request(duo, questions, sample, number), stop)
        finally:
            free.put(duo)
        if answer is None or not len(answer.answer):
            return 0
        answer.save(path)
        return len(answer.answer)

    with ThreadPoolExecutor(slots * len(duos)) as pool:
        try:
            for future in as_completed([pool.submit(write, *shard) for shard in missing]):
                written = future.result()
                done, tokens = done + (written > 0), tokens + written
                there = before + done
                progress(f"the target answers: {there} of {len(shards)}, {tokens} tokens", there / len(shards))
        except BaseException:
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise


def _read_here(duo: Duo, request: Request, stop: Event) -> Answer | None:
    """None: stopped."""
    answer: list[Token] = []
    stream: Any = duo.stream(request)
    with closing(stream):
        for item in stream:
            if stop.is_set():
                return None
            if not isinstance(item, Finished):
                answer.append(item)
    return Answer.of(request.prompt, answer)


def _read_there(duo: Duo, request: Request, stop: Event) -> Answer | None:
    """The same by a Ray task beside the pipeline's coordinator."""
    pipeline = duo.pipeline
    beside = PlacementGroupSchedulingStrategy(pipeline.group, placement_group_bundle_index=0)
    reply = _READ.options(scheduling_strategy=beside).remote(pipeline.reader, request)
    while not stop.is_set():
        try:
            found: Answer = ray.get(reply, timeout=_STOP_SECONDS)
        except GetTimeoutError:
            continue
        except RayError as error:
            raise plain_error(error) from error
        return found
    while not ray.wait([reply], timeout=_STOP_SECONDS)[0]:  # one that has not begun yet cannot be cancelled
        pipeline.reader.cancel(request)
    return None


def _read(reader: Reader, request: Request) -> Answer:
    with closing(reader.stream(request)) as messages:
        tokens = [item for message in messages for item in unpacked(message) if not isinstance(item, Finished)]
    return Answer.of(request.prompt, tokens)


_READ: Any = ray.remote(num_cpus=0, max_retries=0)(_read)


def _request(duo: Duo, questions: Questions, sample: int, number: int) -> Request:
    """Drawn as the configuration says, at temperature 1 where it says greedy."""
    configured = duo.prepared.config.sampling.temperature
    request = duo.request(
        questions.prompts[number], raw=questions.raw, max_tokens=questions.max_tokens, stop=(), logprobs=TOP,
        temperature=(configured or 1.0) if sample else 0.0, seed=sample,
        repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0,
    )  # fmt: skip
    # The seed only tells the samples apart; the schedule may go by live times.
    return replace(request, reproducible=False)


def describe_work(duos: Sequence[Duo], questions: Questions, folder: Path) -> str:
    """What there is to do, for people, before it starts: at most, and by the target's measured time without a draft."""
    missing = sum(not path.is_file() for _, _, path in questions.shards(folder))
    tokens = missing * questions.max_tokens
    prepared = duos[0].prepared
    slots = prepared.settings.target.slots
    costs: dict[str, Any] = duos[0].pipeline.describe().measured
    pass_seconds = Costs.from_dict(costs).target_seconds(slots, alone=True)
    seconds = pass_seconds * tokens / (slots * len(duos))
    by = "" if len(duos) == 1 else f" in {len(duos)} pipelines"
    return (
        f"{missing} answers to write ({len(questions.prompts)} prompts, {len(questions.held_out)} of them held out): "
        f"at most {tokens:,} tokens, {tokens * _TOKEN_BYTES / 2**20:.0f} MiB on disk, {seconds / 60:.1f} minutes by "
        f"T_target({slots}){by}"
    )
