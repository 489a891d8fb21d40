"""How good a draft is for a target, how fast the two are here, and what would help."""

from duo_ray.diagnosis.diagnosis import Diagnosis, conclude
from duo_ray.diagnosis.measuring import observe
from duo_ray.diagnosis.prompts import BUILT_IN
from duo_ray.diagnosis.show import html_writer, show_diagnosis

__all__ = ["BUILT_IN", "Diagnosis", "conclude", "html_writer", "observe", "show_diagnosis"]
