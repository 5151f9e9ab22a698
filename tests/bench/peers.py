"""The engines that `bench_peers` measures: OpenAI-compatible servers, and transformers here."""

import base64
import http.client
import io
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

from tests.bench.workloads import Ask, Picture, Workload

START_SECONDS = 900
REST_SECONDS = 120
"""Longest that a server may go on with its own preparations once it listens."""
ANSWER_SECONDS = 900


@dataclass(frozen=True)
class Reply:
    """One answer, with times from the moment its request was sent."""

    first_seconds: float
    seconds: float
    num_tokens: int
    text: str
    token_ids: tuple[int, ...]

    @property
    def seconds_per_token(self) -> float:
        """Of the tokens after the first."""
        return (self.seconds - self.first_seconds) / max(1, self.num_tokens - 1)


class Peer(Protocol):
    """An engine that is measured."""

    name: str

    def prepare(self, workload: Workload) -> Any:
        """Do what a client does before it sends; not measured."""
        ...

    def run(self, prepared: Any) -> list[Reply]:
        """Answer all requests, the workload's number of them at a time."""
        ...

    def rest(self) -> None:
        """Wait until nothing is left to do of what the engine's start began."""
        ...

    def pause(self) -> None:
        """Use no processor while another engine is measured."""
        ...

    def resume(self) -> None: ...

    def close(self) -> None: ...


class Server:
    """A server with POST /v1/chat/completions, reached over streaming HTTP."""

    def __init__(self, name: str, url: str, extra: dict[str, Any] | None = None) -> None:
        """Use a server that runs already.

        Args:
            name: In the report.
            url: `http://host:port`.
            extra: Fields to add to each request.
        """
        self.name = name
        self._address = urllib.parse.urlsplit(url).netloc
        self._extra = extra or {}
        self._process: subprocess.Popen[bytes] | None = None
        self._model = ""

    @classmethod
    def start(cls, name: str, command: str, extra: dict[str, Any] | None = None) -> Self:
        """Start a server, and wait until it lists its model.

        Args:
            name: In the report, and of its log file.
            command: Shell words; `{port}` stands for a free port.
            extra: Fields to add to each request.
        """
        port = _free_port()
        log = Path(tempfile.gettempdir()) / f"bench_peers-{name}.log"
        words = shlex.split(command.replace("{port}", str(port)))
        server = cls(name, f"http://127.0.0.1:{port}", extra)
        start = time.perf_counter()
        with log.open("wb") as out:
            server._process = subprocess.Popen(
                words, stdout=out, stderr=subprocess.STDOUT, process_group=0
            )
        try:
            server.connect()
        except BaseException:
            server.close()
            print(f"{name}: see {log}", file=sys.stderr)
            raise
        print(f"started   {name} in {time.perf_counter() - start:.1f} s: {command}")
        return server

    def connect(self) -> None:
        """Wait for the server, and learn what it calls its model."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self._process is not None and self._process.poll() is not None:
                raise SystemExit(f"{self.name} ended with status {self._process.returncode}")
            try:
                with urllib.request.urlopen(f"http://{self._address}/v1/models") as answer:
                    self._model = json.load(answer)["data"][0]["id"]
                    return
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.1)
        raise SystemExit(f"{self.name} did not start within {START_SECONDS} s")

    def prepare(self, workload: Workload) -> tuple[list[bytes], int]:
        return [self._body(ask) for ask in workload.asks], workload.concurrency

    def run(self, prepared: tuple[list[bytes], int]) -> list[Reply]:
        bodies, concurrency = prepared
        with ThreadPoolExecutor(concurrency) as clients:
            return list(clients.map(self._answer, bodies))

    def rest(self) -> None:
        deadline = time.monotonic() + REST_SECONDS
        used = self._processor_seconds()
        while time.monotonic() < deadline:
            time.sleep(2.0)
            before, used = used, self._processor_seconds()
            if used - before < 0.1:
                return

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        if self._process is None:
            return
        self._signal(signal.SIGCONT)
        self._signal(signal.SIGTERM)
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self._process.wait()

    def _processor_seconds(self) -> float:
        """Time that the server's processes have computed for; 0 for one that was not started."""
        if self._process is None:
            return 0.0
        ticks = 0
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = path.read_text().rpartition(")")[2].split()
            except OSError:  # it has ended
                continue
            if int(fields[2]) == self._process.pid:  # its group
                ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, number)

    def _body(self, ask: Ask) -> bytes:
        """A request of exactly `max_tokens` greedy tokens, streamed."""
        messages = [
            {"role": turn.role, "content": [_part(part) for part in turn.parts]}
            for turn in ask.turns
        ]
        fields = {
            "model": self._model,
            "messages": messages,
            "max_tokens": ask.max_tokens,
            "min_tokens": ask.max_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        return json.dumps(fields | self._extra).encode()

    def _answer(self, body: bytes) -> Reply:
        start = time.perf_counter()
        connection = http.client.HTTPConnection(self._address, timeout=ANSWER_SECONDS)
        headers = {"content-type": "application/json"}
        connection.request("POST", "/v1/chat/completions", body, headers)
        response = connection.getresponse()
        if response.status != 200:
            raise SystemExit(f"{self.name}: {response.status} {response.read()[:500]!r}")
        times: list[float] = []
        texts: list[str] = []
        ids: list[int] = []
        num_tokens = 0
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            for choice in event.get("choices", ()):
                text, new = choice["delta"].get("content"), choice.get("token_ids")
                if text or new:
                    times.append(time.perf_counter() - start)
                    texts.append(text or "")
                    ids += new or ()
            num_tokens = (event.get("usage") or {}).get("completion_tokens", num_tokens)
        connection.close()
        if not times:
            raise SystemExit(f"{self.name} gave an empty answer")
        return Reply(times[0], times[-1], num_tokens or len(ids), "".join(texts), tuple(ids))


class Transformers:
    """Hugging Face transformers in this process, requests in batches of the concurrency."""

    name = "transformers"

    def __init__(self, model: Path, dtype: str = "float32") -> None:
        """Load processor and model, to compute in `dtype`."""
        import torch
        from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

        start = time.perf_counter()
        self._torch = torch
        # AutoProcessor would want torchvision, for videos
        self._processor = AutoImageProcessor.from_pretrained(model)
        self._tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
        loaded = AutoModelForImageTextToText.from_pretrained(model, dtype=getattr(torch, dtype))
        self._model = loaded.eval()
        print(f"started   transformers, {dtype}, in {time.perf_counter() - start:.1f} s")

    def prepare(self, workload: Workload) -> list[list[tuple[Ask, list[bytes]]]]:
        asks = [_with_pictures(ask) for ask in workload.asks]
        size = workload.concurrency
        return [asks[i : i + size] for i in range(0, len(asks), size)]

    def run(self, prepared: list[list[tuple[Ask, list[bytes]]]]) -> list[Reply]:
        return [reply for batch in prepared for reply in self._answer(batch)]

    def rest(self) -> None:
        """Its start is over when it returns."""

    def pause(self) -> None:
        """An idle model uses nothing."""

    def resume(self) -> None: ...

    def close(self) -> None: ...

    def logprobs(self, ask: Ask, output_ids: Sequence[int]) -> list[float]:
        """Log-probability of every id as the one that follows a request's prompt and `output_ids`.

        The request is alone: nothing is padded.
        """
        inputs = self._inputs([_with_pictures(ask)])
        torch, ids = self._torch, inputs["input_ids"]
        output = torch.tensor([output_ids], dtype=ids.dtype)
        inputs["input_ids"] = torch.cat([ids, output], dim=1)
        for name, filler in (("attention_mask", 1), ("mm_token_type_ids", 0)):
            more = torch.full_like(output, filler, dtype=inputs[name].dtype)
            inputs[name] = torch.cat([inputs[name], more], dim=1)
        with torch.inference_mode():
            logits = self._model(**inputs, logits_to_keep=1).logits[0, -1]
        scores: list[float] = torch.log_softmax(logits.double(), dim=-1).tolist()
        return scores

    def _answer(self, batch: list[tuple[Ask, list[bytes]]]) -> list[Reply]:
        start = time.perf_counter()
        inputs = self._inputs(batch)
        num_tokens = batch[0][0].max_tokens
        watch = _Watch()
        with self._torch.inference_mode():
            outputs = self._model.generate(
                **inputs,
                max_new_tokens=num_tokens,
                min_new_tokens=num_tokens,
                do_sample=False,
                streamer=watch,
            )
        seconds = time.perf_counter() - start
        first = watch.times[1] - start  # the streamer gets the prompt, then each token
        new_ids = outputs[:, inputs["input_ids"].shape[1] :].tolist()
        return [
            Reply(first, seconds, len(ids), self._tokenizer.decode(ids), tuple(ids))
            for ids in new_ids
        ]

    def _inputs(self, batch: list[tuple[Ask, list[bytes]]]) -> dict[str, Any]:
        """What its own processor gives: pixel values, and ids with a place for each row."""
        from PIL import Image

        pngs = [png for _, pngs in batch for png in pngs]
        pixels: dict[str, Any] = {}
        if pngs:
            images = [Image.open(io.BytesIO(png)).convert("RGB") for png in pngs]
            pixels = dict(self._processor(images=images, return_tensors="pt"))
        counts = [int(grid.prod()) // 4 for grid in pixels.get("image_grid_thw", ())]
        place = self._model.config.image_token_id
        pad = self._tokenizer.convert_ids_to_tokens(place)
        texts = [self._text(ask, pad, iter([counts.pop(0) for _ in pngs])) for ask, pngs in batch]
        inputs = dict(self._tokenizer(texts, return_tensors="pt", padding=True))
        return {**inputs, **pixels, "mm_token_type_ids": (inputs["input_ids"] == place).int()}

    def _text(self, ask: Ask, pad: str, counts: Iterator[int]) -> str:
        text = self._tokenizer.apply_chat_template(
            _template_messages(ask), add_generation_prompt=True, tokenize=False
        )
        first, *others = text.split(pad)
        return first + "".join(pad * next(counts) + other for other in others)


def _with_pictures(ask: Ask) -> tuple[Ask, list[bytes]]:
    return ask, [p.png() for t in ask.turns for p in t.parts if isinstance(p, Picture)]


class _Watch:
    """Notes when transformers has made a token of each row."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, _: Any) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None: ...


def _part(part: Picture | str) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    data = base64.b64encode(part.png()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


def _template_messages(ask: Ask) -> list[dict[str, Any]]:
    def shown(part: Picture | str) -> dict[str, str]:
        return {"type": "text", "text": part} if isinstance(part, str) else {"type": "image"}

    return [{"role": turn.role, "content": [shown(p) for p in turn.parts]} for turn in ask.turns]


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port
