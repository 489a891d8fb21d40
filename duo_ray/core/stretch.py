"""Stretches of plain decoding: several steps of a request alone in one call, which share what a message costs."""

from __future__ import annotations

import logging
from dataclasses import replace

from duo_ray.core.context import followed
from duo_ray.core.costs import STRETCH_S
from duo_ray.types import Span, TargetModel, TargetReply, TokenLogprobs, VerifyJob

logger = logging.getLogger(__name__)


def draw_further(model: TargetModel, job: VerifyJob, reply: TargetReply) -> TargetReply:
    """The reply to `job` with as many further tokens as it asks for: those that jobs of their own would get.

    Fewer where one of `job.ends` is drawn, where the passes take longer than `STRETCH_S`, and where one fails, which
    the next job will meet, too; none where the first pass was a longer one.
    """
    [verdict] = reply.verdicts
    if verdict.token is None or reply.tokens != 1:
        return reply
    drawn, context = [verdict.token], job.context
    shown: tuple[TokenLogprobs, ...] = verdict.logprobs
    ended = reply.span.ended
    while len(drawn) <= job.further and drawn[-1] not in job.ends and ended - reply.span.started < STRETCH_S:
        context = followed(context, drawn[-1])
        try:
            more = model.verify([replace(job, context=context, further=0)], [None])
        except Exception as error:  # what was drawn before is not lost for it
            logger.warning("%s: a pass of several failed: %s", job.context.request_id, error)
            break
        [one] = more.verdicts
        if one.token is None:
            break
        drawn.append(one.token)
        shown, ended = shown + one.logprobs, more.span.ended
    whole = replace(verdict, further=tuple(drawn[1:]), logprobs=shown)
    return replace(reply, verdicts=(whole,), span=Span(reply.span.started, ended), passes=len(drawn))
