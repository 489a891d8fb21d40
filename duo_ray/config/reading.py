"""config.yaml to a `Config`, and what is wrong with it in one line."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from duo_ray.config.checks import ConfigError, shown
from duo_ray.config.sections import Config


def load_config(path: str | Path | None = None, overrides: Mapping[str, object] | None = None) -> Config:
    """Read config.yaml (None: defaults only), with `overrides` of dotted keys laid over it.

    An override that is a text is read as YAML, as it would be in the file: "8" is a number, "null" nothing.

    Raises:
        ConfigError: one line that names the file, the setting, its value and what is allowed.
    """
    source = "config" if path is None else Path(path).name
    data = {} if path is None else _read_yaml(Path(path))
    overridden = dict(overrides or {})
    for key, value in overridden.items():
        _lay_over(data, key, _parse(value, key) if isinstance(value, str) else value)
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        details = error.errors(include_url=False)
        path_of_first = _dotted(details[0])
        where = "override" if any(_within(path_of_first, key) for key in overridden) else source
        others = len({_dotted(detail) for detail in details}) - 1
        more = f" (and {others} more)" if others else ""
        raise ConfigError(f"{where}: {_describe(details[0])}{more}") from None


class _UniqueKeys(yaml.SafeLoader):
    """YAML in which a key given twice is an error, not a silent choice of the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[object] = set()
        for key, _ in node.value:
            name = key.value
            if name in seen and name != "<<":
                raise yaml.constructor.ConstructorError(None, None, f"{name} is given twice", key.start_mark)
            seen.add(name)
        return super().construct_mapping(node, deep=deep)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    data = _parse(text, path.name)
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"{path.name}: must be a mapping of settings such as `models:`, got {type(data).__name__}")
    return data


def _parse(text: str, source: str) -> Any:
    try:
        return yaml.load(text, Loader=_UniqueKeys)
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"{source}{line}: {error.problem or 'not YAML'}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: not YAML: {' '.join(str(error).split())}") from None


def _lay_over(data: dict[str, Any], key: str, value: object) -> None:
    *sections, name = key.split(".")
    for section in sections:
        if data.get(section) is None:
            data[section] = {}
        data = data[section]
        if not isinstance(data, dict):
            raise ConfigError(f"override: {key} is not a setting: {section} is a value, not a section")
    data[name] = value


def _describe(error: ErrorDetails) -> str:
    """One validation error of pydantic as half a sentence that starts with the setting's dotted name."""
    name, value = _dotted(error), shown(error["input"])
    match error["type"]:
        case "extra_forbidden":
            text = f" is not a setting; {_nearest(name)}"
        case "value_error":
            # What concerns several settings of a section names them itself.
            text = f"{':' if name in _sections() else ''} {error['ctx']['error']}"
        case "model_type":
            text = f" must be a mapping of settings, got {value}"
        case "bool_type" | "literal_error":
            text = f" must be true or false{' or auto' if name == 'optimization.overlap' else ''}, got {value}"
        case "string_type":
            text = f" must be a text, got {value}"
        case "string_too_short":
            text = " must not be empty"
        case _:
            text = f": {error['msg']}, got {value}"
    return name + text


def _dotted(error: ErrorDetails) -> str:
    """The setting's name: a union adds the tried member to pydantic's location, which is no part of it."""
    parts: list[str] = []
    section: type[BaseModel] | None = Config
    for part in error["loc"]:
        parts.append(str(part))
        field = section.model_fields.get(str(part)) if section is not None else None
        section = _section_of(field) if field is not None else None
        if section is None:
            break
    return ".".join(parts)


def _section_of(field: FieldInfo) -> type[BaseModel] | None:
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _settings(section: type[BaseModel] = Config, prefix: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        inner = _section_of(field)
        yield prefix + name
        if inner is not None:
            yield from _settings(inner, f"{prefix}{name}.")


def _sections() -> set[str]:
    names = list(_settings())
    return {name for name in names if any(other.startswith(f"{name}.") for other in names)}


def _nearest(name: str) -> str:
    """A hint: the most similar setting of the same section, else one of that name elsewhere, else all known ones."""
    section, _, last = name.rpartition(".")
    names = list(_settings())
    siblings = [other.rpartition(".")[2] for other in names if other.rpartition(".")[0] == section]
    near = difflib.get_close_matches(last, siblings, n=1)
    if near:
        return f"did you mean {near[0]}?"
    leaves = {other.rpartition(".")[2]: other for other in names}
    near = difflib.get_close_matches(last, leaves, n=1, cutoff=0.8)
    if near:
        return f"did you mean {leaves[near[0]]}?"
    return f"known: {', '.join(siblings)}"


def _within(name: str, key: str) -> bool:
    return name == key or name.startswith(f"{key}.") or key.startswith(f"{name}.")
