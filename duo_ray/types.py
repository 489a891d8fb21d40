"""The messages that cross process boundaries, and the two seams a model engine implements.

Everything here is immutable and small: token ids, a verdict, timings. Probabilities travel beside a message
(`DraftProbs`), never inside it, so that whoever only routes a block need not hold them.

Words are those of the glossary in README.md: target, draft, block, head, gamma, lead, outcome, bet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

Ids = tuple[int, ...]


class DuoRayError(Exception):
    """Base of every error this package raises on purpose; its text tells a user what to change."""


class UnknownPrefix(DuoRayError):
    """A backend does not hold the prefix a message refers to (it restarted, or the request was released).

    The sender answers by sending all ids again (`Context.agreed == 0`).
    """

    def __init__(self, request_ids: Sequence[str]) -> None:
        super().__init__(f"prefix not held for {', '.join(request_ids)}: send all ids again")
        self.request_ids = tuple(request_ids)

    def __reduce__(self) -> tuple[type[UnknownPrefix], tuple[tuple[str, ...]]]:
        return type(self), (self.request_ids,)


class InvalidRequest(DuoRayError, ValueError):
    """A request's parameter is out of range; the text names it and what is allowed."""


class ContextOverflow(DuoRayError):
    """More tokens than a model's context holds."""


class Overloaded(DuoRayError):
    """As many requests wait already as may; the text says when to come again."""

    def __init__(self, waiting: int, retry_after_s: int) -> None:
        super().__init__(f"{waiting} requests wait already: try again in {retry_after_s} s")
        self.waiting = waiting
        self.retry_after_s = retry_after_s

    def __reduce__(self) -> tuple[type[Overloaded], tuple[int, int]]:
        return type(self), (self.waiting, self.retry_after_s)


class NonFiniteLogits(DuoRayError):
    """A model returned NaN or infinite logits; no distribution can be formed from them."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one token is drawn. The same values shape the target's p and the draft's q.

    Order of the transformations (that of Hugging Face's logits processors): logit bias, repetition penalty, presence
    and frequency penalties, temperature, top-k, top-p, min-p.
    """

    temperature: float = 0.7
    """0 is greedy: the most probable token, ties to the lowest id."""
    top_k: int = 0
    """Keep the k most probable tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of most probable tokens whose mass reaches top_p."""
    min_p: float = 0.0
    """Drop tokens less probable than min_p times the most probable one."""
    repetition_penalty: float = 1.0
    """Divide positive, multiply negative logits of ids in prompt or output (arXiv 1909.05858, section 4.1)."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of every id already in the output (OpenAI's definition)."""
    frequency_penalty: float = 0.0
    """Subtracted from the logit of an id once for each time it is in the output (OpenAI's definition)."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, added logit); -inf bans a token."""
    seed: int = 0
    """Key of the request's random numbers: any integer from 0 to 2**63 - 1."""
    logprobs: int = 0
    """Report this many of the target's most probable tokens beside each emitted one; 0 reports nothing."""
    acceptance_top_k: int = 0
    """LOSSY when above 0: keep a drafted token that is among the target's k most probable. 0 is exact."""

    def __post_init__(self) -> None:
        checks: tuple[tuple[str, bool, str], ...] = (
            ("temperature", 0.0 <= self.temperature <= 100.0, "0 to 100"),
            ("top_k", self.top_k >= 0, "0 (off) or more"),
            ("top_p", 0.0 < self.top_p <= 1.0, "above 0, up to 1"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "0 to 1"),
            ("repetition_penalty", 0.01 <= self.repetition_penalty <= 100.0, "0.01 to 100"),
            ("presence_penalty", -100.0 <= self.presence_penalty <= 100.0, "-100 to 100"),
            ("frequency_penalty", -100.0 <= self.frequency_penalty <= 100.0, "-100 to 100"),
            ("seed", 0 <= self.seed < 2**63, "0 to 2**63 - 1"),
            ("logprobs", 0 <= self.logprobs <= 100, "0 to 100"),
            ("acceptance_top_k", self.acceptance_top_k >= 0, "0 (exact) or more"),
        )
        for name, fine, allowed in checks:
            if not fine:
                raise InvalidRequest(f"{name}={getattr(self, name)!r} is out of range: {allowed}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def penalised(self) -> bool:
        """Whether the distribution depends on which ids came before, beyond what the model itself sees."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


@dataclass(frozen=True, slots=True)
class Context:
    """All ids of a request, as a backend must see them, without sending those it already holds.

    The full context is the receiver's first `agreed` ids followed by `ids`. `digest` (see `core.context`) proves that
    both sides mean the same prefix; a receiver that does not hold it raises `UnknownPrefix`.
    """

    request_id: str
    agreed: int
    digest: int
    ids: Ids
    prompt_length: int
    """How many leading ids are the prompt (presence and frequency penalties count only what comes after)."""

    @property
    def length(self) -> int:
        return self.agreed + len(self.ids)


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of work, in seconds of wall-clock time since the epoch."""

    started: float
    ended: float

    @property
    def seconds(self) -> float:
        return self.ended - self.started


# --- draft ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a verification may end: the number of block tokens accepted and the token the target draws next."""

    accepted: int
    token: int


@dataclass(frozen=True, slots=True)
class DraftJob:
    """Ask a draft for a block that continues `context`.

    `context` ends with `assumed` ids that are not committed yet: the block under verification, taken as fully accepted.
    A job for the next block (`bets=True`) starts each sequence with a head, picked, not sampled: a bet on what the
    target draws. A lead (`bets=False`) has no verification to bet on: one sequence, every token sampled.
    """

    context: Context
    assumed: int
    budget: int
    """gamma: tokens of the block over all sequences, heads included. 0 only runs the context through the model."""
    max_sequences: int
    bets: bool
    acceptance: float
    """Running chance that one drafted token is accepted; steers how the budget is split over sequences."""
    sampling: SamplingParams
    width_cost: float = 1.0
    """What a token in a parallel sequence costs of one in a longer sequence; see `core.sequences.split`."""
    chance_temperature: float = 1.0
    """Greedy requests: the temperature at which the draft's probabilities are the chances of its heads."""
    position_shift: int = 0
    """Added to a token's place in `context` for its place among the target's ids, which keys its random numbers: not 0
    where the context is in other tokens than the target's."""
    reproducible: bool = False
    """Give the same block again: in a call of its own, on an empty cache (the rounding of logits depends on what they
    are computed together with)."""


@dataclass(frozen=True, slots=True)
class DraftSequence:
    """One drafted continuation: its bet (None for a lead) and the ids that follow the bet's head."""

    bet: Outcome | None
    ids: Ids
    chance: float
    """The draft's own probability of the head; 1.0 for a lead."""


@dataclass(frozen=True, slots=True)
class DraftBlock:
    """What a draft wrote for one job: sequences in order of their chance, best first.

    Heads count as drafted tokens. `token_seconds` holds one (width, seconds) pair for every llama.cpp decode the block
    took part in: width sequences, those of other requests included, advanced by one token each. `prompt_tokens` were
    new in the context and took `prompt_seconds` before the first drafted token could be sampled.
    """

    request_id: str
    length: int
    """Length of the context this block continues."""
    sequences: tuple[DraftSequence, ...]
    span: Span
    token_seconds: tuple[tuple[int, float], ...] = ()
    prompt_tokens: int = 0
    prompt_seconds: float = 0.0
    pace: float | None = None
    """How many times as long as `token_seconds` says a token took here, where that depends on the text and on the
    block's length: a draft that speaks other tokens than the target holds the last of its own back. None: not told."""

    @property
    def drafted(self) -> int:
        return sum(len(s.ids) + (s.bet is not None) for s in self.sequences)


@dataclass(frozen=True, slots=True)
class DraftProbs:
    """What the tokens after the head of every sequence of a block were sampled from.

    For sequence s, row i of `ids[s]` (int32) and `probs[s]` (float32), both `[len(sequence.ids), K]`, is the draft's
    distribution q truncated to its K most probable tokens and renormalised; unused columns hold id 0, probability 0.
    """

    ids: tuple[NDArray[np.int32], ...]
    probs: tuple[NDArray[np.float32], ...]


# --- target -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class VerifyJob:
    """Ask the target to judge `block` as the continuation of `context` and to draw the token after it.

    The context holds committed ids only. An empty block is plain decoding (or prefill). When more than `chunk` ids are
    missing in the target's cache, one pass runs only so many of them; the verdict then has no token, and the job has to
    be sent again.

    `sequence` and `offset` say which rows of the `DraftProbs` sent beside the job belong to the block: row
    `offset + i` of sequence `sequence` is q of block token i. Without probabilities the block is a deterministic
    proposal: token i is kept when it is the one the target draws.
    """

    context: Context
    block: Ids
    sampling: SamplingParams
    sequence: int = 0
    offset: int = 0
    chunk: int | None = None
    """None leaves it to the target to run all of them in one call."""
    reproducible: bool = False
    """Take over nothing that other requests left in the cache: it was rounded in other passes."""
    further: int = 0
    """Behind an empty block: so many more tokens may be drawn before the answer, at most, in a pass each."""
    ends: frozenset[int] = frozenset()
    """None is drawn after one of these."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The target's log probabilities for one emitted token, before temperature and truncation."""

    logprob: float
    top: tuple[tuple[int, float], ...]
    """(id, log probability) of the most probable tokens, best first."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a verification ended. The emitted ids are `block[:accepted] + (token,) + further`.

    `token` is the correction when `accepted < len(block)`, else a draw from the distribution after the block, which
    decides the bets of the next block; None when the prefill is not finished.
    """

    request_id: str
    accepted: int
    token: int | None
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One entry per emitted id when the request asked for them."""
    cached: int = 0
    """Ids of the context taken over in this pass from what other requests left in the cache."""
    further: Ids = ()
    """Drawn after `token`, each in a pass of its own."""


@dataclass(frozen=True, slots=True)
class TargetReply:
    """Verdicts of one target pass, or of several for a single job, in the order of the jobs."""

    verdicts: tuple[Verdict, ...]
    span: Span
    """Of all passes."""
    tokens: int
    """New tokens run through the model in one pass, summed over the jobs (chunk widths included, padding excluded)."""
    passes: int = 1
    """More than one where further tokens were drawn."""
    alone: bool = False
    """Whether it ran on the spare cores, too (the drafts', none of which worked)."""


# --- seams ------------------------------------------------------------------------------------------------------


@runtime_checkable
class DraftModel(Protocol):
    """A model that proposes. Single-threaded: one call at a time."""

    vocab_size: int
    max_context: int

    def draft(self, jobs: Sequence[DraftJob]) -> list[tuple[DraftBlock, DraftProbs | None]]:
        """One block per job; probabilities for sampled jobs (temperature above 0), None for greedy ones.

        Raises:
            UnknownPrefix: before any work, naming every job whose prefix is not held.
            ContextOverflow: a job's context plus budget does not fit `max_context`.
            NonFiniteLogits: the model broke.
        """
        ...

    def release(self, request_id: str) -> None:
        """Free everything held for a request; unknown ids are ignored."""
        ...


@runtime_checkable
class TargetModel(Protocol):
    """The model whose output is reproduced. Single-threaded: one call at a time."""

    vocab_size: int
    max_context: int
    slots: int
    """How many requests can be held at once."""

    def verify(self, jobs: Sequence[VerifyJob], probs: Sequence[DraftProbs | None]) -> TargetReply:
        """Judge the blocks of all jobs in one forward pass.

        Raises:
            UnknownPrefix: before any work, naming every job whose prefix is not held.
            ContextOverflow: a job's ids do not fit `max_context`, or no slot is free.
            NonFiniteLogits: the model broke.
        """
        ...

    def release(self, request_id: str) -> None:
        """Free the request's slot; unknown ids are ignored."""
        ...


# --- request and result -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Request:
    """One generation, as the coordinator takes it."""

    request_id: str
    prompt: Ids
    sampling: SamplingParams
    max_tokens: int
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    draft: bool = True
    """False: the target alone, through the same actors."""
    reproducible: bool = False
    """The user chose the seed: the schedule then depends on calibrated times, not live ones, so the text repeats."""
    draft_budget: int | None = None
    """Fixed gamma for this request; None leaves it to the configuration."""
    max_sequences: int | None = None
    draft_quant: str | None = None
    """The quantisation of the draft to use, by llama.cpp's name; None leaves it to the measurements."""
    trace: bool = False

    def __post_init__(self) -> None:
        if not self.prompt:
            raise InvalidRequest("prompt is empty: give at least one token")
        if self.max_tokens < 1:
            raise InvalidRequest(f"max_tokens={self.max_tokens} must be at least 1")
        if any(not s for s in self.stop):
            raise InvalidRequest("stop: an empty string would stop at once")


class Origin(StrEnum):
    """Where an emitted token came from."""

    ACCEPTED = "accepted"
    """Drafted, and kept by the target (a head that won its bet included)."""
    CORRECTION = "correction"
    """Drawn from the residual at the first rejected token."""
    BONUS = "bonus"
    """Drawn after a fully accepted block; no head bet on it."""
    PLAIN = "plain"
    """The target alone: nothing was drafted for this position."""


@dataclass(frozen=True, slots=True)
class Token:
    """One emitted token. The texts of all tokens, joined, are the text of the answer."""

    id: int
    text: str
    origin: Origin
    step: int
    logprobs: TokenLogprobs | None = None


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """One bar of the timeline: which actor did what, when."""

    actor: str
    name: str
    span: Span
    details: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """Tokens that became certain since the last delta; what a stream consists of."""

    tokens: tuple[Token, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of a stream."""

    reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    stats: dict[str, object]
    trace: tuple[TraceEvent, ...] = ()
