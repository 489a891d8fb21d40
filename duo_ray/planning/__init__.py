"""What a pipeline would do on hardware that is not there yet: the loop, simulated."""

from duo_ray.planning.prediction import Capacity, Prediction, Schedule, predict, required_capacity
from duo_ray.planning.scenario import Curve, Hardware, Text, Traffic
from duo_ray.planning.simulation import Simulated, simulate

__all__ = [
    "Capacity",
    "Curve",
    "Hardware",
    "Prediction",
    "Schedule",
    "Simulated",
    "Text",
    "Traffic",
    "predict",
    "required_capacity",
    "simulate",
]
