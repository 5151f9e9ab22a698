"""Pictures from http(s) hosts, within limits. Host only."""

import asyncio
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx

from jaxmm.errors import MediaTooLarge
from serving.addresses import resolve
from serving.config import FetchConfig
from serving.errors import FetchError
from serving.gates import Gates

_DEFAULT_PORTS = {"http": 80, "https": 443}
_INFLATED_BYTES = 1 << 18
"""At once, half a millisecond of the event loop; a byte may become a thousand."""


class Remote:
    """Asks hosts for pictures.

    A host is resolved once, its addresses are checked, and the connection goes to a checked
    address: a name that resolves differently a moment later gains nothing. Each redirect starts
    over. No proxy, no cookies, no connection kept.
    """

    def __init__(self, config: FetchConfig, gates: Gates, max_bytes: int) -> None:
        """Take limits: how many at once, and bytes of one picture."""
        self._config = config
        self._gates = gates
        self._max_bytes = max_bytes
        self._resolvers = ThreadPoolExecutor(
            config.max_concurrent, thread_name_prefix="jaxmm-resolve"
        )  # a name whose servers do not answer keeps its thread for long
        self._client = httpx.AsyncClient(
            trust_env=False,
            follow_redirects=False,
            timeout=httpx.Timeout(config.timeout_seconds, connect=config.timeout_seconds / 3),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            headers={"user-agent": "jaxmm", "accept": "*/*", "accept-encoding": "identity"},
        )

    async def aclose(self) -> None:
        """Close what is open."""
        self._resolvers.shutdown(wait=False, cancel_futures=True)
        await self._client.aclose()

    async def get(self, target: httpx.URL, take: Callable[[int], None]) -> list[bytes]:
        """Get one picture, in pieces.

        Args:
            target: From `parse_url`, of an allowed scheme.
            take: Told of the bytes as they come; what it raises ends the fetch.

        Raises:
            FetchError: It cannot be had, or not in time.
            MediaTooLarge: It is larger than the limit.
        """
        seconds = self._config.timeout_seconds
        try:
            async with asyncio.timeout(seconds):
                return await self._follow(target, take)
        except (TimeoutError, httpx.TimeoutException):
            raise FetchError(f"host {target.host} did not answer in {seconds:g} s") from None
        except httpx.HTTPError as e:
            kind = type(e).__name__
            raise FetchError(f"host {target.host} could not be read: {kind}") from None

    async def _follow(self, target: httpx.URL, take: Callable[[int], None]) -> list[bytes]:
        for _ in range(self._config.max_redirects + 1):
            port = target.port or _DEFAULT_PORTS[target.scheme]
            async with self._gates.passing(f"{target.host}:{port}"):
                addresses = await resolve(
                    target.host, port, self._config.allowed_hosts, self._resolvers
                )
                response = await self._ask(target, addresses)
                try:
                    if not response.has_redirect_location:
                        return await self._body(target, response, take)
                    target = self._redirected(target, response.headers["location"])
                finally:
                    await response.aclose()
        limit = self._config.max_redirects
        raise FetchError(f"host {target.host} redirects more than {limit} times")

    async def _ask(self, target: httpx.URL, addresses: tuple[str, ...]) -> httpx.Response:
        """Connect to the very addresses that were checked, the next where one cannot be reached."""
        *others, last = addresses
        for address in others:
            try:
                return await self._client.send(self._request(target, address), stream=True)
            except (httpx.ConnectError, httpx.ConnectTimeout):
                continue
        return await self._client.send(self._request(target, last), stream=True)

    def _request(self, target: httpx.URL, address: str) -> httpx.Request:
        return self._client.build_request(
            "GET",
            target.copy_with(host=address, fragment=None),
            headers={"host": target.netloc.decode("ascii")},
            extensions={"sni_hostname": target.raw_host.decode("ascii")},
        )

    def _redirected(self, target: httpx.URL, location: str) -> httpx.URL:
        try:
            new = parse_url(str(target.join(location)))
        except httpx.InvalidURL:
            raise FetchError(f"host {target.host} redirects to no URL") from None
        if new.scheme not in self._config.schemes:
            schemes = " and ".join(self._config.schemes)
            raise FetchError(f"host {target.host} redirects to another scheme than {schemes}")
        return new

    async def _body(
        self, target: httpx.URL, response: httpx.Response, take: Callable[[int], None]
    ) -> list[bytes]:
        if response.status_code != 200:
            raise FetchError(f"host {target.host} answered {response.status_code}")
        inflate = _inflater(target.host, response.headers.get("content-encoding", "identity"))
        pieces, room = list[bytes](), self._max_bytes
        async for chunk in response.aiter_raw():
            try:
                for piece in _inflated(inflate, chunk):
                    room -= len(piece)
                    if room < 0:
                        raise MediaTooLarge(
                            f"the image at host {target.host} is larger than {self._max_bytes} "
                            "bytes"
                        )
                    take(len(piece))
                    pieces.append(piece)
                    await asyncio.sleep(0)
            except zlib.error:
                raise FetchError(f"host {target.host} sends gzip that is none") from None
        return pieces


def parse_url(url: str) -> httpx.URL:
    """Read an http(s) URL.

    Raises:
        FetchError: Not a URL, one without a host, or one with credentials.
    """
    try:
        target = httpx.URL(url)
        host = target.host  # decodes a name in punycode, which may be none
    except (httpx.InvalidURL, UnicodeError):
        raise FetchError("not a URL; give a data: or an http(s): URL") from None
    if target.scheme in _DEFAULT_PORTS and not host:
        raise FetchError("the URL has no host")
    if target.userinfo:
        raise FetchError("the URL has credentials in it; they are not sent")
    return target


def _inflater(host: str, encoding: str) -> "zlib._Decompress | None":
    if encoding.lower() in ("identity", ""):
        return None
    if encoding.lower() in ("gzip", "x-gzip"):
        return zlib.decompressobj(16 + zlib.MAX_WBITS)
    raise FetchError(f"host {host} sends content-encoding {encoding[:20]!r}; only gzip is undone")


def _inflated(inflate: "zlib._Decompress | None", chunk: bytes) -> Iterator[bytes]:
    """What a chunk becomes, a little at a time; nothing of what follows the end of the gzip."""
    if inflate is None:
        yield chunk
        return
    while chunk and not inflate.eof:
        yield inflate.decompress(chunk, _INFLATED_BYTES)
        chunk = inflate.unconsumed_tail
