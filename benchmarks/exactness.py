"""The whole grid of exactness: 40 prompts x budgets x sequences x drafts, greedy, against the target's own `generate`.

    python -m benchmarks.exactness [--tokens 48] [--precision fp32 bf16] [--at-once 4] [--out exactness.json]

Several prompts are answered at once, so that passes hold blocks of several requests, too.

float32: every answer must equal `model.generate(do_sample=False)` of transformers, token by token. bfloat16: every
answer is compared with the target alone through the same path; where they part, the gap of the two best logits, and by
how much it changes when the target alone computes the same place again, show whether it is a tie.
Exit status 1 when an answer differs and is no tie.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from transformers import AutoModelForCausalLM

from benchmarks.drafts import demo_draft, gemma, poor_draft, random_draft
from duo_ray.config import load_config
from duo_ray.equivalence import settle
from duo_ray.session import Duo
from tests.prompts import PROMPTS

BUDGETS = (1, 4, 16, 0)
SEQUENCES = (1, 2, 4)


@cache
def own_greedy(path: str, prompts: tuple[tuple[int, ...], ...], tokens: int) -> list[list[int]]:
    """The target's own greedy decode, by transformers and nothing of ours."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    out = []
    for ids in prompts:
        batch = torch.tensor([ids])
        result = model.generate(batch, attention_mask=torch.ones_like(batch), do_sample=False, max_new_tokens=tokens)
        out.append(result[0, len(ids) :].tolist())
    return out


def pair(draft: Callable[[], Path], target: Callable[[], Path] | None = None, **settings: object) -> dict[str, object]:
    chosen = {"models.draft.model": str(draft()), **{f"models.draft.{key}": value for key, value in settings.items()}}
    return chosen if target is None else {**chosen, "models.target.model": str(target())}


PAIRS: dict[str, Callable[[], dict[str, object]]] = {
    "demo": partial(pair, demo_draft),
    "Q2_K": partial(pair, poor_draft),
    "random": partial(pair, random_draft),
    "gemma-string": partial(pair, gemma, vocabulary="string"),
    "gemma-intersection": partial(pair, gemma, vocabulary="intersection"),
    "for-gemma-string": partial(pair, demo_draft, gemma, vocabulary="string"),
    "for-gemma-intersection": partial(pair, demo_draft, gemma, vocabulary="intersection"),
}
"""Target and draft of each run; of two families, Gemma 3 is the draft, or the target ("for-gemma")."""


def grid(
    precision: str, arguments: argparse.Namespace, prompts: Sequence[str], progress: Progress
) -> list[dict[str, Any]]:
    cells = []
    tokens, at_once = arguments.tokens, arguments.at_once
    budgets = [None if budget == 0 else budget for budget in arguments.budgets]
    for name in arguments.drafts:
        settings: dict[str, object] = {
            **PAIRS[name](),
            "models.target.precision": precision,
            "models.target.max_seq_len": 512,
            "models.target.slots": at_once,
            "optimization.fallback": False,
        }
        with Duo(load_config(None, settings)) as duo, ThreadPoolExecutor(at_once) as pool:
            ask = {"temperature": 0.0, "max_tokens": tokens, "logprobs": 2}
            alone = list(pool.map(partial(duo.generate, draft=False, **ask), prompts))
            ids = tuple(duo.request(prompt).prompt for prompt in prompts)
            own = own_greedy(str(duo.prepared.files.path), ids, tokens) if precision == "fp32" else None
            task = progress.add_task(
                f"{precision} {name}", total=len(budgets) * len(arguments.sequences) * len(prompts)
            )
            for budget, sequences in itertools.product(budgets, arguments.sequences):
                verdicts: Counter[str] = Counter()
                tokens_of: Counter[str] = Counter()
                gaps = []
                drafted = partial(duo.generate, draft_budget=budget, max_sequences=sequences, **ask)
                for i, (prompt, answer) in enumerate(zip(prompts, pool.map(drafted, prompts), strict=True)):
                    comparison = settle(duo, prompt, answer, alone[i])
                    verdict = comparison.verdict
                    if own is not None and list(answer.token_ids) != own[i]:
                        verdict = "different"
                    if verdict != "equal":
                        gaps.append(comparison.as_dict())
                    verdicts[verdict] += 1
                    stats: dict[str, Any] = answer.stats
                    tokens_of.update({"drafted": stats["draft_tokens"], "accepted": stats["accepted_tokens"]})
                    progress.advance(task)
                cells.append(
                    {"precision": precision, "draft": name, "budget": budget or "auto", "sequences": sequences,
                     **{v: verdicts[v] for v in ("equal", "tie", "different")}, **tokens_of, "parted": gaps}
                )  # fmt: skip
                progress.print({key: value for key, value in cells[-1].items() if key != "parted"})
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--prompts", type=int, default=len(PROMPTS))
    parser.add_argument("--precision", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--drafts", nargs="+", default=list(PAIRS)[:3], choices=PAIRS, help="or pairs of two families")
    parser.add_argument("--budgets", nargs="+", type=int, default=BUDGETS, help="gamma; 0 is auto")
    parser.add_argument("--sequences", nargs="+", type=int, default=SEQUENCES)
    parser.add_argument("--at-once", type=int, default=4, help="how many prompts are answered at the same time")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with Progress() as progress:
        cells = [
            cell
            for precision in arguments.precision
            for cell in grid(precision, arguments, PROMPTS[: arguments.prompts], progress)
        ]
    if arguments.out:
        arguments.out.write_text(json.dumps(cells, indent=1, ensure_ascii=False))
    sys.exit(any(cell["different"] for cell in cells))


if __name__ == "__main__":
    main()
