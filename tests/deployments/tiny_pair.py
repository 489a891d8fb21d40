"""A pair that loads in a moment, for tests of placement and scaling: it agrees with itself, whatever it says."""

from __future__ import annotations

from pathlib import Path

from tests.models.tiny_gguf import write_tiny_llama

CONTEXT = 4096
PROMPT = "丅丆万"
"""Characters of its vocabulary."""


def tiny_pair(folder: Path) -> dict[str, object]:
    """Settings of a pipeline whose draft is the target itself, for nodes of one CPU each; its files go to `folder`."""
    model = str(write_tiny_llama(folder / "tiny.gguf", vocab_size=400, context=CONTEXT, scale=4.0, any_text=True))
    return {
        "hardware.machine": "cluster",
        "models.target.model": model,
        "models.target.device": "cpu",
        "models.target.threads": 1,
        "models.target.precision": "fp32",
        "models.target.max_seq_len": CONTEXT,
        "models.target.slots": 2,
        "models.draft.model": model,
        "models.draft.threads": 1,
        "optimization.draft_budget": 4,
        "optimization.fallback": False,
    }
