"""Pictures are fetched from public hosts alone, within limits, and nothing is let slip."""

import asyncio
import base64
import socket
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmm.errors import MediaError, MediaTooLarge
from serving.addresses import is_public, resolve
from serving.config import FetchConfig
from serving.data_uri import decode_data_uri
from serving.errors import FetchError
from serving.fetch import Fetcher
from tests.serving.media_host import PICTURE, media_host

MAX_BYTES = 4096
PATIENCE_SECONDS = 8  # far below the 20 s that a fetch may take, far above a busy machine's lag


@pytest.fixture(scope="module")
def module_host():
    with media_host() as host:
        yield host


@pytest.fixture
def host(module_host):
    module_host.hits.clear()
    module_host.hosts.clear()
    return module_host


def fetch(url, *, max_bytes=MAX_BYTES, **settings):
    """Fetch one URL with a fetcher of its own."""
    return fetch_all({"here": url}, max_bytes=max_bytes, **settings)[url]


def fetch_all(urls, *, max_bytes=MAX_BYTES, max_total_bytes=1 << 20, **settings):
    async def run():
        config = FetchConfig(**settings)
        fetcher = Fetcher(config, max_bytes=max_bytes, max_total_bytes=max_total_bytes)
        try:
            return await fetcher.fetch_all(urls)
        finally:
            await fetcher.aclose()

    return asyncio.run(run())


def allow(host):
    return (f"127.0.0.1:{host.server_port}",)


LOOPBACK = ["127.0.0.1", "localhost", "0.0.0.0", "2130706433", "0x7f000001", "127.1", "[::1]"]
RESERVED = ["169.254.169.254", "10.0.0.1", "192.168.1.1", "100.64.0.1", "[::ffff:127.0.0.1]"]


@pytest.mark.parametrize("name", LOOPBACK + RESERVED)
def test_private_addresses_are_refused_by_default_at_once(host, name):
    start = time.monotonic()
    with pytest.raises(FetchError, match=r"private or reserved|cannot be resolved"):
        fetch(f"http://{name}:{host.server_port}/picture")
    assert time.monotonic() - start < PATIENCE_SECONDS
    assert host.hits == []


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost", "0.0.0.0"])
def test_a_named_private_host_is_asked(host, name):
    url = f"http://{name}:{host.server_port}/picture"
    assert fetch(url, allowed_hosts=(name,)) == PICTURE
    assert fetch(url, allowed_hosts=(f"{name}:{host.server_port}", ".org")) == PICTURE
    assert host.hosts == [f"{name}:{host.server_port}"] * 2


def test_a_host_that_is_not_allowed_is_not_asked(host):
    with pytest.raises(FetchError, match=r"host 127\.0\.0\.1 is not among fetch\.allowed_hosts"):
        fetch(f"http://127.0.0.1:{host.server_port}/picture", allowed_hosts=("127.0.0.1:1",))
    assert host.hits == []


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("8.8.8.8", True), ("2606:4700::1111", True), ("::ffff:8.8.8.8", True),
        ("64:ff9b::808:808", True), ("127.0.0.1", False), ("::1", False), ("::", False),
        ("169.254.169.254", False), ("fe80::1%lo", False), ("fd00:ec2::254", False),
        ("::ffff:10.0.0.1", False), ("2002:7f00:1::", False), ("64:ff9b::7f00:1", False),
        ("224.0.0.1", False), ("255.255.255.255", False), ("192.0.2.1", False), ("0.0.0.0", False),
    ],
)  # fmt: skip
def test_which_addresses_are_public(address, public):
    assert is_public(address) is public


def test_suffixes_cover_the_names_below_them():
    for name in ("example.org", "notexample.org", "example.org.evil.net"):
        with pytest.raises(FetchError, match="is not among"):
            asyncio.run(resolve(name, 80, [".example.org"]))
    # below the suffix the rule lets it through, to a name that cannot exist
    with pytest.raises(FetchError, match="cannot be resolved"):
        asyncio.run(resolve("a.example.invalid", 80, [".example.invalid"]))


def test_redirects_within_the_host_are_followed_up_to_the_limit(host):
    base = f"http://127.0.0.1:{host.server_port}"
    assert fetch(f"{base}/chain/3", allowed_hosts=allow(host)) == PICTURE
    with pytest.raises(FetchError, match="more than 2 times"):
        fetch(f"{base}/chain/3", allowed_hosts=allow(host), max_redirects=2)


def test_a_redirect_to_another_host_is_checked_like_the_first(host):
    with media_host() as other:
        target = f"http://127.0.0.1:{other.server_port}/picture"
        with pytest.raises(FetchError, match="is not among"):
            fetch(
                f"http://127.0.0.1:{host.server_port}/redirect?to={target}",
                allowed_hosts=allow(host),
            )
        assert other.hits == []


def test_a_redirect_to_another_scheme_is_refused(host):
    with pytest.raises(FetchError, match="images are taken from"):
        fetch(
            f"http://127.0.0.1:{host.server_port}/redirect?to=file:///etc/hostname",
            allowed_hosts=allow(host),
        )


@pytest.mark.parametrize(
    "url",
    ["/etc/hostname", "file:///etc/hostname", "file:///nonexistent", "./x.png", "~/x.png", "",
     "ftp://example.org/x", "gopher://127.0.0.1/"],
)  # fmt: skip
def test_paths_and_other_schemes_get_one_and_the_same_message(url):
    with pytest.raises(FetchError) as refused:
        fetch(url)
    assert str(refused.value) == "here: images are taken from data:, http:, https: URLs"


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("http://", "no host"),
        ("http:///picture", "no host"),
        ("http://user:secret@example.org/", "credentials"),
        ("http://exa mple.org:x/", "not a URL"),
        ("http://name.invalid/x?key=secret", "host name.invalid cannot be resolved"),
    ],
)
def test_urls_that_cannot_be_asked(url, problem):
    with pytest.raises(FetchError, match=problem) as refused:
        fetch(url)
    assert "secret" not in str(refused.value)


def test_no_scheme_at_all_means_data_uris_alone():
    with pytest.raises(FetchError, match="images are taken from data: URLs"):
        fetch("http://example.org/", schemes=())


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("status/404", "host 127.0.0.1 answered 404"),
        ("status/500?key=secret", "host 127.0.0.1 answered 500"),
        ("short", "could not be read"),
        ("brotli", "only gzip is undone"),
        ("hang", "did not answer in 0.3 s"),
        ("trickle", "did not answer in 0.3 s"),
        ("endless", "larger than 4096 bytes"),
        ("bomb", "larger than 4096 bytes"),
    ],
)
def test_a_host_that_misbehaves_costs_no_more_than_the_limits(host, path, problem):
    start = time.monotonic()
    timeout_seconds = 0.3 if "did not answer" in problem else 9.0
    with pytest.raises(MediaError, match=problem) as refused:
        fetch(
            f"http://127.0.0.1:{host.server_port}/{path}",
            allowed_hosts=allow(host),
            timeout_seconds=timeout_seconds,
        )
    assert time.monotonic() - start < PATIENCE_SECONDS
    assert "secret" not in str(refused.value)


def test_a_closed_port_is_a_fetch_error():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(FetchError, match="could not be read"):
        fetch(f"http://127.0.0.1:{port}/x", allowed_hosts=("127.0.0.1",))


def test_gzip_is_undone_and_the_declared_type_is_not_believed(host):
    base = f"http://127.0.0.1:{host.server_port}"
    assert fetch(f"{base}/gzip", allowed_hosts=allow(host)) == PICTURE
    assert fetch(f"{base}/picture", allowed_hosts=allow(host)) == PICTURE


def test_a_picture_of_exactly_the_limit_is_taken(host):
    url = f"http://127.0.0.1:{host.server_port}/picture"
    assert fetch(url, max_bytes=len(PICTURE), allowed_hosts=allow(host)) == PICTURE
    with pytest.raises(MediaTooLarge):
        fetch(url, max_bytes=len(PICTURE) - 1, allowed_hosts=allow(host))


def test_content_is_asked_for_again_with_every_request(host):
    url = f"http://127.0.0.1:{host.server_port}/flip"
    assert [fetch(url, allowed_hosts=allow(host)) for _ in range(2)] == [b"1", b"2"]


def test_equal_urls_of_one_request_are_asked_once(host):
    url = f"http://127.0.0.1:{host.server_port}/picture"
    assert fetch_all({"a": url, "b": url}, allowed_hosts=allow(host)) == {url: PICTURE}
    assert host.hits == ["/picture"]


def test_pictures_of_one_request_are_limited_together(host):
    urls = {str(i): f"http://127.0.0.1:{host.server_port}/picture?{i}" for i in range(3)}
    with pytest.raises(MediaTooLarge, match="2048 bytes together"):
        fetch_all(urls, max_total_bytes=2048, allowed_hosts=allow(host))


def test_one_picture_that_fails_ends_the_waiting_for_the_others(host):
    base = f"http://127.0.0.1:{host.server_port}"
    start = time.monotonic()
    with pytest.raises(FetchError, match=r"^second: .* answered 404"):
        fetch_all(
            {"first": f"{base}/hang", "second": f"{base}/status/404"}, allowed_hosts=allow(host)
        )
    assert time.monotonic() - start < PATIENCE_SECONDS


ENCODED = base64.b64encode(PICTURE).decode()


@pytest.mark.parametrize(
    "uri",
    [
        f"data:image/png;base64,{ENCODED}",
        f"data:image/png;charset=utf-8;base64,{ENCODED}",
        f"DATA:image/png;BASE64,{ENCODED}",
        f"data:image/png;name=a.png;base64,{ENCODED}",
        f"data:;base64,{ENCODED}",
        f"data:application/octet-stream;base64,{ENCODED}",
        "data:image/png;base64," + ENCODED.replace("+", "%2B").replace("=", "%3D"),
        "data:image/png;base64," + ENCODED.rstrip("="),
        "data:image/png;base64," + "\n".join(ENCODED[i : i + 76] for i in range(0, 1400, 76)),
    ],
)
def test_every_legal_form_of_a_data_uri_is_taken(uri):
    assert fetch(uri) == PICTURE


@pytest.mark.parametrize(
    "uri",
    ["data:image/png,xyz", "data:image/png;base64", "data:base64,AAAA", "data:", "data:;base64,A",
     "data:;base64,A*==", "data:;base64,AA=A", "data:;base64,é"],
)  # fmt: skip
def test_other_data_uris_are_refused_without_repeating_them(uri):
    with pytest.raises(MediaError, match="data URI") as refused:
        fetch(uri)
    assert "xyz" not in str(refused.value)


@given(st.binary(max_size=100))
def test_any_bytes_come_back(data):
    encoded = base64.b64encode(data).decode()
    assert decode_data_uri(f"data:;base64,{encoded}", 100) == data


def test_a_data_uri_is_held_to_the_size_limit():
    assert len(decode_data_uri("data:;base64," + "AAAA" * 10, 30)) == 30
    with pytest.raises(MediaTooLarge, match="limit is 29"):
        decode_data_uri("data:;base64," + "AAAA" * 10, 29)
