"""Finding families, and serving one that is added from outside: a toy without a processor."""

import importlib
import json
import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jaxmm.models
from jaxmm.errors import MediaTooLarge, ModelError, RequestError
from jaxmm.models import families, family_module, has_module, read_config
from jaxmm.models.auto_processor import AutoImageProcessor
from jaxmm.models.qwen2_vl.processor import ImageProcessor
from tests.checkpoints import byte_tokenizer, checkpoint, write_processor, write_tokenizer
from tests.engines import ask, make_engine, on_loop, picture, request, turn

TESTS = Path(__file__).parents[2]


@pytest.fixture
def toy_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The toy's folder stands beside those of the package."""
    yield from _extended(monkeypatch, "families")


@pytest.fixture
def broken_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield from _extended(monkeypatch, "families_broken")


def _extended(monkeypatch: pytest.MonkeyPatch, folder: str) -> Iterator[None]:
    places = [*jaxmm.models.__path__, str(TESTS / folder)]
    monkeypatch.setattr(jaxmm.models, "__path__", places)
    families.cache_clear()
    importlib.invalidate_caches()
    yield
    monkeypatch.undo()
    families.cache_clear()


def toy_checkpoint(directory: Path) -> Path:
    """The decoder of the small Qwen2-VL, and a random toy encoder."""
    raw = json.loads((checkpoint("qwen2_vl") / "config.json").read_text())
    raw |= {"model_type": "toy_vl", "vision_config": {"width": 32}}
    (directory / "config.json").write_text(json.dumps(raw))
    write_processor(directory, "qwen2_vl")
    write_tokenizer(directory, byte_tokenizer())
    weights = load_file(checkpoint("qwen2_vl") / "model.safetensors")
    weights = {k: v for k, v in weights.items() if not k.startswith("visual.")}
    random = np.random.default_rng(0)
    weights["visual.patch.weight"] = random.normal(0, 0.05, (32, 588)).astype(np.float32)
    weights["visual.merge.weight"] = random.normal(0, 0.1, (64, 128)).astype(np.float32)
    save_file(weights, directory / "model.safetensors")
    return directory


def test_a_folder_is_a_family(toy_path: None) -> None:
    assert families().folders["toy_vl"] == "toy_vl"
    assert {"qwen2_vl", "qwen2_5_vl"} < families().folders.keys()
    assert has_module("qwen2_vl", "processor")
    assert not has_module("toy_vl", "processor")


def test_two_folders_cannot_serve_one_type(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "another_qwen").mkdir()
    (tmp_path / "another_qwen" / "__init__.py").write_text('MODEL_TYPES = ("qwen2_vl",)\n')
    monkeypatch.setattr(jaxmm.models, "__path__", [*jaxmm.models.__path__, str(tmp_path)])
    families.cache_clear()
    with pytest.raises(ModelError, match="another_qwen and qwen2_vl both serve 'qwen2_vl'"):
        families()
    monkeypatch.undo()
    families.cache_clear()


def test_a_family_that_cannot_be_imported_costs_only_its_own_users(
    broken_path: None, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    with caplog.at_level(logging.WARNING):
        assert read_config(checkpoint("qwen2_vl")).family == "qwen2_vl"
        assert read_config(checkpoint("qwen2_5_vl")).family == "qwen2_5_vl"
    warnings = [r for r in caplog.records if r.name == "jaxmm.models"]
    assert len(warnings) == 1
    assert "broken_vl" in warnings[0].getMessage()
    (tmp_path / "config.json").write_text('{"model_type": "broken_vl"}')
    with pytest.raises(ModelError, match=r"broken_vl was skipped: .*a_package_that_nobody_has"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    "line", ["import nobody_has", "raise RuntimeError('built for another: nobody_has')"]
)
def test_a_module_that_cannot_be_imported_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, line: str
) -> None:
    folder = tmp_path / "half_vl"
    folder.mkdir()
    (folder / "__init__.py").write_text('MODEL_TYPES = ("half_vl",)\n')
    (folder / "config.py").write_text(f"{line}\n")
    monkeypatch.setattr(jaxmm.models, "__path__", [*jaxmm.models.__path__, str(tmp_path)])
    families.cache_clear()
    with pytest.raises(ModelError, match=r"'half_vl' cannot be served: .*nobody_has"):
        family_module("half_vl", "config")
    monkeypatch.undo()
    families.cache_clear()


def test_the_toy_is_served(toy_path: None, tmp_path: Path) -> None:
    directory = toy_checkpoint(tmp_path)
    image = picture(90, 62, 5)
    with make_engine("qwen2_vl", model=str(directory)) as on:
        [result] = ask(on, request(turn("<image>", "what is it"), [image]))
        assert result.usage.image_tokens == 3 * 2  # 84 x 56 pixels
        assert len(result.token_ids) == 16
        arena = on_loop(on, lambda: np.asarray(on._parts.runner._arena))
    # the rows by hand
    patches, _ = ImageProcessor(min_pixels=3136).patches(image)
    weights = load_file(directory / "model.safetensors")
    x = patches.astype(np.float32) / 255 @ weights["visual.patch.weight"].T
    expected = x.reshape(6, 128) @ weights["visual.merge.weight"].T
    np.testing.assert_allclose(arena[:6], expected, rtol=1e-4, atol=1e-4)


def auto(directory: Path, **limits: int) -> AutoImageProcessor:
    return AutoImageProcessor.from_checkpoint(directory, patch_size=14, merge_size=2, **limits)


@pytest.mark.parametrize("size", [(200, 130), (19, 19), (448, 448), (30, 900)])
def test_fallback_gives_the_patches_of_the_processor_that_it_stands_in_for(
    size: tuple[int, int],
) -> None:
    image = picture(*size)
    own = ImageProcessor.from_checkpoint(checkpoint("qwen2_vl"), max_pixels=100352)
    ours, grid = auto(checkpoint("qwen2_vl"), max_pixels=100352).patches(image)
    expected, expected_grid = own.patches(image)
    assert grid == expected_grid
    np.testing.assert_array_equal(ours, expected)


def test_fallback_keeps_to_the_limits_of_the_request() -> None:
    processor = auto(checkpoint("qwen2_vl"), max_pixels=100352)
    _, small = processor.patches(picture(448, 448), 3136, 12544)
    assert small == (1, 8, 8)
    with pytest.raises(RequestError, match="max_pixels=200000"):
        processor.limits(None, 200000)
    with pytest.raises(MediaTooLarge, match="cannot be processed"):
        processor.patches(picture(6000, 14))


def test_fallback_cuts_whole_pictures(tmp_path: Path) -> None:
    table = {
        "image_processor_type": "SiglipImageProcessor",
        "size": {"height": 56, "width": 84},
        "resample": 3,
    }
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(table))
    (tmp_path / "config.json").write_text('{"model_type": "siglip"}')
    processor = auto(tmp_path)
    image = picture(84, 56, 3)
    patches, grid = processor.patches(image)
    assert grid == (1, 4, 6)
    assert processor.max_patches == 24
    # no resizing: as the patches of a processor that leaves the size alone
    expected, _ = ImageProcessor(min_pixels=3136).patches(image)
    np.testing.assert_array_equal(patches, expected)
    with pytest.raises(RequestError, match="server's limits"):
        processor.limits(None, 3136)


def test_fallback_without_a_processor_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    with pytest.raises(ModelError, match="no image processor can be loaded"):
        auto(tmp_path)
