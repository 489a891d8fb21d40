"""The words that all chats begin with are in the caches of target and draft before the first chat."""

from __future__ import annotations

from pathlib import Path

import pytest

from duo_ray.actors.draft import DraftActor, DraftSettings
from duo_ray.actors.target import TargetActor, TargetSettings
from duo_ray.core.context import IdLog
from duo_ray.models.catalog import resolve_target
from duo_ray.models.llama_vocabulary import LlamaVocabulary
from duo_ray.models.tokenizer import Tokenizer
from duo_ray.models.vocabulary import TokenizerVocabulary, chat_opening
from duo_ray.types import DraftJob, SamplingParams, VerifyJob

pytestmark = pytest.mark.models

GREEDY = SamplingParams(temperature=0.0)
CHAT = [{"role": "user", "content": "Why does ice float?"}]
OWN_SYSTEM = [{"role": "system", "content": "Answer in French."}, *CHAT]


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The actors run in this process, without Ray."""
    for module in ("draft", "target"):
        monkeypatch.setattr(f"duo_ray.actors.{module}.node_id", lambda: "here")


def draft_reads(path: Path, tokenizer: Tokenizer, chat: list[dict[str, str]], vocabulary: str = "auto") -> int:
    """Tokens that a new draft actor still has to run before it could continue a chat."""
    settings = DraftSettings(
        (("", str(path)),), "demo", None, threads=1, cores=(), max_context=256, slots=2, max_sequences=2,
        vocabulary=vocabulary, warmup_steps=1, node="here",
    )  # fmt: skip
    actor = DraftActor(settings)
    actor.adapt(tokenizer)
    ids = tokenizer.chat(chat)
    context = IdLog(ids).context("r", agreed=0, prompt_length=len(ids))
    [block], _ = actor.draft("", [DraftJob(context, 0, 0, 1, bets=False, acceptance=1.0, sampling=GREEDY)])
    return block.prompt_tokens


def test_a_draft_reads_only_the_users_words(demo_gguf: Path, demo_target: Path) -> None:
    tokenizer = Tokenizer.load(demo_target)
    opening = chat_opening(TokenizerVocabulary(tokenizer))
    assert "helpful AI assistant named SmolLM" in tokenizer.decode(opening)
    assert draft_reads(demo_gguf, tokenizer, CHAT) == len(tokenizer.chat(CHAT)) - len(opening)


def test_a_draft_of_another_family_has_the_words_of_its_own_template(demo_gguf: Path, gemma_chat_gguf: Path) -> None:
    target = Tokenizer.load(resolve_target(str(gemma_chat_gguf)).tokenizer_path)
    with LlamaVocabulary.open(demo_gguf) as draft:
        whole, opening = draft.chat(CHAT), chat_opening(draft)
    assert whole is not None
    assert len(opening) > 8
    assert draft_reads(demo_gguf, target, CHAT, "string") == len(whole) - len(opening)


def test_a_chat_with_its_own_system_message_is_read_whole(demo_gguf: Path, demo_target: Path) -> None:
    tokenizer = Tokenizer.load(demo_target)
    assert draft_reads(demo_gguf, tokenizer, OWN_SYSTEM) == len(tokenizer.chat(OWN_SYSTEM))


def test_a_target_runs_only_the_users_words(demo_gguf: Path, demo_target: Path) -> None:
    tokenizer = Tokenizer.load(demo_target)
    opening, ids = chat_opening(TokenizerVocabulary(tokenizer)), tokenizer.chat(CHAT)
    settings = TargetSettings(
        str(demo_gguf), "llama_cpp", "demo", "cpu", "Q4_1", slots=2, max_context=256, vocab_size=tokenizer.vocab_size,
        threads=1, cores=(), attn_implementation="sdpa", chunk=128, device_map=None, cuda_graphs=False,
        quantization="none", gpu_layers=0, warmup_steps=1, opening=opening, node="here",
    )  # fmt: skip
    context = IdLog(ids).context("r", agreed=0, prompt_length=len(ids))
    reply = TargetActor(settings).verify([VerifyJob(context, (), GREEDY)], [None], False)
    assert reply.verdicts[0].cached == len(opening)
    assert reply.tokens == len(ids) - len(opening)
