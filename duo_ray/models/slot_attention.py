"""Attention of one pass over slots: what each token may see, and the kernels that read K and V where they are.

transformers calls the kernels by the names they are registered under here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PretrainedConfig

FOLDED_SDPA = "duo_ray_folded_sdpa"
KV_CACHE_ATTENTION = "duo_ray_kv_cache_attention"
"""FlashAttention 2 over the slots. (A name with "flash" in it gets other treatment from transformers as well.)"""

KEY_BUCKET = 64  # columns read back are a multiple of this: aligned masks, few distinct shapes
_GROUP_COST = 1024  # what one more attention call costs, in pairs of a query and a key

Windows = dict[str, int | None]
"""Sliding window per layer type; the type "" stands for a model whose layers are all alike."""


class Segment(NamedTuple):
    """Run `ids` at positions `start`, `start + 1`, ... of a slot and return the logits of the last `keep` of them."""

    slot: int
    start: int
    ids: Sequence[int]
    keep: int


def layer_windows(config: PretrainedConfig) -> Windows:
    """Which masks a model wants: one per layer type when its layers differ, else a single one."""
    window: int | None = getattr(config, "sliding_window", None)
    types: Sequence[str] | None = getattr(config, "layer_types", None)
    if not types:
        return {"": window}
    return {kind: window if kind == "sliding_attention" else None for kind in types}


def attention_masks(positions: Tensor, keys: int, windows: Windows, dtype: torch.dtype) -> Tensor | dict[str, Tensor]:
    """Additive masks `[rows, 1, width, keys]` for queries at `positions` `[rows, width]`.

    A query sees the keys up to its own position and, in a layer with a sliding window, only the last `window` of them.
    Additive, because eager attention takes a boolean mask for numbers; finite, because a row of -inf is NaN.
    """
    key, query = torch.arange(keys, device=positions.device), positions[:, None, :, None]
    masks = {}
    for kind, window in windows.items():
        seen = key <= query
        if window is not None:
            seen &= key > query - window
        masks[kind] = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(
            ~seen, torch.finfo(dtype).min
        )
    return masks.get("", masks)


class _Group(NamedTuple):
    """Consecutive slots whose attention is one call, padded to the longest of them."""

    first: int
    rows: int
    width: int
    keys: int
    begin: int
    """Where its tokens begin among those of the pass, and where they end."""
    end: int
    gather: Tensor | None
    """`[rows * width]`: the token in each place, padding repeats a row's last; None: no padding."""
    scatter: Tensor | None
    """`[end - begin]`: the place of each token."""


class Rows:
    """A pass whose tokens lie in one row: which of them belong together, and what they may see.

    The layers see `[1, tokens, ...]`; only attention is done row by row, in groups of neighbouring slots of similar
    length, so that K and V are read where they are.
    """

    def __init__(
        self, segments: Sequence[Segment], columns: int, windows: Windows, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.groups: list[_Group] = []
        begin, start = 0, 0
        for end in range(1, len(segments) + 1):
            if end == len(segments) or not _alike(segments[begin : end + 1]):
                group = _group(segments[begin:end], start, columns, device)
                self.groups.append(group)
                begin, start = end, group.end
        positions = [_positions(segments, group).to(device) for group in self.groups]
        kinds = {
            kind: [attention_masks(p, g.keys, {"": window}, dtype) for p, g in zip(positions, self.groups, strict=True)]
            for kind, window in windows.items()
        }
        markers = {kind: masks[0] for kind, masks in kinds.items()}
        self.marker: Any = markers.get("", markers)
        """What the model hands to each of its layers as the mask: tells which kind of layer it is."""
        self._masks: dict[int, list[Any]] = {id(masks[0]): masks for masks in kinds.values()}

    def attend(self, query: Tensor, key: Tensor, value: Tensor, marker: Tensor, scaling: float | None) -> Tensor:
        """Query `[1, h, tokens, d]`, whole K and V buffers -> `[1, tokens, h, d]`."""
        parts = []
        for group, mask in zip(self.groups, self._masks[id(marker)], strict=True):
            first, rows, width, keys, begin, end, gather, scatter = group
            q = query[0, :, begin:end] if gather is None else query[0, :, gather]
            q = q.reshape(len(q), rows, width, -1).transpose(0, 1)
            k, v = key[first : first + rows, :, :keys], value[first : first + rows, :, :keys]
            out = _folded(q, k, v, mask, scaling).flatten(0, 1)
            parts.append(out if scatter is None else out[scatter])
        return (parts[0] if len(parts) == 1 else torch.cat(parts))[None]


def _alike(segments: Sequence[Segment]) -> bool:
    """Whether the last segment may join the ones before: the next slot, and padding costs less than a call."""
    if segments[-1].slot != segments[-2].slot + 1:
        return False
    lengths = [len(s.ids) for s in segments]
    ends = [s.start + n for s, n in zip(segments, lengths, strict=True)]
    return len(segments) * max(lengths) * max(ends) <= _GROUP_COST + 2 * sum(
        n * end for n, end in zip(lengths, ends, strict=True)
    )


def _group(segments: Sequence[Segment], start: int, columns: int, device: torch.device) -> _Group:
    lengths = [len(s.ids) for s in segments]
    rows, width, count = len(segments), max(lengths), sum(lengths)
    longest = max(s.start + len(s.ids) for s in segments)
    keys = min(-(-longest // KEY_BUCKET) * KEY_BUCKET, columns)
    gather = scatter = None
    if count < rows * width:
        places: list[int] = []
        tokens: list[int] = []
        token = start
        for row, length in enumerate(lengths):
            tokens += [*range(token, token + length), *[token + length - 1] * (width - length)]
            places += range(row * width, row * width + length)
            token += length
        gather, scatter = torch.tensor(tokens, device=device), torch.tensor(places, device=device)
    return _Group(segments[0].slot, rows, width, keys, start, start + count, gather, scatter)


def _positions(segments: Sequence[Segment], group: _Group) -> Tensor:
    """Positions `[rows, width]` of a group's tokens; padding repeats the last of a row."""
    mine = [s for s in segments if group.first <= s.slot < group.first + group.rows]
    last = torch.tensor([[s.start + len(s.ids) - 1] for s in mine])
    return torch.minimum(torch.tensor([[s.start] for s in mine]) + torch.arange(group.width), last)


def folded_sdpa(
    module: nn.Module,  # noqa: ARG001
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    dropout: float = 0.0,  # noqa: ARG001
    scaling: float | None = None,
    slot_rows: Rows | None = None,
    **extra: Any,
) -> tuple[Tensor, None]:
    """Scaled dot-product attention over slots, without a copy of K and V for grouped query heads.

    `slot_rows` comes through the model's keyword arguments; without it the batch is a padded one.
    """
    _refuse(extra, "sdpa", "softcap", "position_bias", "s_aux")
    if slot_rows is not None:
        return slot_rows.attend(query, key, value, attention_mask, scaling), None
    return _folded(query, key, value, attention_mask, scaling), None


def _refuse(extra: Mapping[str, Any], kernel: str, *names: str) -> None:
    """Raises RuntimeError where a model wants one of these kinds of attention, which `kernel` does not compute."""
    for name in names:
        if extra.get(name) is not None:
            raise RuntimeError(f"{kernel} has no {name}: load the model with attn_implementation='eager'")


def _folded(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float | None) -> Tensor:
    """Query `[B, h, n, d]`, K and V `[B, h/g, L, d]`, mask `[B, 1, n, L]` -> `[B, n, h, d]`.

    The g query heads that share a KV head become g times as many queries: `[B, h, n, d]` -> `[B, h/g, g*n, d]`. With an
    explicit mask, transformers' own sdpa repeats K and V g times instead.
    """
    batch, heads, width, dim = query.shape
    kv_heads = key.shape[1]
    group = heads // kv_heads
    mask = mask if group == 1 or width == 1 else mask.repeat(1, 1, group, 1)
    out = nn.functional.scaled_dot_product_attention(
        query.reshape(batch, kv_heads, group * width, dim), key, value, attn_mask=mask, scale=scaling
    )
    return out.reshape(batch, heads, width, value.shape[-1]).transpose(1, 2).contiguous()


def row_lengths(positions: Tensor, slots: Tensor, windows: Windows) -> Tensor | dict[str, Tensor]:
    """What stands in for the masks in `kv_cache_attention`: int32 `[2, rows, 1, 1]`, each row's length and its slot.

    Four dimensions, because transformers hands on a mask of four as it is.

    Args:
        positions: `[rows, width]`, of the queries.
        slots: `[rows, 1]`.
    """
    packed = torch.stack([positions[:, -1] + 1, slots[:, 0]]).int()[..., None, None]
    masks = dict.fromkeys(windows, packed)
    return masks.get("", masks)


def kv_cache_attention(
    module: nn.Module,  # noqa: ARG001
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    dropout: float = 0.0,  # noqa: ARG001
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **extra: Any,
) -> tuple[Tensor, None]:
    """FlashAttention 2 (arXiv 2307.08691) on rows of their own lengths, without a mask and without gathering slots.

    `flash_attn_with_kvcache` takes the last of a row's queries for its last token, so padding is on the left: a padded
    query sees fewer keys or none, and nobody reads what it computes.

    Args:
        query: `[rows, heads, width, head_dim]`.
        key, value: the buffers of all slots, `[slots, kv_heads, keys, head_dim]`, the new tokens already written.
        attention_mask: see `row_lengths`.
        sliding_window: a query sees its own key and the `sliding_window - 1` before it.

    Raises:
        RuntimeError: the model wants a kind of attention that the package does not compute.
    """
    from flash_attn import flash_attn_with_kvcache  # noqa: PLC0415 (only where it is asked for)

    _refuse(extra, "FlashAttention 2", "position_bias", "s_aux")
    lengths, slots = attention_mask[..., 0, 0].unbind()
    out: Tensor = flash_attn_with_kvcache(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        cache_seqlens=lengths,
        cache_batch_idx=slots,
        softmax_scale=scaling,
        causal=True,
        window_size=(-1, -1) if sliding_window is None else (sliding_window - 1, 0),
        softcap=softcap or 0.0,
    )
    return out, None


AttentionInterface.register(FOLDED_SDPA, folded_sdpa)
AttentionInterface.register(KV_CACHE_ATTENTION, kv_cache_attention)
