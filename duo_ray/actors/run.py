"""One request on its way through the models, step after step, whatever happens to them.

The same for real models in other processes and for simulated ones in simulated time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from duo_ray.actors.models import Drafter, DraftLost, Judgement, ProbsLost, Target, TargetLost
from duo_ray.actors.rounds import Rounds
from duo_ray.core.costs import Costs
from duo_ray.core.gamma import Plan
from duo_ray.core.round import RoundPlanner
from duo_ray.core.stats import StepTimes
from duo_ray.core.step import Decoding
from duo_ray.types import DraftBlock, DraftJob, DuoRayError, Span, Token, TraceEvent, UnknownPrefix

logger = logging.getLogger(__name__)

Probs = TypeVar("Probs")
"""What stands for a block's probabilities on their way from the draft to the target."""


class Run(Generic[Probs]):
    """Asks target and draft what `decoding` wants to know, in rounds with other requests."""

    def __init__(
        self,
        decoding: Decoding[Probs],
        *,
        target: Target[Probs],
        draft: Drafter[Probs] | None,
        rounds: Rounds[Run[Probs]],
        planner: RoundPlanner[Run[Probs]],
        costs: Costs,
        clock: Callable[[], float],
        stepped: Callable[[StepTimes | None], None],
    ) -> None:
        """Args:
        costs: told what each round took beside the models' work.
        clock: seconds; the models' spans are by the same clock.
        stepped: told the end of every step, without times for the first, which is prefill.
        """
        self.decoding = decoding
        self.trace: list[TraceEvent] = []
        """What was at work when, if the request asks for it."""
        self.prefilling = True
        """Whether the target does not hold the whole prompt yet."""
        self._request, self._stats = decoding.request, decoding.stats
        self._target, self._draft = target, draft
        self._rounds, self._planner, self._costs = rounds, planner, costs
        self._clock, self._stepped = clock, stepped
        self._pending: asyncio.Task[tuple[DraftBlock, Probs | None]] | None = None
        self._draft_fault: str | None = None
        self._in_step = False
        self._comparable = False
        """Whether the overhead of the step before says something beside that of this one."""
        self._chunk, self._further = 1, 0
        if self._draft is not None:
            self._draft.requests += 1

    async def steps(self, emit: Callable[[list[Token]], None]) -> None:
        """Step after step to the end of the request, or until it is cancelled; frees what it held in any case.

        `emit` gets tokens as they become certain, never none.
        """
        self._rounds.enter(self)
        try:
            while not self.decoding.finished:
                await self._step(lambda tokens: emit(tokens) if tokens else None)
        finally:
            self._close()

    # --- rounds

    @property
    def shares_budget(self) -> bool:
        """Whether what this request drafts is decided together with what others do."""
        own = self._request.reproducible or self._request.draft_budget is not None
        return not self._in_step and not own and self.decoding.may_draft(self._without_draft())

    @property
    def waits_for_draft(self) -> bool:
        """Whether a block asked for in an earlier step has not come yet."""
        return self._pending is not None

    @property
    def draft(self) -> Hashable:
        """Which draft actor it uses."""
        return self._draft_name

    def begin_round(self, plan: Plan | None, chunk: int, further: int) -> bool:
        """Start a step, unless a prefill goes on. True: it has a lead that the others wait for."""
        self._chunk, self._further = chunk, further
        if self._in_step:
            return False
        self._in_step = True
        self.decoding.plan(without_draft=self._without_draft(), shared=plan)
        return self.decoding.leads and not self._request.reproducible

    async def _step(self, emit: Callable[[list[Token]], None]) -> None:
        decoding, stats = self.decoding, self._stats
        await self._rounds.join(self)
        began, late = self._clock(), self._pending is not None
        lead = await self._lead()
        late = late or self._pending is not None
        await self._rounds.all_led()
        sent, job = self._clock(), None
        if self._without_draft() is None and (job := decoding.draft_job()) is not None:
            self._pending = self._ask(job)
        judgement = await self._judge()
        first = stats.first_token is None
        tokens = decoding.commit(judgement.verdict)
        if first:
            # Shown at once: the first token does not wait for the draft's prompt pass.
            emit(tokens + decoding.settle())
            tokens, stats.first_token = [], self._clock()
        patience = 0.0
        if job is not None and not first and decoding.worth_waiting:
            waited, rows, controller = self._clock() - sent, len(self._rounds), decoding.controller
            tokens_asked = controller.usual_tokens(job.budget)
            patience = self._planner.patience(controller.costs, tokens_asked, waited=waited, rows=rows)
        block = await self._collect(patience)
        # One message a step: each costs the processes at both ends time that the models could use.
        emit(tokens + decoding.settle())
        self._in_step = False
        stats.ended = self._clock()
        if first:
            self._stepped(None)
            return
        self._account(Span(began, stats.ended), judgement, lead, block, late=late or self._pending is not None)

    @property
    def _draft_name(self) -> str:
        return "" if self._draft is None else self._draft.name

    def _ask(self, job: DraftJob) -> asyncio.Task[tuple[DraftBlock, Probs | None]]:
        if self._draft is None or self._stats.draft_quant is None:
            raise DuoRayError("a draft job for a request without a draft")
        return asyncio.create_task(self._draft.draft(self._stats.draft_quant, job))

    async def _lead(self) -> DraftBlock | None:
        job = self.decoding.lead_job()
        if job is None:
            return None
        self._pending = self._ask(job)
        if self._request.reproducible:
            with self._rounds.away(self):
                await asyncio.wait([self._pending])
        else:
            controller, rows = self.decoding.controller, len(self._rounds)
            patience = self._planner.lead_patience(controller.costs, controller.usual_tokens(job.budget), rows=rows)
            await asyncio.wait([self._pending], timeout=patience)
            self._rounds.led(self)
        if not self._pending.done():
            return None
        answer = self._take()
        if answer is None:
            return None
        self.decoding.hold(*answer)
        self._note(self._draft_name, "lead", answer[0].span, tokens=answer[0].drafted)
        return answer[0]

    async def _judge(self) -> Judgement:
        """The target's verdict, however often the target has to be waited for, and however long the prompt is."""
        target, decoding = self._target, self.decoding
        while True:
            await asyncio.sleep(0)  # all of the round ask their drafts first: idle ones lend the target their cores
            job = decoding.verify_job(self._chunk, further=self._further)
            try:
                judgement = await target.verify(job, decoding.hand_probs)
            except TargetLost:
                with self._rounds.away(self):
                    await target.returned()
                decoding.target_lost()
            except UnknownPrefix:
                decoding.target_lost()
            except ProbsLost:
                decoding.drop_hand()
            else:
                self.prefilling = not decoding.prefilled(judgement.verdict)
                name = "prefill" if self.prefilling else "verify"
                told = {"block": len(job.block), "accepted": judgement.verdict.accepted, "passes": judgement.passes}
                self._note("target", name, judgement.span, **told)
                if not self.prefilling:
                    return judgement
                await self._rounds.join(self)

    async def _collect(self, patience: float) -> DraftBlock | None:
        """The block written meanwhile, if it comes within `patience` seconds.

        One that is late already (a prompt pass, a busy core) is not waited for: the target goes on alone.
        """
        if self._pending is None:
            return None
        if self._request.reproducible:
            # Whether a block is late must not depend on time; others need not wait for it.
            with self._rounds.away(self):
                await asyncio.wait([self._pending])
        elif not self.decoding.finished:
            await asyncio.wait([self._pending], timeout=patience)
        if not self._pending.done():
            return None
        answer = self._take()
        if answer is None:
            return None
        block, probs = answer
        self.decoding.offer(block, probs)
        self._note(self._draft_name, "block", block.span, tokens=block.drafted, sequences=len(block.sequences))
        return block

    def _take(self) -> tuple[DraftBlock, Probs | None] | None:
        """The finished draft job's answer; a failed one leaves the request without a draft for now."""
        task, self._pending = self._pending, None
        if task is None:
            return None
        try:
            return task.result()
        except (DraftLost, UnknownPrefix):
            self.decoding.draft_lost()
        except Exception as error:  # whatever is wrong with the draft, the target's text does not depend on it
            self.decoding.draft_lost()
            self._draft_fault = f"draft failed: {error}"
            logger.warning(
                "%s: %s; this request goes on without a draft", self._request.request_id, error, exc_info=True
            )
        return None

    def _without_draft(self) -> str | None:
        """Why no draft can be asked now; None when one can."""
        if self._draft is None or self._draft_fault is not None:
            return self._draft_fault or "no draft"
        return None if self._draft.available else "draft not available"

    def _account(
        self, wall: Span, judgement: Judgement, lead: DraftBlock | None, block: DraftBlock | None, *, late: bool
    ) -> None:
        """Note a step's times; `late`: a block came that an earlier step had asked for, or one is still to come."""
        lead_seconds = lead.span.seconds if lead is not None else 0.0
        block_seconds = block.span.seconds if block is not None else 0.0
        passes = judgement.passes
        overhead = self._stats.timed(wall, judgement.span, lead_seconds, block_seconds, passes=passes)
        asked, before = self.decoding.current_plan, self._comparable
        self._comparable = not late and len(self._rounds) == 1
        if not late:
            drafting = bool(asked.lead or asked.gamma or asked.read)
            self._costs.observe_overhead(overhead, drafting=drafting, follows=before and self._comparable)
        plain = self._costs.target_seconds(judgement.requests, alone=True)
        self._stepped(StepTimes(judgement.span.seconds, overhead, plain, passes))
        self._note("coordinator", "step", wall)

    def _note(self, actor: str, name: str, span: Span, **details: int) -> None:
        if self._request.trace:
            self.trace.append(TraceEvent(actor, name, span, tuple((k, str(v)) for k, v in details.items())))

    def _close(self) -> None:
        request_id = self._request.request_id
        self._rounds.leave(self)
        self._target.release(request_id)
        if self._draft is not None:
            self._draft.requests -= 1
            self._draft.release(request_id)
        if self._pending is not None:
            # The job may still run; its answer is of no use to anyone.
            self._pending.cancel()
            if self._draft is not None and not self.decoding.finished:
                self._draft.abandon(request_id)  # a long prompt takes it seconds
