"""`flash_attn_with_kvcache` of the package flash-attn (2.x) in plain torch, as documented, for CPUs and float32.

It refuses what the real one's checks refuse or what would make its kernel read beyond the cache.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor,
    cache_batch_idx: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
) -> Tensor:
    """Attention of `q` `[batch, n, heads, d]` to the first `cache_seqlens` keys of the rows `cache_batch_idx` of the
    caches `[rows, keys, kv_heads, d]`. The causal mask is aligned to the bottom right corner; a query without any key
    gets zeros.
    """
    batch, width, heads, dim = q.shape
    for cache in (k_cache, v_cache):
        assert cache.stride(-1) == 1
        assert heads % cache.shape[2] == 0
    for numbers, bound in ((cache_seqlens, k_cache.shape[1] + 1), (cache_batch_idx, len(k_cache))):
        assert numbers.dtype == torch.int32
        assert numbers.is_contiguous()
        assert numbers.shape == (batch,)
        assert 0 <= int(numbers.min()) <= int(numbers.max()) < bound
    out = torch.zeros_like(q)
    for row in range(batch):
        length = int(cache_seqlens[row])
        keys, values = (cache[cache_batch_idx[row], :length].transpose(0, 1) for cache in (k_cache, v_cache))
        keys, values = (x.repeat_interleave(heads // len(x), 0) for x in (keys, values))
        scores = q[row].transpose(0, 1) @ keys.transpose(1, 2) * (softmax_scale or 1.0 / math.sqrt(dim))
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        left, right = window_size
        query = torch.arange(width)[:, None] + length - width
        key = torch.arange(length)[None, :]
        seen = torch.ones(width, length, dtype=torch.bool)
        if causal or right >= 0:
            seen &= key <= query + (0 if causal else right)
        if left >= 0:
            seen &= key >= query - left
        some = seen.any(1)
        weights = scores[:, some].masked_fill(~seen[some], -math.inf).softmax(-1)
        out[row, some] = (weights @ values).transpose(0, 1)
    return out
