"""Reading config.json: the oracle is transformers' own configuration class."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import transformers

from jaxmm.errors import ModelError
from jaxmm.models import family_module, read_config
from jaxmm.models.config import ModelConfig
from tests.checkpoints import FAMILIES, Family, checkpoint


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    return request.param


def write(directory: Path, value: dict[str, Any], name: str = "config.json") -> Path:
    (directory / name).write_text(json.dumps(value))
    return directory


def published(family: Family) -> dict[str, Any]:
    return json.loads((checkpoint(family) / "config.json").read_text())


def assert_same_as_transformers(config: ModelConfig, directory: Path) -> None:
    theirs = transformers.AutoConfig.from_pretrained(directory)
    text, vision = theirs.text_config, theirs.vision_config
    assert config.family == theirs.model_type
    assert config.max_position == text.max_position_embeddings
    assert config.image_token_id == theirs.image_token_id
    assert config.video_token_id == theirs.video_token_id
    assert config.vision_start_token_id == theirs.vision_start_token_id
    assert config.vision_end_token_id == theirs.vision_end_token_id
    ours = config.text
    assert ours.vocab_size == text.vocab_size
    assert ours.width == text.hidden_size
    assert ours.mlp_width == text.intermediate_size
    assert ours.num_layers == text.num_hidden_layers
    assert ours.num_heads == text.num_attention_heads
    assert ours.num_kv_heads == text.num_key_value_heads
    assert ours.rms_eps == text.rms_norm_eps
    assert ours.rope_theta == text.rope_parameters["rope_theta"]
    assert list(ours.mrope_section) == text.rope_parameters.get("mrope_section", [16, 24, 24])
    assert ours.tied == theirs.tie_word_embeddings
    assert config.vision.depth == vision.depth
    assert config.vision.num_heads == vision.num_heads
    assert config.vision.patch_size == vision.patch_size
    if config.family == "qwen2_vl":
        assert config.vision.width == vision.embed_dim
        assert config.vision.mlp_width == vision.embed_dim * vision.mlp_ratio
        assert config.vision.out_width == vision.hidden_size
        assert config.vision.window_patches == 0
    else:
        assert config.vision.width == vision.hidden_size
        assert config.vision.mlp_width == vision.intermediate_size
        assert config.vision.out_width == vision.out_hidden_size
        assert config.vision.window_patches == (vision.window_size // vision.patch_size) ** 2
        assert config.vision.full_attention_layers == tuple(vision.fullatt_block_indexes)


def test_published_form_reads_like_transformers(family: Family) -> None:
    assert_same_as_transformers(read_config(checkpoint(family)), checkpoint(family))


def test_form_saved_by_transformers_reads_like_transformers(family: Family, tmp_path: Path) -> None:
    transformers.AutoConfig.from_pretrained(checkpoint(family)).save_pretrained(tmp_path)
    assert "text_config" in json.loads((tmp_path / "config.json").read_text())
    assert_same_as_transformers(read_config(tmp_path), tmp_path)


def test_missing_keys_have_the_defaults_of_the_class(family: Family, tmp_path: Path) -> None:
    vision = {"hidden_size": 8192} if family == "qwen2_vl" else {"out_hidden_size": 8192}
    write(tmp_path, {"model_type": family, "vision_config": vision})
    assert_same_as_transformers(read_config(tmp_path), tmp_path)


def test_published_7b_of_qwen2_5_vl_with_the_keys_that_its_file_has(tmp_path: Path) -> None:
    text = {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
        "vocab_size": 152064,
        "rope_theta": 1000000.0,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "tie_word_embeddings": False,
    }
    vision = {"hidden_size": 1280, "in_chans": 3, "spatial_patch_size": 14, "tokens_per_second": 2}
    write(tmp_path, {"model_type": "qwen2_5_vl", **text, "vision_config": vision})
    config = read_config(tmp_path)
    assert (config.vision.depth, config.vision.mlp_width) == (32, 3420)
    assert (config.vision.out_width, config.vision.window_patches) == (3584, 64)
    assert config.vision.full_attention_layers == (7, 15, 23, 31)
    assert (config.vision.head_channels, config.text.head_channels) == (80, 128)
    assert config.eos_token_ids == (151645,)


def test_eos_ids_are_those_of_the_generation_config(family: Family, tmp_path: Path) -> None:
    write(tmp_path, published(family) | {"eos_token_id": 7})
    assert read_config(tmp_path).eos_token_ids == (7,)
    write(tmp_path, {"eos_token_id": [5, 6]}, "generation_config.json")
    assert read_config(tmp_path).eos_token_ids == (5, 6)


@pytest.mark.parametrize("flag", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_the_weights_say_whether_the_head_is_tied(tied: bool, flag: bool, tmp_path: Path) -> None:
    shutil.copytree(checkpoint("qwen2_vl", tied=tied), tmp_path, dirs_exist_ok=True)
    write(tmp_path, published("qwen2_vl") | {"tie_word_embeddings": flag})
    assert read_config(tmp_path).text.tied == tied


def test_pixels_are_normalised_as_the_processor_file_says(tmp_path: Path) -> None:
    write(tmp_path, published("qwen2_vl"))
    assert read_config(tmp_path).vision.image_mean == (0.48145466, 0.4578275, 0.40821073)
    write(tmp_path, {"image_mean": [0.5, 0.5, 0.5]}, "preprocessor_config.json")
    assert read_config(tmp_path).vision.image_mean == (0.5, 0.5, 0.5)


def test_config_is_a_static_argument(family: Family) -> None:
    assert hash(read_config(checkpoint(family))) == hash(read_config(checkpoint(family)))


def test_unknown_family_is_refused_with_those_there_are(tmp_path: Path) -> None:
    write(tmp_path, {"model_type": "llava"})
    with pytest.raises(ModelError, match=r"'llava' is not one .*: qwen2_5_vl, qwen2_vl"):
        read_config(tmp_path)
    with pytest.raises(ModelError, match="'gpt' is not one"):
        family_module("gpt", "config")


def test_directory_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json' does not exist"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": "64"}, "hidden_size='64' is not an integer"),
        ({"num_attention_heads": 0}, "num_attention_heads=0"),
        ({"num_attention_heads": 3}, "no multiple of 3 heads"),
        ({"num_key_value_heads": 3}, "4 query heads are no multiple of 3"),
        ({"rope_theta": "x"}, "rope_theta='x' is not a number"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ({"use_sliding_window": True}, "use_sliding_window=True is not supported"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "type='yarn' is not supported"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 4]}}, "whose sum is 8"),
        ({"vision_config": {"hidden_size": 128}}, "rows of 128 values, the decoder takes 64"),
        (
            {"vision_config": {"hidden_size": 64, "embed_dim": 100}},
            "vision width 100 is no multiple of 16 heads",
        ),
        ({"vision_config": {"in_channels": 4}}, "in_channels=4 is not supported"),
        (
            {"vision_config": {"hidden_size": 64, "spatial_merge_size": 3}},
            "spatial_merge_size=3 is not supported",
        ),
    ],
)
def test_what_cannot_be_served_is_named(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write(tmp_path, published("qwen2_vl") | change)
    with pytest.raises(ModelError, match=message):
        read_config(tmp_path)
