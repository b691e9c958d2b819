"""A soak test: serves a model on loopback, loads it with mixed requests, and looks for errors, growth and changed answers.

    .venv/bin/python scripts/soak.py MODEL [--seconds 1800] [--out FILE]

MODEL is what `vllm-w8a8 serve` takes, with a tokenizer.json. Requests are long and short, streamed or not, greedy and sampled;
some are given up or cut off while they run. Meanwhile probe prompts are scored again and again. Exit status 0 only if nothing
is wrong: no error in an answer or in the server's log, no request left behind, memory and the probes' perplexity as they were.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import re
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean

import demo
import httpx
import psutil

TEXT = Path(__file__).resolve().parent.parent / "vllm_w8a8_plugin" / "texts" / "english.txt"

NAME = "soak"
MAX_LENGTH = 1024
SEQUENCES = 8
CLIENTS = 10  # more than the server runs at a time: some wait
# Small: the warm-up writes to all of the cache, whose pages count as memory only from then on, and requests are preempted.
BLOCK, BLOCKS = 128, 32
PROBES, PROBE_TOKENS = 6, 160
ABANDONED = 900
WARM_UPS = 3  # of each kind
REQUEST_SECONDS = 300
SAMPLE_SECONDS = 1.0
UNMEASURED = 0.2  # of the time under load: memory settles
MEMORY_LIMIT, PERPLEXITY_LIMIT = 0.02, 0.01

BAD_LINE = re.compile(r"\b(ERROR|CRITICAL)\b|Traceback \(most recent call last\)")


class Wrong(Exception):
    """An answer that is not what was asked for."""


@dataclass
class Result:
    """What a soak saw.

    Attributes:
        seconds: time under load.
        requests: how many of each kind were sent.
        failures: one line for each answer that was wrong, beginning with the kind.
        log_lines: lines of the server's log that tell of an error.
        memory: resident bytes of the server's processes by name, second by second, without the first part of the load.
        quiet: the probes' perplexity before and after the load.
        loaded: their perplexity under load, pass by pass.
        wasted: tokens that the server made for an answer of `ABANDONED` tokens after its reader had gone.
        preempted: how often it has preempted one.
        left: what it still counted after the load: requests running and waiting, share of the cache in use.
        machine_load: the machine's load average before the server started, over a minute.
    """

    seconds: float
    requests: dict[str, int]
    failures: list[str]
    log_lines: list[str]
    memory: list[dict[str, int]]
    quiet: list[float]
    loaded: list[float]
    wasted: int
    preempted: int
    left: dict[str, float]
    machine_load: float = 0.0

    def memory_growth(self) -> float:
        """Mean of the last third of the time over that of the first, minus 1."""
        first, last = self._thirds()
        return sum(last.values()) / sum(first.values()) - 1

    def _thirds(self) -> tuple[dict[str, float], dict[str, float]]:
        """Mean bytes of each process over the first and the last third of the time."""
        third = len(self.memory) // 3
        names = sorted({name for sample in self.memory for name in sample})
        parts = (self.memory[:third], self.memory[-third:])
        return tuple({name: fmean(sample.get(name, 0) for sample in part) for name in names} for part in parts)

    def perplexity_changes(self) -> list[float]:
        """Of every pass under load and of the quiet one after it, from the quiet one before."""
        before, *after = self.quiet
        return [value / before - 1 for value in (*self.loaded, *after)]

    def problems(self) -> list[str]:
        """Everything that is wrong, one line each."""
        found = [*self.failures, *(f"the server's log: {line}" for line in self.log_lines)]
        if len(self.memory) < 3 or not self.loaded:
            found.append(f"too short: {len(self.memory)} samples of memory, {len(self.loaded)} passes over the probes")
            return found
        if self.memory_growth() > MEMORY_LIMIT:
            first, last = self._thirds()
            grown = ", ".join(f"{name} from {first[name] / 1e6:.0f} to {last[name] / 1e6:.0f} MB" for name in first)
            found.append(f"memory grew by {self.memory_growth():.1%}, {MEMORY_LIMIT:.0%} is the limit: {grown}")
        changed = [change for change in self.perplexity_changes() if not abs(change) <= PERPLEXITY_LIMIT]  # NaN is one, too
        if changed:
            found.append(f"the probes' perplexity changed by {changed[0]:+.2%}, {PERPLEXITY_LIMIT:.0%} is the limit")
        if self.wasted > ABANDONED // 2:
            found.append(f"an answer of {ABANDONED} tokens went on for {self.wasted} after its reader had gone")
        if any(self.left.values()):
            found.append(f"after the load the server still counts {self.left}")
        return found


@dataclass
class Client:
    """Sends requests to one server; every kind of request is a method that raises where the answer is wrong."""

    http: httpx.AsyncClient
    port: int
    text: list[int]
    dice: random.Random
    requests: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def prompt(self, shortest: int, longest: int) -> list[int]:
        length = self.dice.randint(shortest, longest)
        start = self.dice.randrange(len(self.text) - length)
        return self.text[start : start + length]

    async def complete(self, **body) -> dict:
        """The answer to a completion, checked."""
        answer = await self.http.post("/v1/completions", json={"model": NAME, **body})
        if answer.status_code != 200:
            raise Wrong(f"status {answer.status_code}: {answer.text[:200]}")
        content = answer.json()
        reasons = [choice["finish_reason"] for choice in content["choices"]]
        if len(reasons) != body.get("n", 1) or not set(reasons) <= {"stop", "length"}:
            raise Wrong(f"{body.get('n', 1)} answers were asked for, they ended by {reasons}")
        if content["usage"]["completion_tokens"] > body["max_tokens"] * body.get("n", 1):
            raise Wrong(f"{content['usage']['completion_tokens']} tokens, at most {body['max_tokens']} were asked for")
        return content

    async def stream(self, path: str, chunks: int | None = None, **body) -> None:
        """A streamed answer, checked to its end or left after so many chunks."""
        got, last = 0, ""
        async with self.http.stream("POST", path, json={"model": NAME, "stream": True, **body}) as answer:
            if answer.status_code != 200:
                raise Wrong(f"status {answer.status_code}: {(await answer.aread())[:200]!r}")
            async for line in answer.aiter_lines():
                if not line.startswith("data: "):
                    continue
                last = line.removeprefix("data: ")
                if last != "[DONE]" and "choices" not in json.loads(last):
                    raise Wrong(f"a chunk without choices: {last[:200]}")
                got += 1
                if got == chunks:
                    return
        if last != "[DONE]" or got < 2:
            raise Wrong(f"the stream ended after {got} chunks with {last[:100]!r}")

    async def short(self) -> None:
        await self.complete(prompt=self.prompt(2, 64), max_tokens=self.dice.randint(1, 16), temperature=0)

    async def long_prompt(self) -> None:
        await self.complete(prompt=self.prompt(300, 900), max_tokens=self.dice.randint(1, 32), temperature=0)

    async def long_answer(self) -> None:
        body = {"prompt": self.prompt(8, 64), "max_tokens": 96, "temperature": 0, "ignore_eos": True}
        await self.stream("/v1/completions", **body)

    async def sampled(self) -> None:
        content = await self.complete(
            prompt=self.prompt(8, 200),
            max_tokens=48,
            n=2,
            temperature=self.dice.uniform(0.2, 1.5),
            top_p=self.dice.uniform(0.5, 1.0),
            top_k=self.dice.choice([-1, 5, 40]),
            min_p=self.dice.choice([0.0, 0.05]),
            repetition_penalty=self.dice.choice([1.0, 1.2]),
            presence_penalty=self.dice.choice([0.0, 0.5]),
            logprobs=3,
            seed=self.dice.randrange(2**31),
        )
        for choice in content["choices"]:
            if not all(value <= 0 for value in choice["logprobs"]["token_logprobs"]):
                raise Wrong(f"log-probabilities above 0 or not finite: {choice['logprobs']['token_logprobs'][:8]}")

    async def streamed_sampled(self) -> None:
        body = {"prompt": self.prompt(8, 300), "max_tokens": 64, "temperature": 0.8, "top_p": 0.95, "stop": ["\n\n"]}
        await self.stream("/v1/completions", **body)

    async def left_stream(self) -> None:
        """The reader goes away in the middle of an answer."""
        body = {"prompt": self.prompt(8, 300), "max_tokens": 400, "ignore_eos": True}
        await self.stream("/v1/completions", chunks=self.dice.randint(1, 12), **body)

    async def given_up(self) -> None:
        """The reader loses patience: in the queue, in the prompt or in the answer."""
        body = {"prompt": self.prompt(100, 900), "max_tokens": 100, "ignore_eos": True, "temperature": 0.7}
        with suppress(TimeoutError):
            await asyncio.wait_for(self.complete(**body), self.dice.uniform(0.01, 2.0))

    async def cut_off(self) -> None:
        """The connection is reset, with nothing said before."""
        body = json.dumps({"model": NAME, "prompt": self.prompt(8, 300), "max_tokens": 300, "ignore_eos": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {demo.HOST}\r\nContent-Type: application/json\r\n"
        data = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
        _, writer = await asyncio.open_connection(demo.HOST, self.port)
        linger = struct.pack("ii", 1, 0)  # close sends a reset
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        # Sometimes the request itself is cut.
        writer.write(data if self.dice.random() < 0.8 else data[: self.dice.randrange(len(data))])
        await writer.drain()
        await asyncio.sleep(self.dice.uniform(0.0, 1.0))
        writer.transport.abort()

    async def refused(self) -> None:
        """What the server has to refuse, and go on."""
        body = {"model": NAME, "prompt": self.text[:MAX_LENGTH], "max_tokens": 16}
        answer = await self.http.post("/v1/completions", json=body)
        if answer.status_code != 400:
            raise Wrong(f"a prompt that is too long got status {answer.status_code}, expected 400")

    def kinds(self) -> tuple[Callable[[], Awaitable[None]], ...]:
        return (
            self.short, self.long_prompt, self.long_answer, self.sampled, self.streamed_sampled,
            self.left_stream, self.given_up, self.cut_off, self.refused,
        )  # fmt: skip

    async def run_until(self, end: float) -> None:
        """One request after the other, of kinds by chance."""
        while time.monotonic() < end:
            await self.attempt(self.dice.choice(self.kinds()))

    async def attempt(self, kind: Callable[[], Awaitable[None]]) -> None:
        self.requests[kind.__name__] += 1
        try:
            await kind()
        except (Wrong, httpx.HTTPError, OSError, ValueError, KeyError) as error:
            self.failures.append(f"{kind.__name__}: {type(error).__name__}: {error}")

    async def perplexity(self) -> float:
        """Of the probes, each scored alone, one after the other."""
        values: list[float] = []
        for i in range(PROBES):
            prompt = self.text[i * PROBE_TOKENS : (i + 1) * PROBE_TOKENS]
            content = await self.complete(prompt=prompt, max_tokens=1, temperature=0, prompt_logprobs=0)
            scores = content["choices"][0]["prompt_logprobs"][1:]
            values += [score[str(token)]["logprob"] for token, score in zip(prompt[1:], scores, strict=True)]
        return math.exp(-fmean(values))

    async def score_until(self, end: float, passes: list[float]) -> None:
        while time.monotonic() < end:
            self.requests["probe"] += PROBES
            try:
                passes.append(await self.perplexity())
            except (Wrong, httpx.HTTPError, ValueError, KeyError) as error:
                self.failures.append(f"probe: {type(error).__name__}: {error}")

    async def warm_up(self) -> None:
        """Writes to every block of the KV cache, by long prompts that share nothing; then sends some requests of each kind."""
        length = MAX_LENGTH - BLOCK
        vocabulary = sorted(set(self.text))
        prompts = [self.dice.choices(vocabulary, k=length) for _ in range(2 * BLOCKS * BLOCK // length)]
        await asyncio.gather(*(self.complete(prompt=prompt, max_tokens=1) for prompt in prompts))
        await asyncio.gather(*(self.attempt(kind) for kind in self.kinds() for _ in range(WARM_UPS)))

    async def metrics(self) -> Counter[str]:
        """The server's own counts, summed over labels."""
        counts: Counter[str] = Counter()
        for line in (await self.http.get("/metrics")).text.splitlines():
            if match := re.match(r"vllm:(\w+)\{.*\} (\S+)$", line):
                counts[match[1]] += float(match[2])
        return counts

    async def abandon(self) -> int:
        """Goes away from a long answer when nothing else runs; how many tokens were made of it in the end."""
        before = (await self.metrics())["generation_tokens_total"]
        body = {"prompt": self.prompt(8, 64), "max_tokens": ABANDONED, "ignore_eos": True}
        await self.stream("/v1/completions", chunks=2, **body)
        await self.left()
        return int((await self.metrics())["generation_tokens_total"] - before)

    async def left(self) -> dict[str, float]:
        """What the server counts of requests and cache when it has had time to end them."""
        for _ in range(60):
            counts = await self.metrics()
            left = {name: counts[name] for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")}
            if not any(left.values()):
                break
            await asyncio.sleep(0.5)
        return left


def resident_bytes(pid: int) -> dict[str, int]:
    """Resident memory of a process and all that it has started, by their names."""
    found: Counter[str] = Counter()
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for one in (process, *process.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                found[one.name()] += one.memory_info().rss
    return dict(found)


async def watch_memory(pid: int, start: float, end: float, samples: list[dict[str, int]]) -> None:
    await asyncio.sleep(max(0.0, start - time.monotonic()))
    while time.monotonic() < end:
        samples.append(resident_bytes(pid))
        await asyncio.sleep(SAMPLE_SECONDS)


async def load(pid: int, port: int, text: list[int], seconds: float, seed: int) -> Result:
    """Loads a server that is ready."""
    limits = httpx.Limits(max_connections=4 * CLIENTS, max_keepalive_connections=CLIENTS)
    base = f"http://{demo.HOST}:{port}"
    async with httpx.AsyncClient(base_url=base, timeout=REQUEST_SECONDS, limits=limits, trust_env=False) as http:
        client = Client(http, port, text, random.Random(seed))
        await client.warm_up()
        quiet = [await client.perplexity()]
        start = time.monotonic()
        end = start + seconds
        memory, loaded = [], []
        await asyncio.gather(
            *(client.run_until(end) for _ in range(CLIENTS)),
            client.score_until(end, loaded),
            watch_memory(pid, start + UNMEASURED * seconds, end, memory),
        )
        took = time.monotonic() - start
        left = await client.left()
        wasted = await client.abandon()
        counts = await client.metrics()
        quiet.append(await client.perplexity())
    return Result(
        seconds=took,
        requests=dict(client.requests),
        failures=client.failures,
        log_lines=[],
        memory=memory,
        quiet=quiet,
        loaded=loaded,
        wasted=wasted,
        preempted=int(counts["num_preemptions_total"]),
        left=left,
    )


@contextmanager
def server(model: Path, port: int, log: Path) -> Iterator[subprocess.Popen]:
    """`vllm-w8a8 serve` of the model; ended on the way out."""
    command = [str(demo.BIN / "vllm-w8a8"), "serve", str(model), "--served-model-name", NAME, "--host", demo.HOST]
    command += ["--port", str(port), "--max-model-len", str(MAX_LENGTH), "--max-num-seqs", str(SEQUENCES)]
    command += ["--block-size", str(BLOCK), "--num-gpu-blocks-override", str(BLOCKS)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    # Large buffers, as a probe's logits, go back to the system when they are freed: memory is then what is held, and does not
    # grow for a while by the holes that glibc's heap has between buffers of changing sizes.
    environment["MALLOC_MMAP_THRESHOLD_"] = str(1024**2)
    if demo.is_cpu_build():
        command.append("--enforce-eager")
        # One thread: those that wait for each other at every layer lose most of their time where other processes run.
        environment |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
        # oneDNN keeps the programs of 1024 shapes, a new one for almost every batch: with fewer the warm-up fills its cache.
        environment["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] = "64"
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=log.parent, start_new_session=True
        )
    try:
        demo.wait_until_healthy(process, port, log)
        yield process
    finally:
        demo.stop(process)


def soak(model: Path, seconds: float, seed: int = 0) -> Result:
    """Serves a model and loads it for so long.

    Raises:
        demo.DemoError: the server did not start.
    """
    from tokenizers import Tokenizer

    text = Tokenizer.from_file(str(model / "tokenizer.json")).encode(TEXT.read_text(encoding="utf-8")).ids
    demo.bypass_proxies_on_loopback()
    machine_load = os.getloadavg()[0]
    port = demo.free_port()
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        log = Path(folder, "server.log")
        with server(model.resolve(), port, log) as process:
            result = asyncio.run(load(process.pid, port, text, seconds, seed))
            # Before the server is told to end, which it may complain of.
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    result.log_lines = [line for line in lines if BAD_LINE.search(line)]
    result.machine_load = machine_load
    return result


def summary(result: Result) -> str:
    sent = ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in sorted(result.requests.items()))
    lines = [
        f"{sum(result.requests.values())} requests in {result.seconds:.0f} s: {sent}",
        f"preempted: {result.preempted}; tokens made of an abandoned answer of {ABANDONED}: {result.wasted}; load average of "
        f"the machine before: {result.machine_load:.1f}",
    ]
    if len(result.memory) >= 3 and result.loaded:
        worst = max(map(abs, result.perplexity_changes()))
        mean = fmean(sum(sample.values()) for sample in result.memory) / 1e9
        lines += [
            f"memory: {mean:.3f} GB, last third against first {result.memory_growth():+.2%}",
            f"probes: perplexity {result.quiet[0]:.4f} before, {result.quiet[1]:.4f} after, {len(result.loaded)} passes under "
            f"load, at most {worst:.3%} away",
        ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description="Serves a model and loads it with mixed requests.")
    parser.add_argument("model", type=Path, help="folder of a model, with tokenizer.json")
    parser.add_argument("--seconds", type=float, default=180, help="time under load (180)")
    parser.add_argument("--seed", type=int, default=0, help="of the requests (0)")
    parser.add_argument("--out", type=Path, help="JSON file for all that was seen")
    args = parser.parse_args()
    try:
        result = soak(args.model, args.seconds, args.seed)
    except demo.DemoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(summary(result))
    if args.out:
        args.out.write_text(json.dumps(asdict(result), indent=2) + "\n", encoding="utf-8")
    problems = result.problems()
    for problem in problems[:20]:
        print(f"problem: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
