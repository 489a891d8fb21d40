"""config.yaml: what is accepted, and the one line a user reads when something is not."""

from pathlib import Path

import llama_cpp
import pytest
import yaml
from pydantic import ValidationError

from duo_ray.config import QUANT_TYPES, Config, ConfigError, load_config, parse_cores
from duo_ray.types import SamplingParams

EXAMPLE = """
hardware:     {cpu_cores: 16, gpu_type: A800, cpu_affinity: 0-15}
models:
  target:     {model: demo, device: cuda:0, precision: fp16, max_seq_len: 4096}
  draft:      {model: demo, device: cpu, quant: Q5_K_M, threads: 8}
optimization: {draft_budget: auto, max_sequences: 4, warmup_steps: 50}
"""


def write(directory: Path, text: str) -> Path:
    path = directory / "config.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def refusal(directory: Path, text: str) -> str:
    with pytest.raises(ConfigError) as error:
        load_config(write(directory, text))
    message = str(error.value)
    assert "\n" not in message
    return message


def test_the_documented_example_loads_as_written(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, EXAMPLE))
    assert config.hardware.cpu_cores == 16
    assert config.hardware.affinity == tuple(range(16))
    assert config.models.target.device == "cuda:0"
    assert config.models.target.max_seq_len == 4096
    assert config.models.draft.quant == "Q5_K_M"
    assert config.optimization.draft_budget == "auto"


def test_no_file_gives_the_defaults() -> None:
    assert load_config() == Config()


def test_an_empty_file_gives_the_defaults(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, "# nothing\n")) == Config()


def test_a_section_with_every_line_commented_out_gives_its_defaults(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, "hardware:\n  # cpu_cores: 4\nmodels:\n  target:\n")) == Config()


def test_the_defaults_survive_a_round_trip_through_yaml(tmp_path: Path) -> None:
    text = yaml.safe_dump(Config().model_dump(mode="json"))
    assert load_config(write(tmp_path, text)) == Config()


def test_config_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Config().hardware.cpu_cores = 3  # type: ignore[misc]


def test_every_setting_has_a_description_and_a_default() -> None:
    schema = Config.model_json_schema()
    for section in (schema, *schema["$defs"].values()):
        assert "required" not in section
        assert all(field.get("description") or "$ref" in field for field in section["properties"].values())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "optimization: {draft_budgt: 3}",
            "config.yaml: optimization.draft_budgt is not a setting; did you mean draft_budget?",
        ),
        ("draft_budget: 3", "config.yaml: draft_budget is not a setting; did you mean optimization.draft_budget?"),
        (
            "zzz: 1",
            "config.yaml: zzz is not a setting; known: hardware, models, optimization, sampling, acceptance, serving",
        ),
        ("optimization: {max_sequences: 12}", "config.yaml: optimization.max_sequences must be 1 to 8, got 12"),
        ("optimization: {max_sequences: yes}", "config.yaml: optimization.max_sequences must be 1 to 8, got True"),
        ("optimization: {draft_budget: 0}", "config.yaml: optimization.draft_budget must be auto or 1 to 128, got 0"),
        (
            "optimization: {gamma_min: 40}",
            "config.yaml: optimization: gamma_min 40 must not be above gamma_max 32",
        ),
        (
            "optimization: {overlap: maybe}",
            "config.yaml: optimization.overlap must be true or false or auto, got 'maybe'",
        ),
        ("optimization: {fallback: 3}", "config.yaml: optimization.fallback must be true or false, got 3"),
        ("models: {target: {precision: fp8}}", "models.target.precision must be auto, fp32, bf16 or fp16, got 'fp8'"),
        ("models: {target: {device: gpu}}", "models.target.device must be auto, cpu, cuda or cuda:N, got 'gpu'"),
        ("models: {target: 3}", "config.yaml: models.target must be a mapping of settings, got 3"),
        ("models: {target: {model: 3}}", "config.yaml: models.target.model must be a text, got 3"),
        ("models: {target: {model: ''}}", "config.yaml: models.target.model must not be empty"),
        ("models: {draft: {device: 'cuda:0'}}", "models.draft.device must be cpu"),
        ("models: {draft: {quant: Q5_KM}}", "got 'Q5_KM'; did you mean Q5_K_M?"),
        (
            "models: {draft: {quant: 5}}",
            "quant must be null, auto or a llama.cpp quantisation, got 5; known: auto",
        ),
        ("hardware: {cpu_affinity: 3-1}", "has a range that runs backwards or past core 4095: '3-1'"),
        ("hardware: {cpu_affinity: [0, 1]}", "must be auto or a core list such as"),
        ("sampling: {top_p: 0}", "config.yaml: sampling: top_p=0.0 is out of range: above 0, up to 1"),
        ("sampling: {temperature: .nan}", "config.yaml: sampling.temperature must be 0 to 100, got nan"),
        ("sampling: {seed: -1}", "sampling.seed must be null or 0 to 9223372036854775807, got -1"),
        ("sampling: {stop: ['']}", "sampling.stop must be a list of texts that are not empty, got ['']"),
        ("serving: {replicas: {min: 3}}", "config.yaml: serving.replicas: min 3 must not be above max 1"),
        ("serving: {queue: -1}", "config.yaml: serving.queue must be 0 to 100000, got -1"),
        ("serving: {limits: {tokens: 0}}", "serving.limits.tokens must be null or 1 to 16777216, got 0"),
        ("serving: {max_replicas: 3}", "serving.max_replicas is not a setting; did you mean replicas?"),
        ("- 3", "config.yaml: must be a mapping of settings such as `models:`, got list"),
        ("a: [1", "config.yaml, line 1: expected ',' or ']'"),
        ("hardware:\n  cpu_cores: 1\n  cpu_cores: 2", "config.yaml, line 3: cpu_cores is given twice"),
    ],
)
def test_a_bad_setting_is_named_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    assert message in refusal(tmp_path, text)


def test_several_errors_are_counted(tmp_path: Path) -> None:
    message = refusal(tmp_path, "optimization: {max_sequences: 12, gamma_max: 0, overlap: maybe}")
    assert message.endswith("(and 2 more)")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.yaml: no such file"):
        load_config(tmp_path / "absent.yaml")


def test_an_override_wins_over_the_file(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, EXAMPLE), {"models.draft.threads": 2, "sampling.temperature": "0"})
    assert config.models.draft.threads == 2
    assert config.models.draft.quant == "Q5_K_M"
    assert config.sampling.temperature == 0.0


def test_an_override_given_as_text_is_read_as_yaml() -> None:
    config = load_config(overrides={"sampling.stop": "[a, b]", "sampling.seed": "7", "models.draft.model": "null"})
    assert config.sampling.stop == ("a", "b")
    assert config.sampling.seed == 7
    assert config.models.draft.model is None


def test_a_bad_override_is_told_apart_from_the_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^override: optimization\.max_sequences must be 1 to 8, got 12$"):
        load_config(write(tmp_path, EXAMPLE), {"optimization.max_sequences": "12"})


def test_an_override_inside_a_value_is_refused() -> None:
    with pytest.raises(ConfigError, match="hardware is a value, not a section"):
        load_config(overrides={"hardware": 3, "hardware.cpu_cores": 2})


@pytest.mark.parametrize(("given", "read"), [("null", None), ("AUTO", "auto"), ("q4_k_m", "Q4_K_M")])
def test_a_quantisation_may_be_left_open_or_chosen(given: str, read: str | None) -> None:
    assert load_config(overrides={"models.draft.quant": given}).models.draft.quant == read


def test_draft_model_none_means_no_draft() -> None:
    assert load_config(overrides={"models.draft.model": "none"}).models.draft.model is None


def test_numbers_in_scientific_notation_are_numbers(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, "sampling: {temperature: 1e-3}")).sampling.temperature == 0.001


def test_sampling_defaults_are_those_of_a_request() -> None:
    assert Config().sampling_params(seed=5) == SamplingParams(seed=5)


def test_a_configured_seed_wins_over_the_offered_one() -> None:
    assert load_config(overrides={"sampling.seed": 3}).sampling_params(seed=5).seed == 3


def test_lossy_acceptance_reaches_the_parameters() -> None:
    assert load_config(overrides={"acceptance.top_k": 4}).sampling_params(seed=0).acceptance_top_k == 4


@pytest.mark.parametrize("key", ["7", "''", "' '", "schlüssel", '"a\\nb"'])
def test_an_api_key_that_cannot_be_sent_is_refused_and_not_repeated(tmp_path: Path, key: str) -> None:
    message = refusal(tmp_path, f"serving: {{api_key: {key}}}")
    assert message == "config.yaml: serving.api_key must be null, env:NAME or a text of printable ASCII characters"


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({}, "demo"),
        ({"models.target.model": "meta-llama/Llama-3.1-8B-Instruct"}, "Llama-3.1-8B-Instruct"),
        ({"models.target.model": "./models/tiny.gguf"}, "tiny"),
        ({"serving.model_name": "ours"}, "ours"),
    ],
)
def test_the_served_name_is_the_targets_unless_set(settings: dict[str, object], name: str) -> None:
    assert load_config(overrides=settings).model_name == name


def test_parse_cores_reads_ranges_and_single_cores() -> None:
    assert parse_cores("8, 0-3,2") == (0, 1, 2, 3, 8)


def test_quantisation_names_are_those_of_the_llama_cpp_bindings() -> None:
    for name, number in QUANT_TYPES.items():
        prefix = "LLAMA_FTYPE_ALL_" if name == "F32" else "LLAMA_FTYPE_MOSTLY_"
        assert getattr(llama_cpp, prefix + name) == number
