"""How late the server's event loop is while every request brings four large pictures.

    python -m tests.bench.bench_event_loop [--seconds 30] [--clients 8] [--form JPEG]

A whole server with the model that ships, on the loop that `jaxmm serve` runs on, its clients in a
process of their own, each sending one request after the other: four pictures of 1536 x 2170 as data
URIs. Prints hardware, commit, the lag of the event loop while they send (median, p99, largest), the
most processor time that it took at a stretch, and the time of GET /health; and, as what the machine
itself adds, the lag of a loop in another process that does nothing at the same time.
"""

import argparse
import asyncio
import base64
import io
import json
import multiprocessing
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import uvicorn
from PIL import Image

from jaxmm.config import load_config
from jaxmm.engine import Engine
from serving.config import ServerConfig
from serving.lag import LagProbe
from serving.main import tune_interpreter, uvicorn_config
from tests.bench.machine import describe_run
from tests.serving.soak import SETTINGS

SIZE = (1536, 2170)
NUM_BODIES = 3
MAX_PIXELS = 384 * 384
"""Of each picture for the model, whose context is short; it is decoded whole all the same."""
WARM_UP_SECONDS = 5


def picture(seed: int, form: str) -> bytes:
    """A smooth scene with grain, different for every seed; compresses like a photograph."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (68, 48, 3), np.uint8))
    smooth = np.asarray(coarse.resize(SIZE, Image.Resampling.BICUBIC), np.int16)
    grain = rng.integers(-6, 7, smooth.shape, np.int16)
    file = io.BytesIO()
    Image.fromarray(np.clip(smooth + grain, 0, 255).astype(np.uint8)).save(
        file, form, quality=90, compress_level=1
    )
    return file.getvalue()


def body(seed: int, form: str) -> bytes:
    """A request with four pictures that no other request has."""
    kind = f"data:image/{form.lower()};base64,"
    urls = [kind + base64.b64encode(picture(4 * seed + i, form)).decode() for i in range(4)]
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": u}} for u in urls]
    parts.append({"type": "text", "text": "What is in the pictures?"})
    messages = [{"role": "user", "content": parts}]
    asked = {"messages": messages, "max_tokens": 8, "max_pixels": MAX_PIXELS}
    return json.dumps(asked).encode()


def send(url: str, seconds: float, clients: int, folder: Path) -> None:
    """Be all the clients, who send the bodies of a folder; prints what they met."""
    bodies = [file.read_bytes() for file in sorted(folder.iterdir())]

    async def run() -> tuple[list[int], list[float]]:
        statuses: list[int] = []
        health: list[float] = []
        end = time.monotonic() + seconds

        async def one(index: int, http: httpx.AsyncClient) -> None:
            """One client; with a new salt, nothing is known from before."""
            while time.monotonic() < end:
                index += 1
                salted = bodies[index % len(bodies)][:-1] + b', "cache_salt": "%d-%d"}' % (
                    clients,
                    index,
                )
                answer = await http.post(f"{url}/v1/chat/completions", content=salted)
                statuses.append(answer.status_code)

        async def look(http: httpx.AsyncClient) -> None:
            while time.monotonic() < end:
                start = time.perf_counter()
                await http.get(f"{url}/health")
                health.append(time.perf_counter() - start)
                await asyncio.sleep(0.1)

        async with httpx.AsyncClient(timeout=300) as http:
            work = [one(i, http) for i in range(clients)]
            await asyncio.gather(look(http), *work)
        return statuses, health

    statuses, health = asyncio.run(run())
    counts = {status: statuses.count(status) for status in sorted(set(statuses))}
    size = sum(map(len, bodies)) / len(bodies) / 1e6
    print(f"requests  {counts}, {size:.1f} MB each, {len(statuses) / seconds:.2f} a second")
    print(f"health    {shown(health)}")


def idle(seconds: float) -> None:
    """The lag of a loop that does nothing, on the same machine at the same time."""
    lags: list[float] = []
    probe = LagProbe(lags.append)

    async def run() -> None:
        with_timeout = asyncio.wait_for(probe.run(), seconds)
        await asyncio.gather(with_timeout, return_exceptions=True)

    asyncio.run(run())
    print(f"idle loop {shown(lags)}")


def shown(seconds: list[float]) -> str:
    """Median, p99 and largest in milliseconds."""
    median, p99, top = np.percentile(np.array(seconds) * 1e3, [50, 99, 100])
    return f"median {median:.1f} ms, p99 {p99:.1f} ms, largest {top:.1f} ms"


def main() -> None:
    """Serve, have it loaded, and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--form", choices=["JPEG", "PNG"], default="JPEG")
    parser.add_argument("--send", nargs=2, metavar=("URL", "FOLDER"), help=argparse.SUPPRESS)
    parsed = parser.parse_args()
    if parsed.send:
        url, folder = parsed.send
        send(url, parsed.seconds, parsed.clients, Path(folder))
        return
    print(describe_run(), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(NUM_BODIES):
            Path(folder, str(seed)).write_bytes(body(seed, parsed.form))
        measure(folder, parsed.clients, parsed.seconds)


def measure(folder: str, clients: int, seconds: float) -> None:
    """Serve clients who send the bodies of a folder, and print how late the loop was."""
    settings = {f"engine.{name}": value for name, value in SETTINGS.items()}
    config = load_config(ServerConfig, None, settings)
    with Engine(config.engine) as engine, socket.create_server(("127.0.0.1", 0)) as listener:
        tune_interpreter()
        served = uvicorn_config(engine, config)
        server = uvicorn.Server(served)
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        words = [sys.executable, "-m", "tests.bench.bench_event_loop", "--send", url, folder,
                 "--clients", str(clients), "--seconds"]  # fmt: skip
        subprocess.run([*words, str(WARM_UP_SECONDS)], check=True, stdout=subprocess.DEVNULL)
        probe: LagProbe = served.app.state.lag
        lags: list[float] = []
        probe.observe = lags.append
        probe.take()
        beside = multiprocessing.get_context("spawn").Process(target=idle, args=(seconds,))
        beside.start()
        subprocess.run([*words, str(seconds)], check=True)
        _, busy = probe.take()
        beside.join()
        print(f"event loop {shown(lags)}; busy at a stretch {busy * 1e3:.1f} ms at most")
        server.should_exit = True
        thread.join()


if __name__ == "__main__":
    main()
