"""Is `duo-ray plan` right? Five schedules measured on this machine and simulated from the times they were measured at.

    python -m benchmarks.plan_check [--tokens 96] [--prompts 4] [--out plan_check.json]

The Q2_K draft, which is wrong often enough for schedules to differ. For all of them the simulation gets what a user of
the default has: T_target(n), T_draft(k) and overhead as that pipeline's own estimates say after the runs, and one
acceptance, the share of blocks whose first token was accepted. Exit status 1 when a speed is off by more than 10%.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.drafts import poor_draft
from benchmarks.measured import Turn
from benchmarks.ours import VARIANTS, Engine
from benchmarks.tasks import TASKS, read_tasks
from duo_ray.config import load_config
from duo_ray.core.gamma import Policy
from duo_ray.planning import Hardware, Text, Traffic, simulate

SCHEDULES = ("duo", "sequential", "lead-0", "gamma-4", "one-sequence")
LIMIT = 0.1


def decode_speed(turns: Sequence[Turn]) -> float:
    """Tokens per second after the first token, all answers together."""
    return sum(len(turn.ids) - 1 for turn in turns) / sum(turn.at[-1] - turn.at[0] for turn in turns)


def acceptance(turns: Sequence[Turn]) -> float:
    """Share of verified blocks whose first token was kept."""
    return fmean(turn.stats["acceptance_per_position"][0] for turn in turns if turn.stats["acceptance_per_position"])


def run(tokens: int, count: int) -> list[dict[str, Any]]:
    """Measure, then simulate, each schedule."""
    config = load_config(None, {"models.draft.model": str(poor_draft()), "models.target.slots": 2})
    engine = Engine(config, ("target", *SCHEDULES), lambda _text, _share: None)
    prompts = [prompt.turns[0] for name in TASKS for prompt in read_tasks([name], None, 1, seed=0)][:count]
    tokenizer = engine.duo.prepared.tokenizer
    asked = [tokenizer.chat([{"role": "user", "content": prompt}]) for prompt in prompts]
    turns: dict[str, list[Turn]] = {name: [] for name in engine.methods}
    try:
        for number, ids in enumerate([asked[0], *asked]):
            for name, method in engine.methods.items():
                turn = method.generate(ids, tokens)
                method.between()
                if number > 0:  # the first prompt warms up
                    turns[name].append(turn)
        costs = engine.methods["duo"].pipeline().measured
    finally:
        engine.close()
    a, own = acceptance(turns["duo"]), engine.duo.prepared.settings.coordinator.policy
    length = round(fmean(len(ids) for ids in asked))
    return [
        compare(name, turns[name], costs, Text(a, length, round(fmean(len(turn.ids) for turn in turns[name]))), own)
        for name in ("target", *SCHEDULES)
    ]


def compare(name: str, turns: Sequence[Turn], costs: Mapping[str, Any], text: Text, policy: Policy) -> dict[str, Any]:
    """`costs`: as `Costs.as_dict`; `policy`: the pipeline's own, of which a schedule changes some fields."""
    variant = VARIANTS[name]
    simulated = simulate(
        Hardware.from_costs(costs),
        text,
        replace(policy, **variant.policy),
        max_sequences=variant.max_sequences or 4,
        draft=variant.draft,
        traffic=Traffic(24),
    )
    measured = decode_speed(turns)
    return {
        "schedule": name,
        "measured tokens/s": measured,
        "simulated tokens/s": simulated.decode_speed,
        "off by": simulated.decode_speed / measured - 1.0,
        "acceptance": text.acceptance,
        "accepted measured": fmean(turn.stats["mean_accepted"] for turn in turns),
        "accepted simulated": simulated.mean("mean_accepted"),
        "costs": dict(costs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--out", type=Path, help="write everything to this JSON file")
    arguments = parser.parse_args()
    rows = run(arguments.tokens, arguments.prompts)
    if arguments.out:
        arguments.out.write_text(json.dumps(rows, indent=1))
    print("| schedule | measured tokens/s | simulated | off by | accepted a step, measured | simulated |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['schedule']} | {row['measured tokens/s']:.1f} | {row['simulated tokens/s']:.1f} | "
            f"{row['off by']:+.0%} | {row['accepted measured']:.2f} | {row['accepted simulated']:.2f} |"
        )
    sys.exit(any(abs(row["off by"]) > LIMIT for row in rows if row["schedule"] in SCHEDULES))


if __name__ == "__main__":
    main()
