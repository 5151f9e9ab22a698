"""Settings: where they come from, which wins, and what is said about wrong ones."""

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxmm.config import EngineConfig, PageConfig, environment, field_names, load_config
from jaxmm.errors import ConfigError


@pytest.fixture(autouse=True)
def no_settings_around(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The machine's own variables do not matter here."""
    for name in [n for n in os.environ if n.startswith("JAXMM_")]:
        monkeypatch.delenv(name)
    yield


def toml(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "config.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_nothing_given_is_the_defaults() -> None:
    assert load_config(EngineConfig) == EngineConfig()


def test_toml_tables_fill_nested_settings(tmp_path: Path) -> None:
    path = toml(tmp_path, 'model = "m"\n[pages]\npage_size = 32\n[media]\nworkers = 3\n')
    config = load_config(EngineConfig, path)
    assert (config.model, config.pages.page_size, config.media.workers) == ("m", 32, 3)
    assert config.arena == EngineConfig().arena


def test_later_sources_win(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = toml(tmp_path, "max_running = 1\nmax_waiting = 1\nmax_model_len = 1\n")
    monkeypatch.setenv("JAXMM_MAX_WAITING", "2")
    monkeypatch.setenv("JAXMM_MAX_MODEL_LEN", "2")
    config = load_config(EngineConfig, path, {"max_model_len": 3})
    assert (config.max_running, config.max_waiting, config.max_model_len) == (1, 2, 3)


def test_environment_names_nested_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXMM_PAGES_PREFIX_CACHE", "no")
    monkeypatch.setenv("JAXMM_MEMORY_FRACTION", "0.25")
    assert environment(EngineConfig) == {
        "pages.prefix_cache": "no", "memory_fraction": "0.25"
    }  # fmt: skip
    config = load_config(EngineConfig)
    assert config.pages.prefix_cache is False
    assert config.memory_fraction == 0.25


@pytest.mark.parametrize(
    ("wrong", "nearest"),
    [
        ("JAXMM_MAX_RUNING", "JAXMM_MAX_RUNNING"),
        ("JAXMM_PAGE_SIZE", "JAXMM_PAGES_PAGE_SIZE"),
        ("JAXMM_PAGES.PAGE_SIZE", "JAXMM_PAGES_PAGE_SIZE"),
    ],
)
def test_unknown_variable_is_warned_of_and_names_the_nearest(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, wrong: str, nearest: str
) -> None:
    monkeypatch.setenv(wrong, "1")
    assert load_config(EngineConfig) == EngineConfig()
    (said,) = caplog.messages
    assert said == f"variable ignored, no setting of EngineConfig name={wrong} nearest={nearest}"


@pytest.mark.parametrize(
    ("wrong", "nearest"),
    [
        ("max_runing", "max_running"),
        ("pages.pagesize", "pages.page_size"),
        ("page.page_size", "pages.page_size"),
        ("media.max_pixel", "media.max_pixels"),
        ("on_recompil", "on_recompile"),
        ("page_size", "pages.page_size"),
    ],
)
def test_unknown_key_names_the_nearest(tmp_path: Path, wrong: str, nearest: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown setting {wrong}; the nearest is {nearest}$"):
        load_config(EngineConfig, None, {wrong: 1})
    with pytest.raises(ConfigError, match=f"the nearest is {nearest}$"):
        load_config(EngineConfig, toml(tmp_path, f"{wrong} = 1\n"))


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("max_running", "64", 64),
        ("memory_fraction", "0.5", 0.5),
        ("memory_fraction", 1, 1.0),
        ("progress", "false", False),
        ("progress", "1", True),
        ("dtype", "bfloat16", "bfloat16"),
        ("model", "some/dir", "some/dir"),
    ],
)
def test_strings_become_the_type_of_the_setting(name: str, text: Any, value: Any) -> None:
    loaded = getattr(load_config(EngineConfig, None, {name: text}), name)
    assert loaded == value
    assert type(loaded) is type(value)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("max_running", "many", "max_running='many' is not a number"),
        ("max_running", 1.5, "max_running=1.5 is not of type int"),
        ("max_running", True, "max_running=True is not of type int"),
        ("progress", "maybe", "progress='maybe' is not true or false"),
        ("dtype", "float8", "dtype='float8' is not one of auto, float32, bfloat16"),
        ("pages.page_size", 24, "pages.page_size=24 is not a power of two"),
        ("pages.page_size", 2, r"pages.page_size=2 is outside \[4, 1024\]; 0 derives it"),
        ("arena.page_rows", 24, "arena.page_rows=24 is not a power of two"),
        ("max_waiting", 0, "max_waiting=0 is outside .*; the default is 1024"),
        ("max_model_len", 1, "max_model_len=1 is outside .*; 0 derives it"),
        ("memory_fraction", 0.0, "memory_fraction=0.0 is outside"),
        ("media.timeout_seconds", 0, "media.timeout_seconds=0.0 is outside"),
        ("media.worker_memory_bytes", 1000, "media.worker_memory_bytes=1000 is outside"),
    ],
)
def test_wrong_value_is_refused_with_the_setting_and_the_value(
    name: str, value: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(EngineConfig, None, {name: value})


NUMBERS = [name for name, kind in field_names(EngineConfig).items() if kind in (int, float)]


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [-1, 10**18, float("nan"), float("inf"), "", None, [1]])
def test_no_number_can_be_absurd(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^{name}="):
        load_config(EngineConfig, None, {name: value})
    section, _, field = name.rpartition(".")
    kinds = {f.name: f.type for f in dataclasses.fields(EngineConfig)} | {"": EngineConfig}
    with pytest.raises(ConfigError, match=rf"^{name}="):
        kinds[section](**{field: value})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dtype": "float8"}, "dtype='float8' is not one of"),
        ({"progress": "yes"}, "progress='yes' is not of type bool"),
        ({"model": 7}, "model=7 is not of type str"),
        ({"pages": 64}, "pages=64 is not of type PageConfig"),
    ],
)
def test_values_given_in_python_are_checked_too(fields: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**fields)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"buckets.min_step_tokens": 64, "buckets.max_step_tokens": 32},
            "min_step_tokens=64 is above buckets.max_step_tokens=32",
        ),
        (
            {"buckets.min_lane_patches": 512, "buckets.max_patches_per_step": 256},
            "min_lane_patches=512 is above buckets.max_patches_per_step=256",
        ),
        (
            {"media.min_pixels": 4000, "media.max_pixels": 3000},
            "media.min_pixels=4000 is above media.max_pixels=3000",
        ),
    ],
)
def test_limits_that_contradict_are_refused(values: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(EngineConfig, None, values)


def test_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load_config(EngineConfig, tmp_path)
    (tmp_path / "latin.toml").write_bytes(b"model = '\xe9'")
    with pytest.raises(ConfigError, match="is not valid TOML"):
        load_config(EngineConfig, tmp_path / "latin.toml")


def test_file_that_is_missing_or_no_toml(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        load_config(EngineConfig, tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="is not valid TOML"):
        load_config(EngineConfig, toml(tmp_path, "max_running = = 3"))


def test_every_setting_has_a_name_and_a_description() -> None:
    names = field_names(EngineConfig)
    assert "pages.page_size" in names
    assert names["pages.page_size"] is int
    assert field_names(PageConfig, "pages.").keys() <= names.keys()
    source = Path(load_config.__code__.co_filename).read_text(encoding="utf-8")
    for name in names:
        field = name.rsplit(".", 1)[-1]
        after = source.split(f"    {field}: ", 1)[1].split("\n", 2)[1]
        assert after.strip().startswith('"""'), f"{name} has no description"
