"""What a student is trained for, and the acceptance to expect of it; both over the target's most probable tokens.

Of the target's distribution p only the K most probable tokens are known, and the mass of all others together. Those
others are one more event: the divergences are between distributions over K + 1 events, q's mass outside the K tokens
against p's. By the data-processing inequality they are never above the divergences over all tokens, and they are zero
when the student agrees on the K tokens and on how much is left.

A token of probability 0 is one the student does not have: it counts among the others. Where all K are 0, nothing is
known of p; see `distillation.translation`.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LEAST = 1e-6
"""Probabilities below count as this much: they come in 16 bits, and a logarithm of zero ends a training."""


def distillation_loss(
    logits: Tensor, tokens: Tensor, ids: Tensor, probs: Tensor, divergence: str, *, written: Tensor | None = None
) -> Tensor:
    """Cross-entropy on the target's tokens plus the divergence from its distributions, nats a token.

    The first is a mean over the places the target wrote, the second over those where p is known.

    Args:
        logits: `[N, V]`, the student's.
        tokens: `[N]`, what stands there.
        ids, probs: `[N, K]`, the target's most probable tokens and their probabilities.
        divergence: forward, KL(p || q); reverse, KL(q || p); mixed, the mean of both.
        written: `[N]`, whether the target wrote that and not the student itself; None: it wrote all.
    """
    everything = logits.logsumexp(-1, keepdim=True)
    log_q_top = logits.gather(-1, ids) - everything
    entropy = everything - logits.gather(-1, tokens[:, None])
    log_q = _with_rest(log_q_top.exp() * (probs > 0)).log()
    p = _with_rest(probs)
    log_p = p.log()
    forward = (p * (log_p - log_q)).sum(-1)
    reverse = (log_q.exp() * (log_q - log_p)).sum(-1)
    chosen = {"forward": forward, "reverse": reverse, "mixed": 0.5 * (forward + reverse)}[divergence]
    known = is_known(probs)
    written = torch.ones_like(known) if written is None else written
    return _mean(entropy[:, 0], written) + _mean(chosen, known)


def _mean(values: Tensor, counted: Tensor) -> Tensor:
    return (values * counted).sum() / counted.sum().clamp(min=1)


def is_known(probs: Tensor) -> Tensor:
    """`[N]`: whether anything is known of the target's distribution at each place."""
    return probs.sum(-1) > 0


def _with_rest(probs: Tensor) -> Tensor:
    """`[N, K + 1]`: the mass of all other tokens behind the K."""
    rest = 1.0 - probs.sum(-1, keepdim=True)
    return torch.cat([probs, rest], -1).clamp(min=_LEAST)


def acceptances(logits: Tensor, ids: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
    """Chances that a drafted token is kept, for each of N positions; 0 where p is not known.

    Sampled at temperature 1 it is sum over x of min(p(x), q(x)) (Leviathan et al., arXiv 2211.17192, theorem 3.5); over
    the target's K most probable tokens that is a lower bound. Greedy it is 1 where both models' best tokens agree.

    Args:
        logits: `[N, V]`, the student's.
        ids, probs: `[N, K]`, best first.
    """
    q = (logits.gather(-1, ids) - logits.logsumexp(-1, keepdim=True)).exp()
    best = (logits.argmax(-1) == ids[:, 0]) & (probs[:, 0] > 0)
    return torch.minimum(probs, q).sum(-1), best.float()
