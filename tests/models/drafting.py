"""Draft jobs for a tiny model, and llama.cpp used plainly to compare with."""

from pathlib import Path

import numpy as np
from llama_cpp import llama_cpp as ll
from numpy.typing import NDArray

from duo_ray.core.context import IdLog
from duo_ray.core.sampling import distribution, penalise
from duo_ray.models import llama_library as library
from duo_ray.models.llama_cpp import LlamaCppDraft
from duo_ray.types import DraftBlock, DraftJob, DraftProbs, Ids, SamplingParams
from tests.models.tiny_gguf import END

VOCAB, CONTEXT = 96, 256
PROMPT = (0, 5, 17, 42, 9, 63, 28)
GREEDY = SamplingParams(temperature=0.0)
SAMPLED = SamplingParams(temperature=1.0, seed=7)
NEVER_ENDS = ((END, -float("inf")),)


class Reference:
    """llama.cpp without anything shared or batched: every answer starts from an empty cache, one token per decode."""

    def __init__(self, path: Path) -> None:
        library.start_library()
        model_params = ll.llama_model_default_params()
        model_params.use_extra_bufts = False
        self.model = ll.llama_model_load_from_file(str(path).encode(), model_params)
        params = ll.llama_context_default_params()
        params.n_ctx = CONTEXT
        params.n_threads = params.n_threads_batch = 1
        params.flash_attn_type = ll.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self.context = ll.llama_init_from_model(self.model, params)
        self.vocab_size = ll.llama_vocab_n_tokens(ll.llama_model_get_vocab(self.model))

    def logits(self, ids: Ids) -> NDArray[np.float32]:
        ll.llama_memory_clear(ll.llama_get_memory(self.context), True)
        for token in ids:
            one = (ll.llama_token * 1)(token)
            assert ll.llama_decode(self.context, ll.llama_batch_get_one(one, 1)) == 0
        return np.ctypeslib.as_array(ll.llama_get_logits_ith(self.context, -1), (self.vocab_size,)).copy()

    def close(self) -> None:
        ll.llama_free(self.context)
        ll.llama_model_free(self.model)


def make_job(
    ids: Ids,
    budget: int,
    sampling: SamplingParams = GREEDY,
    *,
    request: str = "r",
    bets: bool = False,
    assumed: int = 0,
    max_sequences: int = 8,
    acceptance: float = 0.7,
    agreed: int = 0,
) -> DraftJob:
    context = IdLog(ids).context(request, agreed=agreed, prompt_length=len(PROMPT))
    return DraftJob(context, assumed, budget, max_sequences, bets, acceptance, sampling)


def draft_one(draft: LlamaCppDraft, job: DraftJob) -> tuple[DraftBlock, DraftProbs]:
    """The block of one sampled job."""
    [(block, probs)] = draft.draft([job])
    assert probs is not None
    return block, probs


def drafted_ids(block: DraftBlock) -> list[Ids]:
    """Ids of every sequence, heads included."""
    return [((s.bet.token,) if s.bet else ()) + s.ids for s in block.sequences]


def assert_rows_are_fresh(
    reference: Reference, context: Ids, block: DraftBlock, probs: DraftProbs, sampling: SamplingParams = SAMPLED
) -> None:
    """Every q that a block ships is what a fresh decode of the same ids gives."""
    rows = 0
    for sequence, ids, q in zip(block.sequences, probs.ids, probs.probs, strict=True):
        head = (sequence.bet.token,) if sequence.bet else ()
        for i in range(len(sequence.ids)):
            before = (*context, *head, *sequence.ids[:i])
            expected = distribution(penalise(reference.logits(before), before, len(PROMPT), sampling), sampling)
            shipped = np.zeros(VOCAB)
            np.add.at(shipped, ids[i], q[i])
            np.testing.assert_allclose(shipped, expected, atol=2e-3)
            rows += 1
    assert rows == sum(len(sequence.ids) for sequence in block.sequences)


def draft_fresh(
    draft: LlamaCppDraft,
    reference: Reference,
    ids: Ids,
    budget: int,
    sampling: SamplingParams = SAMPLED,
    *,
    request: str = "r",
    agreed: int = 0,
) -> DraftBlock:
    """The block of one sampled job with bets, every q of which is what a fresh decode gives."""
    job = make_job(ids, budget, sampling, request=request, bets=True, agreed=agreed)
    block, probs = draft_one(draft, job)
    assert_rows_are_fresh(reference, ids, block, probs, sampling)
    return block


def assert_greedy(reference: Reference, context: Ids, ids: Ids, tolerance: float = 0.01) -> None:
    """Every id has the largest logit after those before it, up to float noise."""
    for i, token in enumerate(ids):
        logits = reference.logits((*context, *ids[:i]))
        assert logits[token] >= logits.max() - tolerance
