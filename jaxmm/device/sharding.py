"""Where arrays lie on a mesh of chips: one table from axis letters to mesh axes. Traced.

Every array name ends in its axis letters (`qkv_OD`), so a name says how the array is split. What is
split over chips follows Megatron-LM (arXiv:1909.08053, section 3): heads, the MLP's inner width and
the vocabulary; of experts each chip has some, whole. Residuals are whole on every chip, and two
sums a layer put them together.
"""

from jax.sharding import PartitionSpec

MESH_AXIS = {
    "F": "model",  # MLP width
    "H": "model",  # query heads
    "K": "model",  # KV heads
    "O": "model",  # outputs of the fused projection, grouped by KV head
    "V": "model",  # vocabulary
    "Z": "model",  # experts
}
"""Axis letter -> mesh axis; letters that are not here are whole on every chip."""

WHOLE = PartitionSpec()
"""On every chip, whole."""

LANES = PartitionSpec("model")
"""What a chip encodes: of several lanes behind each other each chip has one."""


def spec_of(letters: str) -> PartitionSpec:
    """How an array with these axes is split; the first letter of a mesh axis takes it.

    Args:
        letters: One for each axis, `2` or any other character for an axis that is never split.
    """
    axes: list[str | None] = []
    for letter in letters:
        axis = MESH_AXIS.get(letter)
        axes.append(None if axis in axes else axis)
    return PartitionSpec(*axes)


def param_spec(path: tuple[str | int, ...], *, split_encoder: bool = False) -> PartitionSpec:
    """How the parameter at a path such as `("text", "layers", 0, "qkv_OD")` is split.

    Args:
        path: Its place in the nested dict of all parameters.
        split_encoder: False: the encoder is whole on every chip, each with a lane of its own.
    """
    split = split_encoder or path[0] == "text"
    return spec_of(str(path[-1]).rpartition("_")[2]) if split else WHOLE
