"""A verdict from raw logits: every engine whose logits are NumPy arrays judges its blocks with this."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from duo_ray.core.sampling import Floats, Purpose, check_finite, distribution, most_probable, penalise, uniform
from duo_ray.core.verify import Row, verify
from duo_ray.types import Ids, SamplingParams, TokenLogprobs


def judge(
    raw: Callable[[int], Floats],
    ids: Sequence[int],
    block: Ids,
    q: Sequence[Row] | None,
    prompt_length: int,
    params: SamplingParams,
) -> tuple[int, int]:
    """How many tokens of `block` stay, and the token that follows them.

    Args:
        raw: `raw(i)` are the target's logits `[V]` after `ids` and the first i block tokens; asked for as needed.
        ids: committed ids of the request, of which the first `prompt_length` are the prompt.
        q: see `core.verify.verify`.

    Raises:
        NonFiniteLogits: a row that was needed is broken.
    """

    def logits(i: int) -> Floats:
        return penalise(raw(i), (*ids, *block[:i]), prompt_length, params)

    if params.greedy and not params.acceptance_top_k:  # without a distribution in between, which is slow to form
        for i in range(len(block) + 1):
            row = logits(i)
            check_finite(row)
            best = int(row.argmax())
            if i == len(block) or best != block[i]:
                return i, best

    lossy = None
    if params.acceptance_top_k:

        def lossy(i: int) -> bool:
            return block[i] in most_probable(logits(i), params.acceptance_top_k)

    return verify(
        lambda i: distribution(logits(i), params),
        block,
        q,
        lambda i: uniform(params.seed, len(ids) + i, Purpose.ACCEPT),
        lambda i: uniform(params.seed, len(ids) + i, Purpose.TOKEN),
        lossy,
    )


def logprobs(raw: Callable[[int], Floats], emitted: Ids, count: int) -> tuple[TokenLogprobs, ...]:
    """For each emitted token its log probability under `raw(i)`, and the `count` most probable ones, ties by id."""
    entries = []
    for i, token in enumerate(emitted if count else ()):
        row = raw(i).astype(np.float64)
        logs = row - row.max()
        logs -= np.log(np.exp(logs).sum())
        top = most_probable(logs, count)
        entries.append(TokenLogprobs(float(logs[token]), tuple((int(t), float(logs[t])) for t in top)))
    return tuple(entries)
