"""Answers of a target in the tokens of a student that has other ones.

The student reads and writes its own tokens of the same text; a chat is read in its own template. Where tokens of both
begin at the same byte, the target's probabilities are known for the tokens that both vocabularies have; at other
places nothing is known but the student's next token.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from duo_ray.core.context import IdLog
from duo_ray.distillation.data import Answer, Progress
from duo_ray.distillation.workspace import DistillationError
from duo_ray.models.alignment import Alignment
from duo_ray.models.conversation import ConversationReader
from duo_ray.models.tokenizer import Tokenizer
from duo_ray.models.vocabulary import Counterparts, TokenizerVocabulary
from duo_ray.types import Ids


class Translator:
    """From the target's tokens to the student's."""

    def __init__(self, target: Tokenizer, student: Tokenizer) -> None:
        self._target, self._student = TokenizerVocabulary(target), TokenizerVocabulary(student)
        self._reader = ConversationReader(target)
        self._counterparts = Counterparts(self._target, self._student)
        self._to_student = np.full(self._target.size, -1, np.int64)
        for ours, theirs in self._counterparts.to_draft.items():
            self._to_student[ours] = theirs

    def translate(self, answer: Answer) -> Answer | None:
        """The same text in the student's tokens; None where nothing of the answer is left.

        A token of the target without a counterpart keeps its place among the most probable ones, with probability 0. A
        place where no token of the target begins has probability 0 throughout.
        """
        alignment = Alignment(self._target, self._student, self._counterparts, self._conversation)
        prompt, written = answer.prompt.tolist(), answer.answer.tolist()
        log = IdLog([*prompt, *written])
        alignment.receive(log.context("", agreed=0, prompt_length=len(prompt)))
        ids = alignment.draft_ids
        ours, theirs = alignment.ends
        length = alignment.draft_prompt_length
        if length == 0 or length == len(ids):
            return None
        begins = {end: place for place, end in enumerate(ours[len(prompt) - 1 : -1])}
        top_ids = np.zeros((len(ids) - length, answer.top_ids.shape[1]), np.int32)
        top_probs = np.zeros(top_ids.shape, np.float16)
        for row, (start, end) in enumerate(pairwise(theirs[length - 1 :])):
            place = begins.get(start)
            # Of tokens that do not spell the text only where all of them end is known: the first of them begins here.
            if place is not None and end > start:
                found = self._to_student[answer.top_ids[place]]
                top_ids[row] = np.maximum(found, 0)
                top_probs[row] = np.where(found >= 0, answer.top_probs[place], 0.0)
        return Answer(np.array(ids[:length], np.int32), np.array(ids[length:], np.int32), top_ids, top_probs)

    def _conversation(self, prompt: Ids) -> list[int] | None:
        messages = self._reader.read(prompt)
        return None if messages is None else self._student.chat(messages)


def translate_answers(
    paths: Sequence[Path], folder: Path, translator: Translator, longest: int, progress: Progress
) -> list[Path]:
    """Files of the translated answers, written to `folder` where they are not there.

    Those longer than the student's context of `longest` tokens are left out.

    Raises:
        DistillationError: none is left.
    """
    folder.mkdir(exist_ok=True)
    found = []
    for done, path in enumerate(paths):
        progress("writing the answers in the student's tokens", done / len(paths))
        to = folder / path.name
        if not to.is_file():
            answer = translator.translate(Answer.load(path))
            if answer is None or len(answer.prompt) + len(answer.answer) > longest:
                continue
            answer.save(to)
        found.append(to)
    if not found:
        raise DistillationError(
            f"none of {len(paths)} answers can be had in the student's tokens within its context of {longest}: give "
            "other or shorter prompts, or another --student"
        )
    return found
