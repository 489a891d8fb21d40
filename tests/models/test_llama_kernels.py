"""llama.cpp's own layouts of weights, in processes of their own: it decides about them once a process."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

from benchmarks.drafts import demo_draft
from duo_ray.models.llama_library import quantize

LAYOUTS = """
import json
from duo_ray.models import llama_kernels
print(json.dumps([llama_kernels.may_repack(), llama_kernels._layouts()]))
"""

LOGITS = """
import json, sys
from duo_ray.models import llama_cpp, llama_library
from duo_ray.models.llama_context import BatchRow
if sys.argv[2] == "plain":
    llama_library.may_repack = lambda: False
model = llama_cpp.LlamaCppDraft.load(sys.argv[1], threads=1, max_context=256, slots=1)
model._context.decode([BatchRow(100 + i, i, 0, i == 39) for i in range(40)])
print(json.dumps(model._context.logits(39).tolist()))
"""


def output_of(program, *arguments):
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True)
    assert "AMX" not in done.stderr
    return json.loads(done.stdout)


def test_amx_is_not_among_the_layouts_and_nothing_is_said_of_it():
    allowed, names = output_of(LAYOUTS)
    assert allowed
    assert "AMX" not in names


@pytest.mark.models
def test_repacked_weights_give_the_same_distribution_but_for_rounding(tmp_path):
    """Activations are rounded to 8 bits in every layer: another order of sums moves some of them by a step."""
    model = tmp_path / "small.gguf"
    quantize(demo_draft(), model, "Q4_0", threads=2)
    logits = [np.array(output_of(LOGITS, str(model), way)) for way in ("repacked", "plain")]
    repacked, plain = (np.exp(each - each.max()) / np.exp(each - each.max()).sum() for each in logits)
    assert np.abs(repacked - plain).sum() / 2 < 0.1
    assert repacked.argmax() == plain.argmax()
