"""One request in two vocabularies: the target's ids, the draft's ids for the same text, and where each ends in it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence

from duo_ray.core.context import IdLog, common_prefix
from duo_ray.models.vocabulary import Counterparts, Vocabulary
from duo_ray.types import Context, Ids

_BACK = 8
"""Draft tokens that are looked back to find the start of a word: beyond that an encoding may begin inside one."""

_SPECIAL = b"\xff"
"""Stands around the name of a special token in the text: no UTF-8 holds this byte."""

_SPACES = b" \t\r\n"


class Alignment:
    """The text of one request as both models see it, changed only where it changed.

    Offsets count bytes of the target's text. Ids of the draft are kept as far as the text they stand for is still
    there, those it drafted itself included; what follows is encoded from the start of a word on. So a step costs as
    much as its own tokens, however long the text is.
    """

    def __init__(
        self,
        target: Vocabulary,
        draft: Vocabulary,
        counterparts: Counterparts,
        conversation: Callable[[Ids], list[int] | None],
    ) -> None:
        """`conversation` gives the draft's ids of a prompt that is a chat by the target's template, None otherwise."""
        self._target, self._draft, self._counterparts = target, draft, counterparts
        self._conversation = conversation
        self._log = IdLog()
        self._draft_log = IdLog()
        self._text = bytearray()
        self._ends: list[int] = []  # of the target's ids in the text
        self._draft_ends: list[int] = []
        self._covered = 0  # the text up to here is in the draft's ids
        self._prompt_length = self._draft_prompt_length = self._agreed = 0
        self.is_chat = False
        self.waits = False
        """Whether the context is only a part of the prompt: that is translated as a whole, for its end tells a chat."""
        self.tails: Sequence[Ids] = ()
        """What the draft wrote after the last context, every sequence with its head."""

    def knows(self, context: Context) -> bool:
        """Whether the prefix that `context` refers to is held."""
        return context.agreed <= len(self._log) and self._log.digest(context.agreed) == context.digest

    def receive(self, context: Context) -> None:
        """Become what `context`, whose prefix is known, describes."""
        dropped = self._log.ids[context.agreed :]
        self._log.receive(context)
        kept = context.agreed + common_prefix(dropped, list(context.ids))
        self.waits = len(self._log) < context.prompt_length
        if not self.waits:
            if kept < context.prompt_length or not self._ends:
                self._begin(context.prompt_length)
            else:
                self._go_on(kept)
        self.tails = ()

    def draft_context(self, request_id: str, *, whole: bool = False) -> Context:
        """The context in the draft's ids; `whole`: without reference to those sent before."""
        agreed = 0 if whole else self._agreed
        return self._draft_log.context(request_id, agreed=agreed, prompt_length=self._draft_prompt_length)

    @property
    def lengths(self) -> tuple[int, int]:
        """Ids of the context: the target's and the draft's."""
        return len(self._log), len(self._draft_log)

    @property
    def answer_lengths(self) -> tuple[int, int]:
        """Ids behind the prompt: the target's and the draft's."""
        return len(self._log) - self._prompt_length, len(self._draft_log) - self._draft_prompt_length

    @property
    def draft_ids(self) -> list[int]:
        """The context in the draft's ids, of which `draft_prompt_length` are the prompt's."""
        return self._draft_log.ids

    @property
    def draft_prompt_length(self) -> int:
        return self._draft_prompt_length

    @property
    def ends(self) -> tuple[Sequence[int], Sequence[int]]:
        """Where each of the target's ids, and each of the draft's, ends in the text."""
        return self._ends, self._draft_ends

    @property
    def complete(self) -> bool:
        """Whether the draft sees all of the text: a draft without byte tokens waits for the rest of a character."""
        return self._covered == len(self._text)

    def following(self, tail: Ids) -> tuple[bytes, int | None]:
        """The text that drafted ids add to the context, and the special token that ends it, if one does.

        Empty when they contradict the part of the context that the draft has not seen.
        """
        text, special = b"", None
        for token in tail:
            if self._draft.is_special(token):
                special = token
                break
            text += self._draft.piece(token)
        unseen = bytes(self._text[self._covered :])
        return (text[len(unseen) :], special) if text.startswith(unseen) else (b"", None)

    # --- the text and the ids

    def _begin(self, prompt_length: int) -> None:
        self._append(0)
        self._prompt_length = prompt_length
        prompt = tuple(self._log.ids[:prompt_length])
        prompt_end = self._ends[prompt_length - 1] if prompt_length else 0
        ids = self._conversation(prompt)
        self.is_chat = ids is not None
        if ids is not None:
            # By another template the text is another one: only its end has a counterpart.
            ends = [prompt_end] * len(ids)
        else:
            start = self._ends[0] if prompt[:1] == (self._target.bos,) else 0
            ids, ends = self._encode(start, prompt_end, opening=True)
            first = self._draft.bos if ids or self._draft.bos is not None else next(iter(self._draft.ends), 0)
            if first is not None:
                ids, ends = [first, *ids], [start, *ends]
        self._draft_prompt_length = len(ids)
        rest, rest_ends = self._encode(prompt_end, len(self._text))
        self._replace(0, ids + rest, ends + rest_ends, len(self._draft_log))

    def _go_on(self, kept: int) -> None:
        before = len(self._draft_log)
        start = self._ends[kept - 1] if kept else 0
        old = self._text[start:]
        self._append(kept)
        unchanged = start + _shared_length(old, self._text[start:])
        cut = bisect_right(self._draft_ends, unchanged)
        if cut == before and self._covered <= unchanged:
            tail, ends = max((self._matching(tail) for tail in self.tails), key=_number, default=((), []))
            self._draft_log.extend(tail)
            self._draft_ends += ends
            cut += len(tail)
        if self._end(cut) < len(self._text):
            cut = self._start_of_word(cut)
            ids, ends = self._encode(self._end(cut), len(self._text))
        else:
            self._covered = len(self._text)
            ids, ends = [], []
        self._replace(cut, ids, ends, before)

    def _append(self, kept: int) -> None:
        """Bring text and ends up to date with the target's ids, of which `kept` are in them."""
        del self._ends[kept:]
        del self._text[self._ends[-1] if kept else 0 :]
        for token in self._log.ids[kept:]:
            piece = self._target.piece(token)
            if self._target.is_special(token):
                piece = _SPECIAL + piece + _SPECIAL
            elif self._target.drops_first_space and len(self._ends) == (self._log.ids[0] == self._target.bos):
                piece = piece.removeprefix(b" ")
            self._text += piece
            self._ends.append(len(self._text))

    def _replace(self, cut: int, ids: list[int], ends: list[int], before: int) -> None:
        """Put `ids` in the place of the draft's ids from `cut` on, of which the last call had `before`."""
        removed = self._draft_log.ids[cut:before]
        self._draft_log.crop(cut)
        self._draft_log.extend(ids)
        self._draft_ends[cut:] = ends
        self._agreed = min(cut, before) + common_prefix(removed, ids)

    def _end(self, count: int) -> int:
        """Where the first `count` ids of the draft end in the text."""
        return self._draft_ends[count - 1] if count else 0

    def _matching(self, tail: Ids) -> tuple[Ids, list[int]]:
        """The first of the drafted ids that say what the text says, and where each ends."""
        at, ends = self._covered, []
        for token in tail:
            piece = self._draft.piece(token)
            if self._draft.is_special(token):
                counterpart = int(self._counterparts.to_target[token])
                piece = _SPECIAL + (self._target.piece(counterpart) if counterpart >= 0 else piece) + _SPECIAL
            if not piece or not self._text.startswith(piece, at):
                break
            at += len(piece)
            ends.append(at)
        return tail[: len(ends)], ends

    def _start_of_word(self, cut: int) -> int:
        """How many of the first `cut` draft ids to keep so that the next one begins a word, if that is not far."""
        for count in range(cut, max(cut - _BACK, self._draft_prompt_length - 1), -1):
            at = self._end(count)
            apart = count == len(self._draft_ends) or self._draft_ends[count] > at
            if apart and (at == 0 or self._text[at - 1] == _SPECIAL[0] or self._is_space(at) > self._is_space(at - 1)):
                return count
        return cut

    def _is_space(self, at: int) -> bool:
        return self._text[at] in _SPACES

    # --- encoding for the draft

    def _encode(self, start: int, end: int, *, opening: bool = False) -> tuple[list[int], list[int]]:
        """Draft ids of the text from `start` to `end`, and where each ends."""
        ids: list[int] = []
        ends: list[int] = []
        self._covered = start
        for special, run_end in self._runs(start, end):
            if special is None:
                found, found_ends = self._encode_run(bytes(self._text[self._covered : run_end]), opening=opening)
            else:
                found = self._counterpart(special)
                found_ends = [run_end] * len(found)
                self._covered = run_end
            ids += found
            ends += found_ends
            opening = False
        return ids, ends

    def _runs(self, start: int, end: int) -> Iterator[tuple[int | None, int]]:
        """The special tokens and the runs of text between them: (its id or None, where it ends)."""
        index = bisect_right(self._ends, start)
        run = start
        while index < len(self._ends) and self._ends[index] <= end:
            token = self._log.ids[index]
            if self._target.is_special(token):
                before = self._ends[index - 1] if index else 0
                if before > run:
                    yield None, before
                yield token, self._ends[index]
                run = self._ends[index]
            index += 1
        if end > run:
            yield None, end

    def _counterpart(self, special: int) -> list[int]:
        """A special token of the target in the draft's ids."""
        if special in self._counterparts.to_draft:
            return [self._counterparts.to_draft[special]]
        if special in self._target.ends and self._draft.ends:
            return [self._draft.ends[0]]
        if special == self._target.bos:
            return []
        return self._draft.continuation(self._target.piece(special).decode(errors="replace"))

    def _encode_run(self, run: bytes, *, opening: bool) -> tuple[list[int], list[int]]:
        ids: list[int] = []
        ends: list[int] = []
        for text, raw in _characters(run):
            end = self._covered + len(raw)
            if text:
                found = (self._draft.opening if opening else self._draft.continuation)(text)
                ends += self._ends_of(found, raw, self._covered)
            else:
                found = [self._counterparts.draft_bytes[byte] for byte in raw if byte in self._counterparts.draft_bytes]
                if not found and end == len(self._text):
                    break  # the rest of the character may come
                ends += self._ends_of(found, raw, self._covered)
            ids += found
            self._covered = end
            opening = False
        return ids, ends

    def _ends_of(self, ids: Sequence[int], raw: bytes, start: int) -> list[int]:
        """Where each id ends. When they do not say exactly what the text says, only the end of all is known."""
        pieces = [self._draft.piece(token) for token in ids]
        said = b"".join(pieces)
        if said == b" " + raw:
            start -= 1  # the space that some vocabularies put before a text
        elif said != raw:
            return [start + len(raw)] * len(ids)
        ends = []
        for piece in pieces:
            start += len(piece)
            ends.append(start)
        return ends


def _characters(run: bytes) -> Iterator[tuple[str, bytes]]:
    """(text, its bytes) where `run` is UTF-8, ("", bytes) where it is not."""
    while run:
        try:
            yield run.decode(), run
        except UnicodeDecodeError as error:
            if error.start:
                yield run[: error.start].decode(), run[: error.start]
            yield "", run[error.start : error.end]
            run = run[error.end :]
        else:
            return


def _shared_length(a: bytearray, b: bytearray) -> int:
    shortest = min(len(a), len(b))
    if a[:shortest] == b[:shortest]:
        return shortest
    return next(i for i in range(shortest) if a[i] != b[i])


def _number(found: tuple[Ids, list[int]]) -> int:
    return len(found[0])
