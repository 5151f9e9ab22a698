"""Rotary tables: what XLA makes of them. How they turn heads, the models' parity tests say."""

import jax
import jax.numpy as jnp
from jax import Array

from jaxmm.device.rope import Rope, rotate


def test_tables_are_computed_once_for_all_layers() -> None:
    def layers(angle_TX: Array, x_THC: Array) -> Array:
        rope = Rope.of(angle_TX)
        for _ in range(3):
            x_THC = jnp.cumsum(rotate(x_THC, rope), axis=0)  # no layer is fused with the next
        return x_THC

    shapes = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((64, 8), (64, 2, 16)))
    text = jax.jit(layers).lower(*shapes).compile().as_text()
    assert text.count(" cosine(") == 1
    assert text.count(" sine(") == 1
