"""Converted checkpoints: the oracle is the same checkpoint read from its safetensors files."""

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxmm.basis import model_directory
from jaxmm.config import EngineConfig
from jaxmm.device.backend import spread_kv_heads
from jaxmm.errors import ModelError
from jaxmm.models import read_config
from jaxmm.models.converted import convert, converted_digest, is_converted, restore_params
from jaxmm.models.loading import load_params
from jaxmm.models.remote import fetch_small_files
from jaxmm.models.stored import ParameterPath
from jaxmm.models.tensor_files import sample_digest
from serving.cli import main
from tests.checkpoints import FAMILIES, checkpoint
from tests.jaxmm.models.test_loading import assert_equal_params, leaves


def one_device(_: ParameterPath) -> None:
    return None


def from_files(directory: Path, dtype: Any = np.float32) -> dict[str, Any]:
    return load_params(directory, read_config(directory), dtype, lambda _, value: value)


def restored(directory: Path, dtype: Any = np.float32, sharding: Any = one_device) -> Any:
    return restore_params(directory, read_config(directory), dtype, sharding)


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("converted") / "model"
    convert(checkpoint("qwen2_5_vl"), out, progress=False)
    return out


@pytest.mark.parametrize("family", FAMILIES)
def test_restored_parameters_equal_those_of_the_files(family: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert(checkpoint(family), out, progress=False)
    assert_equal_params(restored(out), from_files(checkpoint(family)))


def test_the_directory_says_of_the_model_what_the_original_says(converted: Path) -> None:
    assert is_converted(converted) and not is_converted(checkpoint("qwen2_5_vl"))
    assert read_config(converted) == read_config(checkpoint("qwen2_5_vl"))
    names = {path.name for path in checkpoint("qwen2_5_vl").iterdir()}
    kept = {name for name in names if ".safetensors" not in name}
    assert kept | {"jaxmm.json", "weights"} == {path.name for path in converted.iterdir()}


@pytest.mark.parametrize("tied", [False, True])
def test_a_head_that_is_the_embedding_stays_so_whatever_config_json_said(
    tied: bool, tmp_path: Path
) -> None:
    source = checkpoint("qwen2_vl", tied=tied)
    out = tmp_path / "out"
    convert(source, out, progress=False)
    assert read_config(out).text.tied is tied
    assert ("head_VD" in restored(out)["text"]) is not tied


def test_weights_keep_the_dtype_of_the_files_and_are_cast_on_the_way_in(tmp_path: Path) -> None:
    source = checkpoint("qwen2_vl", dtype="bfloat16")
    out = tmp_path / "out"
    convert(source, out, progress=False)
    assert json.loads((out / "jaxmm.json").read_text())["dtype"] == "bfloat16"
    assert_equal_params(restored(out, np.float32), from_files(source, np.float32))


def test_weights_are_restored_where_they_are_wanted(converted: Path) -> None:
    mesh = Mesh(np.array(jax.devices()[:1]), ("model",))

    def split(path: ParameterPath) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec("model" if path[-1] == "embed_VD" else None))

    params = restored(converted, sharding=split)
    assert params["text"]["embed_VD"].sharding.spec == PartitionSpec("model")
    assert_equal_params(params, from_files(checkpoint("qwen2_5_vl")))


def test_restoring_in_many_waves_gives_the_same(converted: Path) -> None:
    config = read_config(converted)
    params = restore_params(converted, config, np.float32, one_device, wave_bytes=1 << 16)
    assert_equal_params(params, from_files(checkpoint("qwen2_5_vl")))


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_more_chips_than_kv_heads_restore_what_they_would_load(family: Any, tmp_path: Path) -> None:
    source, out = checkpoint(family), tmp_path / "out"
    convert(source, out, progress=False)
    config = spread_kv_heads(read_config(source), 2 * read_config(source).text.num_kv_heads)
    assert config.text.kv_copies == 2
    expected = load_params(source, config, np.float32, lambda _, value: value)
    assert_equal_params(restore_params(out, config, np.float32, one_device), expected)


def test_another_layout_of_parameters_is_refused(converted: Path, tmp_path: Path) -> None:
    fetched = fetch_small_files(str(converted), tmp_path)  # a copy that may be changed
    description = json.loads((fetched / "jaxmm.json").read_text())
    (fetched / "jaxmm.json").write_text(json.dumps(description | {"table": "0"}))
    with pytest.raises(ModelError, match="convert the original again"):
        restored(fetched)


def test_weights_that_are_gone_are_a_model_error(converted: Path, tmp_path: Path) -> None:
    fetched = fetch_small_files(str(converted), tmp_path)
    description = json.loads((fetched / "jaxmm.json").read_text())
    gone = description | {"weights": str(tmp_path / "gone")}
    (fetched / "jaxmm.json").write_text(json.dumps(gone))
    with pytest.raises(ModelError, match="cannot be restored"):
        restored(fetched)


def test_what_is_there_is_not_written_over(converted: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="not empty"):
        convert(checkpoint("qwen2_vl"), converted, progress=False)
    with pytest.raises(ModelError, match="converted already"):
        convert(converted, tmp_path / "again", progress=False)


def test_small_files_come_here_and_weights_stay(converted: Path, tmp_path: Path) -> None:
    copy = fetch_small_files(str(converted), tmp_path)
    assert copy.name == converted.name and not (copy / "weights").exists()
    assert_equal_params(restored(copy), restored(converted))
    assert fetch_small_files(str(converted), tmp_path) == copy


def test_an_address_without_a_converted_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="jaxmm convert MODEL"):
        fetch_small_files(str(checkpoint("qwen2_vl")), tmp_path)


def test_a_scheme_that_nobody_reads_is_a_model_error() -> None:
    with pytest.raises(ModelError, match="or a gs:// address"):
        model_directory(EngineConfig(model="nowhere://bucket/model"))


def test_the_command_converts_and_says_how_to_serve(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["convert", str(checkpoint("qwen2_vl")), str(out), "--dtype", "bfloat16"]) == 0
    assert capsys.readouterr().out == f"jaxmm serve --model {out}\n"
    value = leaves(restored(out, "bfloat16"))["text", "norm_D"]
    assert value.dtype == "bfloat16"
    assert main(["convert", str(tmp_path / "none"), str(out)]) == 1


def test_checkpoints_of_one_architecture_are_told_apart(tmp_path: Path) -> None:
    """What the processes of a pod compare: the names and sizes of their files are the same."""
    one, other = checkpoint("qwen2_vl"), checkpoint("qwen2_vl", seed=1)
    assert sample_digest(one) == sample_digest(shutil.copytree(one, tmp_path / "copy"))
    assert sample_digest(one) != sample_digest(other)
    digests = []
    for i, source in enumerate((one, one, other)):
        convert(source, tmp_path / str(i), progress=False)
        digests.append(converted_digest(tmp_path / str(i)))
    assert digests[0] == digests[1] != digests[2]


def test_a_weight_file_that_is_missing_is_a_model_error(tmp_path: Path) -> None:
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"model-00001-of-00002\.safetensors' cannot be read"):
        sample_digest(tmp_path)
