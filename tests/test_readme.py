"""What the README says is so: its snippets run, its table and tree are those of the source."""

import base64
import os
import re
import subprocess

import pytest

from docs.write_readme import ROOT, filled
from serving.protocol import parse_chat_request
from tests.checkpoints import checkpoint
from tests.engines import SMALL, cache_dir, engine
from tests.serving.conftest import running

README = (ROOT / "README.md").read_text(encoding="utf-8")
NOTEBOOK, SESSION, CLIENT = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
SERVED_AT = "http://127.0.0.1:8000"


@pytest.fixture
def small_model(monkeypatch):
    """Makes an engine that is told nothing a small one: settings come from the environment."""
    model = {"model": checkpoint("qwen2_5_vl"), "compile_cache_dir": cache_dir()}
    for name, value in {**SMALL, **model}.items():
        monkeypatch.setenv(f"JAXMM_{name.replace('.', '_').upper()}", str(value))


def test_the_notebook_example_is_under_25_lines():
    assert len(NOTEBOOK.splitlines()) < 25


@pytest.mark.slow
def test_the_notebook_example_runs(small_model, capsys):
    exec(compile(NOTEBOOK, "README.md", "exec"), {})
    assert "Usage(prompt_tokens=" in capsys.readouterr().out


@pytest.mark.slow
def test_the_conversation_example_runs(small_model, capsys):
    exec(compile(SESSION, "README.md", "exec"), {})
    assert capsys.readouterr().out.count("'role': 'assistant'") == 2


@pytest.mark.slow
def test_the_client_example_streams_an_answer_and_its_usage(capsys):
    with running(engine("qwen2_5_vl")) as url:
        exec(compile(CLIENT.replace(SERVED_AT, url), "README.md", "exec"), {})
    assert "CompletionUsage(" in capsys.readouterr().out


def test_the_curl_example_is_a_request_that_the_server_takes(tmp_path):
    """Pasted into a shell, with a picture larger than one argument of a command may be."""
    (command,) = re.findall(r"```bash\n(curl .*?)```", README, re.DOTALL)
    picture = os.urandom(300_000)
    (tmp_path / "cat.jpg").write_bytes(picture)
    (tmp_path / "curl").write_text('#!/bin/sh\necho "$@" > words\nexec cat\n')
    (tmp_path / "curl").chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    ran = subprocess.run(
        ["sh", "-c", command], cwd=tmp_path, env={"PATH": path}, capture_output=True, check=True
    )
    request = parse_chat_request(ran.stdout, "model")
    sent = (tmp_path / "words").read_text().split()
    assert sent[0] == f"{SERVED_AT}/v1/chat/completions" and sent[-2:] == ["-d", "@-"]
    shown, asked = request.messages[0].content
    assert base64.b64decode(shown.image_url.url.removeprefix("data:image/jpeg;base64,")) == picture
    assert asked.type == "text"


def test_settings_table_and_tree_are_those_of_the_source():
    assert filled(README) == README, "run: make readme"


def test_files_that_the_text_names_exist():
    named = re.findall(r"\]\(([^)#:]+)\)", README)
    road = [name for line in README.splitlines() for name in re.findall(r"`([\w/]+\.py)`", line)]
    homes = [ROOT, *(ROOT / d for d in ("serving", "jaxmm", "jaxmm/host", "jaxmm/device"))]
    missing = [name for name in named + road if not any((home / name).exists() for home in homes)]
    assert named and road and not missing


@pytest.mark.parametrize("target", re.findall(r"^make (\w+)", README, re.MULTILINE))
def test_make_targets_that_the_text_names_exist(target):
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
