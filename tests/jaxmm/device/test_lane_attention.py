"""Attention of a lane by the TPU kernels, in the interpreter, beside the portable form."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmm.device.lane_attention import attend_images
from jaxmm.device.rope import Rope
from tests.kernels_pallas.interpreter import interpret

PATCHES, HEADS = 256, 2
TOLERANCE = 2e-5
"""Sums of up to 200 products in another order."""


@functools.partial(jax.jit, static_argnames=("channels", "implementation"))
def attend(qkv, rope, segments, **options):
    return attend_images(qkv, rope, segments, **options)


@pytest.mark.parametrize(("turned", "channels"), [(True, 64), (False, 64), (True, 80)])
def test_heads_are_parted_alike_with_and_without_a_rotation(turned: bool, channels: int) -> None:
    """Two heads of 80 fill no registers, as four do where an encoder is split: XLA turns them."""
    random = np.random.default_rng(0)
    qkv = random.normal(size=(PATCHES, 3 * HEADS * channels)).astype(np.float32)
    segments = np.repeat([0, 1, -1], [200, 40, 16]).astype(np.int32)
    angles = random.uniform(-3, 3, (PATCHES, channels // 2)).astype(np.float32)
    rope = Rope.of(jnp.asarray(angles)) if turned else None
    got = interpret(attend, qkv, rope, segments, channels=channels, implementation="pallas")
    wanted = attend(qkv, rope, segments, channels=channels, implementation="portable")
    np.testing.assert_allclose(got[:240], wanted[:240], atol=TOLERANCE)
