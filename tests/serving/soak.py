"""A crowd of clients of all kinds against a whole server; every answer is checked.

The trained model that ships answers questions about pictures, and its answers are known: what
comes back under any load must be what is given alone.
"""

import asyncio
import base64
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

import jaxmm
from tests.engines import SMALL, cache_dir

ROOT = Path(__file__).parents[2]
CONTENT = ROOT / "tests" / "data" / "content"
CASES = [c for c in json.loads((CONTENT / "cases.json").read_text())["cases"] if "pictures" in c]
KEYS = ("first-soak-key", "second-soak-key")
START_SECONDS = 300
SETTINGS = {
    **SMALL,
    "model": str(jaxmm.default_model()),
    "compile_cache_dir": cache_dir(),
    "max_running": 16,
    "pages.num_pages": 1024,
    "media.max_pixels": 672 * 336,
}
"""As for the content gate, so that both share their executables."""
FAULTS = ("wrong answer", "5xx", "other status", "client fault")
"""What must not happen; the last is a connection that ended before its answer."""


class SoakServer:
    """The server's process."""

    def __init__(self, **settings: Any) -> None:
        """Start it, and wait until it serves. Settings of the server by name, dots and all."""
        values = {**SETTINGS, "api_keys": ",".join(KEYS), **settings}
        flags = [f"--{n.replace('.', '-').replace('_', '-')}={v}" for n, v in values.items()]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.serving.soak_server", *flags],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            cwd=ROOT, env=os.environ | {"JAX_PLATFORMS": "cpu"},
        )  # fmt: skip
        self.errors: list[str] = []
        self._reader = threading.Thread(target=self._read_errors, daemon=True)
        self._reader.start()
        self.url = self._read_url()

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        self.errors += self.process.stderr

    def _read_url(self) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if found := re.search(r"jaxmm serves at (http://\S+)", line):
                self.process.stdout.readline()  # empty
                self.process.stdout.readline()  # the curl line
                self.process.stdout.readline()
                return found[1]
        raise AssertionError("the server did not start: " + "".join(self.errors[-20:]))

    def tell(self, command: str) -> dict[str, Any]:
        """Send a command to the process; its answer."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{command}\n")
        self.process.stdin.flush()
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer

    def end(self) -> int:
        """Send SIGTERM; the exit status."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(60)
        finally:
            self.kill()

    def kill(self) -> None:
        """End it in any case."""
        self.process.kill()
        self.process.wait()
        self._reader.join(10)
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()


def _uri(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def question(case: dict[str, Any]) -> dict[str, Any]:
    """The body that asks a case's last turn."""
    pictures = [
        {"type": "image_url", "image_url": {"url": _uri((CONTENT / name).read_bytes())}}
        for name in case["pictures"]
    ]
    messages: list[dict[str, Any]] = []
    for turn in case["turns"]:
        content = [*([] if messages else pictures), {"type": "text", "text": turn["question"]}]
        messages += [
            {"role": "user", "content": content},
            {"role": "assistant", "content": turn["answer"]},
        ]
    return {"messages": messages[:-1], "max_tokens": 40, "temperature": 0}


class Crowd:
    """Sends random requests and counts how each ended; what must not happen goes to `wrong`, each
    beginning with one of FAULTS."""

    def __init__(self, url: str, seed: int) -> None:
        self._random = random.Random(seed)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        self._client = httpx.AsyncClient(base_url=url, timeout=300, limits=limits)
        self.outcomes: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.seconds: list[float] = []
        """From sending to the end of the answer, of all that were answered."""

    async def aclose(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    async def run(self, num_requests: int, num_clients: int) -> None:
        """Send so many requests, from so many clients at once."""
        left = iter(range(num_requests))

        async def client() -> None:
            for _ in left:
                await self.one()

        await asyncio.gather(*(client() for _ in range(num_clients)))

    async def one(self) -> None:
        """Send one request of a random kind: a tenth are given up, a fiftieth are corrupt."""
        kind = self._random.choices(
            [self._ask, self._give_up, self._corrupt, self._malformed, self._intrude],
            [84, 10, 2, 2, 2],
        )[0]
        try:
            await kind()
        except httpx.TransportError as error:
            self.wrong.append(f"client fault: {kind.__name__} {type(error).__name__} {error}")

    async def _post(self, body: Any, key: str | None = None) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"authorization": f"Bearer {key or self._random.choice(KEYS)}"}
        return await self._client.post("/v1/chat/completions", content=content, headers=headers)

    async def _ask(self) -> None:
        case = self._random.choice(CASES)
        body = question(case) | {"stream": self._random.random() < 0.5}
        start = time.perf_counter()
        response = await self._post(body)
        if response.status_code == 429 and "retry-after" in response.headers:
            self.outcomes["refused"] += 1
        elif not self._has_status(response, 200):
            pass
        elif (answer := _text(response, body["stream"])) != case["expected"]:
            self.wrong.append(
                f"wrong answer: {case['pictures']} {answer!r}, not {case['expected']!r}"
            )
        else:
            self.outcomes["answered"] += 1
            self.seconds.append(time.perf_counter() - start)

    async def _give_up(self) -> None:
        """Close the connection after some events, or after a moment without any."""
        body = question(self._random.choice(CASES))
        body |= {"stream": True, "ignore_eos": True, "max_tokens": 200}
        headers = {"authorization": f"Bearer {self._random.choice(KEYS)}"}
        patience, num_events = self._random.uniform(0, 0.5), self._random.randrange(4)
        try:
            async with (
                asyncio.timeout(patience if num_events == 0 else None),
                self._client.stream(
                    "POST", "/v1/chat/completions", json=body, headers=headers
                ) as response,
            ):
                lines = response.aiter_lines()
                for _ in range(2 * num_events):
                    await anext(lines, None)
        except TimeoutError:
            pass
        self.outcomes["given up"] += 1

    async def _corrupt(self) -> None:
        """A picture that is cut, or with some bytes changed."""
        case = self._random.choice(CASES)
        data = bytearray((CONTENT / case["pictures"][0]).read_bytes())
        cut = self._random.random() < 0.5
        if cut:
            del data[self._random.randrange(len(data) * 3 // 4) :]
        else:
            for _ in range(self._random.randint(1, 20)):
                data[self._random.randrange(len(data))] = self._random.randrange(256)
        body = question({**case, "pictures": []})
        part = {"type": "image_url", "image_url": {"url": _uri(bytes(data))}}
        first = body["messages"][0]["content"]
        body["messages"][0]["content"] = [part, *first]
        response = await self._post(body)
        allowed = (400, 429) if cut else (200, 400, 429)  # a changed byte may leave a picture
        self._has_status(response, *allowed)
        self.outcomes["corrupt"] += 1

    async def _malformed(self) -> None:
        text = json.dumps(question(self._random.choice(CASES))).encode()
        response = await self._post(text[: self._random.randrange(len(text))])
        self._has_status(response, 400)
        self.outcomes["malformed"] += 1

    async def _intrude(self) -> None:
        response = await self._post(question(CASES[0]), key="no-key-of-yours")
        self._has_status(response, 401)
        self.outcomes["intruders"] += 1

    def _has_status(self, response: httpx.Response, *allowed: int) -> bool:
        status = response.status_code
        if status not in allowed:
            kind = "5xx" if status >= 500 else "other status"
            self.wrong.append(f"{kind}: {status}, not {allowed}: {response.text[:200]}")
        return status in allowed


def _text(response: httpx.Response, streamed: bool) -> str:
    if not streamed:
        return str(response.json()["choices"][0]["message"]["content"])
    events = [line[6:] for line in response.text.split("\n\n") if line.startswith("data: {")]
    chunks = [json.loads(event) for event in events]
    return "".join(c["choices"][0]["delta"].get("content", "") for c in chunks if c["choices"])
