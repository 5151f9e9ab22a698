"""How many descriptors the process may have, and how many of them connections. Host only."""

import logging
import resource

logger = logging.getLogger(__name__)

SPARE = 1024
"""For all that is not a connection of a client: two for each decoding process (a host of 224 cores
has 112), pictures that are fetched or read, logs, the compiler's cache, what JAX opens."""


def raise_limit(most: int) -> None:
    """Raise the process's limit as far as it may go for so many connections; warn of fewer."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = most + SPARE if hard == resource.RLIM_INFINITY else min(most + SPARE, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError):  # a limit of the system's beside this one; the warning tells
            wanted = soft
    room = limit_connections(most)
    if room < most:
        logger.warning(
            "few descriptors limit=%d connections=%d; for %d connections start the server with "
            "a hard limit of %d (ulimit -Hn, LimitNOFILE=)", wanted, room, most, most + SPARE,
        )  # fmt: skip


def limit_connections(most: int) -> int:
    """Connections at once: all descriptors but the spare ones, or half where they are few."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return most
    return min(most, max(soft - SPARE, soft // 2))
