"""The synchronous loop over one draft and one target: the readable reference, the baseline and the oracle.

It makes exactly the decisions of the asynchronous coordinator, one after the other: the block is drafted before its bet
is known, although here the target has already answered.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from duo_ray.core.step import Decoding
from duo_ray.types import DraftModel, DraftProbs, TargetModel, Token


def decode(
    decoding: Decoding[DraftProbs], target: TargetModel, draft: DraftModel | None = None, *, chunk: int = 128
) -> Iterator[Token]:
    """Generate until the request's first ending event; yields tokens as their text becomes certain.

    `chunk` is the number of prompt tokens per prefill pass. The models' slots are released also when the caller stops
    early.
    """
    request_id = decoding.request.request_id
    try:
        while not decoding.finished:
            decoding.plan(without_draft="no draft" if draft is None else None)
            lead = decoding.lead_job()
            if lead is not None and draft is not None:
                decoding.hold(*draft.draft([lead])[0])
            probs, job = decoding.hand_probs, decoding.draft_job()
            verdict = target.verify([decoding.verify_job(chunk)], [probs]).verdicts[0]
            while not decoding.prefilled(verdict):
                verdict = target.verify([decoding.verify_job(chunk)], [probs]).verdicts[0]
            yield from decoding.commit(verdict)
            if job is not None and draft is not None:
                decoding.offer(*draft.draft([job])[0])
            yield from decoding.settle()
            decoding.stats.ended = time.time()
    finally:
        target.release(request_id)
        if draft is not None:
            draft.release(request_id)
