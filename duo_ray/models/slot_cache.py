"""Many requests in one preallocated KV buffer, for unmodified Hugging Face causal LMs.

Each request owns one slot (a row of the buffer) and uses as many of its columns as it has tokens. The mask alone says
which columns count, so cropping a request is forgetting a number, exact at any depth, sliding windows included.

One forward runs different numbers of tokens for any number of slots. Normally all tokens lie in one row behind each
other, so that nothing is padded but attention (`slot_attention.Rows`); CUDA graphs and a model's own attention want a
padded batch.
"""

from __future__ import annotations

import mmap
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from duo_ray.models import slot_attention
from duo_ray.models.slot_attention import FOLDED_SDPA, KEY_BUCKET, KV_CACHE_ATTENTION, Rows, Segment, layer_windows

_WIDE = 32  # of a padded batch, rows longer than this are run apart: padding short ones that far costs more than a pass
_MAX_GRAPHS = 64
_MAX_GRAPH_WIDTH = 64  # wider passes are bound by arithmetic, not by kernel launches


class PassShape(NamedTuple):
    """Everything that fixes the tensor shapes of a forward: passes of equal shape can share a captured graph."""

    first: int | None
    """Slot of the first row when the rows are consecutive slots (read as a view), None when their numbers are data."""
    rows: int
    width: int
    keep: int
    keys: int
    """Columns read back from the buffer."""


class PassInputs(NamedTuple):
    """Views into one flat int64 tensor, so that a whole pass reaches the device in a single copy."""

    ids: Tensor  # [rows, width]
    positions: Tensor  # [rows, width]; padding, on the left, repeats the row's first real position, always a legal one
    columns: Tensor  # [rows, width]; where each token's K and V are written, the trash column for padding
    keep: Tensor  # [rows, keep]; offsets into the width whose logits are wanted
    slots: Tensor  # [rows, 1]

    @classmethod
    def of(cls, flat: Tensor, shape: PassShape) -> PassInputs:
        rows, width = shape.rows, shape.width
        ids, positions, columns, keep, slots = torch.split(flat, [rows * width] * 3 + [rows * shape.keep, rows])
        return cls(
            ids.view(rows, width),
            positions.view(rows, width),
            columns.view(rows, width),
            keep.view(rows, shape.keep),
            slots.view(rows, 1),
        )


class SlotCache(Cache):
    """The KV buffer: per layer `[slots, heads, columns, head_dim]` for keys and for values, on that layer's device."""

    def __init__(self, layers: int, slots: int, columns: int, *, whole: bool = False) -> None:
        """`whole`: hand all slots to attention, which picks the rows of the pass itself."""
        self.slots, self.columns, self._whole = slots, columns, whole
        self._slot_layers = [_SlotLayer(self) for _ in range(layers)]
        super().__init__(layers=[*self._slot_layers])

    def plan(self, inputs: PassInputs, shape: PassShape | None) -> None:
        """Say what the next forward writes and reads; without a shape attention gets the whole buffers."""
        self._inputs, self._shape = inputs, shape
        self._moved: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def destination(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Slots `[rows, 1]` and columns `[rows, width]` to write to, on the device of the layer that asks."""
        if device not in self._moved:
            self._moved[device] = self._inputs.slots.to(device), self._inputs.columns.to(device)
        return self._moved[device]

    def read(self, buffer: Tensor) -> Tensor:
        """The rows of a padded pass, `[rows, heads, keys, head_dim]`: a view for consecutive slots, else a copy."""
        if self._shape is None:
            return buffer
        first, rows, keys = self._shape.first, self._shape.rows, self._shape.keys
        if self._whole:
            return buffer[:, :, :keys]
        if first is not None:
            return buffer[first : first + rows, :, :keys]
        return buffer[self.destination(buffer.device)[0][:, 0], :, :keys]

    def copy(self, source: int, slot: int, length: int) -> None:
        """Copy the first `length` columns of one slot to another."""
        for buffer in self._buffers():
            buffer[slot, :, :length] = buffer[source, :, :length]

    def clear(self, slot: int) -> None:
        """Zero a slot: NaN left behind by a broken pass would poison later ones even where it is masked."""
        for buffer in self._buffers():
            buffer[slot].zero_()

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers())

    def _buffers(self) -> Iterator[Tensor]:
        return chain.from_iterable(layer.buffers for layer in self._slot_layers)


class _SlotLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    is_sliding = False  # sliding layers keep every column too; the window is in the mask
    is_croppable = True

    def __init__(self, cache: SlotCache) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.cache = cache
        self.buffers: tuple[Tensor, ...] = ()
        """Keys and values, once the first pass has shown their shapes."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.buffers = self._zeros(key_states), self._zeros(value_states)
        self.is_initialized = True

    def _zeros(self, states: Tensor) -> Tensor:
        # Zeros, not garbage: a masked key has weight 0, and 0 * NaN is NaN.
        shape = torch.Size((self.cache.slots, states.shape[1], self.cache.columns, states.shape[3]))
        if states.device.type != "cpu":
            return states.new_zeros(shape)
        # Pages of an anonymous mapping are zero and cost memory only once they are written.
        pages = mmap.mmap(-1, shape.numel() * states.element_size())
        return torch.frombuffer(pages, dtype=states.dtype).view(shape)

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if not self.buffers:
            self.lazy_initialization(key_states, value_states)
        keys, values = self.buffers
        slots, columns = self.cache.destination(keys.device)
        keys[slots, :, columns] = key_states.transpose(1, 2)  # [rows, width, heads, head_dim]
        values[slots, :, columns] = value_states.transpose(1, 2)
        return self.cache.read(keys), self.cache.read(values)

    # Asked for only by a model that builds its own mask or positions, and that cannot work: rows differ in length.
    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:  # noqa: ARG002 - the base class has it
        raise RuntimeError("the model ignores the 4-D attention mask it was given")

    def get_seq_length(self) -> int:
        raise RuntimeError("the model ignores the position ids it was given")

    def get_max_length(self) -> int:
        return self.cache.columns


class SlotRunner:
    """Forward passes of one model over the slots of one cache. It remembers no lengths: a segment says where it starts.

    With `graphs`, passes are captured in CUDA graphs, one per `PassShape`, and replayed: a decoding step is a thousand
    tiny kernels whose launches would otherwise cost more than their work. Shapes are then rounded up to powers of two.
    """

    def __init__(self, model: Any, *, slots: int, max_context: int, graphs: bool = False) -> None:
        self._model, self.graphs = model, graphs
        self._device: torch.device = model.get_input_embeddings().weight.device
        config = model.config.get_text_config(decoder=True)
        self._windows = layer_windows(config)
        self._masked = config._attn_implementation != KV_CACHE_ATTENTION
        columns = -(-(max_context + 1) // KEY_BUCKET) * KEY_BUCKET
        self._trash = columns - 1  # never a real token's: there is at least one column more than any request can use
        self.cache = SlotCache(config.num_hidden_layers, slots, columns, whole=not self._masked)
        one_device = len({parameter.device for parameter in model.parameters()}) == 1
        self._ragged = config._attn_implementation == FOLDED_SDPA and one_device and not graphs
        self._captured: OrderedDict[PassShape, _Graph] = OrderedDict()
        self._pool: Any = None  # memory shared by all graphs: only the latest replay's logits are ever read

    def forward(self, segments: Sequence[Segment]) -> Tensor:
        """Logits `[sum of keep, V]` of all segments, one after the other; valid until the next forward.

        Segments must be sorted by slot, one per slot.
        """
        if self._ragged:
            return self._one_row(segments)
        narrow = [s for s in segments if len(s.ids) <= _WIDE]
        wide = [s for s in segments if len(s.ids) > _WIDE]
        if not (narrow and wide):
            return self._padded(segments)
        # A replayed graph's logits last until the next one.
        parts: dict[int, Tensor] = {}
        for group, logits in ((narrow, self._padded(narrow).clone()), (wide, self._padded(wide))):
            ends = accumulate(s.keep for s in group)
            parts |= {s.slot: logits[end - s.keep : end] for s, end in zip(group, ends, strict=True)}
        return torch.cat([parts[s.slot] for s in segments])

    def _one_row(self, segments: Sequence[Segment]) -> Tensor:
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        kept: list[int] = []
        for slot, start, tokens, wanted in segments:
            ids += tokens
            positions += range(start, start + len(tokens))
            slots += [slot] * len(tokens)
            kept += range(len(ids) - wanted, len(ids))
        # A pass without any wanted logits computes one row of them all the same.
        place, keep = (torch.tensor([part], device=self._device) for part in (positions, kept or [0]))
        on_slots, inputs = (torch.tensor([part], device=self._device) for part in (slots, ids))
        rows = Rows(segments, self.cache.columns, self._windows, self._model.dtype, self._device)
        self.cache.plan(PassInputs(inputs, place, place, keep, on_slots), None)
        logits: Tensor = self._model(
            input_ids=inputs,
            position_ids=place,
            attention_mask=rows.marker,
            cache=self.cache,
            use_cache=True,
            logits_to_keep=keep[0],
            slot_rows=rows,
        ).logits
        return logits[0, : len(kept)]

    def _padded(self, segments: Sequence[Segment]) -> Tensor:
        logits = self.run(*self.prepare(segments))
        if all(s.keep == logits.shape[1] for s in segments):
            return logits.flatten(0, 1)
        return torch.cat([row[: s.keep] for row, s in zip(logits, segments, strict=True)])

    def prepare(self, segments: Sequence[Segment]) -> tuple[Tensor, PassShape]:
        """Lay the segments out as one flat int64 tensor (see `PassInputs`) and the shape that goes with it."""
        slots = [s.slot for s in segments]
        width, keep = max(len(s.ids) for s in segments), max(1, *(s.keep for s in segments))
        keys = max(s.start + len(s.ids) for s in segments)
        if self.graphs:
            width, keep, keys = _power_of_two(width), _power_of_two(keep), _power_of_two(keys)
        keys = min(-(-keys // KEY_BUCKET) * KEY_BUCKET, self.cache.columns)
        consecutive = self._masked and slots == list(range(slots[0], slots[0] + len(slots)))
        ids, positions, columns, kept = [], [], [], []
        for _, start, tokens, wanted in segments:
            count = len(tokens)
            padding = width - count
            places = range(start, start + count)
            ids += [*[0] * padding, *tokens]
            positions += [*[start] * padding, *places]
            columns += [*[self._trash] * padding, *places]
            kept += [*range(width - wanted, width), *[width - 1] * (keep - wanted)]
        shape = PassShape(slots[0] if consecutive else None, len(slots), width, keep, keys)
        return torch.tensor([*ids, *positions, *columns, *kept, *slots]), shape

    def run(self, flat: Tensor, shape: PassShape) -> Tensor:
        """Logits `[rows, keep, V]` of a prepared pass: replayed where a graph serves its shape, else by `call`."""
        if self.graphs and shape.width <= _MAX_GRAPH_WIDTH:
            return self._replay(flat, shape)
        return self.call(flat.to(self._device), shape)

    def call(self, flat: Tensor, shape: PassShape) -> Tensor:
        """Logits `[rows, keep, V]` of a prepared pass, straight from the model."""
        inputs = PassInputs.of(flat, shape)
        self.cache.plan(inputs, shape)
        logits: Tensor = self._model(
            input_ids=inputs.ids,
            position_ids=inputs.positions,
            attention_mask=slot_attention.attention_masks(
                inputs.positions, shape.keys, self._windows, self._model.dtype
            )
            if self._masked
            else slot_attention.row_lengths(inputs.positions, inputs.slots, self._windows),
            cache=self.cache,
            use_cache=True,
            logits_to_keep=inputs.keep,
        ).logits
        return logits

    def _replay(self, flat: Tensor, shape: PassShape) -> Tensor:
        graph = self._captured.get(shape)
        if graph is None:
            if len(self._captured) == _MAX_GRAPHS:
                self._captured.popitem(last=False)
            graph = self._captured[shape] = self._capture(flat, shape)
        self._captured.move_to_end(shape)
        graph.inputs.copy_(flat)
        graph.graph.replay()
        return graph.logits

    def _capture(self, flat: Tensor, shape: PassShape) -> _Graph:
        inputs = flat.to(self._device)
        # As torch's notes on CUDA graphs ask: run first on a side stream, so that lazy initialisation is not captured.
        side = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            for _ in range(2):
                self.call(inputs, shape)
        torch.cuda.current_stream(self._device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self._device), torch.cuda.graph(graph, pool=self._pool):
            logits = self.call(inputs, shape)
        self._pool = graph.pool()
        return _Graph(graph, inputs, logits)


class _Graph(NamedTuple):
    """A captured pass with the memory it reads its inputs from and writes its logits to."""

    graph: torch.cuda.CUDAGraph
    inputs: Tensor
    logits: Tensor


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
