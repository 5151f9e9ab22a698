"""Pictures from the URLs of a request: data URIs, and http(s) within limits. Host only."""

import asyncio
import zlib
from collections.abc import Mapping

import httpx

from jaxmm.errors import MediaError, MediaTooLarge
from serving.addresses import resolve
from serving.config import FetchConfig
from serving.data_uri import decode_data_uri
from serving.errors import FetchError

_DEFAULT_PORTS = {"http": 80, "https": 443}


class Fetcher:
    """Gets pictures; one for a server.

    A host is resolved once, the addresses are checked, and the connection goes to the checked
    address: a name that resolves differently a moment later gains nothing. Each redirect starts
    over. No proxy, no cookies, no connection kept.
    """

    def __init__(self, config: FetchConfig, *, max_bytes: int, max_total_bytes: int) -> None:
        """Take limits: bytes of one picture, and of all pictures of one request."""
        self._config = config
        self._max_bytes = max_bytes
        self._max_total_bytes = max_total_bytes
        self._client = httpx.AsyncClient(
            trust_env=False,
            follow_redirects=False,
            timeout=config.timeout_seconds,
            limits=httpx.Limits(max_keepalive_connections=0),
            headers={"user-agent": "jaxmm", "accept": "image/*", "accept-encoding": "identity"},
        )

    async def aclose(self) -> None:
        await self._client.aclose()

    async def fetch_all(self, urls: Mapping[str, str]) -> dict[str, bytes]:
        """Get several pictures at once; equal URLs are asked once.

        Args:
            urls: Where the picture stands in the request (for messages), to its URL.

        Returns:
            The bytes of each, by URL.

        Raises:
            MediaError: One cannot be had, or they are too large together; the others are given up.
        """
        places = {url: where for where, url in reversed(list(urls.items()))}
        budget = _Budget(self._max_total_bytes)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = {
                    url: group.create_task(self._fetch_at(where, url, budget))
                    for url, where in places.items()
                }
        except ExceptionGroup as several:
            raise several.exceptions[0] from None
        return {url: task.result() for url, task in tasks.items()}

    async def _fetch_at(self, where: str, url: str, budget: "_Budget") -> bytes:
        try:
            return await self._fetch(url, budget)
        except MediaError as e:
            raise type(e)(f"{where}: {e}") from e

    async def _fetch(self, url: str, budget: "_Budget") -> bytes:
        if url[:5].lower() == "data:":
            data = decode_data_uri(url, self._max_bytes)
            budget.take(len(data))
            return data
        seconds = self._config.timeout_seconds
        target = _parse(url)
        try:
            async with asyncio.timeout(seconds):
                return await self._follow(target, budget)
        except (TimeoutError, httpx.TimeoutException):
            raise FetchError(f"host {target.host} did not answer in {seconds:g} s") from None
        except httpx.HTTPError as e:
            kind = type(e).__name__
            raise FetchError(f"host {target.host} could not be read: {kind}") from None

    async def _follow(self, target: httpx.URL, budget: "_Budget") -> bytes:
        for _ in range(self._config.max_redirects + 1):
            request = await self._request(target)
            response = await self._client.send(request, stream=True)
            try:
                if not response.has_redirect_location:
                    return await self._body(target, response, budget)
                target = _parse(str(target.join(response.headers["location"])))
            except httpx.InvalidURL:
                raise FetchError(f"host {target.host} redirects to no URL") from None
            finally:
                await response.aclose()
        limit = self._config.max_redirects
        raise FetchError(f"host {target.host} redirects more than {limit} times")

    async def _request(self, target: httpx.URL) -> httpx.Request:
        """Check the target, and address the request to the very address that was checked."""
        if target.scheme not in self._config.schemes:
            raise FetchError(_schemes_message(self._config.schemes))
        port = target.port or _DEFAULT_PORTS[target.scheme]
        address = await resolve(target.host, port, self._config.allowed_hosts)
        return self._client.build_request(
            "GET",
            target.copy_with(host=address, fragment=None),
            headers={"host": target.netloc.decode("ascii")},
            extensions={"sni_hostname": target.raw_host.decode("ascii")},
        )

    async def _body(self, target: httpx.URL, response: httpx.Response, budget: "_Budget") -> bytes:
        if response.status_code != 200:
            raise FetchError(f"host {target.host} answered {response.status_code}")
        inflate = _inflater(target.host, response.headers.get("content-encoding", "identity"))
        body = bytearray()
        async for chunk in response.aiter_raw():
            room = self._max_bytes - len(body)
            piece = inflate.decompress(chunk, room + 1) if inflate else chunk
            if len(piece) > room:
                raise MediaTooLarge(
                    f"the image at host {target.host} is larger than {self._max_bytes} bytes"
                )
            budget.take(len(piece))
            body += piece
        return bytes(body)


class _Budget:
    """Bytes that the pictures of one request may still take together."""

    def __init__(self, num_bytes: int) -> None:
        self._limit = self._left = num_bytes

    def take(self, num_bytes: int) -> None:
        self._left -= num_bytes
        if self._left < 0:
            raise MediaTooLarge(f"the images are larger than {self._limit} bytes together")


def _parse(url: str) -> httpx.URL:
    try:
        target = httpx.URL(url)
    except httpx.InvalidURL:
        raise FetchError("not a URL; give a data: or an http(s): URL") from None
    if target.scheme in _DEFAULT_PORTS and not target.host:
        raise FetchError("the URL has no host")
    if target.userinfo:
        raise FetchError("the URL has credentials in it; they are not sent")
    return target


def _schemes_message(schemes: tuple[str, ...]) -> str:
    """The same for every refused URL, so that it tells nothing about files."""
    return f"images are taken from {', '.join(f'{scheme}:' for scheme in ('data', *schemes))} URLs"


def _inflater(host: str, encoding: str) -> "zlib._Decompress | None":
    if encoding.lower() in ("identity", ""):
        return None
    if encoding.lower() in ("gzip", "x-gzip"):
        return zlib.decompressobj(16 + zlib.MAX_WBITS)
    raise FetchError(f"host {host} sends content-encoding {encoding[:20]!r}; only gzip is undone")
