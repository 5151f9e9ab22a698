"""Which hosts and addresses pictures may be fetched from. Host only."""

import asyncio
import functools
import ipaddress
import socket
from collections.abc import Sequence
from concurrent.futures import Executor

from serving.errors import FetchError

_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


async def resolve(
    host: str, port: int, allowed_hosts: Sequence[str], threads: Executor | None = None
) -> tuple[str, ...]:
    """Give the addresses to connect to, best first, all of them checked.

    Args:
        host: Name or address literal of a URL, IPv6 without brackets.
        port: Port that is going to be used.
        allowed_hosts: Setting `fetch.allowed_hosts`.
        threads: Where the system is asked, which may take long; None: the event loop's.

    Raises:
        FetchError: The host may not be asked, or has no address.
    """
    named = any(entry in _spellings(host, port) for entry in allowed_hosts)
    if not (named or any(_covers(entry, host) for entry in allowed_hosts)):
        raise FetchError(f"host {host} is not among fetch.allowed_hosts")
    try:
        ask = functools.partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
        found = await asyncio.get_running_loop().run_in_executor(threads, ask)
    except (OSError, UnicodeError):
        raise FetchError(f"host {host} cannot be resolved") from None
    addresses = tuple(dict.fromkeys(str(entry[4][0]) for entry in found))
    if not named and not all(map(is_public, addresses)):
        raise FetchError(
            f"host {host} is at a private or reserved address; "
            "the server's fetch.allowed_hosts must name it"
        )
    return addresses


def is_public(address: str) -> bool:
    """Say whether an address is one of the open internet, an IPv4 one inside IPv6 included."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour
        if ip in _NAT64:
            inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(str(inner))
    return ip.is_global and not ip.is_multicast and not ip.is_reserved


def _spellings(host: str, port: int) -> set[str]:
    shown = f"[{host}]" if ":" in host else host
    return {host, shown, f"{shown}:{port}"}


def _covers(entry: str, host: str) -> bool:
    return entry == "*" or (entry.startswith(".") and host.endswith(entry))
