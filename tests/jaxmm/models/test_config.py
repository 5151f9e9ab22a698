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
from jaxmm.sizes import weight_count
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
    qwen3 = config.family.startswith("qwen3")
    section = [24, 20, 20] if qwen3 else [16, 24, 24]
    assert list(ours.mrope_section) == text.rope_parameters.get("mrope_section", section)
    assert ours.tied == theirs.tie_word_embeddings
    if qwen3:
        assert ours.head_channels == text.head_dim
        assert config.vision.position_side**2 == vision.num_position_embeddings
        assert config.vision.deepstack_layers == tuple(vision.deepstack_visual_indexes)
        assert ours.deepstack_levels == len(vision.deepstack_visual_indexes)
    if config.family == "qwen3_vl_moe":
        assert ours.num_experts == text.num_experts
        assert ours.experts_per_token == text.num_experts_per_tok
        assert ours.expert_width == text.moe_intermediate_size
        assert ours.dense_layers == tuple(text.mlp_only_layers)
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
        if qwen3:
            assert config.vision.window_patches == 0
            return
        assert config.vision.window_patches == (vision.window_size // vision.patch_size) ** 2
        assert config.vision.full_attention_layers == tuple(vision.fullatt_block_indexes)


def test_published_form_reads_like_transformers(family: Family) -> None:
    assert_same_as_transformers(read_config(checkpoint(family)), checkpoint(family))


def test_form_saved_by_transformers_reads_like_transformers(family: Family, tmp_path: Path) -> None:
    transformers.AutoConfig.from_pretrained(checkpoint(family)).save_pretrained(tmp_path)
    assert "text_config" in json.loads((tmp_path / "config.json").read_text())
    assert_same_as_transformers(read_config(tmp_path), tmp_path)


def test_missing_keys_have_the_defaults_of_the_class(family: Family, tmp_path: Path) -> None:
    width = {"qwen3_vl": 4096, "qwen3_vl_moe": 2048}.get(family, 8192)
    vision = {"hidden_size" if family == "qwen2_vl" else "out_hidden_size": width}
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


def test_published_30b_a3b_of_qwen3_vl_with_the_keys_that_its_file_has(tmp_path: Path) -> None:
    text = {
        "head_dim": 128,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "rope_scaling": {
            "mrope_interleaved": True,
            "mrope_section": [24, 20, 20],
            "rope_type": "default",
        },
        "rope_theta": 5000000,
        "vocab_size": 151936,
    }
    vision = {"model_type": "qwen3_vl_moe", "out_hidden_size": 2048}
    write(tmp_path, {"model_type": "qwen3_vl_moe", "text_config": text, "vision_config": vision})
    config = read_config(tmp_path)
    # the name says 30 billion
    assert 29e9 < weight_count(config) < 32e9
    assert config.text.row_width == 4 * 2048
    assert (config.text.head_channels, config.text.rope_theta) == (128, 5e6)
    assert all(map(config.text.has_experts, range(48)))


def test_eos_ids_are_those_of_the_generation_config(family: Family, tmp_path: Path) -> None:
    raw = published(family)
    raw.get("text_config", {}).pop("eos_token_id", None)
    write(tmp_path, raw | {"eos_token_id": 7})
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


@pytest.mark.parametrize("name", [*FAMILIES, "gemma3"])
def test_pixels_are_normalised_as_a_whole_processors_file_says(name: Any, tmp_path: Path) -> None:
    """In which transformers 5 saves the settings that had a file of their own."""
    shutil.copy(checkpoint(name) / "config.json", tmp_path)
    table = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6]}
    write(tmp_path, {"image_processor": table}, "processor_config.json")
    vision = read_config(tmp_path).vision
    assert (vision.image_mean, vision.image_std) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))


def test_config_is_a_static_argument(family: Family) -> None:
    assert hash(read_config(checkpoint(family))) == hash(read_config(checkpoint(family)))


def test_unknown_family_is_refused_with_those_there_are(tmp_path: Path) -> None:
    write(tmp_path, {"model_type": "llava"})
    there = "deepseek_vl_v2, gemma3, qwen2_5_vl, qwen2_vl, qwen3_vl, qwen3_vl_moe"
    with pytest.raises(ModelError, match=rf"'llava' is not one .*: {there}$"):
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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention_bias": True}, "attention_bias=True is not supported"),
        ({"rope_scaling": {"mrope_interleaved": False}}, "mrope_interleaved=False"),
        ({"norm_topk_prob": False}, "norm_topk_prob=False is not supported"),
        ({"num_experts_per_tok": 9}, "9 experts a token of only 8"),
        ({"num_hidden_layers": 2}, "3 deepstack levels for 2 layers"),
        ({"num_key_value_heads": 3}, "4 query heads are no multiple of 3"),
    ],
)
def test_what_qwen3_cannot_be_is_named(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    raw = published("qwen3_vl_moe")
    raw["text_config"] |= change
    write(tmp_path, raw)
    with pytest.raises(ModelError, match=message):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_position_embeddings": 60}, "num_position_embeddings=60 is not a square"),
        ({"deepstack_visual_indexes": [3, 1]}, r"\[3, 1\] do not ascend below the 4 layers"),
        ({"deepstack_visual_indexes": [1, 4]}, r"\[1, 4\] do not ascend"),
        ({"hidden_act": "silu"}, "hidden_act='silu' is not supported"),
    ],
)
def test_what_its_encoder_cannot_be_is_named(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    raw = published("qwen3_vl")
    raw["vision_config"] |= change
    write(tmp_path, raw)
    with pytest.raises(ModelError, match=message):
        read_config(tmp_path)
