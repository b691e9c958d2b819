"""The tuner with a timer that needs no GPU, and its compiling processes with the real compiler."""

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path

import pytest
import torch

from w8a8_kernels import tiles, timing, tune
from w8a8_kernels.tiles import Tile, default_tile, kernel_for, max_shared_bytes, tile_for
from w8a8_kernels.tune import Gpu, Measurement, candidates, neighbours

ROOT = Path(__file__).resolve().parents[2]
H200 = Gpu("NVIDIA H200", (9, 0), 132)
RESULTS = ROOT / "benchmarks" / "results" / "tile-search-nvidia-h200-2026-11-30.json"


class FakeTimer:
    """A tile takes 10 us and 1 for each field in which it differs from the fastest, `best(M)`; notes what it is asked."""

    def __init__(
        self, best: Callable[[int], Tile] = lambda M: Tile(16, 32, 64, 4, 2), others: dict[str, float] | None = None
    ) -> None:
        self.best = best
        self.others = others or {}
        self.cells: list[tuple[int, int, int]] = []
        self.rounds: list[list[Tile]] = []

    def __call__(self, M: int, N: int, K: int, tiles: list[Tile]) -> Measurement:
        if (M, N, K) not in self.cells:
            self.cells.append((M, N, K))
        self.rounds.append(tiles)
        best = astuple(self.best(M))
        us = {tile: 10.0 + sum(a != b for a, b in zip(astuple(tile), best, strict=True)) for tile in tiles}
        return Measurement(us, self.others)


def entries(path: Path) -> dict[tuple[int, int], dict[int, tiles.Entry]]:
    return tiles.read_table(path, H200.device_name, H200.capability)


def run(out: Path, timer: tune.Measure, shapes=((64, 512),), batch_sizes=(1, 16)) -> Path:
    return tune.tune(shapes, batch_sizes, out, measure=timer, gpu=H200)


@pytest.mark.parametrize(
    ("others", "kernel"),
    [
        ({}, None),
        ({"cutlass": 9.0}, "cutlass"),
        ({"cutlass": 11.0}, "triton"),
        ({"cutlass": 9.0, "pingpong": 8.0}, "pingpong"),
        ({"cutlass": 9.0, "pingpong": 11.0}, "cutlass"),
    ],
)
def test_keeps_the_best(others: dict[str, float], kernel: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    best = {bucket: candidates(bucket, 1024, 4096, (9, 0), 132)[bucket % 7] for bucket in (1, 16, 128)}
    path = run(tmp_path / "out", FakeTimer(best.__getitem__, others), ((1024, 4096),), (1, 13, 100))
    assert path == tmp_path / "out" / "nvidia-h200.json"
    content = json.loads(path.read_text())
    assert content["device"] == "NVIDIA H200"
    assert content["capability"] == [9, 0]
    assert set(content["versions"]) == {"torch", "triton", "vllm"}
    assert list(content["tiles"]["1024x4096"]) == ["1", "16", "128"]
    assert content["tiles"]["1024x4096"]["16"]["us"] == min([10.0, *others.values()])
    monkeypatch.setenv(tiles.CONFIG_DIR_VARIABLE, str(path.parent))
    for M, bucket in ((1, 1), (9, 16), (100, 128)):
        found = tile_for(M, 1024, 4096, device_name="NVIDIA H200", capability=(9, 0), num_sms=132)
        assert found == best[bucket]
        assert kernel_for(M, 1024, 4096, device_name="NVIDIA H200", capability=(9, 0)) == kernel


def test_goes_on_where_it_stopped(tmp_path: Path) -> None:
    timer, asked = FakeTimer(), []

    def stops(M: int, N: int, K: int, tiles: list[Tile]) -> Measurement:
        if len(timer.cells) == 3 and (M, N, K) not in timer.cells:
            raise KeyboardInterrupt
        return timer(M, N, K, tiles)

    shapes, batch_sizes = ((64, 512), (96, 64)), (1, 16)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, stops, shapes, batch_sizes)
    assert timer.cells == [(1, 64, 512), (16, 64, 512), (1, 96, 64)]
    rest = FakeTimer()
    path = tune.tune(shapes, batch_sizes, tmp_path, progress=lambda *now: asked.append(now), measure=rest, gpu=H200)
    assert rest.cells == [(16, 96, 64)]
    assert asked[0] == (0, 4, "64x512, 1 rows")
    assert asked[-1] == (4, 4, "done")
    assert {shape: set(buckets) for shape, buckets in entries(path).items()} == {(64, 512): {1, 16}, (96, 64): {1, 16}}


def test_other_versions_are_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = run(tmp_path, FakeTimer())
    before = path.read_text()
    now = tune.installed_versions()
    monkeypatch.setattr(tune, "installed_versions", lambda: {**now, "triton": "99.0"})
    timer = FakeTimer()
    run(tmp_path, timer, batch_sizes=(16,))
    assert timer.cells == [(16, 64, 512)]
    assert set(entries(path)[64, 512]) == {16}  # what is left was measured with these versions
    assert path.with_suffix(".json.old").read_text() == before


def test_two_writers_merge(tmp_path: Path) -> None:
    first, second = FakeTimer(), FakeTimer()

    def while_the_other_writes(M: int, N: int, K: int, tiles: list[Tile]) -> Measurement:
        if not second.cells:
            run(tmp_path, second, ((96, 64), (64, 512)), (16,))
        return first(M, N, K, tiles)

    path = run(tmp_path, while_the_other_writes, ((64, 512),), (1, 16))
    assert {shape: set(buckets) for shape, buckets in entries(path).items()} == {(64, 512): {1, 16}, (96, 64): {16}}
    assert first.cells == [(1, 64, 512)]  # 16 was there when its turn came


def test_many_writers_at_once_lose_nothing(tmp_path: Path) -> None:
    shapes = [(64 * i, 512) for i in range(1, 7)]
    writers = [threading.Thread(target=run, args=(tmp_path, FakeTimer(), (shape,), (1, 2, 4, 8, 16))) for shape in shapes]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    found = entries(tmp_path / "nvidia-h200.json")
    assert {shape: len(found.get(shape, ())) for shape in shapes} == dict.fromkeys(shapes, 5)


KILLED = """
import os, signal
from w8a8_kernels import tune
cells = []
def timer(M, N, K, tiles):
    cells.append(M)
    if len(set(cells)) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return tune.Measurement({tiles[0]: 1.0})
tune.tune([(64, 512)], [1, 2, 4, 8], OUT, measure=timer, gpu=tune.Gpu("NVIDIA H200", (9, 0), 132))
"""


def python(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT / "kernels"), **variables}
    env.pop("TRITON_INTERPRET", None)
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300)


def test_killed_between_cells(tmp_path: Path) -> None:
    done = python(KILLED.replace("OUT", repr(str(tmp_path))))
    assert done.returncode == -signal.SIGKILL, done.stderr
    path = tmp_path / "nvidia-h200.json"
    assert set(entries(path)[64, 512]) == {1, 2}
    timer = FakeTimer()
    run(tmp_path, timer, batch_sizes=(1, 2, 4, 8))
    assert [M for M, _, _ in timer.cells] == [4, 8]
    assert set(entries(path)[64, 512]) == {1, 2, 4, 8}


def test_a_write_that_fails_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = run(tmp_path, FakeTimer(), batch_sizes=(1,))
    before = path.read_text()

    def no_space(file: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(tune.os, "fsync", no_space)
    with pytest.raises(OSError, match="no space left"):
        run(tmp_path, FakeTimer(), batch_sizes=(16,))
    assert path.read_text() == before
    assert [p.name for p in tmp_path.glob("*.tmp")] + [p.name for p in tmp_path.glob(".*.tmp")] == []


@pytest.mark.parametrize(
    ("shapes", "batch_sizes", "message"),
    [
        ([(64, 64)], [], "got batch sizes []"),
        ([(64, 64)], [16, 0], "got batch sizes [16, 0]"),
        ([], [16], "got shapes []"),
        ([(64, 10**6)], [16], "K from 1 to 132"),
    ],
)
def test_refuses(shapes: list, batch_sizes: list, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError) as error:
        run(tmp_path, FakeTimer(), shapes, batch_sizes)
    assert message in str(error.value)
    assert not list(tmp_path.iterdir())


def test_refuses_a_broken_file(tmp_path: Path) -> None:
    (tmp_path / "nvidia-h200.json").write_text("{")
    with pytest.raises(ValueError, match=r"nvidia-h200\.json: got what is not JSON"):
        run(tmp_path, FakeTimer())
    assert (tmp_path / "nvidia-h200.json").read_text() == "{"


def test_nothing_runs(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no tile ran for 64x512 and 1 rows"):
        run(tmp_path, lambda M, N, K, tiles: Measurement({}))


@pytest.mark.parametrize(
    ("capability", "num_sms"), [((8, 0), 108), ((8, 9), 142), ((9, 0), 132), ((10, 0), 148), ((12, 0), 170)]
)
@pytest.mark.parametrize(
    ("N", "K"), [(6144, 4096), (57344, 8192), (1024, 3072), (4096, 12288), (96, 64), (1009, 4099), (1, 1)]
)
def test_candidates(capability: tuple[int, int], num_sms: int, N: int, K: int) -> None:
    for M in (1, 16, 32, 64, 128, 256, 8192):
        tried = candidates(M, N, K, capability, num_sms)
        assert tried[0] == default_tile(M, N, K, num_sms=num_sms, capability=capability)
        assert 3 <= len(tried) <= 140
        assert len(set(tried)) == len(tried)
        assert max(tile.stage_bytes for tile in tried) <= max_shared_bytes(capability)
        assert tried == candidates(M if M == 1 else M - 1, N, K, capability, num_sms)


def test_searches_around_the_best_candidates(tmp_path: Path) -> None:
    # Two fields away from a candidate: a round for each.
    best = Tile(64, 128, 256, 4, 3, 2)
    cell = 128, 1024, 4096, (9, 0), 132
    tried = candidates(*cell)
    assert best not in tried
    assert best not in {near for tile in tried for near in neighbours(tile, *cell)}
    timer = FakeTimer(lambda M: best)
    path = run(tmp_path, timer, ((1024, 4096),), (128,))
    assert entries(path)[1024, 4096][128].tile == best
    assert len(timer.rounds) == 1 + tune.ROUNDS
    assert sum(map(len, timer.rounds)) <= 200


def test_stops_where_nothing_near_is_faster(tmp_path: Path) -> None:
    timer = FakeTimer(lambda M: candidates(M, 1024, 4096, (9, 0), 132)[0])
    run(tmp_path, timer, ((1024, 4096),), (128,))
    assert len(timer.rounds) == 2


def test_candidates_are_near_what_won_on_an_h200() -> None:
    for cell in json.loads(RESULTS.read_text())["cells"]:
        where = cell["M"], cell["N"], cell["K"], (9, 0), 132
        us = {Tile(*values): us for us, *values in cell["scales_early"]}
        tried = candidates(*where)
        reached = {*tried, *(near for tile in tried for near in neighbours(tile, *where))}
        assert min(us.get(tile, 1e9) for tile in reached) <= 1.01 * min(us.values()), cell


def test_candidates_need_tensor_cores() -> None:
    with pytest.raises(ValueError, match=r"compute capability 7\.5, expected 8\.0 or newer"):
        candidates(16, 64, 64, (7, 5), 40)


@pytest.fixture
def measured_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> tune.GpuMeasure:
    """The tuner's own timer, kernels in the interpreter, with a clock that says how often it was asked."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("the interpreter is off where there is a GPU")
    clock = itertools.count(1)

    def fake_us(calls: list[Callable[[], torch.Tensor]], warm_up_ms: float) -> float:
        assert [call().shape for call in calls] == [(5, 48)] * 3
        return float(next(clock))

    monkeypatch.setattr(timing, "graph_us", fake_us)
    monkeypatch.setattr(timing, "call_count", lambda M, N, K, device: (2, 3))
    monkeypatch.setattr(tune.Compilers, "compile", lambda self, N, K, tiles: tiles)
    with tune.GpuMeasure(Gpu("NVIDIA L40S", (8, 9), 142), torch.device("cpu")) as measure:
        yield measure


TILES = [Tile(16, 32, 64, 4, 2, 1, True), Tile(16, 64, 32, 4, 2, 2), Tile(32, 32, 32, 4, 2)]


def test_times_each_tile(measured_on_a_cpu: tune.GpuMeasure) -> None:
    measured = measured_on_a_cpu(5, 48, 130, TILES)
    assert measured == Measurement({tile: float(i) for i, tile in enumerate(TILES, 1)})


def test_a_tile_with_other_bits_stops_it(measured_on_a_cpu: tune.GpuMeasure, monkeypatch: pytest.MonkeyPatch) -> None:
    split_k = pytest.importorskip("w8a8_kernels.scaled_mm.split_k")
    run = split_k.scaled_mm_split_k

    def wrong(*args, tile: Tile, **options) -> torch.Tensor:
        out = run(*args, tile=tile, **options)
        out[3, 7] += (tile == TILES[1]) * 0.125
        return out

    monkeypatch.setattr(split_k, "scaled_mm_split_k", wrong)
    with pytest.raises(RuntimeError, match=r"block_n=64, .* gives other bits than .* for 5 rows and a weight 48x130"):
        measured_on_a_cpu(5, 48, 130, TILES)


@pytest.mark.gpu
def test_tunes_this_gpu(tmp_path: Path) -> None:
    path = tune.tune([(192, 512)], [1, 64, 512], tmp_path)
    gpu = tune.current_gpu()
    assert set(tiles.read_table(path, gpu.device_name, gpu.capability)[192, 512]) == {1, 64, 512}


# The launch, on tensors without memory, must find on disk all that the processes compiled: nothing else is asked of them.
COMPILED = """
import json
import torch, triton
from w8a8_kernels import compilations, tune
from w8a8_kernels.scaled_mm.split_k import scaled_mm_split_k
from w8a8_kernels.tiles import Tile

CAPABILITY = (9, 0)
# K that the blocks divide and K that they do not; the last one cannot be compiled.
CELLS = [(96, 512, Tile(16, 64, 128, 4, 3, 2, True)), (96, 528, Tile(64, 32, 128, 4, 3)), (96, 512, Tile(8, 8, 8, 4, 2))]

if __name__ == "__main__":
    with tune.Compilers(CAPABILITY, workers=1) as compilers:
        compiled = [len(list(compilers.compile(N, K, [tile]))) for N, K, tile in CELLS]
    hits, seen_by_others = [], []
    triton.knobs.compilation.listener = lambda **event: hits.append(event["cache_hit"])
    triton.knobs.runtime.jit_post_compile_hook = lambda **event: seen_by_others.append(1)
    counts = [compilations()]
    tune._use_compile_target(CAPABILITY)
    run = triton.JITFunction.run
    triton.JITFunction.run = lambda self, *args, grid, warmup, **kwargs: run(self, *args, grid=grid, warmup=True, **kwargs)
    tensor = lambda *shape, dtype=torch.float32: torch.empty(shape, dtype=dtype, device="meta")
    for M in (1, 16, 5):
        for N, K, tile in CELLS[:2]:
            operands = tensor(M, K, dtype=torch.int8), tensor(M, 1), tensor(N, K, dtype=torch.int8), tensor(N, 1)
            scaled_mm_split_k(*operands, None, torch.bfloat16, num_sms=132, capability=CAPABILITY, tile=tile, pdl=True)
        counts.append(compilations())
    print(json.dumps([compiled, hits, counts, len(seen_by_others)]))
"""


@pytest.mark.slow
def test_compiles_what_is_launched_and_counts_it(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    done = python(COMPILED, TRITON_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    compiled, hits, counts, seen_by_others = json.loads(done.stdout.splitlines()[-1])
    assert compiled == [1, 1, 0]
    assert hits == [True] * 3  # two products and one reduction
    assert counts == [0, 3, 3, 3]  # another number of rows makes no variant
    assert seen_by_others == 3
