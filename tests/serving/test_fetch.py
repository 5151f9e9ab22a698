"""Pictures are fetched from public hosts alone, within limits, and nothing is let slip."""

import asyncio
import base64
import contextlib
import os
import socket
import string
import threading
import time

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmm.errors import MediaError, MediaTooLarge
from serving.addresses import is_public, resolve
from serving.config import FetchConfig
from serving.data_uri import decode_data_uri
from serving.errors import FetchError
from serving.fetch import Fetcher
from serving.gates import Gates
from serving.local_files import read_file_url
from serving.offload import Offload
from serving.remote import Remote
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
    return fetch_all({"here": url}, max_bytes=max_bytes, **settings)["here"]


def fetch_all(urls, *, max_bytes=MAX_BYTES, max_total_bytes=1 << 20, **settings):
    async def run():
        config = FetchConfig(**settings)
        fetcher = Fetcher(config, Offload(), max_bytes=max_bytes, max_total_bytes=max_total_bytes)
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
    with pytest.raises(FetchError, match="redirects to another scheme than http and https"):
        fetch(
            f"http://127.0.0.1:{host.server_port}/redirect?to=file:///etc/hostname",
            allowed_hosts=allow(host),
            file_folder="/",
        )


@pytest.mark.parametrize(
    "url",
    ["/etc/hostname", "file:///etc/hostname", "file:///nonexistent", "./x.png", "~/x.png", "",
     "ftp://example.org/x", "gopher://127.0.0.1/"],
)  # fmt: skip
def test_paths_and_other_schemes_get_one_and_the_same_message(url):
    with pytest.raises(FetchError) as refused:
        fetch(url)
    assert str(refused.value) == "here: images and videos are taken from data:, http:, https: URLs"


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("http://", "no host"),
        ("http:///picture", "no host"),
        ("http://user:secret@example.org/", "credentials"),
        ("http://exa mple.org:x/", "not a URL"),
        ("http://xn--a/", "not a URL"),
        ("http://name.invalid/x?key=secret", "host name.invalid cannot be resolved"),
    ],
)
def test_urls_that_cannot_be_asked(url, problem):
    with pytest.raises(FetchError, match=problem) as refused:
        fetch(url)
    assert "secret" not in str(refused.value)


def test_no_scheme_at_all_means_data_uris_alone():
    with pytest.raises(FetchError, match="images and videos are taken from data: URLs"):
        fetch("http://example.org/", schemes=())


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("status/404", "host 127.0.0.1 answered 404"),
        ("status/500?key=secret", "host 127.0.0.1 answered 500"),
        ("short", "could not be read"),
        ("brotli", "only gzip is undone"),
        ("nogzip", "sends gzip that is none"),
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


def test_what_gzip_made_small_comes_whole(host):
    """Eight megabytes of zeros, of eight kilobytes."""
    size, url = 8 << 20, f"http://127.0.0.1:{host.server_port}/bomb"
    got = fetch_all({"here": url}, max_bytes=size, max_total_bytes=size, allowed_hosts=allow(host))
    assert got == {"here": bytes(size)}
    with pytest.raises(MediaTooLarge, match=f"larger than {size - 1} bytes"):
        fetch_all(
            {"here": url}, max_bytes=size - 1, max_total_bytes=size, allowed_hosts=allow(host)
        )


def test_what_follows_the_end_of_gzip_is_left(host):
    """Where the end comes in the middle of what arrives at once, and is not undone at once."""
    size, url = 8 << 20, f"http://127.0.0.1:{host.server_port}/trailing"
    got = fetch_all(
        {"here": url},
        max_bytes=size,
        max_total_bytes=size,
        allowed_hosts=allow(host),
        timeout_seconds=PATIENCE_SECONDS,
    )
    assert got == {"here": bytes(size)}


def test_hosts_hear_that_videos_are_taken_too(host):
    url = f"http://127.0.0.1:{host.server_port}/clip"
    assert fetch(url, allowed_hosts=allow(host)) == PICTURE


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
    assert fetch_all({"a": url, "b": url}, allowed_hosts=allow(host)) == {
        "a": PICTURE,
        "b": PICTURE,
    }
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


def test_a_name_with_several_addresses_is_asked_at_the_next_where_one_is_closed(host):
    """`localhost` is ::1 and 127.0.0.1 on most machines; the host listens at one of them."""

    async def run():
        config = FetchConfig(allowed_hosts=("localhost",))
        remote = Remote(config, Gates(1, 1), MAX_BYTES)
        url = httpx.URL(f"http://localhost:{host.server_port}/picture")
        response = await remote._ask(url, ("::1", "127.0.0.2", "127.0.0.1"))
        await response.aread()
        await response.aclose()
        await remote.aclose()
        return response.content

    assert asyncio.run(run()) == PICTURE


async def most_at_once(hosts, gates):
    """Pass all at once, 10 ms each; the most that were inside together, by host."""
    inside, most = dict.fromkeys(hosts, 0), dict.fromkeys([*hosts, "all"], 0)

    async def one(host):
        async with gates.passing(host):
            inside[host] += 1
            most[host] = max(most[host], inside[host])
            most["all"] = max(most["all"], sum(inside.values()))
            await asyncio.sleep(0.01)
            inside[host] -= 1

    await asyncio.gather(*map(one, hosts))
    return most


def test_fetches_are_limited_over_all_and_for_each_host():
    gates = Gates(5, 2)
    most = asyncio.run(most_at_once(["a", "b", "c", "d"] * 6, gates))
    assert most == {"a": 2, "b": 2, "c": 2, "d": 2, "all": 5}
    assert gates.num_hosts == 0


def test_those_that_wait_for_a_slow_host_take_no_turn_from_others():
    async def run():
        gates, passed = Gates(2, 1), []

        async def slow():
            async with gates.passing("slow"):
                await asyncio.sleep(60)

        waiting = [asyncio.create_task(slow()) for _ in range(10)]
        await asyncio.sleep(0)
        async with asyncio.timeout(PATIENCE_SECONDS), gates.passing("quick"):
            passed.append(gates.num_hosts)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        return passed, gates.num_hosts

    assert asyncio.run(run()) == ([2], 0)


def test_waiting_for_a_turn_counts_as_time(host):
    base = f"http://127.0.0.1:{host.server_port}"
    start = time.monotonic()
    with pytest.raises(FetchError, match=r"did not answer in 0\.5 s"):
        fetch_all(
            {str(i): f"{base}/hang?{i}" for i in range(8)},
            allowed_hosts=allow(host),
            max_concurrent=2,
            timeout_seconds=0.5,
        )
    assert time.monotonic() - start < PATIENCE_SECONDS
    assert len(host.hits) <= 2


@pytest.fixture
def folder(tmp_path):
    """A folder with pictures, and a secret beside it that links lead to."""
    folder = tmp_path / "media"
    (folder / "deep").mkdir(parents=True)
    for path in (folder / "a.png", folder / "a b.png", folder / "deep" / "b.png"):
        path.write_bytes(PICTURE)
    (tmp_path / "secret.png").write_bytes(b"secret")
    (tmp_path / "media2").mkdir()
    (tmp_path / "media2" / "secret.png").write_bytes(b"secret")
    (folder / "out.png").symlink_to(tmp_path / "secret.png")
    (folder / "up").symlink_to(tmp_path)
    (folder / "in.png").symlink_to(folder / "deep" / "b.png")
    (folder / "circle.png").symlink_to(folder / "circle.png")
    os.mkfifo(folder / "fifo.png")
    return folder


@pytest.mark.parametrize(
    "path",
    ["{0}/a.png", "{0}/a%20b.png", "{0}/deep/b.png", "{0}/deep/../a.png", "{0}/in.png",
     "{0}/%61.png", "{0}/deep/%2e%2e/a.png", "{0}//a.png"],
)  # fmt: skip
@pytest.mark.parametrize("start", ["file://", "FILE://", "file://localhost"])
def test_files_below_the_folder_are_read(folder, start, path):
    assert fetch(start + path.format(folder), file_folder=str(folder)) == PICTURE


@pytest.mark.parametrize(
    "url",
    ["file:///etc/hostname", "file:///nonexistent", "file://{0}", "file://{0}/", "file:", "file:a",
     "file://{0}/../secret.png", "file://{0}/%2e%2e/secret.png", "file://{0}/..%2fsecret.png",
     "file://{0}/out.png", "file://{0}/up/secret.png", "file://{0}/circle.png", "file://{0}/deep",
     "file://{0}/fifo.png", "file://{0}/none.png", "file://{0}2/secret.png", "file://{0}/a.png%00",
     "file://example.org{0}/a.png", "file://{0}/a.png?x", "file://{0}/a.png/", "file:a.png",
     "file://{0}/a.png/../../secret.png", "file://[", "file://{0}/%ff%fe.png"],
)  # fmt: skip
def test_all_else_gets_one_message_whether_it_exists_or_not(folder, url):
    if url.endswith("a.png/"):  # a file with a slash behind it is that file for `resolve`
        assert fetch(url.format(folder), file_folder=str(folder)) == PICTURE
        return
    with pytest.raises(FetchError) as refused:
        fetch(url.format(folder), file_folder=str(folder))
    assert str(refused.value) == "here: no picture that may be read is at this file: URL"


def test_a_file_is_held_to_the_limits(folder):
    url = f"file://{folder}/a.png"
    assert fetch(url, max_bytes=len(PICTURE), file_folder=str(folder)) == PICTURE
    with pytest.raises(MediaTooLarge, match="larger than 1023 bytes"):
        fetch(url, max_bytes=len(PICTURE) - 1, file_folder=str(folder))
    with pytest.raises(MediaTooLarge, match="1500 bytes together"):
        fetch_all(
            {"1": url, "2": f"file://{folder}/deep/b.png"},
            max_total_bytes=1500,
            file_folder=str(folder),
        )


def test_files_are_not_read_on_the_threads_that_parse_bodies(folder):
    """They may wait for a disk of the network, and nobody else should."""

    async def run():
        let_go = threading.Event()
        offload = Offload(1)
        busy = asyncio.create_task(offload.run(1 << 20, let_go.wait, PATIENCE_SECONDS))
        await asyncio.sleep(0.05)
        config = FetchConfig(file_folder=str(folder))
        fetcher = Fetcher(config, offload, max_bytes=1 << 20, max_total_bytes=1 << 20)
        try:
            got = await fetcher.fetch_all({"here": f"file://{folder}/a.png"})
            return got, busy.done()
        finally:
            let_go.set()
            await busy
            await fetcher.aclose()
            offload.close()

    assert asyncio.run(run()) == ({"here": PICTURE}, False)


def test_a_folder_does_not_open_other_schemes(folder):
    for url in ("/etc/hostname", "./a.png", str(folder / "a.png"), "files:///x", "ftp://x/y"):
        with pytest.raises(FetchError) as refused:
            fetch(url, file_folder=str(folder))
        assert (
            str(refused.value)
            == "here: images and videos are taken from data:, http:, https:, file: URLs"
        )


def test_no_descriptor_is_left_by_files(folder):
    before = len(os.listdir("/proc/self/fd"))
    for name in ("a.png", "deep/b.png", "out.png", "deep", "fifo.png", "none/none.png"):
        with contextlib.suppress(MediaError):
            read_file_url(f"file://{folder}/{name}", folder, MAX_BYTES)
    assert len(os.listdir("/proc/self/fd")) == before


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
     "data:;base64,A*==", "data:;base64,AA=A", "data:;base64,é", "data:;base64,AA-_",
     "data:;base64,AA%3DA", "data:;base64,%4", "data:;base64," + "A" * (1 << 18) + "=" + "AAA",
     "data:;base64," + "A" * ((1 << 18) - 2) + "==" + "AAAA"],
)  # fmt: skip
def test_other_data_uris_are_refused_without_repeating_them(uri):
    with pytest.raises(MediaError, match="data URI") as refused:
        fetch(uri)
    assert "xyz" not in str(refused.value)


@given(st.binary(max_size=100), st.randoms())
def test_any_bytes_come_back_however_they_are_written(data, random):
    encoded = base64.b64encode(data).decode().rstrip("=" * random.randrange(2))
    written = "".join(
        random.choice([c, f"%{ord(c):02x}", f"%{ord(c):02X}", f"{c}\n", f" {c}"]) for c in encoded
    )
    assert decode_data_uri(f"data:;base64,{written}#{random.random()}", 1000) == data


@pytest.mark.parametrize("shift", range(8))
def test_large_data_uris_are_decoded_across_every_kind_of_cut(shift):
    """Pieces end anywhere in an escape, in white space and in a group of four."""
    data = bytes(range(256)) * 1200
    encoded = base64.b64encode(data).decode()
    for written in (encoded, encoded.replace("A", "%41"), encoded.replace("A", "\r\nA")):
        uri = "data:;base64," + " " * shift + written
        assert decode_data_uri(uri, len(data)) == data
        with pytest.raises(MediaTooLarge):
            decode_data_uri(uri, len(data) - 1)


def test_every_letter_of_base64_and_no_other_is_taken_at_every_place():
    letters = set(string.ascii_letters + string.digits + "+/")
    for letter in map(chr, range(1, 128)):
        if letter in "%=#" or letter.isspace():  # these have a meaning of their own
            continue
        for place in range(8):
            written = "Zm9v" * 2 + "A" * place + letter + "A" * (7 - place)
            if letter in letters:
                decoded = base64.b64decode(written, validate=True)
                assert decode_data_uri(f"data:;base64,{written}", 99) == decoded
            else:
                with pytest.raises(MediaError, match="not valid base64"):
                    decode_data_uri(f"data:;base64,{written}", 99)


def test_a_data_uri_is_held_to_the_size_limit():
    assert len(decode_data_uri("data:;base64," + "AAAA" * 10, 30)) == 30
    with pytest.raises(MediaTooLarge, match="limit is 29"):
        decode_data_uri("data:;base64," + "AAAA" * 10, 29)
