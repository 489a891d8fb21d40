"""The pipeline at work: the target's own texts, how fast they came with and without the draft, what was accepted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from duo_ray.core.costs import Costs
from duo_ray.diagnosis.positions import Estimate
from duo_ray.hardware.load import sample_load
from duo_ray.models.vocabulary import VocabularyMatch
from duo_ray.session import Answer, Duo, Prompt
from duo_ray.types import DuoRayError, Ids, SamplingParams

Progress = Callable[[str, float], None]
"""Told what is being done, and the share of it that is."""


@dataclass(frozen=True, slots=True)
class Written:
    """One text of the target's own: what it answers alone, or, sampled, an answer with its distribution."""

    prompt: Ids
    answer: Ids
    sampled: bool


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens after the first of each answer, and the seconds they took."""

    tokens: int = 0
    seconds: float = 0.0

    @property
    def per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    def and_of(self, answer: Answer) -> Speed:
        milliseconds: Any = answer.stats["decode_ms"]
        return Speed(self.tokens + answer.completion_tokens - 1, self.seconds + milliseconds / 1000.0)


@dataclass(frozen=True, slots=True)
class Judged:
    """Drafted tokens that the target looked at, and those it kept."""

    kept: int = 0
    looked_at: int = 0

    def and_of(self, answer: Answer) -> Judged:
        kept: Any = answer.stats["kept_tokens"]
        looked_at: Any = answer.stats["judged_tokens"]
        return Judged(self.kept + kept, self.looked_at + looked_at)

    @property
    def acceptance(self) -> Estimate | None:
        """Chance that a drafted token is kept, given that all before it were."""
        return Estimate.of_share(self.kept, self.looked_at)


@dataclass(frozen=True, slots=True)
class Observed:
    """What running the pipeline showed."""

    written: tuple[Written, ...]
    sampling: SamplingParams
    """Of the sampled answers."""
    alone: Speed
    """The target without the draft, greedy."""
    drafted: Speed
    """The same answers with it."""
    greedy: Judged
    sampled: Judged
    costs: dict[str, Any]
    """Measured seconds, as `core.costs.Costs.as_dict` gives them."""
    match: VocabularyMatch
    idle_load: tuple[float, ...]
    """Busy share of each core while the pipeline had nothing to do."""

    @property
    def speedup(self) -> float:
        """Measured: speed with the draft as a multiple of the target's alone."""
        return self.drafted.per_second / self.alone.per_second if self.alone.per_second else 0.0

    @property
    def overhead_share(self) -> float:
        """The round overhead of a step that drafts, as a share of T_target(1)."""
        costs = Costs.from_dict(self.costs)
        return costs.overhead(drafting=True) / costs.target_seconds(1)


def observe(
    duo: Duo,
    prompts: Sequence[Prompt],
    *,
    max_tokens: int,
    temperature: float | None,
    raw: bool,
    seed: int,
    progress: Progress,
) -> Observed:
    """Answer every prompt greedily by the target alone, greedily with the draft, and sampled with the draft.

    Args:
        temperature: of the sampled answers; None: the configuration's, or 1 where that is greedy.

    Raises:
        DuoRayError: no answer has more than one token, or the pipeline failed.
    """
    progress("listening to the idle machine", 0.0)
    load = sample_load(0.5).cores
    configured = duo.prepared.config.sampling.temperature
    sampling: dict[str, Any] = {
        "temperature": temperature or configured or 1.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
    }
    alone, drafted, greedy, sampled = Speed(), Speed(), Judged(), Judged()
    written: list[Written] = []
    for number, prompt in enumerate(prompts):
        at = f"prompt {number + 1} of {len(prompts)}"
        common: dict[str, Any] = {"max_tokens": max_tokens, "raw": raw, "stop": ()}
        plain = duo.request(prompt, draft=False, **{**sampling, "temperature": 0.0}, **common)
        progress(f"{at}: the target alone", (3 * number) / (3 * len(prompts)))
        answer = duo.generate(plain)
        alone = alone.and_of(answer)
        written.append(Written(plain.prompt, answer.token_ids, sampled=False))
        progress(f"{at}: with the draft", (3 * number + 1) / (3 * len(prompts)))
        answer = duo.generate(duo.request(prompt, **{**sampling, "temperature": 0.0}, **common))
        drafted, greedy = drafted.and_of(answer), greedy.and_of(answer)
        progress(f"{at}: with the draft, sampled", (3 * number + 2) / (3 * len(prompts)))
        # The seed repeats the text; the schedule may go by the live times all the same.
        request = replace(duo.request(prompt, seed=seed + number, **sampling, **common), reproducible=False)
        answer = duo.generate(request)
        sampled = sampled.and_of(answer)
        written.append(Written(request.prompt, answer.token_ids, sampled=True))
    if not (alone.seconds and drafted.seconds):
        raise DuoRayError(
            "every answer ended after one token, so there is nothing to measure: ask for more (--max-tokens), or give "
            "prompts that the model answers at length"
        )
    info = duo.pipeline.describe()
    return Observed(
        tuple(written), request.sampling, alone, drafted, greedy, sampled, info.measured, info.drafts[0].vocabulary,
        load,
    )  # fmt: skip
