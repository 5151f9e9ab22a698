"""Pods of 2 and 4 local processes: the oracle is the same engine in one process."""

import functools
import json
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import httpx
import pytest

from jaxmm.models.converted import convert
from serving.example import picture_uri
from tests.checkpoints import Family, checkpoint
from tests.engines import make_engine
from tests.pods import FEW, free_port, pod, workload

LEADER = ("-m", "tests.pods")

pytestmark = pytest.mark.slow


@functools.cache
def expected(family: Family) -> list[list[int]]:
    """The workload's tokens from one process."""
    with make_engine(family, **FEW) as alone:
        return workload(alone)


def first_answer(process: subprocess.Popen[str]) -> list[list[int]]:
    """What process 0 prints once the workload is done."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith("[["):
            return json.loads(line)
    raise AssertionError("".join(lines))


def ends(process: subprocess.Popen[str], since: float) -> tuple[int, str]:
    """Exit status and output of a process that ends within ten seconds of a time."""
    out, _ = process.communicate(timeout=max(0.1, 10 - (time.monotonic() - since)))
    return process.returncode, out


def test_two_processes_answer_as_one_and_each_names_the_one_that_was_killed() -> None:
    """Of two chips each, as hosts have several; each of two KV heads stands on two of the four."""
    with pod(checkpoint("qwen2_5_vl"), LEADER, 2, chips=2) as (leader, follower):
        assert first_answer(leader) == expected("qwen2_5_vl")
        follower.kill()
        status, out = ends(leader, time.monotonic())
    assert status == 1
    assert re.search(r"the pod ends: process 1 \(.*\) was lost", out)
    assert re.search(r"heard: the engine has stopped: process 1 \(.*\) was lost", out)


def test_replicas_on_processes_of_their_own_answer_as_one_and_end_with_process_0() -> None:
    with pod(checkpoint("gemma3"), LEADER, 2, replicas=2) as (leader, follower):
        assert first_answer(leader) == expected("gemma3")
        leader.kill()
        status, out = ends(follower, time.monotonic())
    assert status != 0  # JAX too ends a process whose coordinator is gone
    assert "the pod ends: process 0 (127.0.0.1) was lost" in out


def test_replicas_on_two_processes_each_answer_as_one_and_end_together(tmp_path: Path) -> None:
    """Of experts and an encoder that are split, each process restoring its parts; the second
    replica has no chip of process 0, which hears its tokens."""
    convert(checkpoint("qwen3_vl_moe"), tmp_path / "model", progress=False)
    split = {"JAXMM_ENCODER_PARALLEL": "model"}
    with pod(tmp_path / "model", LEADER, 4, replicas=2, **split) as processes:
        assert first_answer(processes[0]) == expected("qwen3_vl_moe")
        processes[3].kill()
        since = time.monotonic()
        for process in processes[:3]:
            status, out = ends(process, since)
            assert status == 1
            assert re.search(r"the pod ends: process 3 \(.*\) was lost", out), out


def test_the_server_runs_on_a_pod_and_ends_in_order_when_any_host_is_asked_to() -> None:
    port = free_port()
    serve = ("-m", "serving.cli", "serve")
    with pod(checkpoint("qwen2_5_vl"), serve, 2, chips=2, JAXMM_PORT=port) as (leader, follower):
        assert leader.stdout is not None
        assert any(line.startswith("jaxmm serves at") for line in leader.stdout)
        content = [
            {"type": "image_url", "image_url": {"url": picture_uri()}},
            {"type": "text", "text": "what?"},
        ]
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 8}
        answer = httpx.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body, timeout=60)
        assert answer.status_code == 200
        assert answer.json()["usage"]["completion_tokens"] > 0
        video = {"type": "video", "video": [picture_uri()] * 4}
        body["messages"] = [{"role": "user", "content": [video]}]
        whole, pruned = (
            httpx.post(
                f"http://127.0.0.1:{port}/v1/chat/completions",
                json=body | {"video_pruning_rate": rate},
                timeout=60,
            ).json()["usage"]["prompt_tokens_details"]["video_tokens"]
            for rate in (0, 0.5)
        )
        assert pruned == whole // 2  # one step of two
        follower.send_signal(signal.SIGTERM)
        since = time.monotonic()
        assert ends(leader, since)[0] == 0
        assert ends(follower, since)[0] == 0


def test_processes_that_were_started_otherwise_end_at_once_and_say_which() -> None:
    other = {"JAXMM_PAGES_NUM_PAGES": 64}
    with pod(checkpoint("qwen2_5_vl"), LEADER, 2, for_followers=other) as (leader, follower):
        for process in (leader, follower):
            out, _ = process.communicate(timeout=120)
            assert process.returncode == 1
            assert re.search(r"process 1 \(.*\) serves another model, or has other settings", out)


def test_a_start_that_fails_at_process_0_ends_the_others_with_the_reason(tmp_path: Path) -> None:
    """A broken tokenizer, which process 0 alone reads."""
    model = checkpoint("qwen2_5_vl")
    shutil.copytree(model, tmp_path / "broken")
    (tmp_path / "broken" / "tokenizer_config.json").write_text("{")
    right = {"JAXMM_MODEL": model}
    broken = pod(tmp_path / "broken", LEADER, 2, chips=2, for_followers=right)
    with broken as (leader, follower):
        out, _ = leader.communicate(timeout=120)
        assert leader.returncode == 1 and "ModelError" in out
        status, out = ends(follower, time.monotonic())
    assert status != 0
    assert re.search("the pod ends: process 0 could not start: no tokenizer can be loaded", out), (
        out
    )
