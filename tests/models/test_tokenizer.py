"""Text to ids and back: as transformers does it, one token at a time, and never half a character."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, processors

from duo_ray.models.catalog import resolve_target
from duo_ray.models.tokenizer import Tokenizer, TokenizerError
from tests.models.tokenizers import byte_level, metaspace, sentencepiece

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)

BACKENDS: dict[str, Backend] = {
    "byte level": byte_level(),
    "sentencepiece": sentencepiece(),
    "sentencepiece without start": sentencepiece(start=False),
    "metaspace": metaspace(),
}


def save(directory: Path, backend: Backend, **config: Any) -> Path:
    backend.save(str(directory / "tokenizer.json"))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(named | config))
    return directory


def streamed(tokenizer: Tokenizer, ids: list[int]) -> str:
    stream = tokenizer.stream()
    return "".join([stream.push(token) for token in ids] + [stream.flush()])


class TestStream:
    @given(text=TEXT)
    @settings(deadline=None)
    def test_byte_level_gives_any_text_back(self, text: str) -> None:
        tokenizer = Tokenizer(BACKENDS["byte level"])
        assert streamed(tokenizer, BACKENDS["byte level"].encode(text, add_special_tokens=False).ids) == text

    @pytest.mark.parametrize("kind", BACKENDS)
    @given(text=TEXT | st.text("ab \u2581", max_size=20))
    @settings(deadline=None)
    def test_text_is_what_the_library_decodes_at_once(self, kind: str, text: str) -> None:
        backend = BACKENDS[kind]
        ids = backend.encode(text, add_special_tokens=False).ids
        assert streamed(Tokenizer(backend), ids) == backend.decode(ids)

    @given(ids=st.lists(st.integers(0, 399), max_size=30))
    @settings(max_examples=300, deadline=None)
    def test_any_byte_level_ids_give_what_the_library_decodes(self, ids: list[int]) -> None:
        backend = BACKENDS["byte level"]
        assert streamed(Tokenizer(backend), ids) == backend.decode(ids)

    @given(ids=st.lists(st.integers(0, 275), max_size=12))
    @settings(max_examples=300, deadline=None)
    def test_any_sentencepiece_ids_give_what_the_library_decodes_where_they_are_utf8(self, ids: list[int]) -> None:
        backend = BACKENDS["sentencepiece"]
        expected = backend.decode(ids)
        if "\ufffd" not in expected:
            assert streamed(Tokenizer(backend), ids) == expected

    @pytest.mark.parametrize("kind", ["byte level", "sentencepiece"])
    def test_half_a_character_is_held_back(self, kind: str) -> None:
        backend = BACKENDS[kind]
        stream = Tokenizer(backend).stream()
        ids = [backend.token_to_id(token) for token in byte_tokens(kind, "🙂".encode())]
        assert [stream.push(token) for token in ids] == ["", "", "", "🙂"]

    @pytest.mark.parametrize("kind", ["byte level", "sentencepiece"])
    def test_broken_bytes_do_not_hold_the_text_after_them(self, kind: str) -> None:
        backend = BACKENDS[kind]
        stream = Tokenizer(backend).stream()
        broken = [backend.token_to_id(token) for token in byte_tokens(kind, b"\xf0\x9f" * 50)]
        pushed = "".join(stream.push(token) for token in broken)
        assert len(pushed) == 49
        assert stream.push(backend.token_to_id("a")) == "\ufffda"

    def test_an_unfinished_character_comes_out_at_the_end(self) -> None:
        backend = BACKENDS["byte level"]
        stream = Tokenizer(backend).stream()
        assert stream.push(backend.token_to_id(byte_tokens("byte level", b"\xe2")[0])) == ""
        assert stream.flush() == "\ufffd"

    def test_special_tokens_are_shown_on_demand_only(self) -> None:
        tokenizer = Tokenizer(BACKENDS["byte level"])
        ids = tokenizer.encode_part("<|user|>the</s>")
        assert tokenizer.decode(ids) == "the"
        assert tokenizer.decode(ids, skip_special=False) == "<|user|>the</s>"

    def test_an_id_beyond_the_vocabulary_adds_nothing(self) -> None:
        tokenizer = Tokenizer(BACKENDS["byte level"])
        assert tokenizer.decode([tokenizer.vocab_size, 10**9, -1]) == ""


def byte_tokens(kind: str, data: bytes) -> list[str]:
    """The tokens of single bytes."""
    if kind == "sentencepiece":
        return [f"<0x{byte:02X}>" for byte in data]
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(0x100 + others.index(byte)) for byte in data]


class TestEncode:
    def with_bos(self) -> Backend:
        backend = byte_level()
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
        return backend

    def test_bos_comes_first_and_once(self, tmp_path: Path) -> None:
        tokenizer = Tokenizer.load(save(tmp_path, self.with_bos()))
        once = tokenizer.encode("the fox")
        assert once[0] == tokenizer.bos_id == 1
        assert tokenizer.encode("<s>the fox") == once
        assert tokenizer.encode("<s><s>the fox") == once

    def test_the_configuration_may_ask_for_bos(self, tmp_path: Path) -> None:
        tokenizer = Tokenizer.load(save(tmp_path, byte_level(), add_bos_token=True))
        assert tokenizer.encode("the")[0] == 1

    def test_the_configuration_may_forbid_bos(self, tmp_path: Path) -> None:
        tokenizer = Tokenizer.load(save(tmp_path, self.with_bos(), add_bos_token=False))
        assert 1 not in tokenizer.encode("the")

    def test_a_bos_in_the_text_stays_where_none_is_added(self, tmp_path: Path) -> None:
        tokenizer = Tokenizer.load(save(tmp_path, byte_level()))
        assert tokenizer.encode("<s>the")[0] == 1

    def test_a_part_gets_no_bos(self, tmp_path: Path) -> None:
        tokenizer = Tokenizer.load(save(tmp_path, self.with_bos()))
        assert 1 not in tokenizer.encode_part("the")

    @pytest.mark.parametrize(
        ("generation", "config", "expected"),
        [
            ({"eos_token_id": [2, 3]}, {}, {2, 3}),
            ({"eos_token_id": 3}, {}, {2, 3}),
            ({}, {"eos_token_id": 4}, {2, 4}),
            ({}, {}, {2}),
        ],
    )
    def test_eos_ids_come_from_all_files(
        self, tmp_path: Path, generation: dict[str, Any], config: dict[str, Any], expected: set[int]
    ) -> None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert Tokenizer.load(save(tmp_path, byte_level())).eos_ids == expected

    def test_tokens_that_only_the_configuration_lists_are_known(self, tmp_path: Path) -> None:
        backend = byte_level()
        extra = backend.get_vocab_size()
        added = {str(extra): {"content": "<|extra|>", "special": True}}
        tokenizer = Tokenizer.load(save(tmp_path, backend, added_tokens_decoder=added))
        assert tokenizer.encode_part("<|extra|>") == [extra]
        assert tokenizer.vocab_size == extra + 1


TEMPLATES = {
    "chatml": "{% for m in messages %}{{ '<|user|>' + m['role'] + '\n' + m['content'] + '</s>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}",
    "bos": "{{ bos_token }}{% for m in messages %}{{ m.content | trim }}{{ eos_token }}{% endfor %}",
    "whitespace": "{% for m in messages %}\n    {% if m.role == 'user' %}\n  <|user|>{{ m.content }}\n    {% endif %}\n"
    "{% endfor %}\n",
    "json": "{% for m in messages %}{{ m | tojson }}{{ m | tojson(indent=2) }}{% endfor %}{{ tools }}",
    "date": "{{ strftime_now('%Y') }}{{ messages[0].content }}",
    "loops": "{% set ns = namespace(n=0) %}{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
    "{% set ns.n = ns.n + 1 %}{{ m.content }}{% endfor %}{{ ns.n }}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
}
MESSAGES = [
    {"role": "system", "content": "the <b>fox</b> & dog"},
    {"role": "user", "content": " quick 日本 👍🏽 </s> "},
    {"role": "assistant", "content": "brown", "name": None},
]


class TestChat:
    @pytest.mark.parametrize("template", TEMPLATES)
    @pytest.mark.parametrize("in_file", [True, False])
    def test_ids_are_those_of_transformers(self, tmp_path: Path, template: str, in_file: bool) -> None:
        from transformers import AutoTokenizer

        if in_file:
            save(tmp_path, byte_level())
            (tmp_path / "chat_template.jinja").write_text(TEMPLATES[template])
        else:
            save(tmp_path, byte_level(), chat_template=TEMPLATES[template])
        reference = AutoTokenizer.from_pretrained(tmp_path)
        expected = reference.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
        tokenizer = Tokenizer.load(tmp_path)
        assert tokenizer.has_chat_template
        assert tokenizer.chat(MESSAGES) == list(expected)

    def test_the_default_is_taken_from_several_templates(self, tmp_path: Path) -> None:
        named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "{{ messages[0].content }}"}]
        tokenizer = Tokenizer.load(save(tmp_path, byte_level(), chat_template=named))
        assert tokenizer.render([{"role": "user", "content": "fox"}]) == "fox"

    def test_a_refusal_of_the_template_is_passed_on(self, tmp_path: Path) -> None:
        save(tmp_path, byte_level(), chat_template="{{ raise_exception('roles must alternate') }}")
        with pytest.raises(TokenizerError, match="roles must alternate"):
            Tokenizer.load(tmp_path).chat([{"role": "user", "content": "x"}])

    def test_a_message_without_content_is_a_refusal(self, tmp_path: Path) -> None:
        save(tmp_path, byte_level(), chat_template="{{ messages[0].content + 'x' }}")
        with pytest.raises(TokenizerError, match="chat template refuses"):
            Tokenizer.load(tmp_path).chat([{"role": "user"}])

    def test_a_template_cannot_reach_into_python(self, tmp_path: Path) -> None:
        save(tmp_path, byte_level(), chat_template="{{ messages.__class__.__mro__ }}")
        with pytest.raises(TokenizerError, match="chat template refuses"):
            Tokenizer.load(tmp_path).chat([{"role": "user", "content": "x"}])

    def test_no_messages_is_an_error(self, tmp_path: Path) -> None:
        with pytest.raises(TokenizerError, match="messages is empty"):
            Tokenizer.load(save(tmp_path, byte_level())).chat([])

    def test_without_a_template_the_contents_are_plain_text(self, tmp_path: Path) -> None:
        tokenizer = Tokenizer.load(save(tmp_path, byte_level(), add_bos_token=True))
        assert not tokenizer.has_chat_template
        ids = tokenizer.chat([{"role": "user", "content": "the"}, {"role": "assistant", "content": "fox"}])
        assert tokenizer.decode(ids) == "the\nfox\n"
        assert ids[0] == 1

    def test_variables_reach_the_template(self, tmp_path: Path) -> None:
        save(tmp_path, byte_level(), chat_template="{{ enable_thinking }}")
        text = Tokenizer.load(tmp_path).render([{"role": "user", "content": "x"}], enable_thinking=False)
        assert text == "False"


class TestLoad:
    def test_no_tokenizer_json_says_how_to_get_one(self, tmp_path: Path) -> None:
        with pytest.raises(TokenizerError, match=r"has no tokenizer\.json; make one"):
            Tokenizer.load(tmp_path)

    def test_a_broken_tokenizer_json_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "tokenizer.json").write_text("{")
        with pytest.raises(TokenizerError, match=r"tokenizer\.json cannot be read"):
            Tokenizer.load(tmp_path)

    @pytest.mark.parametrize("make", [decoders.BPEDecoder, decoders.CTC])
    def test_a_decoder_of_no_language_model_is_refused(self, make: Callable[[], Any]) -> None:
        backend = byte_level()
        backend.decoder = make()
        with pytest.raises(TokenizerError, match="is not one of a language model known here"):
            Tokenizer(backend)

    def test_loading_imports_neither_torch_nor_transformers(self) -> None:
        program = (
            "import sys, duo_ray.models.tokenizer; print({'torch', 'transformers', 'jinja2', 'ray'} & set(sys.modules))"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == "set()"


@pytest.mark.models
class TestDemo:
    @pytest.fixture
    def directory(self) -> Path:
        return resolve_target("demo").tokenizer_path

    def test_chat_ids_are_those_of_transformers(self, directory: Path) -> None:
        from transformers import AutoTokenizer

        messages = [{"role": "user", "content": "Count to 12: ½ ² 👍🏽"}]
        reference = AutoTokenizer.from_pretrained(directory)
        expected = reference.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert Tokenizer.load(directory).chat(messages) == list(expected)

    def test_chat_markers_are_single_tokens(self, directory: Path) -> None:
        tokenizer = Tokenizer.load(directory)
        assert tokenizer.encode_part("<|im_start|>") == [1]
        assert tokenizer.eos_ids == {2}
