"""`core.sampling` and `core.verify` on the target's device: same order, same random numbers, same verdict.

V is the vocabulary; row r of a job's logits `[n + 1, V]` predicts the token after the first r of its n block tokens.
Nothing of size V leaves the device, and no vocabulary is sorted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from duo_ray.core.sampling import Purpose, uniform
from duo_ray.core.verify import Row
from duo_ray.types import Ids, NonFiniteLogits, SamplingParams, TokenLogprobs

_FIRST_NUCLEUS = 128  # tokens looked at first for top-p; nearly always enough


class TargetRows:
    """What the target draws after each token of a block, computed only as far as the decision needs it.

    Args:
        logits: `[n + 1, V]`, raw.
        ids: the request's committed ids followed by the n block tokens.
        prompt_length: how many leading ids are the prompt.
        at_once: distributions to form together; a GPU does n + 1 as fast as one, a CPU should stop at the rejection.
    """

    def __init__(
        self, logits: Tensor, ids: Sequence[int], prompt_length: int, params: SamplingParams, at_once: int = 1
    ) -> None:
        self._params, self._at_once = params, at_once
        self._logits = penalise(logits, ids, len(ids) - len(logits) + 1, prompt_length, params)
        self._largest: list[float] = self._logits.amax(-1).tolist()
        self._probs: list[Tensor] = []

    def logits(self, i: int) -> Tensor:
        """Row i `[V]` after bias and penalties.

        Raises:
            NonFiniteLogits: that row holds NaN or +inf, or nothing but -inf.
        """
        check_finite(self._largest[i])
        return self._logits[i]

    def probs(self, i: int) -> Tensor:
        """p at row i, float64 `[V]`; the same errors."""
        check_finite(self._largest[i])
        while len(self._probs) <= i:
            first = len(self._probs)
            self._probs += distribution(self._logits[first : first + self._at_once], self._params).unbind()
        return self._probs[i]

    def draw(self, i: int, u: float) -> int:
        """The token the target draws after the first i block tokens."""
        return int(self.logits(i).max(-1).indices) if self._params.greedy else draw(self.probs(i), u)

    def among_best(self, i: int, token: int, count: int) -> bool:
        """Whether `token` is one of the `count` largest logits of row i, ties to the lower id."""
        row = self.logits(i)
        better = (row > row[token]).sum() + (row[:token] == row[token]).sum()
        return int(better) < count


def verify(
    rows: TargetRows, block: Ids, q: Sequence[Row] | None, params: SamplingParams, position: int
) -> tuple[int, int]:
    """How many tokens of `block` stay, and the token that follows them: the rule of `core.verify.verify`.

    Args:
        q: the draft's truncated distribution for each block token; None for a deterministic proposal.
        position: index of the block's first token in the request's ids; keys the random numbers.
    """

    def chance(i: int, purpose: Purpose) -> float:
        return uniform(params.seed, position + i, purpose)

    for i, drafted in enumerate(block):
        if params.acceptance_top_k and rows.among_best(i, drafted, params.acceptance_top_k):
            continue
        if q is None or params.greedy:  # a greedy target keeps its own argmax, whatever the draft's q
            drawn = rows.draw(i, chance(i, Purpose.TOKEN))
            if drawn != drafted:
                return i, drawn
            continue
        ids, probs = q[i]
        p = rows.probs(i)
        drafted_chance = float(probs[ids == drafted].max(initial=0.0))
        if chance(i, Purpose.ACCEPT) * drafted_chance >= float(p[drafted]):
            return i, draw(residual(p, q[i]), chance(i, Purpose.TOKEN))
    return len(block), rows.draw(len(block), chance(len(block), Purpose.TOKEN))


def verify_greedy(block: Ids, best: Sequence[int], largest: Sequence[float]) -> tuple[int, int]:
    """`verify` at temperature 0 without penalties, from the argmax and the largest logit of each of the n + 1 rows.

    Raises:
        NonFiniteLogits: a row that was needed is broken.
    """
    accepted = next((i for i, drafted in enumerate(block) if drafted != best[i]), len(block))
    for value in largest[: accepted + 1]:
        check_finite(value)
    return accepted, best[accepted]


def penalise(logits: Tensor, ids: Sequence[int], start: int, prompt_length: int, params: SamplingParams) -> Tensor:
    """Raw logits `[r, V]` -> biased and penalised, float32 or 64; row j predicts `ids[start + j]` from those before."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if not (params.logit_bias or params.penalised):
        return logits
    out = logits.clone()
    rows, vocab = out.shape
    bias = [(token, value) for token, value in params.logit_bias if token < vocab]
    if bias:
        tokens, values = zip(*bias, strict=True)
        out.index_add_(1, _on(out, tokens), torch.tensor(values, dtype=out.dtype, device=out.device).expand(rows, -1))
    if not params.penalised:
        return out
    # Only the logits of ids seen so far change.
    seen, where = torch.unique(_on(out, ids[: start + rows - 1]), return_inverse=True)
    scores = out[:, seen]
    present = torch.zeros(scores.shape, dtype=torch.bool, device=out.device)
    counts = torch.zeros_like(scores)
    for j in range(rows):
        present[j].index_fill_(0, where[: start + j], True)
        written = where[prompt_length : start + j]
        counts[j].index_add_(0, written, counts.new_ones(len(written)))
    penalty = params.repetition_penalty
    if penalty != 1.0:
        scores = torch.where(present, torch.where(scores > 0, scores / penalty, scores * penalty), scores)
    if params.presence_penalty or params.frequency_penalty:
        scores -= torch.where(counts > 0, params.presence_penalty + params.frequency_penalty * counts, 0.0)
    return out.index_copy_(1, seen, scores)


def distribution(logits: Tensor, params: SamplingParams) -> Tensor:
    """Penalised, finite logits `[r, V]` -> probabilities, float64 `[r, V]`; temperature above 0."""
    logits = logits.double()
    weights = ((logits - logits.amax(-1, keepdim=True)) / params.temperature).exp()
    probs = weights / weights.sum(-1, keepdim=True)
    full, ids = probs, None
    if 0 < params.top_k < full.shape[-1]:  # from a first cut on, only the tokens left are handled
        probs, ids = _most_probable(full, params.top_k)
        probs = _renormalise(probs)
    if params.top_p < 1.0:
        if ids is None:
            probs, ids = _nucleus(full, params.top_p)
        probs = _renormalise(torch.where(_mass_before(probs) < params.top_p, probs, 0.0))
    if params.min_p > 0.0:
        probs = _renormalise(torch.where(probs >= params.min_p * probs.amax(-1, keepdim=True), probs, 0.0))
    return probs if ids is None else torch.zeros_like(full).scatter_(-1, ids, probs)


def draw(probs: Tensor, u: float) -> int:
    """The token whose stretch of the cumulative distribution of `probs` `[V]` holds `u` in [0, 1)."""
    support = probs.nonzero().squeeze(-1)  # a rounded sum can then never land on a token of probability 0
    cumulative = probs[support].cumsum(-1)
    index = torch.searchsorted(cumulative, u * cumulative[-1:], right=True).clamp_(max=len(support) - 1)
    return int(support[index])


def residual(p: Tensor, q: Row) -> Tensor:
    """max(p - q, 0) `[V]`, not normalised; p itself when that is zero everywhere (p = q up to rounding)."""
    ids, probs = q
    left = p.index_add(
        0, _on(p, ids.tolist()), torch.from_numpy(-probs).to(p)
    )  # unused columns are id 0, probability 0
    left.clamp_(min=0.0)
    return left if bool(left.any()) else p


def logprobs(logits: Tensor, emitted: Sequence[int], count: int) -> tuple[TokenLogprobs, ...]:
    """For each raw row `[len(emitted), V]`: log p of the emitted token and of the `count` most probable, ties by id."""
    logs = logits.float().log_softmax(-1)
    count = min(count, logs.shape[-1])
    entries = []
    for row, token in zip(logs, emitted, strict=True):
        # topk may pick any of several equal values; everything not below the last one decides by id.
        ids = (row >= row.topk(count).values[-1]).nonzero().squeeze(-1)
        best = sorted(zip(ids.tolist(), row[ids].tolist(), strict=True), key=lambda pair: (-pair[1], pair[0]))
        entries.append(TokenLogprobs(float(row[token]), tuple(best[:count])))
    return tuple(entries)


def check_finite(largest: float) -> None:
    """Judge a row by its largest logit: raise `NonFiniteLogits` on NaN, +inf, or nothing to choose from (all -inf)."""
    if not math.isfinite(largest):
        raise NonFiniteLogits(
            f"the target's largest logit is {largest}: its weights are broken, or its activations overflow "
            "(float16: load it as bfloat16 or float32)"
        )


def _most_probable(probs: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The `size` largest of each row and their ids, `[r, size]` both, best first, ties to the lower id."""
    values, ids = probs.topk(size)
    # topk takes any of several equal values: where some are left out, fetch them all and let the id decide.
    smallest = values[:, -1:].clamp(min=torch.finfo(probs.dtype).tiny)  # which of the impossible ones is no matter
    reach = int(torch.count_nonzero(probs >= smallest, dim=-1).max())
    if reach > size:
        values, ids = probs.topk(reach)
    ids, order = ids.sort(-1)
    values, best_first = values.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    return values[:, :size], ids.gather(-1, best_first)[:, :size]


def _nucleus(probs: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """As `_most_probable`, as many tokens as it takes for a mass of `top_p` in every row."""
    vocab = probs.shape[-1]
    size = min(_FIRST_NUCLEUS, vocab)
    while True:
        values, ids = _most_probable(probs, size)
        if size == vocab or not bool((_mass_before(values)[:, -1] < top_p).any()):
            return values, ids
        size = min(8 * size, vocab)


def _mass_before(values: Tensor) -> Tensor:
    return values.cumsum(-1) - values


def _renormalise(probs: Tensor) -> Tensor:
    return probs / probs.sum(-1, keepdim=True)


def _on(like: Tensor, ids: Sequence[int]) -> Tensor:
    return torch.tensor(ids, dtype=torch.int64, device=like.device)
