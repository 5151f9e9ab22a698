"""Loading checkpoints: the oracle is transformers' own loading of the same files."""

import json
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from jaxmm.errors import ModelError
from jaxmm.models import family_module, read_config
from jaxmm.models.loading import ParameterPath, load_params
from tests.checkpoints import FAMILIES, Family, checkpoint


def keep(path: ParameterPath, value: np.ndarray) -> np.ndarray:
    return value


def load(directory: Path, dtype: Any = np.float32) -> dict[str, Any]:
    return load_params(directory, read_config(directory), dtype, keep)


def leaves(params: dict[Any, Any], path: ParameterPath = ()) -> dict[ParameterPath, np.ndarray]:
    flat: dict[ParameterPath, np.ndarray] = {}
    for key, value in params.items():
        if isinstance(value, dict):
            flat |= leaves(value, (*path, key))
        else:
            flat[(*path, key)] = value
    return flat


def assert_equal_params(params: dict[str, Any], expected: dict[str, Any]) -> None:
    assert leaves(params).keys() == leaves(expected).keys()
    for path, value in leaves(params).items():
        np.testing.assert_array_equal(value, leaves(expected)[path], err_msg=str(path))


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    return request.param


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A checkpoint whose files may be changed."""
    shutil.copytree(checkpoint("qwen2_vl"), tmp_path, dirs_exist_ok=True)
    return tmp_path


def change_weights(directory: Path, change: dict[str, torch.Tensor | None]) -> None:
    """Put, replace or (None) remove tensors."""
    file = directory / "model.safetensors"
    weights = load_file(file) | change
    save_file({name: value for name, value in weights.items() if value is not None}, file)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
def test_text_parameters_equal_those_that_transformers_loads(family: Family) -> None:
    model = transformers.AutoModelForImageTextToText.from_pretrained(checkpoint(family))
    theirs = {name: p.detach().numpy() for name, p in model.named_parameters()}
    text = load(checkpoint(family))["text"]
    prefix = "model.language_model."
    np.testing.assert_array_equal(text["embed_VD"], theirs[f"{prefix}embed_tokens.weight"])
    np.testing.assert_array_equal(text["norm_D"], theirs[f"{prefix}norm.weight"])
    np.testing.assert_array_equal(text["head_VD"], theirs["lm_head.weight"])
    for index, layer in text["layers"].items():

        def at(name: str, start: str = f"{prefix}layers.{index}.") -> np.ndarray:
            return theirs[start + name]

        # 2 KV heads of 16 channels, each with 2 query heads; an MLP of 128
        for rows, kind in ((layer["qkv_OD"], "weight"), (layer["qkv_O"], "bias")):
            for head, group in enumerate(np.split(rows, 2)):
                q, kv = slice(32 * head, 32 * head + 32), slice(16 * head, 16 * head + 16)
                np.testing.assert_array_equal(group[:32], at(f"self_attn.q_proj.{kind}")[q])
                np.testing.assert_array_equal(group[32:48], at(f"self_attn.k_proj.{kind}")[kv])
                np.testing.assert_array_equal(group[48:], at(f"self_attn.v_proj.{kind}")[kv])
        np.testing.assert_array_equal(layer["out_DO"], at("self_attn.o_proj.weight"))
        np.testing.assert_array_equal(layer["gate_up_2FD"][0], at("mlp.gate_proj.weight"))
        np.testing.assert_array_equal(layer["gate_up_2FD"][1], at("mlp.up_proj.weight"))
        np.testing.assert_array_equal(layer["down_DF"], at("mlp.down_proj.weight"))
        np.testing.assert_array_equal(layer["attn_norm_D"], at("input_layernorm.weight"))
        np.testing.assert_array_equal(layer["mlp_norm_D"], at("post_attention_layernorm.weight"))


@pytest.mark.parametrize("family", FAMILIES)
def test_text_parameters_hold_every_value_that_transformers_loads(family: Family) -> None:
    model = transformers.AutoModelForImageTextToText.from_pretrained(checkpoint(family))
    parts = [*model.model.language_model.parameters(), *model.lm_head.parameters()]
    theirs = np.concatenate([p.detach().numpy().ravel() for p in parts])
    ours = np.concatenate([v.ravel() for v in leaves(load(checkpoint(family))["text"]).values()])
    np.testing.assert_array_equal(np.sort(ours), np.sort(theirs))


def test_vision_parameters_hold_every_value_that_transformers_loads(family: Family) -> None:
    model = transformers.AutoModelForImageTextToText.from_pretrained(checkpoint(family))
    theirs = np.concatenate([p.detach().numpy().ravel() for p in model.model.visual.parameters()])
    ours = np.concatenate([v.ravel() for v in leaves(load(checkpoint(family))["vision"]).values()])
    np.testing.assert_array_equal(np.sort(ours), np.sort(theirs))


def test_shapes_are_those_of_the_table(family: Family) -> None:
    directory = checkpoint(family)
    table = family_module(family, "params").parameters(read_config(directory))
    shapes = {path: value.shape for path, value in leaves(load(directory)).items()}
    assert shapes == {p.path: p.shape for p in table}


def test_both_generations_of_names_load_alike(family: Family) -> None:
    assert_equal_params(load(checkpoint(family, prefixes="module")), load(checkpoint(family)))


def test_what_transformers_saves_loads_alike(family: Family, tmp_path: Path) -> None:
    model = transformers.AutoModelForImageTextToText.from_pretrained(checkpoint(family))
    model.save_pretrained(tmp_path)
    assert_equal_params(load(tmp_path), load(checkpoint(family)))


def test_shards_load_like_one_file(family: Family) -> None:
    assert_equal_params(load(checkpoint(family, shards=3)), load(checkpoint(family)))


def test_tied_checkpoint_has_no_head(family: Family) -> None:
    assert "head_VD" not in load(checkpoint(family, tied=True))["text"]


@pytest.mark.parametrize("stored", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("wanted", [np.float32, ml_dtypes.bfloat16])
def test_any_stored_dtype_becomes_the_wanted_one(stored: str, wanted: Any) -> None:
    directory = checkpoint("qwen2_vl", dtype=stored)
    text = load(directory, wanted)["text"]
    # ml_dtypes rounds to nearest even, as torch does
    file = load_file(directory / "model.safetensors")
    to = torch.float32 if wanted == np.float32 else torch.bfloat16
    for ours, name in (
        (text["embed_VD"], "model.embed_tokens.weight"),
        (text["layers"][0]["qkv_O"][32:48], "model.layers.0.self_attn.k_proj.bias"),
    ):
        assert ours.dtype == wanted
        theirs = file[name].to(to).float().numpy()[: len(ours)]
        np.testing.assert_array_equal(ours.astype(np.float32), theirs)


def test_parameters_are_placed_one_at_a_time_with_their_path() -> None:
    seen = []

    def put(path: ParameterPath, value: np.ndarray) -> str:
        seen.append(path)
        return "placed"

    directory = checkpoint("qwen2_vl")
    params = load_params(directory, read_config(directory), np.float32, put)
    assert params["text"]["layers"][1]["qkv_OD"] == "placed"
    assert len(seen) == len(set(seen))
    assert ("text", "layers", 1, "qkv_OD") in seen


def test_progress_is_shown_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    directory = checkpoint("qwen2_vl")
    config = read_config(directory)
    load_params(directory, config, np.float32, keep, progress=False)
    assert capsys.readouterr().err == ""
    load_params(directory, config, np.float32, keep, progress=True)
    assert "load" in capsys.readouterr().err


def test_rotary_buffers_of_old_files_are_ignored(copied: Path) -> None:
    change_weights(
        copied,
        {
            "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
            "visual.rotary_pos_emb.inv_freq": torch.ones(4),
        },
    )
    assert_equal_params(load(copied), load(checkpoint("qwen2_vl")))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.norm.weight": None}, "lacks tensor 'model.norm.weight' that config.json asks for"),
        ({"visual.blocks.7.x": torch.ones(1)}, "holds tensor 'visual.blocks.7.x' that no param"),
        (
            {"model.layers.1.mlp.up_proj.weight": torch.ones(127, 64)},
            r"'model.layers.1.mlp.up_proj.weight' has shape \(127, 64\).* asks for \(128, 64\)",
        ),
        (
            {"visual.patch_embed.proj.weight": torch.ones(64, 3, 1, 14, 14)},
            r"'visual.patch_embed.proj.weight' has shape \(64, 3, 1, 14, 14\)",
        ),
        (
            {"model.norm.weight": torch.ones(64, dtype=torch.int8)},
            "'model.norm.weight' is I8; only BF16, F16, F32, F64",
        ),
        (
            {"model.language_model.norm.weight": torch.ones(64)},
            "'model.language_model.norm.weight' and 'model.norm.weight' are the same tensor",
        ),
    ],
)
def test_what_is_wrong_with_a_tensor_is_said_with_its_name(
    change: dict[str, torch.Tensor | None], message: str, copied: Path
) -> None:
    change_weights(copied, change)
    with pytest.raises(ModelError, match=message):
        load(copied)


def test_a_long_list_of_missing_tensors_is_cut(copied: Path) -> None:
    names = load_file(copied / "model.safetensors")
    change_weights(copied, {name: None for name in names if name.startswith("visual.blocks.1.")})
    # 12 tensors in a block: two norms, two linear layers of attention, two of the MLP, each with
    # weight and bias
    with pytest.raises(ModelError, match=r"lacks tensors 'visual.blocks.1.attn.* and 8 more that"):
        load(copied)


def test_nothing_is_placed_before_everything_is_checked(copied: Path) -> None:
    change_weights(copied, {"visual.merger.mlp.2.bias": torch.ones(3)})
    placed = []
    with pytest.raises(ModelError):
        load_params(copied, read_config(copied), np.float32, lambda path, _: placed.append(path))
    assert placed == []


def test_a_shard_that_is_not_there_is_named(tmp_path: Path) -> None:
    shutil.copytree(checkpoint("qwen2_vl", shards=3), tmp_path, dirs_exist_ok=True)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model-00002-of-00003\.safetensors"):
        load(tmp_path)


def test_a_file_cut_short_is_named(copied: Path) -> None:
    file = copied / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"model\.safetensors' cannot be read"):
        load(copied)


def test_an_index_without_a_map_is_refused(copied: Path) -> None:
    (copied / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}}))
    with pytest.raises(ModelError, match="has no valid weight_map"):
        load(copied)


def test_a_directory_without_weights_is_refused(copied: Path) -> None:
    (copied / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="lacks tensors"):
        load(copied)
