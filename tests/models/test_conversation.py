"""The messages of a prompt are found again, and put into the draft's own template."""

from __future__ import annotations

import pytest

from duo_ray.core.context import IdLog
from duo_ray.models.conversation import ConversationReader
from duo_ray.models.tokenizer import Tokenizer
from duo_ray.models.translating import TranslatingDraft
from duo_ray.models.vocabulary import Counterparts, Strategy, TokenizerVocabulary
from duo_ray.types import DraftJob, SamplingParams
from tests.models.tokenizers import byte_level
from tests.models.typist import Typist

CHATML = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
    "{{ '<|user|>system\nYou help.</s>\n' }}{% endif %}"
    "{{ '<|user|>' + message['role'] + '\n' + message['content'] + '</s>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|user|>assistant\n' }}{% endif %}"
)
"""As of SmolLM2: every role has a turn, and there is a system message by default."""

GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set first = messages[0]['content'] + '\n\n' %}"
    "{% set turns = messages[1:] %}{% else %}{% set first = '' %}{% set turns = messages %}{% endif %}"
    "{% for message in turns %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ '<|assistant|>' + ('model' if message['role'] == 'assistant' else 'user') + '\n' }}"
    "{{ (first if loop.first else '') + message['content'] | trim + '</s>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>model\n' }}{% endif %}"
)
"""As of Gemma 3: BOS, the system's text before the first user's, trimmed contents, the assistant is called model."""

NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + GEMMA


def tokenizer(template: str | None) -> Tokenizer:
    return Tokenizer(byte_level(), special={"bos_token": "<s>", "eos_token": "</s>"}, chat_template=template)


def chat(turns: int, *, system: bool) -> list[dict[str, str]]:
    messages = [{"role": "system", "content": "Speak plainly."}] if system else []
    for turn in range(turns):
        messages.append({"role": "user", "content": f"question {turn}: what\n\nof  that? 👍🏽"})
        messages.append({"role": "assistant", "content": f"answer {turn}.\n"})
    return messages[:-1]


@pytest.mark.parametrize("template", [CHATML, GEMMA])
@pytest.mark.parametrize("system", [True, False])
@pytest.mark.parametrize("turns", [1, 12])
def test_messages_are_read_back_from_their_ids(template, system, turns):
    ours = tokenizer(template)
    ids = ours.chat(chat(turns, system=system))
    found = ConversationReader(ours).read(tuple(ids))
    assert found is not None
    assert ours.chat(found) == ids
    assert [message["role"] for message in found if message["role"] != "system"] == ["user", "assistant"] * (
        turns - 1
    ) + ["user"]


@pytest.mark.parametrize("text", ["Once upon a time", "<|user|>user\nhalf a turn", "<|user|>user\nHi</s>\n", ""])
def test_what_is_no_conversation_is_none(text):
    ours = tokenizer(CHATML)
    assert ConversationReader(ours).read(tuple(ours.encode(text))) is None


def test_without_a_template_nothing_is_a_conversation():
    ours = tokenizer(None)
    assert ConversationReader(ours).read(tuple(ours.encode("user: hi\nassistant:"))) is None


@pytest.mark.parametrize(("ours", "theirs"), [(CHATML, GEMMA), (GEMMA, CHATML), (CHATML, NO_SYSTEM)])
@pytest.mark.parametrize("system", [True, False])
def test_the_draft_sees_a_chat_in_its_own_template(ours, theirs, system):
    target, draft = tokenizer(ours), tokenizer(theirs)
    context = drafts_context(target, draft, target.chat(chat(12, system=system)))
    text = draft.decode(context, skip_special=False)
    assert context.count(draft.bos_id) == (theirs is not CHATML)
    assert text.endswith("assistant\n" if theirs is CHATML else "<|assistant|>model\n")
    assert ("Speak plainly." in text) == system
    assert "<|assistant|>" not in text if theirs is CHATML else "<|user|>" not in text
    assert [text.count(f"question {turn}:") for turn in range(12)] == [1] * 12


def test_a_draft_without_a_template_sees_the_targets_text():
    target, draft = tokenizer(CHATML), tokenizer(None)
    ids = target.chat(chat(2, system=True))
    assert draft.decode(drafts_context(target, draft, ids), skip_special=False) == target.decode(
        ids, skip_special=False
    )


def test_what_follows_the_prompt_follows_in_the_drafts_template_too():
    target, draft = tokenizer(CHATML), tokenizer(GEMMA)
    ids = target.chat(chat(3, system=True))
    context = drafts_context(target, draft, ids + target.encode_part("the quick"), prompt_length=len(ids))
    assert draft.decode(context, skip_special=False).endswith("<|assistant|>model\nthe quick")


def drafts_context(target: Tokenizer, draft: Tokenizer, ids: list[int], prompt_length: int | None = None) -> list[int]:
    """The ids that a draft is given for the target's."""
    ours, theirs = TokenizerVocabulary(target), TokenizerVocabulary(draft)
    typist = Typist(theirs.size)
    translating = TranslatingDraft(
        typist, theirs, ours, strategy=Strategy.STRING, counterparts=Counterparts(ours, theirs), ratio=1.0,
        reader=ConversationReader(target),
    )  # fmt: skip
    context = IdLog(ids).context("r", agreed=0, prompt_length=prompt_length or len(ids))
    translating.draft([DraftJob(context, 0, 0, 1, False, 0.7, SamplingParams(temperature=0.0))])
    return list(typist.logs["r"].ids)
