"""What the student writes itself, with the target's probabilities along it: on-policy data.

A student that is trained on the target's texts alone never sees where its own words lead ("On-Policy Distillation of
Language Models", arXiv 2306.13649). It samples at temperature 1; the target reads what it wrote, in this process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import GenerationConfig

from duo_ray.actors.target import TargetSettings, load_target
from duo_ray.distillation.data import TOP, Answer, Progress
from duo_ray.distillation.student import load_model

_AT_ONCE = 8
_LEAST = 8
"""Samples that are written however long they take."""


def write_own_samples(
    student: Path,
    settings: Callable[[], TargetSettings],
    answers: Sequence[Path],
    folder: Path,
    *,
    device: str,
    ends: frozenset[int],
    until: Callable[[], bool],
    progress: Progress,
) -> list[Path]:
    """Files of samples, one for each answer of the target, written to `folder` where they are not there.

    Args:
        student: its directory, with the target's vocabulary.
        settings: of the target, which is loaded here, asked for when it has to be.
        answers: files of the target's answers; a sample has as many tokens as the answer, at most.
        ends: ids that end a text.
        until: asked before every few samples; True ends the work, but not before there is something to train with.
    """
    folder.mkdir(exist_ok=True)
    missing = [path for path in answers if not (folder / path.name).is_file()]
    if missing and not (until() and len(answers) - len(missing) >= _LEAST):
        progress("loading the target beside the student", None)
        with _loaded(settings()) as (target, vocab_size):
            model = load_model(student).to(device).eval()
            for start in range(0, len(missing), _AT_ONCE):
                done = len(answers) - len(missing) + start
                if done >= _LEAST and until():
                    break
                progress(f"the student writes: {done} of {len(answers)}", done / len(answers))
                paths = missing[start : start + _AT_ONCE]
                asked = [Answer.load(path) for path in paths]
                samples = _samples(model, asked, ends, vocab_size)
                for path, answer, sample in zip(paths, asked, samples, strict=True):
                    score(target, answer.prompt, sample).save(folder / path.name)
    return [folder / path.name for path in answers if (folder / path.name).is_file()]


@contextmanager
def _loaded(settings: TargetSettings) -> Iterator[tuple[Any, int]]:
    """The target in this process, freed at the end, and how many ids it knows; torch's threads stay as they were."""
    threads = torch.get_num_threads()
    target: Any = load_target(replace(settings, slots=1, cuda_graphs=False))
    try:
        yield target, settings.vocab_size
    finally:
        if settings.engine == "llama_cpp":
            target.close()
        torch.set_num_threads(threads)


@torch.no_grad()
def _samples(model: Any, asked: Sequence[Answer], ends: frozenset[int], vocab_size: int) -> list[NDArray[np.int32]]:
    """One text of the model for each prompt, up to its first end; at least one token."""
    longest = max(len(each.prompt) for each in asked)
    ids = torch.zeros((len(asked), longest), dtype=torch.int64, device=model.device)
    mask = torch.zeros_like(ids)
    for row, each in enumerate(asked):  # padded on the left: all texts go on at the same place
        ids[row, longest - len(each.prompt) :] = torch.from_numpy(each.prompt)
        mask[row, longest - len(each.prompt) :] = 1
    count = max(len(each.answer) for each in asked)
    # Nothing of what the model's own settings would do to its distribution; padding of its output layer is no token.
    settings: Any = GenerationConfig
    model.generation_config = settings(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=count, eos_token_id=sorted(ends) or None,
        pad_token_id=0, suppress_tokens=[*range(vocab_size, model.config.vocab_size)] or None,
    )  # fmt: skip
    written = model.generate(ids, attention_mask=mask)
    samples = []
    for row, each in zip(written[:, longest:].tolist(), asked, strict=True):
        text = row[: len(each.answer)]
        end = next((place for place, token in enumerate(text) if token in ends), len(text) - 1)
        samples.append(np.array(text[: end + 1], np.int32))
    return samples


def score(target: Any, prompt: NDArray[np.int32], sample: NDArray[np.int32]) -> Answer:
    """A sample with the target's most probable tokens at each of its places."""
    top_ids = np.zeros((len(sample), TOP), np.int32)
    top_probs = np.zeros((len(sample), TOP), np.float16)
    text = (*prompt.tolist(), *sample[:-1].tolist())
    for place, logits in enumerate(target.logits_along(text, len(sample))):
        best = np.argpartition(logits, -TOP)[-TOP:]
        best = best[np.argsort(-logits[best])]
        weights = np.exp(logits - logits[best[0]], dtype=np.float64)
        top_ids[place], top_probs[place] = best, weights[best] / weights.sum()
    return Answer(prompt, sample, top_ids, top_probs, own=True)
