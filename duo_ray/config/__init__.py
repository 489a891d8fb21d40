"""The settings of a pipeline: config.yaml as frozen pydantic models.

Every key has a default, a description and a check; an unknown key is refused with the name of the nearest known one.
What depends on the machine is checked in `duo_ray.hardware`, what depends on a model in `duo_ray.models.catalog`.
"""

from __future__ import annotations

from duo_ray.config.checks import QUANT_TYPES, ConfigError, parse_cores
from duo_ray.config.reading import load_config
from duo_ray.config.sections import Config, DraftConfig, TargetConfig

__all__ = ["QUANT_TYPES", "Config", "ConfigError", "DraftConfig", "TargetConfig", "load_config", "parse_cores"]
