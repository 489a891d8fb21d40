"""A llama.cpp model with its KV cache: tokens of many sequences in, rows of logits out, through the low-level API.

All sequences share one cache (`kv_unified`): one decode takes tokens of any of them, however many of each, in one pass
over the weights, and a prefix that several hold takes its cells once.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from llama_cpp import llama_cpp as ll
from numpy.typing import NDArray

from duo_ray.models.llama_library import LlamaCppError, check_model, load_model, log, start_library

Logits = NDArray[np.float32]

_MICRO_BATCH = 64
"""Tokens llama.cpp computes at once on a CPU; more is no faster there and attention scratch grows with it."""


class BatchRow(NamedTuple):
    """One token of a decode."""

    token: int
    position: int
    seq_id: int
    wanted: bool
    """Whether its logits are read."""


class LlamaContext:
    """Made by `load`; freed by `close`.

    Attributes:
        model: llama.cpp's handle of the model.
        memory: llama.cpp's handle of the KV cache.
        vocab_size: rows of the output layer.
        batch_size: tokens one decode takes.
        memory_bytes: weights, KV cache and scratch memory, as llama.cpp accounted for them at load.
    """

    def __init__(self, model: Any, context: Any) -> None:
        self.model = model
        self.memory = ll.llama_get_memory(context)
        self.vocab_size: int = ll.llama_vocab_n_tokens(ll.llama_model_get_vocab(model))
        self.batch_size: int = ll.llama_n_batch(context)
        self.memory_bytes = log.buffer_bytes
        self._context = context
        self._batch = ll.llama_batch_init(self.batch_size, 0, 1)

    @classmethod
    def load(
        cls,
        path: Path,
        *,
        use: str,
        slots: int,
        max_context: int,
        sequences: int,
        threads: int,
        batch_size: int,
        outputs: int,
        gpu_layers: int = 0,
        repack: bool = False,
    ) -> LlamaContext:
        """Load a GGUF file.

        Args:
            use: what it is to be, "draft" or "target", for errors.
            slots: requests of `max_context` tokens each that the KV cache holds.
            sequences: sequence ids, from 0.
            outputs: rows of logits one decode gives.
            gpu_layers: layers computed on a GPU; 0 takes no GPU memory, whatever the build of llama.cpp.
            repack: bring the weights into a layout for this CPU's vector units.

        Raises:
            LlamaCppError: no such file, not a GGUF, a model of no use here, or no memory for the cache.
            ValueError: the context is longer than the model was trained for.
        """
        start_library()
        log.clear()
        model = load_model(path, gpu_layers, repack=repack)
        try:
            check_model(model, path, use)
            trained: int = ll.llama_model_n_ctx_train(model)
            if max_context > trained:
                raise ValueError(
                    f"max_context={max_context}, but {path} was trained for {trained} tokens: ask for less"
                )
            params = ll.llama_context_default_params()
            params.n_ctx = slots * max_context
            params.n_batch = batch_size
            params.n_ubatch = batch_size if gpu_layers else min(_MICRO_BATCH, batch_size)
            params.n_seq_max = sequences
            params.n_outputs_max = outputs
            params.n_threads = params.n_threads_batch = threads
            params.kv_unified = True
            params.swa_full = True  # a sliding-window cache could not be cropped past its window
            params.offload_kqv = params.op_offload = gpu_layers > 0
            if not gpu_layers:
                # On CPUs the fused kernel is the slow one: 4 sequences at 3000 tokens took 384 ms with it, 57 without.
                params.flash_attn_type = ll.LLAMA_FLASH_ATTN_TYPE_DISABLED
            context = ll.llama_init_from_model(model, params)
            if not context:
                raise LlamaCppError(
                    f"no context of {slots} x {max_context} tokens for {path}: lower one of them ({log.quote()})"
                )
        except BaseException:
            ll.llama_model_free(model)
            raise
        return cls(model, context)

    @property
    def closed(self) -> bool:
        return self._context is None

    def close(self) -> None:
        """Free model, KV cache and batch; closing it again does nothing."""
        if self._context is None:
            return
        ll.llama_batch_free(self._batch)
        ll.llama_free(self._context)
        ll.llama_model_free(self.model)
        self._context = self.model = self.memory = None

    def decode(self, rows: Sequence[BatchRow]) -> None:
        """Run at most `batch_size` tokens through the model; their K and V join the cache.

        Raises:
            LlamaCppError: llama.cpp failed; what the cache holds of these sequences is then unknown.
        """
        batch = self._batch
        for i, (token, position, seq_id, wanted) in enumerate(rows):
            batch.token[i] = token
            batch.pos[i] = position
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = seq_id
            batch.logits[i] = wanted
        batch.n_tokens = len(rows)
        code = ll.llama_decode(self._context, batch)
        if code != 0:
            raise LlamaCppError(f"llama_decode of {len(rows)} tokens failed with code {code} ({log.quote()})")

    def logits(self, index: int) -> Logits:
        """Logits `[V]` of one wanted row of the last decode, in llama.cpp's own memory: valid until the next decode."""
        return np.ctypeslib.as_array(ll.llama_get_logits_ith(self._context, index), (self.vocab_size,))

    def use_threads(self, threads: int) -> None:
        """From the next decode on. What it computes does not depend on it, to the bit."""
        ll.llama_set_n_threads(self._context, threads, threads)

    def crop(self, seq_id: int, length: int) -> None:
        """Forget what a sequence holds from position `length` on."""
        if not ll.llama_memory_seq_rm(self.memory, seq_id, length, -1):
            raise LlamaCppError(f"the cache cannot be cropped to {length} tokens: use another model")

    def share(self, source: int, sequence: int, length: int) -> None:
        """Let `sequence`, which holds nothing there, hold the first `length` positions of `source` too."""
        ll.llama_memory_seq_cp(self.memory, source, sequence, 0, length)

    def clear(self) -> None:
        """Forget everything: cells are given out from the first one again."""
        ll.llama_memory_clear(self.memory, False)
