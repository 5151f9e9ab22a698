"""How queries, keys and values lie in memory for the paged attention kernels. Host only.

A KV page is `[K, S, J]`: per KV head, S token slots of one row each; a row is the head's key and
then its value. One page is one run of memory (one DMA), one head of one page is a matrix as the
matrix unit wants it, and nothing is transposed or strided on the way.

    channels C   query lanes   row lanes J
    64           128           128          key | value share one tile; the query's upper half is 0
    72, 80, 128  128           256          key, 0 | value, 0
    192, 256     256           512          key | value

With a shared tile the product of query and row is query times key (zeros meet the value), and the
product of probabilities and row holds the output in its upper half. A row may also be key and value
at once (multi-head latent attention): it takes the lanes of a query, and is shared likewise.
"""

import math

from kernels_pallas.online_softmax import LOG2_E
from kernels_pallas.tiling import LANES, round_up


def query_lanes(channels: int) -> int:
    """Lanes that one query head takes, C or a little more."""
    return round_up(channels, LANES)


def row_lanes(channels: int) -> int:
    """Lanes J that key and value of one token and head take together."""
    return LANES if 2 * channels == LANES else 2 * query_lanes(channels)


def value_lane(channels: int) -> int:
    """First lane of the value inside a row."""
    return row_lanes(channels) // 2


def query_scale(channels: int) -> float:
    """What queries must be multiplied by before the kernels: C^-0.5 · log2(e).

    The kernels take powers of two, not of e. Fold the factor into the rotary tables (or the weight
    of the query norm), so that the product is rounded once.
    """
    return LOG2_E / math.sqrt(channels)
