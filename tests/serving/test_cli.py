"""The command line: every setting has a flag, and the commands do what they say."""

import contextlib
import io
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

import serving.main
from jaxmm.config import EngineConfig, field_names
from jaxmm.errors import ConfigError
from serving.cli import main
from serving.config import ServerConfig, load_server_config
from serving.flags import flag_names, setting_docs
from serving.lifetime import Server
from serving.main import _bind
from tests.fakes import FakeEngine

ROOT = Path(__file__).parents[2]


def test_every_setting_has_one_flag_and_a_description():
    flags = flag_names(ServerConfig)
    assert sorted(flags.values()) == sorted(field_names(ServerConfig))
    assert flags["--pages-page-size"] == "engine.pages.page_size"
    assert flags["--fetch-timeout-seconds"] == "fetch.timeout_seconds"
    assert all(setting_docs(ServerConfig).values())


def test_flags_do_not_meet_those_of_generate():
    engine = {flag for flag, s in flag_names(ServerConfig).items() if s.startswith("engine.")}
    assert not engine & {"--max-tokens", "--temperature", "--top-p", "--top-k", "--seed", "--stop"}


def test_settings_come_from_file_environment_and_overrides_in_this_order(tmp_path, monkeypatch):
    file = tmp_path / "server.toml"
    file.write_text(
        "port = 1\n[engine]\nmodel = 'file'\nmax_waiting = 5\n[engine.pages]\npage_size = 8"
    )
    monkeypatch.setenv("JAXMM_MODEL", "variable")
    monkeypatch.setenv("JAXMM_PAGES_PAGE_SIZE", "16")
    config = load_server_config(file, {"engine.pages.page_size": "32"})
    assert (config.port, config.engine.max_waiting) == (1, 5)
    assert (config.engine.model, config.engine.pages.page_size) == ("variable", 32)


def test_variables_leave_engine_out_and_unknown_ones_are_warned_of(monkeypatch, caplog):
    for name in [name for name in os.environ if name.startswith("JAXMM_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("JAXMM_PORT", "1")
    monkeypatch.setenv("JAXMM_MAX_RUNNING", "2")
    monkeypatch.setenv("JAXMM_ENGINE_MAX_WAITING", "3")
    config = load_server_config()
    assert (config.port, config.engine.max_running) == (1, 2)
    assert config.engine.max_waiting == EngineConfig().max_waiting
    (said,) = caplog.messages
    assert said.endswith("name=JAXMM_ENGINE_MAX_WAITING nearest=JAXMM_MAX_WAITING")


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        ({"prot": 1}, "nearest is port"),
        ({"port": 70_000}, "port=70000"),
        ({"deadline_seconds": 0}, "deadline_seconds"),
        ({"max_request_bytes": -1}, "max_request_bytes"),
        ({"drain_seconds": -1}, "drain_seconds"),
        ({"log_level": "loud"}, "log_level"),
        ({"fetch.timeout_seconds": 0}, "fetch.timeout_seconds"),
        ({"fetch.max_redirects": -1}, "fetch.max_redirects"),
        ({"fetch.schemes": ["file"]}, "file"),
        ({"fetch.max_concurrent": 0}, "fetch.max_concurrent=0 is below 1"),
        ({"fetch.max_concurrent_per_host": 0}, "fetch.max_concurrent_per_host=0 is below 1"),
        ({"fetch.file_folder": "/nonexistent"}, "fetch.file_folder='/nonexistent' is not a folder"),
        ({"engine.pages.page_size": 3}, "page_size=3"),
    ],
)
def test_settings_that_cannot_work_are_refused(overrides, problem):
    with pytest.raises(ConfigError, match=problem):
        load_server_config(None, overrides)


def run(tokenizer, *words):
    """Run a command with a fake engine; give exit status, output, errors, and the engine."""
    engines = []

    def load(config: EngineConfig):
        engines.append(FakeEngine(tokenizer))
        engines[0].config = config
        return engines[0]

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(words, load)
    return status, out.getvalue(), err.getvalue(), engines[0] if engines else None


@pytest.mark.parametrize("stream", [[], ["--stream"]])
def test_generate_prints_the_answer(tokenizer, stream):
    status, out, _, engine = run(
        tokenizer, "generate", "What?", "--image", "a.jpg", "--image", "b.jpg", *stream,
        "--max-tokens", "9999", "--seed", "3", "--pages-page-size", "8", "--progress", "false",
    )  # fmt: skip
    assert (status, out) == (0, "A red square. 図 😀\n")
    request = engine.requests[0]
    assert request.images == (Path("a.jpg"), Path("b.jpg"))
    assert [part["type"] for part in request.messages[0]["content"]] == ["image", "image", "text"]
    assert (request.sampling.max_tokens, request.sampling.seed) == (9999, 3)
    assert (engine.config.pages.page_size, engine.config.progress) == (8, False)
    assert engine.closed


def test_a_wrong_setting_ends_the_command_with_its_message(tokenizer):
    status, out, err, engine = run(tokenizer, "generate", "What?", "--pages-page-size", "3")
    assert (status, out, engine) == (1, "", None)
    assert err.startswith("jaxmm: pages.page_size=3")


def test_a_shortened_flag_is_none(capsys):
    with pytest.raises(SystemExit):
        main(["buckets", "--pages-page-siz", "64"])
    assert "--pages-page-siz" in capsys.readouterr().err


def test_a_plan_for_requests_without_tokens_is_refused(tokenizer):
    words = ("plan", "--topology", "v5e:2x2", "--suggest", "--length", "0")
    status, out, err, _ = run(tokenizer, *words)
    assert (status, out) == (1, "")
    assert err.startswith("jaxmm: length=0 is below 1")


def test_a_port_in_use_is_told_before_the_engine_is_loaded(tokenizer):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        status, _, err, engine = run(tokenizer, "serve", "--port", port)
    assert (status, engine) == (1, None)
    assert f"cannot listen at 127.0.0.1 port {port}" in err


@pytest.mark.parametrize(
    ("flags", "cause"),
    [(("--api-key-file", "nowhere"), "api_key_file='nowhere' cannot be read"),
     (("--trace-endpoint", "http://a/v1/traces"), "trace_endpoint needs jaxmm's extra `trace`")],
)  # fmt: skip
def test_what_the_server_lacks_is_told_before_the_engine_is_loaded(
    tokenizer, monkeypatch, flags, cause
):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    status, _, err, engine = run(tokenizer, "serve", "--port", "0", *flags)
    assert (status, engine) == (1, None)
    assert cause in err


def test_keys_that_a_pipe_gives_once_are_read_once(tokenizer, monkeypatch):
    ends = os.pipe()
    os.write(ends[1], b"team:" + b"k" * 40 + b"\n")
    os.close(ends[1])
    served = []
    monkeypatch.setattr(Server, "run", lambda server, **_: served.append(server))
    monkeypatch.setattr(serving.main, "tune_interpreter", lambda: None)  # of this process
    try:
        words = ("serve", "--port", "0", "--api-key-file", f"/dev/fd/{ends[0]}")
        status, _, err, _ = run(tokenizer, *words)
    finally:
        os.close(ends[0])
    assert (status, err) == (0, "")
    assert len(served) == 1


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_bars_of_progress_do_not_stand_among_json(log_format):
    loaded = []

    def load(config):
        loaded.append(config)
        raise ConfigError("enough")

    assert main(["serve", "--port", "0", "--log-format", log_format], load) == 1
    assert loaded[0].progress is (log_format == "text")


def test_the_version_is_told(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert re.fullmatch(r"jaxmm \d+\.\d+\.\d+\S*\n", capsys.readouterr().out)


def test_a_port_in_use_leaves_no_descriptor():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        before = os.listdir("/proc/self/fd")
        with pytest.raises(ConfigError) as refused:
            _bind("127.0.0.1", taken.getsockname()[1])
        assert len(os.listdir("/proc/self/fd")) == len(before)
    assert "cannot listen" in str(refused.value)  # it lives, and with it the frames that it left


@pytest.mark.slow
def test_serve_prints_a_curl_line_that_is_answered_and_ends_at_sigterm(tmp_path):
    program = (
        "from pathlib import Path\n"
        "from jaxmm.host.chat import ChatTokenizer\nfrom serving.cli import main\n"
        "from tests.chat_checkpoints import write_checkpoint\nfrom tests.fakes import FakeEngine\n"
        f"directory = write_checkpoint(Path({str(tmp_path)!r}))\n"
        "engine = FakeEngine(ChatTokenizer.from_checkpoint(directory))\n"
        "try:\n    main(['serve', '--port', '0'], lambda config: engine)\n"
        "finally:\n    print('closed', engine.closed)\n"
    )
    command = [sys.executable, "-c", program]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            lines = [process.stdout.readline() for _ in range(4)]
            url = re.search(r"http://127.0.0.1:\d+", lines[1])[0]
            words = shlex.split(lines[3])
            assert words[:2] == ["curl", f"{url}/v1/chat/completions"]
            response = httpx.post(words[1], content=words[5], headers=[words[3].split(": ")])
            assert response.json()["choices"][0]["message"]["content"] == "A red square. 図 😀"
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        assert process.stdout.read().strip() == "closed True"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("words", [["serve", "--port", "0"], ["generate", "What?"]])
def test_a_signal_while_the_engine_is_loaded_ends_the_process_at_once(words, number):
    program = (
        "import signal, threading\nfrom concurrent.futures import ThreadPoolExecutor\n"
        "from serving.cli import main\n\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a job behind has it ignored
        "def load(config):\n"
        "    with ThreadPoolExecutor() as pool:\n"
        "        print('loading', flush=True)\n"
        "        pool.submit(threading.Event().wait, 60).result()\n\n"
        f"main({words}, load)\n"
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout.readline() == "loading\n"
        process.send_signal(number)
        default = words[0] == "generate" and number == signal.SIGTERM
        assert process.wait(10) == (-number if default else 128 + number)


def test_the_command_line_runs_as_a_module():
    command = [sys.executable, "-m", "serving.cli", "--help"]
    ran = subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True)
    assert "start the HTTP server" in ran.stdout


def test_the_command_line_and_the_host_part_import_neither_jax_nor_torch():
    program = (
        "import sys\nimport serving.cli, jaxmm.host.chat, jaxmm.host.detokenize\n"
        "assert not {'jax', 'torch', 'fastapi', 'transformers'} & set(sys.modules)\n"
        "import serving.app\nassert 'jax' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)
