"""A student as a .gguf file: llama.cpp computes what transformers does, and reads the same tokenizer from it."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import AutoModelForCausalLM

from duo_ray.distillation.gguf_file import check_exportable, gemma_layer_types, write_gguf
from duo_ray.distillation.gguf_tokenizer import _DIGITS, _SPLIT
from duo_ray.distillation.student import Source, check_student, kept_layers, make_student
from duo_ray.distillation.workspace import DistillationError
from duo_ray.models.catalog import TargetFiles, resolve_target
from duo_ray.models.llama_cpp import LlamaCppDraft
from duo_ray.models.llama_vocabulary import LlamaVocabulary
from duo_ray.models.tokenizer import Tokenizer
from duo_ray.models.translating import examine
from duo_ray.models.vocabulary import SAMPLE, Strategy, TokenizerVocabulary
from tests.distillation.models import small_config, write_model
from tests.models.tiny_transformers import own_greedy, own_logits
from tests.models.tokenizers import byte_level, metaspace, sentencepiece

TEMPLATE = "{% for message in messages %}<|user|>{{ message.content }}{% endfor %}<|assistant|>"
CONFIGS = {
    "llama": small_config("llama", 400),
    "llama with its own head": small_config("llama", 400, tie_word_embeddings=False),
    "llama3 positions": small_config("llama3-rope", 400),
    "qwen2": small_config("qwen2", 400),
    "gemma3": small_config("gemma3-window", 400, num_hidden_layers=6, layer_types=gemma_layer_types(6)),
    "padded embedding": small_config("llama", 417),
}


@pytest.fixture
def tokenizer(tmp_path):
    return write_tokenizer(tmp_path / "tokenizer", byte_level())


def write_tokenizer(folder: Path, backend, **settings):
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps({**special, **settings}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 4]}))
    return folder


@pytest.mark.parametrize("name", CONFIGS)
def test_llama_cpp_writes_the_same_greedy_text_as_transformers(name, tokenizer, tmp_path):
    folder = write_model(tmp_path / "student", CONFIGS[name], tokenizer, sharpness=5.0)
    write_gguf(folder, None, tmp_path / "student.gguf", "student")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt = [1, 70, 71, 5, 9]
    text = [*prompt, *own_greedy(model, prompt, 60)]  # beyond the window of 16
    expected = own_logits(model, text).log_softmax(-1)[:, :400].numpy()
    with closing(LlamaCppDraft.load(tmp_path / "student.gguf", threads=1, max_context=128, slots=1)) as draft:
        found = np.array([row - np.logaddexp.reduce(row) for row in draft.logits_along(text)])[:, :400]
    assert found.argmax(-1)[len(prompt) - 1 : -1].tolist() == text[len(prompt) :]
    np.testing.assert_allclose(found, expected, atol=0.05)  # llama.cpp keeps keys and values in 16 bits


def split_first(pattern: str) -> Backend:
    """Bytes merged within what a pattern splits, as Llama 3 and Qwen 2 do."""
    backend = byte_level()
    steps = [
        pre_tokenizers.Split(Regex(pattern), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    return backend


BACKENDS = {
    "gpt2": byte_level(),
    "llama2": sentencepiece(start=True),
    "gemma": sentencepiece(start=False),
    "llama3": split_first(_SPLIT % _DIGITS["llama-bpe"]),
    "qwen2": split_first(_SPLIT % _DIGITS["qwen2"]),
}


@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
def test_the_tokenizer_is_the_same_in_llama_cpp(backend, tmp_path):
    folder = write_model(
        tmp_path / "student", small_config("llama", 400), write_tokenizer(tmp_path / "tokenizer", backend)
    )
    write_gguf(folder, None, tmp_path / "student.gguf", "student")
    ours = TokenizerVocabulary(Tokenizer.load(folder))
    chat = [{"role": "user", "content": "a cab"}]
    with LlamaVocabulary.open(tmp_path / "student.gguf") as theirs:
        for text in (SAMPLE, "abababab  a b", "12345 naïve 👍🏽 长城"):
            assert theirs.opening(text) == ours.opening(text)
        assert set(ours.ends) == {2, 4} <= set(theirs.ends)
        assert theirs.chat(chat) is not None
        assert theirs.chat(chat)[-1] == ours.chat(chat)[-1] == 4


def test_a_tokenizer_is_taken_over_from_a_gguf_as_it_is(tokenizer, tmp_path):
    folder = write_model(tmp_path / "student", small_config("llama", 400), tokenizer)
    write_gguf(folder, None, tmp_path / "first.gguf", "first")
    write_gguf(folder, tmp_path / "first.gguf", tmp_path / "second.gguf", "second")
    padded = write_model(tmp_path / "padded", small_config("llama", 410), tokenizer)
    write_gguf(padded, tmp_path / "first.gguf", tmp_path / "third.gguf", "third")
    with (
        LlamaVocabulary.open(tmp_path / "first.gguf") as first,
        LlamaVocabulary.open(tmp_path / "second.gguf") as second,
    ):
        assert [first.piece(i) for i in range(400)] == [second.piece(i) for i in range(400)]
        assert first.opening(SAMPLE) == second.opening(SAMPLE)
        assert first.chat([{"role": "user", "content": "a"}]) == second.chat([{"role": "user", "content": "a"}])
    with LlamaVocabulary.open(tmp_path / "third.gguf") as third:
        assert (third.size, third.piece(405)) == (410, b"")


def test_it_opens_in_llama_cpp_python(tokenizer, tmp_path):
    folder = write_model(tmp_path / "student", small_config("llama", 400), tokenizer)
    write_gguf(folder, None, tmp_path / "student.gguf", "student")
    script = (
        "import sys, llama_cpp\n"
        "model = llama_cpp.Llama(sys.argv[1], n_ctx=64, n_threads=1, verbose=False)\n"
        "chat = model.create_chat_completion([{'role': 'user', 'content': 'the fox'}], max_tokens=4, temperature=0)\n"
        "print(chat['usage']['prompt_tokens'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "student.gguf")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    prompt = Tokenizer.load(folder).chat([{"role": "user", "content": "the fox"}])
    assert int(done.stdout) in (len(prompt), len(prompt) + 1)  # with BOS


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("gpt2", {}, "gpt2"),
        ("qwen3", {}, "qwen3"),
        ("qwen2-window", {}, "sliding window"),
        ("gemma3-window", {}, "other layers"),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}}, "linear"),
    ],
)
def test_what_llama_cpp_would_compute_otherwise_is_refused(family, changes, words, tmp_path):
    small_config(family, 400, **changes).save_pretrained(tmp_path)
    with pytest.raises(DistillationError, match=words):
        check_exportable(tmp_path)


def test_a_tokenizer_that_llama_cpp_lacks_is_refused(tmp_path):
    tokenizer = write_tokenizer(tmp_path / "tokenizer", metaspace(), bos_token=None, eos_token=None)
    folder = write_model(tmp_path / "student", small_config("llama", 400), tokenizer)
    with pytest.raises(DistillationError, match="splitting rule"):
        write_gguf(folder, None, tmp_path / "student.gguf", "student")
    unlike = split_first(_SPLIT % r"\p{N}{1,4}")
    strange = write_model(
        tmp_path / "strange", small_config("llama", 400), write_tokenizer(tmp_path / "unlike", unlike)
    )
    with pytest.raises(DistillationError, match="splitting rule"):
        write_gguf(strange, None, tmp_path / "student.gguf", "student")
    with pytest.raises(DistillationError, match="splitting rule"):  # before anything is trained
        check_student(str(folder), target_files(folder), layers=2, student=None)


@pytest.mark.parametrize(
    ("count", "of", "kept"), [(6, 30, (0, 6, 12, 17, 23, 29)), (2, 30, (0, 29)), (2, 3, (0, 2)), (4, 5, (0, 1, 3, 4))]
)
def test_kept_layers_are_spread_from_the_first_to_the_last(count, of, kept):
    assert kept_layers(count, of) == kept


@pytest.mark.parametrize("count", [1, 30, 31])
def test_a_student_has_fewer_layers_than_the_target_and_two_at_least(count):
    with pytest.raises(DistillationError, match=f"--layers {count}.*30 layers"):
        kept_layers(count, 30)


def test_a_student_has_the_targets_own_layers_embedding_and_head(tokenizer, tmp_path):
    config = small_config("llama", 400, num_hidden_layers=5)
    folder = write_model(tmp_path / "target", config, tokenizer)
    make_student(tmp_path / "student", source_of(folder), layers=3)
    target, student = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("target", "student"))
    assert student.config.num_hidden_layers == 3
    for place, layer in enumerate((0, 2, 4)):
        ours, theirs = student.model.layers[place].state_dict(), target.model.layers[layer].state_dict()
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert torch.equal(student.lm_head.weight, target.lm_head.weight)
    assert torch.equal(student.model.norm.weight, target.model.norm.weight)
    assert (tmp_path / "student/tokenizer.json").is_file()


def test_a_token_behind_the_embedding_is_left_out(tmp_path):
    """Gemma 3's tokenizer has one for images."""
    backend = byte_level()
    rows = backend.get_vocab_size()
    backend.add_special_tokens(["<image>"])
    tokenizer = write_tokenizer(tmp_path / "tokenizer", backend)
    folder = write_model(tmp_path / "target", small_config("llama", rows), tokenizer)
    sibling = write_model(tmp_path / "sibling", small_config("qwen2", rows), tokenizer)
    files = TargetFiles(folder, folder, 256, rows, "test")
    assert not check_student(str(folder), files, layers=2, student=str(sibling)).own_vocabulary
    write_gguf(folder, None, tmp_path / "student.gguf", "student")
    with LlamaVocabulary.open(tmp_path / "student.gguf") as written:
        assert written.size == rows
    match = examine(tmp_path / "student.gguf", resolve_target(str(folder)), "auto")
    assert match.strategy is Strategy.SAME, match.describe()


def test_weights_that_are_not_there_are_named(tokenizer, tmp_path):
    folder = write_model(tmp_path / "target", small_config("llama", 400, num_hidden_layers=5), tokenizer)
    (file,) = folder.glob("*.safetensors")
    weights = load_file(file)
    del weights["model.layers.2.mlp.up_proj.weight"]
    save_file(weights, file)
    with pytest.raises(DistillationError, match=r"no weights model\.layers\.1\.mlp\.up_proj"):
        make_student(tmp_path / "student", source_of(folder), layers=3)
    assert not (tmp_path / "student").exists()


def test_a_gemma_student_slides_its_window_where_llama_cpp_does(tokenizer, tmp_path):
    config = small_config("gemma3-window", 400, num_hidden_layers=12, layer_types=gemma_layer_types(12))
    folder = write_model(tmp_path / "target", config, tokenizer)
    make_student(tmp_path / "student", source_of(folder), layers=7)
    found = json.loads((tmp_path / "student/config.json").read_text())["layer_types"]
    assert [kind[0] for kind in found] == [*"sssssfs"]


def test_a_smaller_model_with_the_targets_vocabulary_may_be_the_student(tokenizer, tmp_path):
    folder = write_model(tmp_path / "target", small_config("llama", 400), tokenizer)
    sibling = write_model(tmp_path / "sibling", small_config("qwen2", 416), tokenizer)
    source = check_student(str(folder), target_files(folder), layers=6, student=str(sibling))
    assert not source.own_vocabulary
    make_student(tmp_path / "student", source, layers=None)
    assert json.loads((tmp_path / "student/config.json").read_text())["model_type"] == "qwen2"


def test_a_student_with_another_vocabulary_keeps_it(tokenizer, tmp_path):
    folder = write_model(tmp_path / "target", small_config("llama", 400), tokenizer)
    other = write_tokenizer(tmp_path / "other", sentencepiece())
    sibling = write_model(tmp_path / "sibling", small_config("llama", 400), other)
    source = check_student(str(folder), target_files(folder), layers=6, student=str(sibling))
    assert source.own_vocabulary
    make_student(tmp_path / "student", source, layers=None)
    assert (tmp_path / "student/tokenizer.json").read_text() == (other / "tokenizer.json").read_text()


def test_a_student_without_a_token_in_common_is_refused(tokenizer, tmp_path):
    folder = write_model(tmp_path / "target", small_config("llama", 400), tokenizer)
    strange = Backend(models.BPE({"qqq": 0, "zzz": 1}, [], unk_token="qqq"))
    strange.decoder = decoders.Fuse()
    other = write_tokenizer(tmp_path / "other", strange, bos_token=None, eos_token=None, unk_token=None)
    (other / "generation_config.json").write_text("{}")
    stranger = write_model(tmp_path / "stranger", small_config("llama", 400), other)
    with pytest.raises(DistillationError, match="no token in common"):
        check_student(str(folder), target_files(folder), layers=6, student=str(stranger))


def source_of(folder: Path) -> Source:
    return Source(folder, folder, None, 128, own_vocabulary=False)


def target_files(folder: Path) -> TargetFiles:
    return TargetFiles(folder, folder, 256, 400, "test")
