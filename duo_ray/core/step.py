"""One request's decoding without I/O: which jobs to send, what their answers mean.

`core.decode` drives it synchronously, the coordinator actor asynchronously; neither knows the algorithm. A step:

    decoding.plan()                         # how much to draft
    lead = decoding.lead_job()              # with no block in hand: draft first ...
    decoding.hold(block, probs)             # ... and hold what came back
    verify = decoding.verify_job(chunk)     # the target judges the block in hand ...
    draft = decoding.draft_job()            # ... while the draft writes the next one, betting on how that ends
    decoding.prefilled(verdict)             # a long prompt takes several passes: if not, ask again
    tokens = decoding.commit(verdict)       # the kept tokens, or those and a correction
    decoding.offer(block, probs)            # the next block: in hand from now on, if it won its bet
    tokens += decoding.settle()             # the token drawn after a fully kept block; the controller learns
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from duo_ray.core.budget import Seat
from duo_ray.core.context import common_prefix
from duo_ray.core.costs import LARGEST
from duo_ray.core.gamma import PROBE, GammaController, Plan
from duo_ray.core.request import Detokenizer, Generation
from duo_ray.core.stats import RequestStats
from duo_ray.core.verify import continuation
from duo_ray.types import (
    Context,
    ContextOverflow,
    DraftBlock,
    DraftJob,
    DuoRayError,
    Ids,
    Origin,
    Request,
    Token,
    TokenLogprobs,
    Verdict,
    VerifyJob,
)

Probs = TypeVar("Probs")
"""Whatever carries a block's `DraftProbs`: the object itself, or a reference to it in the object store."""


@dataclass(frozen=True, slots=True)
class _Hand(Generic[Probs]):
    """The drafted ids to verify next, and where their rows are in the probabilities of their block."""

    ids: Ids = ()
    probs: Probs | None = None
    sequence: int = 0
    offset: int = 0


@dataclass(frozen=True, slots=True)
class _Sent:
    """What the draft job in flight was told: the committed length, the ids assumed to follow, its budget."""

    base: int
    assumed: Ids
    gamma: int
    probe: bool
    """Nothing is to be gained by its block but what it tells."""
    step: int


@dataclass(slots=True)
class _Ending:
    """How this step's verification ended."""

    proposed: int
    accepted: int
    verdict: Verdict
    settled: bool = False
    bet_won: bool | None = None
    """Whether a head bet on the token drawn in this step; None: no block came in time to bet on it."""
    late_bet_won: bool | None = None
    """The same of an earlier step's block that came only now."""
    gamma: int = 0
    best_tail: int | None = None


def check_prompt(request: Request, max_context: int) -> None:
    """Refuse a prompt that leaves no room for an answer in a context of `max_context` tokens.

    Raises:
        ContextOverflow: saying both lengths.
    """
    if len(request.prompt) >= max_context:
        raise ContextOverflow(
            f"the prompt has {len(request.prompt)} tokens; the target's context holds {max_context}, "
            "and the answer needs at least one of them: shorten the prompt or raise models.target.max_seq_len"
        )


class Decoding(Generic[Probs]):
    """State of one request between the answers of target and draft."""

    def __init__(
        self,
        request: Request,
        *,
        eos_ids: frozenset[int],
        detokenizer: Detokenizer,
        controller: GammaController,
        stats: RequestStats,
        max_context: int,
        draft_context: int | None,
        max_sequences: int = 1,
        prefetch: bool = True,
    ) -> None:
        """`max_context` and `draft_context` are how many tokens target and draft can hold; None: there is no draft."""
        check_prompt(request, max_context)
        self.request = request
        self.controller = controller
        self.stats = stats
        self.generation = Generation(
            request, eos_ids=eos_ids, detokenizer=detokenizer, max_tokens=max_context - len(request.prompt)
        )
        self._draft_context = draft_context if request.draft else None
        self._max_sequences = request.max_sequences or max_sequences
        self._prefetch = prefetch
        self._hand: _Hand[Probs] = _Hand()
        self._plan = Plan(0, 0, False, "start")
        self._sent: _Sent | None = None
        self._ending: _Ending | None = None
        self._target_agreed = 0
        self._draft_agreed = 0
        self._draft_holds = 0  # at least so many of the ids are in the draft's cache
        self._step = -1
        self._further = 0
        """Plain steps that were taken at once with the last one."""
        stats.prompt_tokens = len(request.prompt)

    @property
    def finished(self) -> bool:
        return self.generation.finish_reason is not None

    # --- asking

    def plan(self, *, without_draft: str | None = None, shared: Plan | None = None) -> Plan:
        """Begin a step: how much to draft, or why not to.

        Args:
            without_draft: why no draft can be asked.
            shared: what was decided together with other requests; None: the request decides for itself.
        """
        self._step += 1
        # A pass commits one token more than its block keeps: beyond that nothing is worth verifying.
        self._hand = replace(self._hand, ids=self._hand.ids[: self.generation.remaining - 1])
        self._plan = plan = self._bounded_plan(without_draft, shared)
        if plan.gamma == 0 and plan.lead == 0:
            kind, _, detail = plan.reason.partition(": ")
            self.stats.reasons[kind] += 1
            self.stats.last_reason = detail or self.stats.last_reason
        return plan

    @property
    def current_plan(self) -> Plan:
        """Of the step that has begun."""
        return self._plan

    def may_draft(self, without_draft: str | None) -> bool:
        """Whether this step could draft; `without_draft` says why none can be asked."""
        return self._obstacle(without_draft) is None

    def _obstacle(self, without_draft: str | None) -> str | None:
        if self._draft_context is None:
            return "no draft"
        if without_draft is not None:
            return without_draft
        if self._sent is not None:
            return "draft is late"
        if not self.generation.token_ids and not self._prefetch:
            return "prefetch is off"
        if len(self.generation.log) >= self._draft_context:
            return f"the draft's context of {self._draft_context} tokens is full"
        return None

    @property
    def behind(self) -> int:
        """Committed ids that the draft has not read."""
        return len(self.generation.log) - self._draft_holds

    def seat(self, draft: Hashable, *, busy: bool) -> Seat:
        """What `core.budget` has to know of this request; `draft` is the actor it uses, and `busy` whether that is."""
        return Seat(self.controller, len(self._hand.ids), self.behind, draft, busy)

    def _bounded_plan(self, without_draft: str | None, shared: Plan | None) -> Plan:
        obstacle = self._obstacle(without_draft)
        if obstacle is not None or self._draft_context is None:
            return Plan(0, 0, False, obstacle or "no draft", further=LARGEST)
        first = not self.generation.token_ids
        may_lead = not (first or self._hand.ids)
        plan = shared
        if plan is None:
            plan = self.controller.plan(may_lead=may_lead, behind=self.behind, further=self._further)
        # The first token never waits for the draft's prompt pass.
        lead = min(plan.lead, self.generation.remaining - 1) if may_lead else 0
        held = len(self._hand.ids) + max(0, lead)
        room = self.generation.remaining - held - 1
        gamma = min(plan.gamma, room * self._max_sequences) if plan.overlap else 0
        if len(self.generation.log) + held + max(0, gamma) > self._draft_context:
            full = f"the draft's context of {self._draft_context} tokens is full"
            return Plan(0, 0, False, full, further=LARGEST)
        return replace(plan, lead=max(0, lead), gamma=max(0, gamma))

    def verify_job(self, chunk: int, *, further: int = 0) -> VerifyJob:
        """The block in hand, for the target to judge; an empty one is plain decoding.

        Args:
            chunk: how many ids of a prompt the target may run in this pass; see `prefilled`.
            further: plain steps it may take at once with this one, if the plan lets it.
        """
        hand, plan = self._hand, self._plan
        context = self._context(self._target_agreed)
        if self._at_work or self.request.reproducible or not self.generation.token_ids:
            further = 0
        further = min(further, plan.further, self.generation.remaining - 1)
        return VerifyJob(
            context,
            hand.ids,
            self.request.sampling,
            sequence=hand.sequence,
            offset=hand.offset,
            chunk=chunk,
            reproducible=self.request.reproducible,
            further=further,
            ends=self.generation.eos_ids if further else frozenset(),
        )

    @property
    def _at_work(self) -> bool:
        """Whether this step is more than a plain one: what comes next depends on more than the target."""
        plan, sent = self._plan, self._sent
        if self._hand.ids or plan.lead or plan.gamma or plan.read:
            return True
        # A probe's block that is a step late is of use yet; one that takes longer has a prompt to read.
        return sent is not None and not (sent.probe and self._step > sent.step + 1)

    @property
    def hand_probs(self) -> Probs | None:
        """What goes beside `verify_job`."""
        return self._hand.probs

    def lead_job(self) -> DraftJob | None:
        """Tokens to draft before the target's pass."""
        return self._draft_job(self._plan.lead, bets=False) if self._plan.lead else None

    def draft_job(self) -> DraftJob | None:
        """The block to write beside the target's pass, betting that the block in hand is accepted; or only reading."""
        if self._sent is not None or not (self._plan.gamma or self._plan.read):
            return None
        return self._draft_job(self._plan.gamma, bets=True)

    def _draft_job(self, budget: int, *, bets: bool) -> DraftJob:
        length = len(self.generation.log)
        if budget:
            base, assumed = length, self._hand.ids
            self.stats.gamma_history.append(budget)
        else:
            base, assumed = min(length, self._draft_holds + self._plan.read), ()
        self._sent = _Sent(base, assumed, budget, self._plan.reason == PROBE, self._step)
        return DraftJob(
            self._context(self._draft_agreed, end=base, extra=assumed),
            assumed=len(assumed),
            budget=budget,
            max_sequences=self._max_sequences if bets else 1,
            bets=bets,
            acceptance=self.controller.acceptance.token,
            sampling=self.request.sampling,
            width_cost=self.controller.width_cost(budget) if bets else 1.0,
            chance_temperature=self.controller.acceptance.sharpness,
            reproducible=self.request.reproducible,
        )

    def _context(self, agreed: int, *, end: int | None = None, extra: Ids = ()) -> Context:
        return self.generation.log.context(
            self.request.request_id, agreed=agreed, prompt_length=len(self.request.prompt), end=end, extra=extra
        )

    # --- answers

    def prefilled(self, verdict: Verdict) -> bool:
        """Note what the target holds now. False: its prefill is not finished, ask again with `verify_job`."""
        self._target_agreed = len(self.generation.log)
        if not self.generation.token_ids:
            self.stats.cached_tokens += verdict.cached
        return verdict.token is not None

    def target_lost(self) -> None:
        """The target does not hold this request any more: send all its ids again."""
        self._target_agreed = 0
        self.stats.target_losses += 1

    def draft_lost(self) -> None:
        """The draft does not hold this request any more, and the job in flight has no answer."""
        self._draft_agreed = self._draft_holds = 0
        self._sent = None
        self.stats.draft_losses += 1

    def drop_hand(self) -> None:
        """What the block in hand was sampled from is lost, so it cannot be judged."""
        self._hand = _Hand()

    @property
    def leads(self) -> bool:
        """Whether this step begins with a lead."""
        return self._plan.lead > 0

    @property
    def worth_waiting(self) -> bool:
        """Whether this step's block is: one that only tells how good the draft is, is not."""
        return self._plan.gamma > 0 and self._plan.reason != PROBE

    @property
    def gamma(self) -> int:
        """Budget of this step's block."""
        return self._plan.gamma

    def hold(self, block: DraftBlock, probs: Probs | None) -> None:
        """The lead came back: it is the block in hand."""
        self._draft_holds = self._receive(block).base
        self._hand = _Hand(block.sequences[0].ids, probs) if block.sequences else _Hand()

    def commit(self, verdict: Verdict) -> list[Token]:
        """Take the verdict on the block in hand: commit what was kept and, after a rejection, the correction."""
        ids, self._hand = self._hand.ids, _Hand()
        self._ending = ending = _Ending(len(ids), verdict.accepted, verdict)
        before = len(self.generation.log)
        tokens = self._commit(ids[: verdict.accepted], Origin.ACCEPTED, verdict.logprobs)
        # An event inside the block ends the request there: what was verified after it does not count.
        kept = len(self.generation.log) - before
        self.stats.verified(len(ids), kept, rejected=kept == verdict.accepted < len(ids))
        if verdict.accepted < len(ids):
            tokens += self._commit_drawn(ending, Origin.CORRECTION)
        return tokens

    def offer(self, block: DraftBlock, probs: Probs | None) -> None:
        """A block written beside a target pass came back, this step's or an earlier one's: hold it if its bet won."""
        sent = self._receive(block)
        ending, log = self._ending, self.generation.log
        committed = tuple(log.ids[sent.base :])
        if ending is not None and not ending.settled and ending.verdict.token is not None:
            committed += (ending.verdict.token, *ending.verdict.further)
        self._draft_holds = sent.base + common_prefix(sent.assumed, committed)
        if sent.gamma == 0:
            return
        found = continuation(block, sent.assumed, committed)
        place = len(sent.assumed)
        if ending is not None and len(committed) > place and committed[:place] == sent.assumed:
            heads = [sequence.bet.token for sequence in block.sequences if sequence.bet is not None]
            won = committed[place] in heads
            if not ending.settled and len(committed) == place + 1:
                ending.bet_won = won
            else:
                ending.late_bet_won = won
            if heads and self.request.sampling.greedy:
                self.controller.calibrate(block.sequences[0].chance, won=committed[place] == heads[0])
        if ending is not None:
            ending.gamma = sent.gamma
            ending.best_tail = max((len(s.ids) for s in block.sequences), default=0)
        if found is not None and not self.finished:
            sequence, offset = found
            self._hand = _Hand(block.sequences[sequence].ids[offset:], probs, sequence, offset)

    def settle(self) -> list[Token]:
        """End the step: commit the token drawn after a fully kept block, with its origin; teach the controller."""
        ending, self._ending = self._ending, None
        if ending is None:
            return []
        bet_won = ending.late_bet_won if ending.bet_won is None else ending.bet_won
        self.stats.judged_heads += bet_won is not None
        self.stats.won_heads += bool(bet_won)
        self.controller.observe(
            proposed=ending.proposed,
            accepted=ending.accepted,
            bet_won=bet_won,
            gamma=ending.gamma,
            best_tail=ending.best_tail,
        )
        self._further = 0
        if ending.settled or self.finished:
            return []
        if ending.verdict.further:
            return self._commit_stretch(ending)
        if ending.bet_won:
            self.stats.accepted_tokens += 1
            return self._commit_drawn(ending, Origin.ACCEPTED)
        if ending.proposed:
            return self._commit_drawn(ending, Origin.BONUS)
        return self._commit_drawn(ending, Origin.PLAIN if ending.bet_won is None else Origin.CORRECTION)

    def _receive(self, block: DraftBlock) -> _Sent:
        if self._sent is None:
            raise DuoRayError(f"a draft block for {block.request_id} came back that was not asked for")
        sent, self._sent = self._sent, None
        if self._draft_agreed == 0 and not self.stats.draft_tokens:
            self.stats.draft_cached_tokens = min(block.length - block.prompt_tokens, self.stats.prompt_tokens)
        if self._draft_holds:  # not the prompt, of which a part may be cached
            self.controller.observe_reading(block.prompt_tokens, sent.base - self._draft_holds)
        self._draft_agreed = sent.base
        if sent.gamma:
            self.stats.drafted(block)
            if block.pace is not None:
                self.controller.observe_pace(block.pace)
        return sent

    def _commit_drawn(self, ending: _Ending, origin: Origin) -> list[Token]:
        ending.settled = True
        token = ending.verdict.token
        return [] if token is None else self._commit((token,), origin, ending.verdict.logprobs[ending.accepted :])

    def _commit_stretch(self, ending: _Ending) -> list[Token]:
        """Commit what was drawn in plain steps taken at once, each of them a step."""
        tokens = self._commit_drawn(ending, Origin.PLAIN)
        for place, token in enumerate(ending.verdict.further, 1):
            if self.finished:
                break
            self._step += 1
            self._further += 1
            self.stats.verified(0, 0)
            tokens += self._commit((token,), Origin.PLAIN, ending.verdict.logprobs[place : place + 1])
        self._target_agreed += len(ending.verdict.further)
        self.stats.reasons[self._plan.reason.partition(": ")[0]] += self._further
        return tokens

    def _commit(self, ids: Ids, origin: Origin, logprobs: tuple[TokenLogprobs, ...]) -> list[Token]:
        tokens = self.generation.commit(ids, origin, self._step, logprobs)
        self.stats.completion_tokens = len(self.generation.token_ids)
        return tokens
