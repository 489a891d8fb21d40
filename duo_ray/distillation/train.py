"""The training: transformers' Trainer carries the loop, checkpoints, schedule and resuming.

Learning rate, batch and patience are fixed: they were chosen for students of some ten million weights beside the
embedding, cut from their target. The number of steps comes from the time there is, measured before the first one.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset, Sampler
from transformers import (
    EarlyStoppingCallback,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_pt_utils import get_length_grouped_indices
from transformers.utils.logging import set_verbosity_error

from duo_ray.distillation.data import Answer, Progress
from duo_ray.distillation.loss import acceptances, distillation_loss, is_known
from duo_ray.distillation.student import copy_tokenizer, load_model
from duo_ray.distillation.workspace import Clock, Stage, make_folder, read_json, write_json

LEARNING_RATE = 5e-4
CUT_LEARNING_RATE = 1e-3
"""Of layers cut from the target, which have to learn to do without those between them."""
BATCH = 8
"""Answers of a step."""
PATIENCE = 0.2
"""Share of the planned evaluations that may bring no rise of the expected acceptance before training stops."""
LEAST_RISE = 0.001

_EVALUATIONS = 20
_TESTED = 48
"""Held-out answers of an evaluation, at most."""
_SECONDS_BETWEEN = 10.0, 60.0
"""Between two evaluations, which also save: no less, for what they cost, and no more, for what is repeated after an
interruption."""
_WARM_UP = 0.05

Batch = dict[str, Tensor]
Item = dict[str, Any]


def text_of(answer: Answer) -> NDArray[np.int32]:
    """Ids a model reads to predict the answer: all but its last."""
    return np.concatenate([answer.prompt, answer.answer[:-1]])


class Answers(Dataset[Item]):
    """Answers on disk, read when they are needed."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = list(paths)

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> Item:
        return {"answer": Answer.load(self._paths[index])}

    def lengths(self) -> list[int]:
        return [len(text_of(Answer.load(path))) for path in self._paths]


class ByLength(Sampler[int]):
    """Mixes answers anew in every epoch, those of like length together; a resumed epoch has the same order again.

    (That of transformers goes by a random state which a resumed run does not find again.)
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        self._lengths, self._epoch = list(lengths), 0

    def set_epoch(self, epoch: int) -> None:
        """Told by Trainer."""
        self._epoch = epoch

    def __len__(self) -> int:
        return len(self._lengths)

    def __iter__(self) -> Iterator[int]:
        grouped: Any = get_length_grouped_indices
        return iter(grouped(self._lengths, BATCH, generator=torch.Generator().manual_seed(self._epoch)))


def collate(answers: Sequence[Answer]) -> Batch:
    """A batch of B texts of up to L ids with M answered places in all.

    `input_ids` `[B, L]`, padded behind the texts, where a causal model does not look; `rows`, `columns` `[M]`, the
    places before each answered id; `tokens`, `written` `[M]`; `top_ids`, `top_probs` `[M, K]`.
    """
    texts = [text_of(each) for each in answers]
    ids = np.zeros((len(texts), max(map(len, texts))), np.int64)
    for row, text in enumerate(texts):
        ids[row, : len(text)] = text
    rows = np.concatenate([np.full(len(each.answer), row) for row, each in enumerate(answers)])
    columns = np.concatenate([len(each.prompt) - 1 + np.arange(len(each.answer)) for each in answers])
    return {
        "input_ids": torch.from_numpy(ids),
        "rows": torch.from_numpy(rows),
        "columns": torch.from_numpy(columns),
        "tokens": torch.from_numpy(np.concatenate([each.answer for each in answers]).astype(np.int64)),
        "written": torch.from_numpy(np.concatenate([np.full(len(each.answer), not each.own) for each in answers])),
        "top_ids": torch.from_numpy(np.concatenate([each.top_ids for each in answers]).astype(np.int64)),
        "top_probs": torch.from_numpy(np.concatenate([each.top_probs for each in answers]).astype(np.float32)),
    }


def answer_logits(model: Any, batch: Batch) -> Tensor:
    """Logits `[M, V]` (float32) at the answered places alone: the head costs as much as many layers."""
    hidden = model.base_model(input_ids=batch["input_ids"], use_cache=False).last_hidden_state
    logits: Tensor = model.get_output_embeddings()(hidden[batch["rows"], batch["columns"]])
    return logits.float()


@torch.no_grad()
def expected_acceptance(logits_of: Callable[[Batch], Tensor], batches: Sequence[Batch]) -> dict[str, float]:
    """Means over all places that are known: `acceptance` of sampled tokens at temperature 1, `greedy` of best ones."""
    sums, count = np.zeros(2), 0
    for batch in batches:
        found = acceptances(logits_of(batch), batch["top_ids"], batch["top_probs"])
        sums += [float(each.sum()) for each in found]
        count += int(is_known(batch["top_probs"]).sum())
    return {"acceptance": float(sums[0] / max(1, count)), "greedy": float(sums[1] / max(1, count))}


def _loss(logits: Tensor, batch: Batch, divergence: str) -> Tensor:
    rows = batch["tokens"], batch["top_ids"], batch["top_probs"]
    return distillation_loss(logits, *rows, divergence, written=batch["written"])


class _OneDevice(TrainingArguments):
    """Trainer would copy the model onto every GPU there is."""

    @property
    def n_gpu(self) -> int:
        return min(1, int(super().n_gpu))


class Distiller(Trainer):
    """A Trainer with the loss and the figure of a distillation."""

    def __init__(
        self, model: Any, arguments: TrainingArguments, *, divergence: str, tested: Sequence[Batch], **options: Any
    ) -> None:
        super().__init__(
            model, arguments, data_collator=lambda items: collate([each["answer"] for each in items]), **options
        )
        self._divergence, self._tested = divergence, tested

    def _get_train_sampler(self, train_dataset: Any = None) -> ByLength:
        answers: Any = train_dataset or self.train_dataset
        return ByLength(answers.lengths())

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,  # noqa: ARG002 - Trainer's signature
    ) -> Any:
        """Mean over the places of the batch; see `loss.distillation_loss`."""
        with self.accelerator.autocast():
            logits = answer_logits(model, inputs)
        loss = _loss(logits, inputs, self._divergence)
        return (loss, logits) if return_outputs else loss

    def measure(self) -> dict[str, float]:
        """Expected acceptance on the held-out answers."""
        model: Any = self.model
        model.eval()

        def logits_of(batch: Batch) -> Tensor:
            with self.accelerator.autocast():
                return answer_logits(model, batch)

        return expected_acceptance(logits_of, [self._prepare_inputs(batch) for batch in self._tested])

    def evaluate(self, *_arguments: Any, **_options: Any) -> dict[str, float]:
        """What the loop asks for after every so many steps."""
        metrics = {f"eval_{name}": value for name, value in self.measure().items()}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


class _Watch(TrainerCallback):
    """Shows how far the training is, keeps the clock, and ends it in time."""

    def __init__(self, clock: Clock, share: float, progress: Progress, before: float) -> None:
        self._clock, self._share, self._progress = clock, share, progress
        self._loss, self._acceptance = float("nan"), before

    def on_log(self, *_: Any, **given: Any) -> None:
        self._loss = given["logs"].get("loss", self._loss)

    def on_evaluate(self, *_: Any, **given: Any) -> None:
        self._acceptance = given["metrics"]["eval_acceptance"]

    def on_step_end(self, *given: Any, **_: Any) -> None:
        state, control = given[1:]
        step, steps = state.global_step, state.max_steps
        self._progress(
            f"training: step {step} of {steps}, loss {self._loss:.2f}, expected acceptance {self._acceptance:.3f}",
            step / steps,
        )
        if self._clock.left(self._share) < 0:
            control.should_evaluate = control.should_save = control.should_training_stop = True

    def on_save(self, *_: Any, **__: Any) -> None:
        self._clock.keep()


def fastest_precision(model: Any, batch: Batch, divergence: str, device: str) -> tuple[str, dict[str, float]]:
    """bfloat16 or float32 arithmetic, whichever takes less for two steps here, and the seconds of one step of each."""
    model.to(device).train()
    moved = {name: each.to(device) for name, each in batch.items()}
    seconds = {}
    for name in ("bfloat16", "float32"):
        best = float("inf")
        for _ in range(2):
            started = time.perf_counter()
            with torch.autocast(device.partition(":")[0], torch.bfloat16, enabled=name == "bfloat16"):
                logits = answer_logits(model, moved)
            loss = _loss(logits, moved, divergence)
            loss.backward()  # type: ignore[no-untyped-call]
            float(loss.detach())  # waits for a GPU
            best = min(best, time.perf_counter() - started)
            model.zero_grad()
        seconds[name] = best
    return min(seconds, key=lambda name: seconds[name]), seconds


def train(
    stage: Stage,
    training: Sequence[Path],
    testing: Sequence[Path],
    *,
    divergence: str,
    cut: bool,
    clock: Clock,
    share: float,
    device: str,
    progress: Progress,
) -> dict[str, Any]:
    """Train a student, or go on from its last checkpoint, and keep the best one.

    Args:
        stage: where it starts from and what is kept of the training.
        training, testing: files of answers.
        cut: the student is some of the target's layers; its embedding and head stay the target's then, which leaves
            time for a fifth more steps.
        share: of the clock's time, at which to end.
        device: cpu or cuda.

    Returns:
        What was planned and found: `before` and `after` (see `expected_acceptance`), `steps`, `done`, `precision`.
    """
    silenced: Callable[[], None] = set_verbosity_error  # of the tied head, which checkpoints lack
    silenced()
    tested = _batches(testing)
    model = load_model(stage.start)
    plan = read_json(stage.plan)
    if cut if plan is None else plan.get("frozen"):
        for shared in (model.get_input_embeddings(), model.get_output_embeddings()):
            shared.requires_grad_(False)
    if plan is None:
        progress("measuring a step", None)
        how = {"frozen": cut, "learning_rate": CUT_LEARNING_RATE if cut else LEARNING_RATE}
        plan = {**_plan(model, training, tested, divergence, device, clock.left(share)), **how}
    precision = plan["precision"]
    arguments = _OneDevice(
        output_dir=str(stage.checkpoints),
        max_steps=plan["steps"],
        per_device_train_batch_size=BATCH,
        learning_rate=plan.get("learning_rate", LEARNING_RATE),
        lr_scheduler_type="cosine",
        warmup_steps=round(_WARM_UP * plan["steps"]),
        bf16=precision == "bfloat16",
        use_cpu=device == "cpu",
        eval_strategy="steps",
        save_strategy="steps",
        eval_steps=plan["interval"],
        save_steps=plan["interval"],
        save_total_limit=2,
        load_best_model_at_end=True,
        metric_for_best_model="acceptance",
        greater_is_better=True,
        restore_callback_states_from_checkpoint=True,
        logging_steps=max(1, plan["interval"] // 5),
        remove_unused_columns=False,
        dataloader_pin_memory=device != "cpu",
        disable_tqdm=True,
        report_to="none",
    )
    patience = max(2, round(PATIENCE * plan["steps"] / plan["interval"]))
    trainer = Distiller(
        model, arguments, divergence=divergence, tested=tested, train_dataset=Answers(training),
        eval_dataset=Answers(testing),
        callbacks=[EarlyStoppingCallback(patience, LEAST_RISE)],
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    if "before" not in plan:
        progress("expected acceptance before training", None)
        plan["before"] = trainer.measure()
        write_json(stage.plan, plan)
    trainer.add_callback(_Watch(clock, share, progress, plan["before"]["acceptance"]))
    trainer.train(resume_from_checkpoint=last_checkpoint(stage.checkpoints))
    found = {**plan, "after": trainer.measure(), "done": trainer.state.global_step, "history": _history(trainer)}

    def fill(folder: Path) -> None:
        model.save_pretrained(folder)
        copy_tokenizer(stage.start, folder)
        write_json(folder / "training.json", found)

    make_folder(stage.trained, fill)
    shutil.rmtree(stage.checkpoints)
    return found


def last_checkpoint(folder: Path) -> str | None:
    """The newest checkpoint that is whole; what a killed run left of another one is removed.

    The best one is named in it by a path, which Trainer silently does without where the folder has moved.
    """
    whole: dict[int, Path] = {}
    for path in folder.glob("checkpoint-*"):
        try:
            state = json.loads((path / "trainer_state.json").read_text())  # Trainer writes it last
        except (OSError, ValueError):
            shutil.rmtree(path)
        else:
            whole[state["global_step"]] = path
            if best := state.get("best_model_checkpoint"):
                write_json(
                    path / "trainer_state.json", {**state, "best_model_checkpoint": str(folder / Path(best).name)}
                )
    return str(whole[max(whole)]) if whole else None


def _plan(
    model: Any, training: Sequence[Path], tested: Sequence[Batch], divergence: str, device: str, seconds: float
) -> dict[str, Any]:
    """Precision, number of steps and interval of evaluations for the time there is."""
    batch = collate([Answer.load(path) for path in training[:BATCH]])
    precision, each = fastest_precision(model, batch, divergence, device)
    # An evaluation runs forward only: a third of a step for each batch.
    step, evaluation = each[precision], len(tested) * each[precision] / 3
    steps = max(_EVALUATIONS, int((seconds - _EVALUATIONS * evaluation) / (1.2 * step)))
    least, most = (max(1, int(seconds / step)) for seconds in _SECONDS_BETWEEN)
    interval = min(max(steps // _EVALUATIONS, least), most, steps)
    return {
        "precision": precision,
        "step_seconds": each,
        "steps": steps // interval * interval,
        "interval": interval,
        "batch": BATCH,
        "divergence": divergence,
        "answers": len(training),
        "held_out_answers": sum(len(batch["input_ids"]) for batch in tested),
    }


def _batches(paths: Sequence[Path]) -> list[Batch]:
    answers = sorted((Answer.load(path) for path in paths[:_TESTED]), key=lambda each: len(each.answer))
    return [collate(answers[start : start + BATCH]) for start in range(0, len(answers), BATCH)]


def _history(trainer: Trainer) -> list[dict[str, float]]:
    """Step and expected acceptance of every evaluation."""
    return [
        {"step": entry["step"], "acceptance": entry["eval_acceptance"], "greedy": entry["eval_greedy"]}
        for entry in trainer.state.log_history
        if "eval_acceptance" in entry
    ]
