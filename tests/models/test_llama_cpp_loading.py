"""Loading a draft: what is refused, by name; what it takes."""

from pathlib import Path

import numpy as np
import pytest

from duo_ray.models.llama_cpp import LlamaCppDraft
from duo_ray.models.llama_library import LlamaCppError
from duo_ray.types import UnknownPrefix
from tests.models.drafting import CONTEXT, PROMPT, SAMPLED, VOCAB, Reference, assert_rows_are_fresh, make_job
from tests.models.tiny_gguf import write_tiny_llama, write_tiny_mamba


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(LlamaCppError, match=r"none\.gguf is not a file"):
        LlamaCppDraft.load(tmp_path / "none.gguf", threads=1, max_context=64)


def test_a_file_that_is_not_a_gguf_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"not a model")
    with pytest.raises(LlamaCppError, match="not a GGUF"):
        LlamaCppDraft.load(tmp_path / "model.safetensors", threads=1, max_context=64)


def test_a_truncated_file_quotes_llama_cpp_and_prints_nothing(
    tiny_path: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    short = tmp_path / "short.gguf"
    short.write_bytes(tiny_path.read_bytes()[:200_000])
    with pytest.raises(LlamaCppError, match=r"cannot load .*short\.gguf: .*(not within|corrupted|incomplete)"):
        LlamaCppDraft.load(short, threads=1, max_context=64)
    assert capfd.readouterr() == ("", "")


def test_a_recurrent_model_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(LlamaCppError, match=r"mamba\.gguf \(mamba\) cannot be a draft, it is recurrent"):
        LlamaCppDraft.load(write_tiny_mamba(tmp_path / "mamba.gguf"), threads=1, max_context=64)


def test_an_embedding_model_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(LlamaCppError, match=r"embed\.gguf \(llama\) cannot be a draft, it is an embedding model"):
        LlamaCppDraft.load(write_tiny_llama(tmp_path / "embed.gguf", causal=False), threads=1, max_context=64)


def test_a_context_longer_than_the_model_was_trained_for_names_both(tiny_path: Path) -> None:
    with pytest.raises(ValueError, match=f"max_context=512, but .* was trained for {CONTEXT} tokens"):
        LlamaCppDraft.load(tiny_path, threads=1, max_context=512)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"threads": 0}, "threads=0 must be at least 1"),
        ({"slots": 0}, "slots=0 must be at least 1"),
        ({"slots": 64, "max_sequences": 8}, "slots=64 x max_sequences=8 is 512 sequences; llama.cpp holds 256"),
        ({"n_batch": 63}, "n_batch=63 must be at least slots x max_sequences = 64"),
    ],
)
def test_impossible_sizes_are_refused(tiny_path: Path, arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LlamaCppDraft.load(tiny_path, **{"threads": 1, "max_context": 64, **arguments})


def test_loading_and_drafting_print_nothing(tiny_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    draft = LlamaCppDraft.load(str(tiny_path), threads=1, max_context=64)
    draft.draft([make_job(PROMPT, 4)])
    draft.close()
    assert capfd.readouterr() == ("", "")


def test_a_long_context_is_read_in_pieces_of_n_batch(tiny_path: Path, reference: Reference) -> None:
    draft = LlamaCppDraft.load(
        tiny_path, threads=1, max_context=CONTEXT, slots=2, max_sequences=4, keep=VOCAB, n_batch=8
    )
    jobs = [make_job(tuple(range(2, 2 + n)), 6, SAMPLED, request=str(n), bets=True) for n in (30, 16)]
    for job, (block, probs) in zip(jobs, draft.draft(jobs), strict=True):
        assert probs is not None
        assert_rows_are_fresh(reference, job.context.ids, block, probs)
    draft.close()


def test_memory_covers_weights_and_cache(tiny_path: Path) -> None:
    small, large = (LlamaCppDraft.load(tiny_path, threads=1, max_context=256, slots=slots) for slots in (1, 8))
    # 2 layers x (K + V) x 2 heads x 16 values x 2 bytes for each of 7 x 256 more cells.
    assert large.memory_bytes() - small.memory_bytes() >= 7 * 256 * 2 * 2 * 2 * 16 * 2
    assert small.memory_bytes() > tiny_path.stat().st_size // 2
    small.close()
    large.close()


def test_warm_up_times_one_two_and_four_sequences_and_holds_nothing(draft: LlamaCppDraft) -> None:
    timings = draft.warm_up(3)
    assert [width for width, _ in timings] == [1] * 3 + [2] * 3 + [4] * 3
    assert all(seconds > 0 for _, seconds in timings)
    draft.draft([make_job(PROMPT, 1, request=str(i)) for i in range(draft.slots)])


def test_warm_up_stays_within_max_sequences(tiny_path: Path) -> None:
    draft = LlamaCppDraft.load(tiny_path, threads=1, max_context=64, max_sequences=2)
    assert {width for width, _ in draft.warm_up(1)} == {1, 2}
    draft.close()


def test_logits_along_a_text_are_those_of_a_fresh_decode_and_leave_nothing_behind(
    draft: LlamaCppDraft, reference: Reference
) -> None:
    rows = [row.copy() for row in draft.logits_along(PROMPT)]
    assert len(rows) == len(PROMPT)
    for i, row in enumerate(rows):
        np.testing.assert_allclose(row, reference.logits(PROMPT[: i + 1]), atol=2e-3)
    with pytest.raises(UnknownPrefix):
        draft.draft([make_job((*PROMPT, 3), 2, request="", agreed=len(PROMPT))])
