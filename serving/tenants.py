"""API keys, and the tenants that they stand for. Host only."""

import hashlib
import hmac
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxmm.errors import ConfigError
from serving.errors import Unauthorized
from serving.refusals import refusal

OPEN_PATHS = frozenset({"/health", "/ready"})
"""Asked by machines that have no key, and telling nothing but one word."""

_ENTRY = re.compile(r"(?:([\w.-]{1,64}):)?([!-~]{1,512})")


class Tenant(NamedTuple):
    """Whom a request is answered for."""

    name: str
    """For logs; tells nothing of the key."""
    scope: str
    """Begins the salt of all its cache entries; empty for the one tenant of a server without keys.

    All of one length, so that no two tenants can arrive at one salt, whatever they add to it.
    """

    def salt(self, given: str | None) -> str:
        """The engine's salt of a request that asks for `cache_salt: given`."""
        return self.scope + (given or "")


ANYBODY = Tenant(name="", scope="")


class Tenants:
    """Finds the tenant of a key."""

    def __init__(self, entries: Sequence[str], admin_entries: Sequence[str] = ()) -> None:
        """Take entries `key` or `tenant:key`; the keys of one tenant share its cache entries.

        Args:
            entries: Keys that are let in; none, and nobody needs one.
            admin_entries: Keys that may also do what concerns all tenants.

        Raises:
            ConfigError: An entry that is neither; the message counts and repeats nothing.
        """
        self._is_open = not entries
        self._by_digest: dict[bytes, Tenant] = {}
        self._admins: set[bytes] = set()
        for number, entry in enumerate((*entries, *admin_entries), 1):
            if not (match := _ENTRY.fullmatch(entry)):
                raise ConfigError(
                    f"API key {number} is not of the form key or tenant:key, in printable ASCII "
                    "without spaces"
                )
            name, key = match[1], match[2]
            tenant = _tenant(f"name:{name}", name) if name else _tenant(f"key:{key}", f"{number}")
            if self._by_digest.setdefault(_digest(key), tenant).scope != tenant.scope:
                raise ConfigError(f"API key {number} is also that of another tenant")
            if number > len(entries):
                self._admins.add(_digest(key))

    def find(self, authorization: str) -> Tenant:
        """Give the tenant of an `Authorization` header.

        Digests are compared, all of them and each in constant time, so that the time taken tells
        nothing of a key.

        Raises:
            Unauthorized: No key, or an unknown one.
        """
        if self._is_open:
            return ANYBODY
        key = _bearer(authorization)
        if not key:
            raise Unauthorized("an API key is needed: send the header Authorization: Bearer KEY")
        digest, found = _digest(key), None
        for known, tenant in self._by_digest.items():
            if hmac.compare_digest(known, digest):
                found = tenant
        if found is None:
            raise Unauthorized("the API key is not known here")
        return found

    def is_admin(self, authorization: str) -> bool:
        """Whether a header has a key of an administrator; on a server without keys, any has."""
        if not self._by_digest:
            return True
        digest = _digest(_bearer(authorization))
        return sum([hmac.compare_digest(known, digest) for known in self._admins]) > 0


class Keys:
    """ASGI middleware: lets a request in by its key, and puts its tenant into `state.tenant`."""

    def __init__(self, app: ASGIApp, tenants: Tenants) -> None:
        self._app = app
        self._tenants = tenants

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                is_open = scope["path"] in OPEN_PATHS
                given = Headers(scope=scope).get("authorization", "")
                tenant = ANYBODY if is_open else self._tenants.find(given)
            except Unauthorized as error:
                await refusal(error)(scope, receive, send)
                return
            state = scope.setdefault("state", {})
            state["tenant"], state["is_admin"] = tenant, self._tenants.is_admin(given)
        await self._app(scope, receive, send)


def read_keys(entries: Sequence[str], file: str, admin_entries: Sequence[str] = ()) -> Tenants:
    """Tenants of the settings `api_keys`, `api_key_file` and `admin_keys`.

    Args:
        entries: See `Tenants`.
        file: Path of a file with one entry a line, `#` and empty lines left out; or empty.
        admin_entries: See `Tenants`.

    Raises:
        ConfigError: The file cannot be read, or has no key in it.
    """
    lines: list[str] = []
    if file:
        try:
            lines = [line.strip() for line in Path(file).read_text(encoding="utf-8").splitlines()]
        except (OSError, UnicodeDecodeError) as e:
            reason = e.strerror if isinstance(e, OSError) else "not UTF-8"
            raise ConfigError(f"api_key_file={file!r} cannot be read: {reason}") from None
        lines = [line for line in lines if line and not line.startswith("#")]
        if not lines:  # whoever names a file wants a closed server
            raise ConfigError(f"api_key_file={file!r} has no key in it")
    return Tenants([*entries, *lines], admin_entries)


def _tenant(origin: str, name: str) -> Tenant:
    return Tenant(name=name, scope=hashlib.sha256(b"jaxmm.tenant.1" + origin.encode()).hexdigest())


def _bearer(authorization: str) -> str:
    """The key of an `Authorization` header; empty if there is none."""
    scheme, _, key = authorization.strip().partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
