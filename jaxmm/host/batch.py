"""Plan -> StepBatch: everything one language step needs, in one int32 buffer. Host only.

One buffer is one transfer to the device, and one message to another host. `StepLayout` says where
each field lies; the device reads the same layout back.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from jaxmm.request import MAX_STOP_TOKEN_IDS

MAX_BANNED = MAX_STOP_TOKEN_IDS + 8
"""Ids that `min_tokens` can hold back: a request's stop ids and the model's own end ids."""

FLOAT_FIELDS = frozenset(
    {
        "temperature_B",
        "top_p_B",
        "min_p_B",
        "repetition_B",
        "presence_B",
        "frequency_B",
    }
)


@dataclass(frozen=True)
class StepLayout:
    """Names, shapes and places of a step's fields, for one bucket of tokens."""

    num_tokens: int
    """T, the bucket."""
    num_sequences: int
    """B, the most sequences of a step; a constant of the engine."""
    num_table_pages: int
    """Q, pages of the longest request."""

    @cached_property
    def fields(self) -> Mapping[str, tuple[int, tuple[int, ...]]]:
        """Name -> (offset in the buffer, shape)."""
        t, b, q = self.num_tokens, self.num_sequences, self.num_table_pages
        shapes: dict[str, tuple[int, ...]] = {
            # how much of the padded arrays is real
            "num_tokens": (),
            "num_decodes": (),
            "num_sequences": (),
            "num_samples": (),
            # 1 when any sampled row needs the dearer path
            "any_random": (),
            "any_penalty": (),
            "any_logprobs": (),
            # tokens
            "ids_T": (t,),
            "feed_T": (t,),  # state slot whose last sampled token is the input; -1: ids_T
            "row_T": (t,),  # arena row; -1: text
            "positions_AT": (3, t),
            "kv_slot_T": (t,),
            # sequences: decodes, then extends
            "starts_B": (b,),
            "counts_B": (b,),
            "lengths_B": (b,),
            "tables_BQ": (b, q),
            # rows to sample
            "sample_token_B": (b,),
            "sample_slot_B": (b,),
            "temperature_B": (b,),
            "top_k_B": (b,),
            "top_p_B": (b,),
            "min_p_B": (b,),
            "repetition_B": (b,),
            "presence_B": (b,),
            "frequency_B": (b,),
            "num_bias_B": (b,),
            "seed_B2": (b, 2),
            "draw_B": (b,),  # how many tokens the sequence drew before this one
            "num_banned_B": (b,),
            "banned_BX": (b, MAX_BANNED),
        }
        offset, fields = 0, {}
        for name, shape in shapes.items():
            fields[name] = (offset, shape)
            offset += math.prod(shape)
        return fields

    @property
    def size(self) -> int:
        """Words in the buffer."""
        offset, shape = next(reversed(self.fields.values()))
        return offset + math.prod(shape)


class StepBatch:
    """One step's buffer, with a writable view for each field."""

    def __init__(self, layout: StepLayout) -> None:
        self.layout = layout
        self.buffer: npt.NDArray[np.int32] = np.zeros(layout.size, np.int32)
        self._views = {
            name: self._view(name, offset, shape) for name, (offset, shape) in layout.fields.items()
        }

    def _view(self, name: str, offset: int, shape: tuple[int, ...]) -> npt.NDArray[np.generic]:
        flat = self.buffer[offset : offset + math.prod(shape)]
        return (flat.view(np.float32) if name in FLOAT_FIELDS else flat).reshape(shape)

    def __getitem__(self, name: str) -> npt.NDArray[np.generic]:
        return self._views[name]
