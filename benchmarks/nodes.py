"""What a draft on another node costs: the same pipeline with its draft beside the target and on a node of its own.

    python -m benchmarks.nodes [--tokens 64] [--prompts 5] [--out results.json]

Two Ray nodes on this machine: messages between them go through actor calls and the object store as they would over a
network, whose own latency comes on top. Both pipelines are loaded at once and answer every prompt in turn, so that
drift of the machine's speed hits both alike; the draft budget is fixed, so that both do the same work.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster
from rich.progress import track

from benchmarks.pipeline import PROMPTS
from duo_ray.actors.launch import set_ray_environment
from duo_ray.config import load_config
from duo_ray.session import Duo

SETTINGS: dict[str, object] = {
    "models.target.slots": 1,
    "models.target.max_seq_len": 512,
    "optimization.fallback": False,
    "optimization.draft_budget": 4,
}
WAYS = {"greedy": {"temperature": 0.0}, "sampled": {"temperature": 0.8, "seed": 1}}
"""A greedy draft sends token ids; a sampled one also what each was drawn from."""
FIGURES: dict[str, Callable[[Mapping[str, Any]], float]] = {
    "overhead p50 ms": lambda stats: stats["round_overhead_ms"]["p50"],
    "overhead p90 ms": lambda stats: stats["round_overhead_ms"]["p90"],
    "T_target ms": lambda stats: stats["t_target_ms"],
    "T_draft ms": lambda stats: stats["t_draft_ms"],
    "tokens/s": lambda stats: stats["tokens_per_s"],
}


@contextlib.contextmanager
def both_pipelines() -> Iterator[dict[str, Duo]]:
    """A pipeline with its draft on the target's node, and one with its draft elsewhere."""
    set_ray_environment()
    head = {"num_cpus": 3, "resources": {"draft_cpu": 1}, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    os.environ["RAY_ADDRESS"] = cluster.address
    with contextlib.ExitStack() as stack:
        stack.callback(cluster.shutdown)
        stack.callback(ray.shutdown)
        ray.init(logging_level="ERROR")
        here = stack.enter_context(Duo(load_config(None, SETTINGS)))
        # With too little memory for a coordinator, so that only the draft goes there.
        cluster.add_node(num_cpus=1, memory=2**20, resources={"draft_cpu": 1})
        elsewhere = stack.enter_context(Duo(load_config(None, SETTINGS)))
        for duo, apart in ((here, False), (elsewhere, True)):
            info = duo.pipeline.info
            if (info.drafts[0].node != info.target.node) is not apart:
                raise RuntimeError(f"Ray placed target and draft on {info.target.node} and {info.drafts[0].node}")
        yield {"same node": here, "another node": elsewhere}


def run(prompts: Sequence[str], tokens: int) -> list[dict[str, Any]]:
    """One row of figures for each answer."""
    rows = []
    with both_pipelines() as pipelines:
        for duo, options in product(pipelines.values(), WAYS.values()):
            duo.generate(PROMPTS[0], max_tokens=16, **options)
        for prompt, (way, options) in track(list(product(prompts, WAYS.items())), "answers"):
            answers = {
                where: duo.generate(prompt, max_tokens=tokens, ignore_eos=True, **options)
                for where, duo in pipelines.items()
            }
            for where, answer in answers.items():
                figures = {name: figure(answer.stats) for name, figure in FIGURES.items()}
                rows.append({"draft on": where, "sampling": way, "prompt": prompt, "text": answer.text, **figures})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=5, help="how many of the built-in prompts")
    parser.add_argument("--out", type=Path, help="write everything measured to this JSON file")
    arguments = parser.parse_args()
    rows = run(PROMPTS[: arguments.prompts], arguments.tokens)
    if arguments.out:
        arguments.out.write_text(json.dumps(rows, indent=1))
    print("| draft on | sampling | " + " | ".join(FIGURES) + " | same text |")
    print("|---" * (len(FIGURES) + 3) + "|")
    for way, where in product(WAYS, ("same node", "another node")):
        chosen = [row for row in rows if row["sampling"] == way]
        here = [row for row in chosen if row["draft on"] == where]
        medians = [f"{statistics.median(row[name] for row in here):.1f}" for name in FIGURES]
        texts = {prompt: {row["text"] for row in chosen if row["prompt"] == prompt} for prompt in PROMPTS}
        same = sum(len(each) == 1 for each in texts.values())
        print(f"| {where} | {way} | {' | '.join(medians)} | {same}/{len(here)} |")


if __name__ == "__main__":
    main()
