"""A media host that misbehaves on request, on a loopback port of its own."""

import contextlib
import gzip
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

MEDIA = Path(__file__).parents[1] / "data" / "media"
PICTURE = bytes(range(256)) * 4
BOMB = gzip.compress(bytes(8 << 20))


class _Handler(BaseHTTPRequestHandler):
    """Paths: /picture /status/N /redirect?to=URL /chain/N /hang /trickle /endless /short /gzip
    /bomb /trailing /brotli /nogzip /clip /flip /media/NAME."""

    protocol_version = "HTTP/1.1"
    server: "_Host"

    def log_message(self, *_):
        pass

    def do_GET(self):
        url = urlsplit(self.path)
        self.server.hits.append(self.path)
        self.server.hosts.append(self.headers["host"])
        name, _, rest = url.path.strip("/").partition("/")
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            getattr(self, f"_{name}")(rest, parse_qs(url.query))
        self.close_connection = True

    def _send(self, status, body=b"", length=None, **headers):
        self.send_response(status)
        self.send_header("content-length", str(len(body) if length is None else length))
        for header, value in headers.items():
            self.send_header(header.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def _picture(self, *_):
        self._send(200, PICTURE, content_type="text/html")

    def _status(self, code, _):
        self._send(int(code), b"sorry")

    def _redirect(self, _, query):
        self._send(302, location=query["to"][0])

    def _chain(self, left, _):
        if int(left):
            self._send(302, location=f"/chain/{int(left) - 1}")
        else:
            self._picture()

    def _hang(self, *_):
        self.server.ended.wait(20)

    def _trickle(self, *_):
        self._send(200, b"", length=1000)
        while not self.server.ended.wait(0.05):
            self.wfile.write(b"x")
            self.wfile.flush()

    def _endless(self, *_):
        self.send_response(200)
        self.end_headers()
        while not self.server.ended.is_set():
            self.wfile.write(bytes(65536))

    def _short(self, *_):
        self._send(200, PICTURE, length=len(PICTURE) + 10)

    def _gzip(self, *_):
        self._send(200, gzip.compress(PICTURE), content_encoding="gzip")

    def _bomb(self, *_):
        self._send(200, BOMB, content_encoding="gzip")

    def _trailing(self, *_):
        self._send(200, BOMB + PICTURE, content_encoding="gzip")

    def _brotli(self, *_):
        self._send(200, PICTURE, content_encoding="br")

    def _nogzip(self, *_):
        self._send(200, PICTURE, content_encoding="gzip")

    def _clip(self, *_):
        """A host that keeps to what the client says it takes."""
        taken = {"*/*", "video/*", "video/mp4"} & set(self.headers["accept"].split(", "))
        self._send(200 if taken else 406, PICTURE, content_type="video/mp4")

    def _media(self, name, _):
        self._send(200, (MEDIA / name).read_bytes(), content_type="image/png")

    def _flip(self, *_):
        self._send(200, b"%d" % len(self.server.hits))


class _Host(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64  # of the five that are the default, a busy machine refuses the sixth

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.hits: list[str] = []
        self.hosts: list[str] = []
        self.ended = threading.Event()

    def handle_error(self, *_):
        pass  # a client that hangs up is what the tests are about


@contextlib.contextmanager
def media_host():
    """Run a host; it has `server_port`, and `hits`, the paths that were asked."""
    with _Host() as host:
        threading.Thread(target=host.serve_forever, args=(0.02,), daemon=True).start()
        yield host
        host.ended.set()
        host.shutdown()
