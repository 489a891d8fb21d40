"""Text to token ids and back, over the `tokenizers` library alone: no torch, no transformers, loaded in milliseconds.

Chats are rendered the way transformers renders them (same Jinja environment, same variables), so that ids equal those
of its `apply_chat_template`. Ids become text byte by byte: what a token adds to the text depends on nothing but itself
and, for the very first one, on where it stands. So streaming is linear, and half a character is never shown.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers

from duo_ray.types import DuoRayError

if TYPE_CHECKING:
    import jinja2

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

_CLEANED = (
    (" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"), (" n't", "n't"), (" 'm", "'m"),
    (" do not", " don't"), (" 's", "'s"), (" 've", "'ve"), (" 're", "'re"),
)  # fmt: skip
"""What the WordPiece decoder of the `tokenizers` library calls clean-up, token by token."""

_PLAIN_ROLES = "{% for message in messages %}{{ message.content }}\n{% endfor %}"


class TokenizerError(DuoRayError):
    """Tokenizer files that cannot be used, or messages a chat template refuses."""


class Tokenizer:
    """The tokenizer of a model directory.

    Attributes:
        vocab_size: the largest token id plus one, or as many as the model has rows; ids from here on are padding of
            the embedding, or tokens that the model does not know (Gemma 3's tokenizer has one for images).
        bos_id: the id that starts a text, None where the model has none.
        eos_id: the id that ends a text, None where the model has none.
        eos_ids: ids that end an answer.
        joining: what its decoder does.
        has_chat_template: False for base models; `chat` then only joins the messages.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special: Mapping[str, str] | None = None,
        eos_ids: Iterable[int] = (),
        chat_template: str | None = None,
        add_bos: bool | None = None,
        rows: int | None = None,
    ) -> None:
        """Wrap a tokenizer of the `tokenizers` library.

        Args:
            special: texts of bos_token, eos_token, ... as chat templates see them.
            eos_ids: ids that end an answer, beside that of eos_token.
            add_bos: whether plain text starts with BOS; None: as the tokenizer itself does.
            rows: of the model's embedding, where that is known.

        Raises:
            TokenizerError: a decoder that joins tokens in a way not known here.
        """
        self._backend = backend
        self._special = dict(special or {})
        self._template = chat_template
        self._add_bos = add_bos
        added = backend.get_added_tokens_decoder()
        self._hidden = frozenset(token for token, entry in added.items() if entry.special)
        self._pieces: dict[int, bytes] = {}
        decoder = backend.decoder
        if decoder is None:
            raise TokenizerError("tokenizer.json has no decoder: it cannot make text of tokens")
        self.joining = Joining.of(json.loads(decoder.__getstate__()))
        size = max([backend.get_vocab_size(with_added_tokens=False), *(token + 1 for token in added)])
        self.vocab_size = size if rows is None else min(size, rows)
        self.bos_id = self._id_of("bos_token")
        self.eos_id = self._id_of("eos_token")
        self.eos_ids = frozenset({*eos_ids, *([] if self.eos_id is None else [self.eos_id])})

    @classmethod
    def load(cls, path: str | Path, *, rows: int | None = None) -> Tokenizer:
        """Read tokenizer.json and what stands beside it in a model directory; `rows`: of that model's embedding.

        Raises:
            TokenizerError: no tokenizer.json, or one that cannot be read.
        """
        directory = Path(path)
        file = directory / "tokenizer.json"
        if not file.is_file():
            raise TokenizerError(
                f"{directory} has no tokenizer.json; make one with transformers:"
                " AutoTokenizer.from_pretrained(directory).save_pretrained(directory)"
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise TokenizerError(f"{file} cannot be read: {error}") from None
        backend.no_truncation()
        backend.no_padding()
        config = _read_json(directory / "tokenizer_config.json")
        backend.add_tokens(_missing_tokens(backend, config))
        generation = _read_json(directory / "generation_config.json") or _read_json(directory / "config.json")
        return cls(
            backend,
            special=_special_tokens(config),
            eos_ids=_as_ids(generation.get("eos_token_id")),
            chat_template=_chat_template(directory, config),
            add_bos=config.get("add_bos_token"),
            rows=rows,
        )

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def encode(self, text: str) -> list[int]:
        """Ids of a plain text, special tokens in it parsed; BOS first where the model wants it, never twice."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=True).ids
        bos = self.bos_id
        if bos is None:
            return ids
        start = 0
        while start < len(ids) and ids[start] == bos:
            start += 1
        wanted = bool(start) if self._add_bos is None else self._add_bos or text.startswith(self._special["bos_token"])
        return [bos] * wanted + ids[start:]

    def encode_part(self, text: str) -> list[int]:
        """Ids of a text that continues another: special tokens in it parsed, none added."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    def encode_spelled(self, text: str) -> list[int]:
        """Ids of a text that means itself: names of special tokens in it are spelled out, none is added."""
        self._backend.encode_special_tokens = True
        try:
            return self.encode_part(text)
        finally:
            self._backend.encode_special_tokens = False

    def chat(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> list[int]:
        """Ids of a conversation, ready for the assistant's answer.

        Without a chat template the contents are joined by line breaks and encoded as plain text.

        Args:
            messages: {"role": ..., "content": ...} each.
            variables: more of what the template reads, such as `tools` or `enable_thinking`.

        Raises:
            TokenizerError: no messages, or the template refuses them.
        """
        text = self.render(messages, **variables)
        return self.encode(text) if self._template is None else self.encode_part(text)

    def render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """The text of a conversation by the chat template; see `chat`."""
        return render_chat(self._template or _PLAIN_ROLES, messages, {**self._special, **variables})

    def piece(self, token: int) -> bytes:
        """The bytes a token adds to a text; empty for an id the vocabulary does not have."""
        if token not in self._pieces:
            text = self._backend.id_to_token(token) if token >= 0 else None
            self._pieces[token] = b"" if text is None else self.joining.piece(text)
        return self._pieces[token]

    def text_of(self, token: int) -> str | None:
        """A token as the vocabulary spells it (`Ġthe`, `▁the`); None for an id it does not have."""
        text: str | None = self._backend.id_to_token(token)
        return text

    def is_special(self, token: int) -> bool:
        """Whether a token is a control token such as EOS, which `decode` leaves out by default."""
        return token in self._hidden

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of `ids`; bytes that are not UTF-8 become U+FFFD."""
        stream = self.stream(skip_special)
        return "".join([stream.push(token) for token in ids] + [stream.flush()])

    def stream(self, skip_special: bool = True) -> Detokenizer:
        """A decoder for ids that come one after the other."""
        return Detokenizer(self, skip_special)

    def _id_of(self, name: str) -> int | None:
        text = self._special.get(name)
        return None if text is None else self._backend.token_to_id(text)


def render_chat(template: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
    """The text of a conversation by a chat template (Jinja); see `Tokenizer.chat`."""
    import jinja2  # noqa: PLC0415 (50 ms that plain text does without)

    if not messages:
        raise TokenizerError("messages is empty: give at least one")
    offered = {"tools": None, "documents": None, "add_generation_prompt": True, **variables}
    try:
        # transformers drops keys that are null before a template sees them.
        plain = [{key: value for key, value in message.items() if value is not None} for message in messages]
        return _compile(template).render(messages=plain, **offered)
    except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
        raise TokenizerError(f"the model's chat template refuses these messages: {error}") from None


class Detokenizer:
    """Ids one by one to text; all that was returned, joined, is `Tokenizer.decode` of all ids."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._joining = tokenizer.joining
        self._spaces = tokenizer.joining.strip
        self._first = True
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The text that became final with this token: at most 3 bytes of an unfinished character wait for the next."""
        if self._skip_special and self._tokenizer.is_special(token):
            return ""
        piece = self._tokenizer.piece(token)
        if self._first and self._joining.first_without_spaces:
            piece = piece.replace(b" ", b"")
        self._first = False
        if self._spaces and piece:
            cut = min(self._spaces, len(piece) - len(piece.lstrip(b" ")))
            piece = piece[cut:]
            self._spaces = 0 if piece else self._spaces - cut
        return self._utf8.decode(piece)

    def flush(self) -> str:
        """What is left at the end: U+FFFD for a character that was never finished."""
        return self._utf8.decode(b"", final=True)


@dataclass(frozen=True, slots=True)
class Joining:
    """How a tokenizer's decoder makes text of tokens, as far as the decoders of language models differ."""

    byte_level: bool = False
    """Each character of a token stands for one byte (GPT-2)."""
    byte_tokens: bool = False
    """A token <0xE2> stands for one byte."""
    replacements: tuple[tuple[str, str], ...] = ()
    """(from, to) within every token: sentencepiece writes a space as U+2581."""
    first_without_spaces: bool = False
    """The first token loses its spaces."""
    strip: int = 0
    """The text loses up to this many spaces at its start."""
    inside_word: str = ""
    """WordPiece: a token that begins with this goes on with a word, any other one starts a new word."""
    clean: bool = False
    """WordPiece: no space before punctuation and in contractions."""

    def piece(self, token: str) -> bytes:
        """The bytes one token stands for."""
        if self.inside_word:
            token = token[len(self.inside_word) :] if token.startswith(self.inside_word) else f" {token}"
            for old, new in _CLEANED if self.clean else ():
                token = token.replace(old, new)
            return token.encode()
        if self.byte_level:
            table = _byte_of_character()
            known = [table.get(character) for character in token]
            return token.encode() if None in known else bytes(byte for byte in known if byte is not None)
        for old, new in self.replacements:
            token = token.replace(old, new)
        if self.byte_tokens and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            with suppress(ValueError):
                return bytes.fromhex(token[3:5])
        return token.encode()

    @classmethod
    def of(cls, decoder: Mapping[str, Any]) -> Joining:
        """Read the decoder section of a tokenizer.json.

        Raises:
            TokenizerError: a kind of decoder not known here.
        """
        found: dict[str, Any] = {}
        for step in decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]:
            match step:
                case {"type": "ByteLevel"}:
                    found["byte_level"] = True
                case {"type": "ByteFallback"}:
                    found["byte_tokens"] = True
                case {"type": "Replace", "pattern": {"String": old}, "content": new}:
                    found["replacements"] = (*found.get("replacements", ()), (old, new))
                case {"type": "Metaspace", "replacement": old}:
                    found["replacements"] = (*found.get("replacements", ()), (old, " "))
                    found["first_without_spaces"] = step.get("prepend_scheme", "always") != "never"
                case {"type": "Strip", "content": " ", "start": start, "stop": 0}:
                    found["strip"] = start
                case {"type": "WordPiece", "prefix": prefix, "cleanup": clean}:
                    found |= {"inside_word": prefix, "clean": clean, "first_without_spaces": True}
                case {"type": "Fuse"}:
                    continue
                case _:
                    raise TokenizerError(
                        f"tokenizer.json: its decoder {json.dumps(step)} is not one of a language model known here"
                        " (ByteLevel, ByteFallback, Replace, Metaspace, WordPiece, Fuse, Strip)"
                    )
        return cls(**found)


@cache
def _byte_of_character() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes stand for themselves, the others for the characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


@cache
def _compile(template: str) -> jinja2.Template:
    """The environment of `transformers.utils.chat_template_utils`; templates are foreign code, so it is a sandbox."""
    import jinja2.ext  # noqa: PLC0415 (as above)
    import jinja2.sandbox  # noqa: PLC0415

    class Generation(jinja2.ext.Extension):
        """{% generation %} marks the assistant's part for training; here it only shows its content."""

        tags = {"generation"}  # noqa: RUF012 (as Jinja declares it)

        def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)  # Jinja's own escapes HTML

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(template)


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object; empty where the file is missing."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise TokenizerError(f"{path} is not JSON: {error}") from None
    return content if isinstance(content, dict) else {}


def _chat_template(directory: Path, config: Mapping[str, Any]) -> str | None:
    file = directory / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template if isinstance(template, str) else None


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    texts = {name: _content(config[name]) for name in _SPECIAL_NAMES if config.get(name) is not None}
    return {name: text for name, text in texts.items() if text is not None}


def _content(token: object) -> str | None:
    """A token stands in tokenizer_config.json as its text or as a mapping that holds it."""
    text = token.get("content") if isinstance(token, Mapping) else token
    return text if isinstance(text, str) else None


def _missing_tokens(backend: tokenizers.Tokenizer, config: Mapping[str, Any]) -> list[tokenizers.AddedToken]:
    """Tokens that only tokenizer_config.json lists, in the order of their ids."""
    entries = sorted(config.get("added_tokens_decoder", {}).items(), key=lambda item: int(item[0]))
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return [
        tokenizers.AddedToken(entry["content"], **{flag: entry[flag] for flag in flags if flag in entry})
        for _, entry in entries
        if backend.token_to_id(entry["content"]) is None
    ]


def _as_ids(value: object) -> tuple[int, ...]:
    """eos_token_id is a number, a list of them, or missing."""
    return (value,) if isinstance(value, int) else tuple(value) if isinstance(value, list) else ()
