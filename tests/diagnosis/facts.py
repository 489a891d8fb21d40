"""Facts that call for nothing, to be changed one by one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from duo_ray.diagnosis.advice import Facts
from duo_ray.diagnosis.positions import Estimate

FINE = Facts(
    speedup=2.0,
    tokens=500,
    simulated=2.0,
    faster=2.02,
    better=2.02,
    ratio=9.0,
    predicted=Estimate(0.8, 0.01, 1000),
    measured=Estimate(0.79, 0.01, 1000),
    weakest=("number", 0.78, 40),
    temperature=1.02,
    overlap=0.8,
    best_overlap=0.8,
    strategy="same",
    other_strategy=None,
    other_template=None,
    quant="Q4_K_M",
    threads=4,
    idle_cores=0,
    shared_cores=False,
    busy=0.02,
    overhead_share=0.03,
    auto_speedup=2.0,
    best_gamma=(8, 2.0),
    best_sequences=(1, 2.0, 2.0),
    stops_at=None,
    slots=8,
)


def facts(**changes: Any) -> Facts:
    return replace(FINE, **changes)
