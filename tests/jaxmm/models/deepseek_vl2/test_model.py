"""Encoder, loading and parts of DeepSeek-VL2 against the authors' arrays and numbers by hand."""

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from jaxmm.basis import load_processor
from jaxmm.config import EngineConfig
from jaxmm.device.backend import Backend
from jaxmm.device.experts import route_scores
from jaxmm.device.image_rows import ImageRows
from jaxmm.device.kv import PagedAttention, pool_shape
from jaxmm.device.lane import Lane
from jaxmm.device.sharding import param_spec
from jaxmm.errors import ModelError
from jaxmm.host.tiles import TileForm, pack_tiles
from jaxmm.models import family_module, read_config
from jaxmm.models.deepseek_vl2.processor import ImageProcessor
from jaxmm.models.loading import load_params, open_params
from kernels_pallas.ragged_paged_attention import Ragged
from tests import deepseek
from tests.jaxmm.models.test_loading import leaves

ABSOLUTE = 1e-4
"""Rows are below 4 in absolute terms: float32 on both sides, sums in other orders."""
LOGPROBS = 1e-3
"""Of tokens of a prompt; a wrong step of the arithmetic shows at 1e-2 and more."""
LANE_PATCHES = 512
"""Of 25 patches a tile: more than any case here has, and no multiple of a tile."""


def load(directory: Path, dtype: Any = np.float32) -> dict[str, Any]:
    return load_params(directory, read_config(directory), dtype, lambda _, value: value)


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A checkpoint whose files may be changed."""
    shutil.copytree(deepseek.FOLDER / "noaux", tmp_path, dirs_exist_ok=True)
    return tmp_path


def change_weights(directory: Path, change: dict[str, np.ndarray | None]) -> None:
    """Put, replace or (None) remove tensors."""
    weights = load_file(directory / "model.safetensors") | change
    kept = {name: value for name, value in weights.items() if value is not None}
    save_file(kept, directory / "model.safetensors")


@pytest.fixture(scope="module")
def encoder() -> Any:
    directory = deepseek.FOLDER / "mha"
    config = read_config(directory).vision
    encoder_class = family_module("deepseek_vl_v2", "vision").VisionEncoder
    graph, state = nnx.split(nnx.eval_shape(lambda: encoder_class(config)))
    nnx.replace_by_pure_dict(state, jax.tree.map(jnp.asarray, load(directory)["vision"]))
    return jax.jit(nnx.merge(graph, state))


@pytest.mark.parametrize("case", [name for name in deepseek.CASES if name != "text_only"])
def test_rows_equal_the_authors(encoder: Any, case: str) -> None:
    """All pictures of a case in one lane, their rows at scattered places of an arena."""
    processor = ImageProcessor.from_checkpoint(deepseek.FOLDER / "mha")
    images = deepseek.pictures(deepseek.cases("mha")[case])
    limits = processor.limits(num_images=len(images))
    features, grids = zip(*(processor.patches(image, *limits) for image in images), strict=True)
    counts = [processor.num_rows(grid) for grid in grids]
    places = np.random.default_rng(0).permutation(sum(counts)).astype(np.int32)
    lane = pack_tiles(
        features,
        grids,
        np.split(places, np.cumsum(counts)[:-1]),
        processor.form,
        lane_patches=LANE_PATCHES,
        patch_values=processor.num_values,
        drop_slot=sum(counts),
    )
    rows = encoder(
        Lane(
            patches_NU=lane.patches,
            later_NU=lane.patches,
            any_later=np.bool_(False),
            coords_N2=lane.coords,
            segment_N=lane.segment,
            window_N=None,
            size_N2=None,
            slot_M=lane.slots,
        )
    )
    assert len(rows) == len(lane.slots)
    assert np.isfinite(rows).all()
    arena = np.full((sum(counts) + 1, rows.shape[1]), np.nan, np.float32)
    arena[lane.slots] = rows
    expected = deepseek.arrays("mha")[f"{case}/image_features"]
    np.testing.assert_allclose(arena[places], expected, rtol=0, atol=ABSOLUTE)


def test_rows_of_two_tiles_by_hand() -> None:
    # tiles of 2 patches by side are one row each, g = 1; two tiles below each other:
    # overview, line end, separator, then tile, line end, tile, line end
    form = TileForm(2)
    grid = (1, 4, 2)
    assert (form.num_patches(grid), form.num_rows(grid), form.lane_rows(13)) == (12, 7, 7)
    patches, slots = np.arange(12, dtype=np.uint8)[:, None], np.arange(10, 17, dtype=np.int32)
    sizes = {"lane_patches": 13, "patch_values": 1, "drop_slot": 99}
    lane = pack_tiles([patches], [grid], [slots], form, **sizes)
    assert lane.slots.tolist() == [10, 13, 15, 11, 14, 16, 12]
    assert lane.segment.tolist() == [0] * 4 + [1] * 4 + [2] * 4 + [-1]
    assert lane.patches.ravel().tolist() == [*range(12), 0]
    # the tiles first: tile, line end, tile, line end, separator, overview, line end
    last = form._replace(overview_first=False)
    lane = pack_tiles([patches], [grid], [slots], last, **sizes)
    assert lane.slots.tolist() == [15, 10, 12, 16, 11, 13, 14]
    empty = pack_tiles([], [], [], form, **sizes)  # that of a chip without a picture
    assert (set(empty.slots.tolist()), set(empty.segment.tolist())) == ({99}, {-1})


@pytest.mark.parametrize("variant", deepseek.VARIANTS)
def test_parameters_hold_every_value_of_the_files(variant: deepseek.Variant) -> None:
    weights = load_file(deepseek.FOLDER / variant / "model.safetensors")
    theirs = [v for name, v in weights.items() if not name.startswith("vision.attn_pool.")]
    ours = leaves(load(deepseek.FOLDER / variant)).values()
    np.testing.assert_array_equal(
        *(
            np.sort(np.concatenate([v.astype(np.float32).ravel() for v in values]))
            for values in (theirs, ours)
        )
    )


@pytest.mark.parametrize("variant", deepseek.VARIANTS)
def test_modules_have_the_parameters_of_the_table(variant: deepseek.Variant) -> None:
    config = read_config(deepseek.FOLDER / variant)
    table = family_module(config.family, "params").parameters(config)
    for part, name, of in (("vision", "VisionEncoder", config.vision), ("text", "TextDecoder", 0)):
        make = getattr(family_module(config.family, part), name)
        arguments = (of,) if of else (config.text, jnp.bfloat16)
        state = nnx.state(nnx.eval_shape(lambda make=make, given=arguments: make(*given)))
        shapes = {(part, *path): leaf.shape for path, leaf in nnx.to_flat_state(state)}
        assert shapes == {p.path: p.shape for p in table if p.path[0] == part}


def test_experts_stand_turned_and_side_by_side() -> None:
    weights = load_file(deepseek.FOLDER / "mla" / "model.safetensors")
    mlp = load(deepseek.FOLDER / "mla")["text"]["layers"][2]["mlp"]
    for expert in range(6):
        source = f"language.model.layers.2.mlp.experts.{expert}"
        gate, up = np.split(mlp["gate_up_ZDO"][expert], 2, axis=1)
        for ours, name in (
            (gate, "gate_proj"),
            (up, "up_proj"),
            (mlp["down_ZFD"][expert], "down_proj"),
        ):
            np.testing.assert_array_equal(ours.T, weights[f"{source}.{name}.weight"])


def test_any_block_of_experts_can_be_read_alone() -> None:
    directory = deepseek.FOLDER / "mla"
    with open_params(directory, read_config(directory), np.float32) as table:
        stored = next(s for s in table if s.path[-1] == "gate_up_ZDO")
        whole = stored.read()
        for block in (
            (slice(2, 4), slice(0, 64), slice(0, 80)),
            (slice(0, 6), slice(8, 40), slice(30, 50)),  # across the border of gate and up
            (slice(5, 6), slice(63, 64), slice(41, 80)),
        ):
            np.testing.assert_array_equal(stored.read(block), whole[block])


def test_what_chooses_experts_stays_in_float32() -> None:
    directory = deepseek.FOLDER / "noaux"
    kept = {path: v.dtype.name for path, v in leaves(load(directory, "bfloat16")).items()}
    wide = {path[-1] for path, dtype in kept.items() if dtype == "float32"}
    assert wide == {"router_XD", "bias_X"}
    assert set(kept.values()) == {"float32", "bfloat16"}


def test_names_say_that_experts_and_heads_are_split() -> None:
    def spec(*path: str) -> list[str | None]:
        return list(param_spec(("text", "layers", 1, *path)))

    assert spec("mlp", "gate_up_ZDO")[0] == spec("mlp", "down_ZFD")[0] == "model"
    assert spec("mlp", "router_XD") == [None, None]
    assert spec("attention", "query_OD") == ["model", None]
    assert spec("attention", "key_value_OC") == ["model", None]
    assert spec("attention", "out_DO") == [None, "model"]
    assert spec("attention", "row_CD") == [None, None]


NAMES: list[tuple[dict[str, np.ndarray | None], str]] = [
    ({"image_newline": None}, "lacks tensor 'image_newline'"),
    (
        {"language.model.layers.1.mlp.gate.e_score_correction_bias": None},
        "lacks tensor 'language.model.layers.1.mlp.gate.e_score_correction_bias'",
    ),
    (
        {"language.model.layers.1.mlp.experts.3.up_proj.weight": None},
        r"lacks tensor 'language\.model\.layers\.1\.mlp\.experts\.3\.up_proj\.weight'",
    ),
    ({"vision.head.weight": np.zeros((2, 2), np.float32)}, "holds tensor 'vision.head.weight'"),
    (
        {"vision.pos_embed": np.zeros((1, 36, 48), np.float32)},
        r"'vision\.pos_embed' has shape \(1, 36, 48\); config\.json asks for \(1, 25, 48\)",
    ),
]


@pytest.mark.parametrize(("change", "words"), NAMES)
def test_tensors_that_do_not_fit_are_named(
    copied: Path, change: dict[str, np.ndarray | None], words: str
) -> None:
    change_weights(copied, change)
    with pytest.raises(ModelError, match=words):
        load(copied)


def test_the_pooling_head_may_be_there_or_not(copied: Path) -> None:
    names = load_file(copied / "model.safetensors")
    change_weights(copied, {n: None for n in names if n.startswith("vision.attn_pool.")})
    assert leaves(load(copied)).keys() == leaves(load(deepseek.FOLDER / "noaux")).keys()


SETTINGS: list[tuple[tuple[str, ...], Any, str]] = [
    (("tile_tag",), "1D", "tile_tag='1D' is not supported"),
    (("language_config", "q_lora_rank"), 96, "q_lora_rank=96 is not supported"),
    (("language_config", "topk_method"), "gready", "topk_method='gready' is not supported"),
    (("language_config", "n_group"), 4, "n_group=4 is not supported"),
    (("language_config", "rope_scaling"), {"type": "yarn"}, "rope_scaling="),
    (("language_config", "num_experts_per_tok"), 9, "9 experts a token of 8"),
    (("projector_config", "depth"), 3, "depth=3 is not supported"),
    (("projector_config", "n_embed"), 32, "n_embed=32 and 64 beside it"),
    (("vision_config", "heads"), 5, "vision width 48 is no multiple of 5 heads"),
]


@pytest.mark.parametrize(("key", "value", "words"), SETTINGS)
def test_settings_that_change_the_arithmetic_are_refused(
    copied: Path, key: tuple[str, ...], value: Any, words: str
) -> None:
    raw = json.loads((copied / "config.json").read_text())
    table = raw
    for name in key[:-1]:
        table = table[name]
    table[key[-1]] = value
    (copied / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ModelError, match=words):
        read_config(copied)


def test_pixels_are_normalised_as_the_processors_file_says(copied: Path) -> None:
    file = copied / "processor_config.json"
    raw = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps(raw | {"image_mean": [0.25] * 3, "image_std": [1, 1, 2]}))
    vision = read_config(copied).vision
    assert (vision.image_mean, vision.image_std) == ((0.25,) * 3, (1, 1, 2))
    assert ImageProcessor.from_checkpoint(copied).fill == (63,) * 3  # int(255 / 4)
    file.unlink()
    vision = read_config(copied).vision
    assert vision.image_mean == vision.image_std == (0.5,) * 3


def test_a_processor_of_other_patches_is_refused_at_start(copied: Path) -> None:
    file = copied / "processor_config.json"
    raw = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps(raw | {"patch_size": 12}))
    with pytest.raises(ModelError, match=r"432 values, and config.json of 588 \(patch_size=14\)"):
        load_processor(EngineConfig(), read_config(copied), copied)


def test_dimensions_of_the_three_forms() -> None:
    plain, latent, biased = (read_config(deepseek.FOLDER / v).text for v in deepseek.VARIANTS)
    assert plain.latent is None
    assert (plain.num_kv_heads, plain.head_channels, plain.kv_values) == (4, 16, 128)
    assert latent.latent is not None
    assert (latent.num_kv_heads, latent.head_channels, latent.kv_values) == (1, 32, 32)
    assert (latent.expert_scores, latent.expert_bias, latent.expert_shares) == (
        "softmax",
        False,
        False,
    )
    assert (biased.expert_scores, biased.expert_bias, biased.expert_shares) == (
        "sigmoid",
        True,
        True,
    )
    assert (biased.expert_scale, biased.dense_layers, biased.shared_width) == (2.0, (0,), 80)


def test_the_published_small_model_keeps_576_values_a_token(copied: Path) -> None:
    raw = json.loads((copied / "config.json").read_text())
    for key in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
        del raw["language_config"][key]  # as the class has them: 512, 128, 64, 128
    raw["vision_config"] = {"model_name": "siglip_so400m_patch14_384"}
    raw["projector_config"] = {"projector_type": "downsample_mlp_gelu", "n_embed": 64}
    (copied / "config.json").write_text(json.dumps(raw))
    config = read_config(copied)
    assert config.text.kv_values == 576
    assert (config.vision.depth, config.vision.mlp_width, config.vision.tile_side) == (27, 4304, 27)


def test_routing_by_hand() -> None:
    scores = jnp.array([[0.1, 0.6, 0.2], [0.5, 0.2, 0.3]])
    # a bias of 0.45 makes expert 2 the first choice everywhere, and its weight stays its score
    bias = jnp.array([0.0, 0.0, 0.45])
    routing = route_scores(scores, bias, 2, shares=True, scale=2.0)
    # token 0: experts 2 (0.65) and 1; token 1: experts 2 (0.75) and 0
    assert routing.order_M.tolist() == [3, 1, 0, 2]
    assert routing.counts_Z.tolist() == [1, 1, 2]
    expected = [2 * 0.5 / 0.8, 2 * 0.6 / 0.8, 2 * 0.2 / 0.8, 2 * 0.3 / 0.8]
    np.testing.assert_allclose(routing.weight_M, expected, rtol=1e-6)
    plain = route_scores(scores, None, 1, shares=False, scale=1.0)
    np.testing.assert_allclose(plain.weight_M, [0.5, 0.6], rtol=1e-6)
    assert plain.order_M.tolist() == [1, 0]


PROMPT_TOKENS, PAGE_SIZE = 128, 16
"""One shape for all cases; the long text has more tokens and is left to the engine."""


@pytest.fixture(scope="module", params=deepseek.VARIANTS)
def decoder(request: pytest.FixtureRequest) -> Any:
    """From a variant's name, its embedding, and a function from a whole prompt to logits."""
    variant: deepseek.Variant = request.param
    config = read_config(deepseek.FOLDER / variant)
    text = load(deepseek.FOLDER / variant)["text"]
    decoder_class = family_module(config.family, "text").TextDecoder
    graph, _ = nnx.split(nnx.eval_shape(lambda: decoder_class(config.text, jnp.float32)))
    pages = PROMPT_TOKENS // PAGE_SIZE

    def run(params: Any, hidden_TD: jax.Array, num_tokens: jax.Array) -> jax.Array:
        pool = pool_shape(config.text, pages, PAGE_SIZE, Backend())
        index_T = jnp.arange(PROMPT_TOKENS, dtype=jnp.int32)
        length_B = num_tokens[None]
        ragged = Ragged(
            num_decodes=jnp.int32(0),
            num_sequences=jnp.int32(1),
            starts_B=jnp.zeros(1, jnp.int32),
            counts_B=length_B,
            lengths_B=length_B,
            tables_BQ=jnp.arange(pages, dtype=jnp.int32)[None],
        )
        attention = PagedAttention.of_step(
            ragged, index_T, num_tokens, page_size=PAGE_SIZE, backend=Backend()
        )
        model = nnx.merge(graph, params)
        no_pages = tuple(jnp.zeros(pool) for _ in range(config.text.num_layers))
        rows = ImageRows(jnp.zeros((1, config.text.width)), -jnp.ones_like(index_T), Backend())
        hidden_TD, _ = model(hidden_TD, jnp.tile(index_T, (3, 1)), no_pages, attention, rows)
        return jax.nn.log_softmax(model.logits(hidden_TD))

    params = jax.tree.map(jnp.asarray, text)
    compiled = jax.jit(run)
    return variant, text["embed_VD"], lambda *given: np.asarray(compiled(params, *given))


@pytest.mark.parametrize("case", [name for name in deepseek.CASES if name != "long_text"])
def test_every_token_of_a_prompt_is_as_likely_as_the_authors_say(decoder: Any, case: str) -> None:
    variant, embed, run = decoder
    golden = deepseek.arrays(variant)
    ids = golden[f"{case}/input_ids"]
    hidden = embed[ids]
    if f"{case}/image_features" in golden:
        hidden[ids == 515] = golden[f"{case}/image_features"]
    num_tokens = len(ids)
    padded = np.pad(hidden, ((0, PROMPT_TOKENS - num_tokens), (0, 0)))
    found = run(padded, jnp.int32(num_tokens))[np.arange(num_tokens - 1), ids[1:]]
    np.testing.assert_allclose(found, golden[f"{case}/prompt_logprobs"], rtol=0, atol=LOGPROBS)
