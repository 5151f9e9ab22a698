"""What the README says is so: its snippets run, its table and tree are those of the source."""

import re
import shlex

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


def test_the_curl_example_is_a_request_that_the_server_takes():
    (command,) = re.findall(r"```bash\n(curl .*?)```", README, re.DOTALL)
    words = shlex.split(command)
    request = parse_chat_request(words[words.index("-d") + 1].encode(), "model")
    assert words[1] == f"{SERVED_AT}/v1/chat/completions"
    assert [part.type for part in request.messages[0].content] == ["image_url", "text"]


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
