"""Attention of a lane by the TPU kernels, in the interpreter, beside the portable form."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmm.device.lane_attention import attend_images
from jaxmm.device.rope import Rope
from tests.kernels_pallas.interpreter import interpret

PATCHES, HEADS, CHANNELS = 256, 2, 64
TOLERANCE = 2e-5
"""Sums of up to 200 products in another order."""


@functools.partial(jax.jit, static_argnames="implementation")
def attend(qkv, rope, segments, *, implementation):
    return attend_images(qkv, rope, segments, channels=CHANNELS, implementation=implementation)


@pytest.mark.parametrize("turned", [True, False])
def test_heads_are_parted_alike_with_and_without_a_rotation(turned: bool) -> None:
    random = np.random.default_rng(0)
    qkv = random.normal(size=(PATCHES, 3 * HEADS * CHANNELS)).astype(np.float32)
    segments = np.repeat([0, 1, -1], [200, 40, 16]).astype(np.int32)
    angles = random.uniform(-3, 3, (PATCHES, CHANNELS // 2)).astype(np.float32)
    rope = Rope.of(jnp.asarray(angles)) if turned else None
    got = interpret(attend, qkv, rope, segments, implementation="pallas")
    wanted = attend(qkv, rope, segments, implementation="portable")
    np.testing.assert_allclose(got[:240], wanted[:240], atol=TOLERANCE)
