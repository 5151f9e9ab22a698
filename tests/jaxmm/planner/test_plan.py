"""Plans up to the compiler: what is read, refused, ranked and shown."""

import dataclasses
import json
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest

from jaxmm.config import EngineConfig
from jaxmm.errors import ConfigError, ModelError
from jaxmm.host.buckets import Buckets
from jaxmm.models import read_config
from jaxmm.planner.floors import Floor
from jaxmm.planner.plan import plan
from jaxmm.planner.question import _processor, read_question
from jaxmm.planner.result import Memory, Picture, Plan, Requests, Step
from jaxmm.planner.splits import suggest
from jaxmm.sizes import Sizes
from serving.engine import describe_plan

needs_compiler = pytest.mark.skipif(
    find_spec("libtpu") is None, reason="libtpu is for Linux on x86-64"
)
GIB = 2**30


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The config.json of Qwen2.5-VL-72B, alone, under another name."""
    path = tmp_path_factory.mktemp("published") / "Qwen2.5-VL-72B.json"
    vision = {
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3456,
        "num_heads": 16,
        "out_hidden_size": 8192,
        "fullatt_block_indexes": [7, 15, 23, 31],
    }
    text = {
        "model_type": "qwen2_5_vl",
        "hidden_size": 8192,
        "intermediate_size": 29568,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 152064,
        "max_position_embeddings": 128000,
        "tie_word_embeddings": False,
    }
    path.write_text(json.dumps({**text, "vision_config": vision}))
    return path


@needs_compiler
def test_a_config_alone_is_enough(published: Path) -> None:
    question = read_question(published, "v5e:4x8")
    assert question.name == "Qwen2.5-VL-72B"
    assert question.model.text.num_layers == 80
    assert len(question.devices) == 32
    assert question.processor.max_patches <= 16384 * 4  # the published limit


def test_a_config_of_pictures_of_one_size_tells_their_size(tmp_path: Path) -> None:
    vision = {"image_size": 896, "patch_size": 14}  # 64 x 64 patches, 16 of them a token
    raw = {"model_type": "gemma3", "text_config": {}, "vision_config": vision}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    processor = _processor(EngineConfig(), read_config(tmp_path), tmp_path)
    assert processor.num_rows(processor.grid(480, 640)) == 256
    assert processor.max_patches == 4096


@needs_compiler
def test_what_has_no_room_is_told_by_how_much(published: Path) -> None:
    found = plan(published, "v5e:2x2")
    assert not found.fits
    # 72 billion weights of two bytes over four chips
    assert found.memory.text_weights / GIB == pytest.approx(72.0e9 * 2 / 4 / GIB, rel=0.03)
    assert found.memory.free < -15 * GIB
    assert "does not fit" in str(found)


@needs_compiler
def test_splits_are_ranked_by_what_they_decode(published: Path) -> None:
    splits = suggest(read_question(published, "v5p:2x2x4"), 4096)
    assert [s.tensor_parallel * s.replicas for s in splits] == [16] * len(splits)
    rates = [s.tokens for s in splits]
    assert rates == sorted(rates, reverse=True)
    # 134 GiB of weights do not go into 96, nor into twice 57 with room for pages
    assert {s.tensor_parallel for s in splits if s.obstacle} == {1, 2}
    assert "no room" in str(splits)


@needs_compiler
def test_a_split_of_the_settings_that_is_set_aside_is_told(published: Path) -> None:
    """Nothing has room, so that nothing is compiled; the least chips come first."""
    shown: list[str] = []
    settings = EngineConfig(model=str(published), tensor_parallel=4)
    describe = partial(describe_plan, settings, "v5e:2x2", None, suggest=True, show=shown.append)
    describe(tensor_parallel=0)
    assert "settings say tensor_parallel=4; planned is the best split, 1." in shown[1]
    assert "4 of tensor_parallel=1: does not fit" in shown[2]
    shown.clear()
    describe(tensor_parallel=4)
    assert "1 of tensor_parallel=4: does not fit" in shown[1]


@needs_compiler
def test_chips_that_encode_the_same_lane_take_its_patches_once(published: Path) -> None:
    lanes, split = (
        read_question(published, "v5e:2x2", EngineConfig(encoder_parallel=how)).backend(4)
        for how in ("lanes", "model")
    )
    assert lanes.lane_rows((8, 3)) == {0: [slice(i, i + 2) for i in (0, 2, 4, 6)]}
    assert split.lane_rows((8, 3)) == {0: [slice(0, 8)]}


@needs_compiler
@pytest.mark.parametrize(
    ("topology", "words"),
    [
        ("v4:2x2x1", "one of v5e, v5p, v6e, tpu7x"),
        ("v5e", "not of the form"),
        ("v5e:3x7", "libtpu knows no topology"),
    ],
)
def test_slices_that_are_none_are_refused(published: Path, topology: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_question(published, topology)


def test_a_wrong_path_is_told_before_what_the_compiler_says(tmp_path: Path) -> None:
    """Also on a machine that has none; no compiler knows this topology."""
    with pytest.raises(ModelError, match="neither a directory nor"):
        plan(tmp_path / "missing.json", "v5e:3x7")


@needs_compiler
def test_models_that_cannot_be_planned_are_refused(published: Path, tmp_path: Path) -> None:
    raw = json.loads(published.read_text())
    raw |= {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4}
    raw["rope_scaling"] = {"type": "mrope", "mrope_section": [2, 3, 3]}
    raw["vision_config"]["out_hidden_size"] = 64
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match="text width of 64"):
        plan(tmp_path, "v5e:2x2")
    with pytest.raises(ConfigError, match="tensor_parallel=3 does not divide"):
        plan(published, "v5e:2x2", tensor_parallel=3)
    with pytest.raises(ConfigError, match="v5e:2x2 has 4 devices"):
        plan(published, "v5e:2x2", EngineConfig(tensor_parallel=8))


def made() -> Plan:
    floor = Floor(memory=0.01, matrix=0.002, links=0.0)
    step = Step(
        name="decode <4>",
        temporary_bytes=GIB,
        collectives={"all-reduce": 57},
        collective_bytes=1 << 20,
        floor=floor,
    )
    return Plan(
        model="m",
        topology="v5e:2x2",
        num_devices=4,
        tensor_parallel=2,
        sizes=Sizes(
            page_size=128,
            num_pages=64,
            num_rows=1024,
            max_running=16,
            max_model_len=4096,
            max_step_tokens=512,
            max_lane_patches=1024,
            buckets=Buckets(tokens=(32, 512), patches=(1024,)),
        ),
        memory=Memory(chip_bytes=16 * GIB, text_weights=8 * GIB, kv=4 * GIB, temporaries=GIB),
        steps=(step,),
        decoded=5,
        requests=(Requests(length=1024, pages=8, fit=8),),
        max_pixels=1003520,
        pictures=(Picture(width=10, height=20, tokens=3, lane=256, floor=floor),),
    )


def test_a_plan_adds_up() -> None:
    found = made()
    assert found.memory.used == 13 * GIB
    assert (found.memory.free, found.fits, found.replicas) == (3 * GIB, True, 2)
    assert found.decode_tokens == pytest.approx(2 * 5 / 0.01)
    assert found.highest_fraction == 0.93  # 15 of 16 GiB


def test_a_plan_that_does_not_fit_says_what_would() -> None:
    found = made()
    fuller = dataclasses.replace(found, memory=dataclasses.replace(found.memory, kv=9 * GIB))
    assert not fuller.fits
    assert "2.00 GiB a chip are missing; memory_fraction=0.93 does" in str(fuller)
    (step,) = found.steps
    greedy = dataclasses.replace(
        found,
        memory=dataclasses.replace(found.memory, temporaries=12 * GIB),
        steps=(dataclasses.replace(step, temporary_bytes=12 * GIB),),
    )
    assert "to decode <4> takes 12.00: lower media.max_pixels" in str(greedy)


def test_a_plan_is_shown_as_text_and_as_html() -> None:
    text, page = str(made()), made()._repr_html_()
    assert "fits, 3.00 GiB a chip are free" in text
    assert "57 all-reduce (1.0 MiB)" in text
    assert "pictures, each alone; above 1003520 pixels they are made smaller" in text
    assert "10.00 ms" in text
    assert "decode &lt;4&gt;" in page
    assert page.count("<table>") == page.count("</table>") == 4
