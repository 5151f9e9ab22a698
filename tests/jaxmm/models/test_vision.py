"""The vision encoders against transformers, several images in one lane."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx

from jaxmm.device.lane import Lane
from jaxmm.host.lanes import pack_lane
from jaxmm.models import family_module, read_config
from jaxmm.models.loading import load_params
from tests.checkpoints import FAMILIES, Family, checkpoint

# float32 on both sides; sums of a few hundred terms in another order
RELATIVE = 1e-4

LANE_PATCHES = 1920
"""One shape for all cases, so that each encoder is compiled once."""

GRIDS = {
    "one row": [(1, 2, 2)],
    "one full window": [(1, 8, 8)],
    "a multiple of four rows": [(1, 16, 24)],
    "ragged right and bottom": [(1, 10, 14)],
    "20 to 1 wide": [(1, 2, 40)],
    "20 to 1 tall": [(1, 40, 2)],
    "three sizes": [(1, 12, 6), (1, 8, 8), (1, 22, 18)],
    "the same size twice": [(1, 6, 10), (1, 6, 10)],
    "less than a window": [(1, 6, 8)],
    "many ragged windows": [(1, 34, 46)],
    "half a window high": [(1, 2, 58)],
    "video": [(3, 6, 8)],
    "video beside a picture": [(1, 4, 6), (2, 10, 6), (1, 8, 8)],
}


@functools.cache
def reference_encoder(family: Family) -> torch.nn.Module:
    model = transformers.AutoModelForImageTextToText.from_pretrained(
        checkpoint(family), attn_implementation="sdpa"
    )
    return model.model.visual.eval()


@functools.cache
def encoder(family: Family, implementation: str) -> Callable[..., jax.Array]:
    directory = checkpoint(family)
    config = read_config(directory)
    params = load_params(directory, config, np.float32, lambda _, value: jnp.asarray(value))
    encoder_class = family_module(family, "vision").VisionEncoder
    graph, state = nnx.split(
        nnx.eval_shape(lambda: encoder_class(config.vision, implementation=implementation))
    )
    nnx.replace_by_pure_dict(state, params["vision"])
    return jax.jit(nnx.merge(graph, state))


def random_patches(family: Family, grids: list[tuple[int, int, int]]) -> list[np.ndarray]:
    """Of still pictures uint8[n, U], of video (t > 1) uint8[t * n, 2 * U]."""
    random = np.random.default_rng(len(grids))
    values = read_config(checkpoint(family)).vision.patch_values
    return [
        random.integers(0, 256, (t * h * w, values * (1 if t == 1 else 2))).astype(np.uint8)
        for t, h, w in grids
    ]


def reference_rows(family: Family, patches: list[np.ndarray], grids: list) -> np.ndarray:
    """Rows of transformers' encoder, for pixels normalised by its processor's rule."""
    config = read_config(checkpoint(family)).vision
    size = config.patch_size
    mean, std = (np.array(v).reshape(3, 1, 1, 1) for v in (config.image_mean, config.image_std))
    frames = []
    for item in patches:
        pair = item.reshape(len(item), -1, 3, size, size).astype(np.float64) / 255.0
        pair = np.repeat(pair, 3 - pair.shape[1], axis=1)  # a still picture is its frame twice
        frames.append(((pair.transpose(0, 2, 1, 3, 4) - mean) / std).reshape(len(item), -1))
    with torch.no_grad():
        output = reference_encoder(family)(
            torch.from_numpy(np.concatenate(frames).astype(np.float32)),
            grid_thw=torch.tensor(grids),
        )
    levels = [output.pooler_output, *getattr(output, "deepstack_features", [])]
    return torch.cat(levels, dim=1).numpy()


def encode(
    family: Family, patches: list[np.ndarray], grids: list, implementation: str = "portable"
) -> np.ndarray:
    """Rows of jaxmm's encoder, in raster order, by way of a lane."""
    config = read_config(checkpoint(family)).vision
    sizes = [t * h * w // 4 for t, h, w in grids]
    slots = np.split(np.arange(sum(sizes), dtype=np.int32), np.cumsum(sizes)[:-1])
    lane = pack_lane(
        patches,
        grids,
        slots,
        lane_patches=LANE_PATCHES,
        patch_values=config.patch_values,
        window_patches=config.window_patches,
        with_sizes=config.position_side > 0,
        drop_slot=sum(sizes),
    )
    later = lane.patches if lane.later is None else lane.later
    rows = encoder(family, implementation)(
        Lane(
            patches_NU=lane.patches,
            later_NU=later,
            any_later=np.bool_(lane.later is not None),
            coords_N2=lane.coords,
            segment_N=lane.segment,
            window_N=lane.window,
            size_N2=lane.sizes,
            slot_M=lane.slots,
        )
    )
    assert np.isfinite(rows).all()
    placed = np.zeros((sum(sizes) + 1, rows.shape[1]), np.float32)
    placed[lane.slots] = rows
    return placed[:-1]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("case", GRIDS)
def test_rows_equal_those_of_transformers(family: Family, case: str) -> None:
    grids = GRIDS[case]
    patches = random_patches(family, grids)
    expected = reference_rows(family, patches, grids)
    rows = encode(family, patches, grids)
    np.testing.assert_allclose(rows, expected, atol=RELATIVE * np.abs(expected).max(), rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_implementations_agree(family: Family) -> None:
    grids = GRIDS["three sizes"]
    patches = random_patches(family, grids)
    portable = encode(family, patches, grids)
    reference = encode(family, patches, grids, "reference")
    np.testing.assert_allclose(portable, reference, atol=RELATIVE * np.abs(reference).max(), rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_do_not_depend_on_lane_mates(family: Family) -> None:
    grids = GRIDS["three sizes"]
    patches = random_patches(family, grids)
    together = encode(family, patches, grids)
    alone = encode(family, patches[1:2], grids[1:2])
    first = grids[0][1] * grids[0][2] // 4
    np.testing.assert_allclose(
        together[first : first + len(alone)], alone, atol=RELATIVE * np.abs(alone).max(), rtol=0
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_module_has_the_parameters_of_the_table(family: Family) -> None:
    config = read_config(checkpoint(family))
    encoder_class = family_module(family, "vision").VisionEncoder
    state = nnx.state(nnx.eval_shape(lambda: encoder_class(config.vision)))
    shapes = {("vision", *path): leaf.shape for path, leaf in nnx.to_flat_state(state)}
    table = family_module(family, "params").parameters(config)
    assert shapes == {p.path: p.shape for p in table if p.path[0] == "vision"}
