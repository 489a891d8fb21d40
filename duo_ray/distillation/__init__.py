"""Drafts made for a target: it writes what the student is trained on."""

from duo_ray.distillation.distillation import Outcome, Task, distill

__all__ = ["Outcome", "Task", "distill"]
