"""Pods of local processes: one program leads, the others follow, over loopback and gloo."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from jaxmm.config import EngineConfig, load_config
from jaxmm.engine import Engine
from jaxmm.errors import EngineStopped
from tests.engines import SMALL, ask, cache_dir, in_parallel, picture, request, turn

ROOT = Path(__file__).parents[1]


FEW = {
    "buckets.min_step_tokens": 32,
    "buckets.max_step_tokens": 32,
    "buckets.min_lane_patches": 256,
    "media.max_pixels": 28224,
    "max_model_len": 256,
    "max_running": 16,
    "pages.num_pages": 128,
    "arena.num_rows": 512,
}
"""Beside SMALL: few buckets, since each process compiles them."""


def free_port() -> int:
    """A port that nobody has now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


def pod_settings(
    model: Path,
    num_processes: int,
    process_id: int,
    port: int,
    replicas: int,
    chips: int,
    sizes: Mapping[str, object],
) -> dict[str, str]:
    """Settings of one process as environment variables."""
    values = {
        **SMALL,
        **sizes,
        "model": model,
        "compile_cache_dir": cache_dir(),
        "tensor_parallel": num_processes * chips // replicas,
        "data_parallel": replicas,
        "coordinator": f"127.0.0.1:{port}",
        "num_processes": num_processes,
        "process_id": process_id,
    }
    return {f"JAXMM_{k.replace('.', '_').upper()}": str(v) for k, v in values.items()}


@contextmanager
def pod(
    model: Path,
    leader: Sequence[str],
    num_processes: int,
    *,
    for_followers: Mapping[str, object] | None = None,
    replicas: int = 1,
    chips: int = 1,
    sizes: Mapping[str, object] = FEW,
    **settings: object,
) -> Iterator[list[subprocess.Popen[str]]]:
    """Processes of a pod, the leader first; what is left of them at the end is killed.

    Args:
        model: The checkpoint.
        leader: Words after `python` for process 0; the others run `jaxmm serve`.
        num_processes: How many.
        for_followers: Variables of the environment of all but process 0.
        replicas: Of the model, each on as many processes.
        chips: Of each process, simulated.
        sizes: Settings beside SMALL.
        **settings: Variables of the environment beside those of `pod_settings`.
    """
    port = free_port()
    processes = []
    try:
        for process_id in range(num_processes):
            environment = os.environ | pod_settings(
                model, num_processes, process_id, port, replicas, chips, sizes
            )
            environment |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
            environment["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={chips}"
            own = (for_followers or {}) if process_id else {}
            environment |= {key: str(value) for key, value in (settings | dict(own)).items()}
            words = leader if process_id == 0 else ["-m", "serving.cli", "serve"]
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-u", *words],
                    env=environment,
                    cwd=ROOT,
                    text=True,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                )
            )
        yield processes
    finally:
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.communicate()


def workload(on: Engine) -> list[list[int]]:
    """Greedy tokens of requests with and without pictures, at once, some of them aborted."""
    wanted = [
        request(turn("hello")),
        request(turn("<image>", "what?"), [picture(140, 112)]),
        request(turn("a", "<image>", "b", "<image>"), [picture(84, 112, 1), picture(56, 56, 2)]),
        request(turn("again", "<image>"), [picture(140, 112)], repetition_penalty=1.3),
        request(turn("bias"), logit_bias={65: 4.0}, n=2),
    ]
    aborted = [request(turn("gone", "<image>"), [picture(112, 84, i)]) for i in range(3)]
    for gone in aborted:
        on.submit(gone, lambda _: None)
    results = in_parallel(lambda i: ask(on, wanted[i])[0], len(wanted) - 1)
    for gone in aborted:
        on.abort(gone.id)
    results += ask(on, wanted[-1])
    return [list(c.token_ids) for result in results for c in result.completions]


def main() -> None:
    """Process 0 of a test's pod: does the workload, prints it, and stays busy until it is ended."""
    with Engine(load_config(EngineConfig)) as on:
        sys.stdout.write(json.dumps(workload(on)) + "\n")
        while True:
            try:
                ask(on, request(turn("busy"), max_tokens=100))
            except EngineStopped as error:
                sys.stdout.write(f"heard: {error}\n")
                time.sleep(60)


if __name__ == "__main__":
    main()
