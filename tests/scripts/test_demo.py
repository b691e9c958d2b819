"""The parts of the demo that need no vLLM. Run: make test ARGS=tests/scripts"""

import os
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import demo
import pytest

SERVER = (
    "import http.server as h, sys\nh.HTTPServer(('127.0.0.1', int(sys.argv[1])), h.SimpleHTTPRequestHandler).serve_forever()\n"
)


def start(code, *arguments, log):
    with log.open("w") as output:
        command = [sys.executable, "-c", code, *map(str, arguments)]
        return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # A zombie that nobody has waited for yet has ended too.
    with open(f"/proc/{pid}/stat") as status:
        return status.read().rsplit(")", 1)[1].split()[0] != "Z"


def test_the_key_of_a_conversion(tmp_path):
    source, code = tmp_path / "model.gguf", tmp_path / "code"
    code.mkdir()
    source.write_bytes(b"1234")
    (code / "a.py").write_text("1")
    first = demo.conversion_key(["convert"], source, [code])
    assert demo.conversion_key(["convert"], source, [code]) == first
    assert demo.conversion_key(["convert", "--skip"], source, [code]) != first
    source.write_bytes(b"12345")
    other_source = demo.conversion_key(["convert"], source, [code])
    assert other_source != first
    (code / "a.py").write_text("2")
    assert demo.conversion_key(["convert"], source, [code]) != other_source


def test_free_port_can_be_bound():
    with socket.socket() as server:
        server.bind(("127.0.0.1", demo.free_port()))


def test_a_server_that_ends_is_noticed_at_once(tmp_path):
    log = tmp_path / "log"
    process = start("import sys; print('the reason'); sys.exit(3)", log=log)
    began = time.monotonic()
    with pytest.raises(demo.DemoError, match=r"status 3(?s:.*)the reason"):
        demo.wait_until_healthy(process, demo.free_port(), log, limit=60)
    assert time.monotonic() - began < 30


def test_a_server_that_does_not_come_up_is_given_up(tmp_path):
    log = tmp_path / "log"
    process = start("import time; time.sleep(60)", log=log)
    try:
        with pytest.raises(demo.DemoError, match="not ready after 1 s"):
            demo.wait_until_healthy(process, demo.free_port(), log, limit=1)
    finally:
        demo.stop(process, patience=5)


def test_stop_ends_the_whole_group_even_if_it_will_not(tmp_path):
    log = tmp_path / "log"
    stubborn = "import signal, time; [signal.signal(s, signal.SIG_IGN) for s in (2, 15)]; time.sleep(60)"
    code = (
        f"import subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-c', {stubborn!r}])\n"
        f"print(child.pid, flush=True)\n"
        f"{stubborn}\n"
    )
    process = start(code, log=log)
    while not log.read_text().endswith("\n"):
        time.sleep(0.05)
    child = int(log.read_text())
    time.sleep(0.5)  # Both have to get as far as ignoring the signals.
    assert is_running(child)
    demo.stop(process, patience=0.3)
    assert process.returncode == -9
    deadline = time.monotonic() + 5
    while is_running(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(child)


def test_health_is_asked_past_a_proxy(tmp_path, monkeypatch):
    (tmp_path / "health").write_text("ok")
    monkeypatch.chdir(tmp_path)
    port = demo.free_port()
    process = start(SERVER, port, log=tmp_path / "log")
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{demo.free_port()}")
    monkeypatch.setenv("no_proxy", "")
    try:
        demo.bypass_proxies_on_loopback()
        demo.wait_until_healthy(process, port, tmp_path / "log", limit=30)
    finally:
        demo.stop(process, patience=5)


def chunk(content=None, tokens=None):
    choices = [] if content is None else [SimpleNamespace(delta=SimpleNamespace(content=content))]
    return SimpleNamespace(choices=choices, usage=tokens and SimpleNamespace(completion_tokens=tokens))


def test_an_answer_is_timed_from_its_first_text(monkeypatch):
    clock = iter([0.0, 2.0, 2.5, 3.0])
    monkeypatch.setattr(demo.time, "monotonic", lambda: next(clock))
    # The stream opens with an empty delta, which is no token, and ends with the usage alone.
    stream = [chunk(""), chunk("The capital"), chunk(" is"), chunk(" Paris. "), chunk(tokens=5)]
    completions = SimpleNamespace(create=lambda **options: stream)
    answer = demo.ask(SimpleNamespace(chat=SimpleNamespace(completions=completions)), [])
    assert answer == demo.Answer("The capital is Paris.", 5, first_token_seconds=2.0, tokens_per_second=4.0)


def test_sizes_are_given_beside_bf16():
    assert demo.sizes_line({"output_bytes": 162_900_000, "bf16_bytes": 269_000_000}) == "163 MB, 61% of bf16's 269 MB"
