"""Measures tiles of the tensor-core GEMM on the GPU at hand, and writes the file that `w8a8_kernels.tiles` reads."""

import fcntl
import json
import logging
import multiprocessing
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from pathlib import Path

import torch

from w8a8_kernels.select import MAX_K, MIN_TRITON_CAPABILITY, has_dependent_launch
from w8a8_kernels.tiles import (
    MIN_TMA_CAPABILITY,
    Tile,
    bucket_of,
    default_tile,
    file_name,
    forget_files,
    max_shared_bytes,
    read_file,
    read_table,
)

DTYPE = torch.bfloat16

# From the best so many tiles of a round the search goes on, so many rounds, as long as a round gains so much of the time.
BEAM, ROUNDS, LEAST_GAIN = 2, 2, 0.005

# Values that the search tries for each field of a tile.
SEARCHED = {
    "block_m": (16, 32, 64, 128),
    "block_n": (32, 64, 128, 256),
    "block_k": (64, 128, 256, 512),
    "num_warps": (4, 8),
    "num_stages": (2, 3, 4, 5, 6, 7),
    "split_k": (1, 2, 3, 4, 8),
    "swap": (False, True),
    "prefetch": (0, 128, 512),
    "tma": (False, True),
    "preload": (0, 1, 2, 4),
}

# With fewer, most of its tile of 128 rows would be nothing.
MIN_PINGPONG_ROWS = 128

# One tile after the other: the GPU is warm, but for the first.
WARM_UP_MS = 1.0

# Compiling is the longer part of tuning; beyond this many processes, loading torch in each takes longer than it saves.
MAX_WORKERS = 16

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Gpu:
    """What a tile depends on: the exact name, compute capability, and number of multiprocessors."""

    device_name: str
    capability: tuple[int, int]
    num_sms: int


@dataclass(frozen=True)
class Measurement:
    """Microseconds of quantizer and product: of every tile that runs, and of other kernels that can run, by their names."""

    us: dict[Tile, float]
    others: dict[str, float] = field(default_factory=dict)


Measure = Callable[[int, int, int, list[Tile]], Measurement]
Progress = Callable[[int, int, str], None]


def current_gpu() -> Gpu:
    """The current CUDA device.

    Raises:
        ValueError: there is none, or it has no int8 tensor cores that Triton compiles for.
    """
    if not torch.cuda.is_available():
        raise ValueError("got no GPU that PyTorch sees, expected an NVIDIA GPU: tiles are measured on the GPU they are for")
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    gpu = Gpu(torch.cuda.get_device_name(), (properties.major, properties.minor), properties.multi_processor_count)
    _check_capability(gpu.capability)
    return gpu


def _check_capability(capability: tuple[int, int]) -> None:
    if capability < MIN_TRITON_CAPABILITY:
        got, least = (".".join(map(str, c)) for c in (capability, MIN_TRITON_CAPABILITY))
        raise ValueError(f"got compute capability {got}, expected {least} or newer: older GPUs have no tiles to measure")


def candidates(M: int, N: int, K: int, capability: tuple[int, int], num_sms: int) -> list[Tile]:
    """Tiles for M rows (of which the bucket counts) to begin a search with, the rule's own first.

    The others won, or nearly, for one weight at least in searches over several thousand tiles on an H200
    (benchmarks/results/tile-search-nvidia-h200-2026-11-30.json).

    Raises:
        ValueError: the compute capability is below 8.0.
    """
    _check_capability(capability)
    M = bucket_of(M)
    first = default_tile(M, N, K, num_sms=num_sms, capability=capability)
    # Columns: block_m, block_n, block_k, num_warps, num_stages, split_k, swap, prefetch, tma, preload.
    if K % 16 != 0:
        grid = [Tile(*block) for block in product((16, 32), (32, 64), (32, 64), (4,), (2, 3), (1, 2))]
    elif M <= 32:
        rows = max(M, 16)
        grid = [Tile(rows, 64, 256, 4, 6, split, True, 512) for split in (1, 2, 3, 4)]
        grid += [Tile(rows, 64, 128, 4, 6, split, True, 512) for split in (1, 3, 4)]
        grid += [Tile(rows, 64, 256, 4, 3, split, True, preload=4) for split in (1, 2, 4)]
        grid += [Tile(rows, 64, 256, 4, 3, 1, True, preload=2), Tile(rows, 64, 512, 4, 3, 1, True, preload=2)]
        grid += [Tile(rows, 64, 256, 4, 3, 1, True, 128), Tile(rows, 128, 256, 8, 3, 1, True, preload=2)]
    elif M <= 64:
        grid = [Tile(64, 64, 256, 4, 5, split, prefetch=512, tma=tma) for split in (1, 2, 4) for tma in (False, True)]
        grid += [Tile(64, 32, 256, 4, 6, split, tma=True) for split in (1, 2)]
        grid += [Tile(64, block_n, 128, 4, 4, tma=tma) for block_n in (64, 128) for tma in (False, True)]
    elif M <= 256:
        grid = [Tile(64, 64, 256, 4, 6, split, tma=True) for split in (1, 2)]
        grid += [
            Tile(64, 64, 256, 4, 4),
            Tile(64, 64, 128, 4, 5, tma=True),
            Tile(64, 32, 256, 4, 5, 2, prefetch=128, tma=True),
        ]
        grid += [Tile(128, 64, 256, 4, 4, split, tma=tma) for split in (1, 2) for tma in (False, True)]
        grid += [Tile(128, 64, 128, 4, 3, tma=tma) for tma in (False, True)]
        grid += [Tile(128, 128, 128, 8, 4), Tile(128, 256, 128, 8, 4, tma=True)]
    else:
        blocks = (
            (64, 64, 256, 4, 5),
            (128, 64, 128, 4, 3),
            (64, 128, 128, 4, 4),
            (128, 128, 128, 8, 4),
            (128, 256, 128, 8, 4),
        )
        grid = [Tile(*block, tma=tma) for block in blocks for tma in (False, True)]
    grid = [_adapted(tile, K, capability) for tile in grid]
    return list(dict.fromkeys([first, *(tile for tile in grid if _is_sound(tile, M, N, K, capability, num_sms))]))


def _adapted(tile: Tile, K: int, capability: tuple[int, int]) -> Tile:
    """`tile` without what the GPU cannot do, no deeper than K, and with as many of its stages as fit."""
    if not has_dependent_launch(capability):
        tile = replace(tile, prefetch=0, preload=0)
    tile = replace(tile, tma=tile.tma and capability >= MIN_TMA_CAPABILITY, block_k=min(tile.block_k, max(bucket_of(K), 64)))
    tile = replace(tile, prefetch=tile.prefetch if tile.prefetch * tile.split_k <= K else 0)
    fitting = max_shared_bytes(capability) // replace(tile, num_stages=1).stage_bytes
    return replace(tile, num_stages=min(tile.num_stages, fitting))


def neighbours(tile: Tile, M: int, N: int, K: int, capability: tuple[int, int], num_sms: int) -> list[Tile]:
    """Tiles for M rows (of which the bucket counts) that differ from `tile` in one field, or in depth and number of blocks."""
    changed = [replace(tile, **{name: value}) for name, values in SEARCHED.items() for value in values]
    changed += [replace(tile, block_k=block_k, num_stages=stages) for block_k in (128, 256) for stages in (3, 4, 6)]
    changed += [replace(tile, tma=not tile.tma, num_stages=stages) for stages in (3, 4, 6)]
    near = (other for other in changed if other != tile and _is_sound(other, bucket_of(M), N, K, capability, num_sms))
    return list(dict.fromkeys(near))


def _is_sound(tile: Tile, M: int, N: int, K: int, capability: tuple[int, int], num_sms: int) -> bool:
    """Whether a tile can run there, with registers for what it holds, and would not plainly waste most of the GPU."""
    programs = -(-M // tile.block_m) * -(-N // tile.block_n) * tile.split_k
    accumulator, held = tile.block_m * tile.block_n, tile.preload * tile.block_n * tile.block_k
    steps = -(-K // tile.block_k)
    if K % 16 != 0 and (
        # Rows are loaded code by code, with an address each: larger blocks spill registers.
        max(tile.block_m * 2, tile.block_n, tile.block_k) > 64 or tile.prefetch or tile.tma or tile.preload
    ):
        return False
    return (
        tile.num_stages >= 2
        and tile.stage_bytes <= max_shared_bytes(capability)
        and tile.block_m <= max(M, 16)
        and (not tile.tma or capability >= MIN_TMA_CAPABILITY)
        and ((not tile.prefetch and not tile.preload) or has_dependent_launch(capability))
        and tile.prefetch * tile.split_k <= K
        and not (tile.prefetch and tile.preload)
        # Every part of K has as many whole blocks then, and that many can be held.
        and (not tile.preload or (K % (tile.block_k * tile.split_k) == 0 and steps >= tile.preload * tile.split_k))
        and (tile.split_k == 1 or (steps >= tile.split_k and programs <= 3 * num_sms))
        # 128 registers of a thread's 255 for sums, and as many for what is loaded early.
        and accumulator <= 128 * 32 * tile.num_warps
        and held <= 4 * 128 * 32 * tile.num_warps
        and (tile.num_warps == 4 or accumulator >= 128 * 64 or held > 0)
        and (not tile.swap or tile.block_n >= 64)
        and not 64 < tile.block_k > bucket_of(K)
    )


def tune(
    shapes: Iterable[tuple[int, int]],
    batch_sizes: Sequence[int],
    out: str | Path,
    *,
    progress: Progress | None = None,
    measure: Measure | None = None,
    gpu: Gpu | None = None,
) -> Path:
    """Measure the best tile of every weight and bucket of rows, and write each at once.

    What the file has from the same versions of torch, Triton and vLLM is not measured again, so a stopped run goes on where it
    stopped, and several processes can fill one file. A file from other versions is put aside as `.json.old`.

    Args:
        shapes: (N, K) of the weights.
        batch_sizes: numbers of rows, each taken to the next power of two.
        out: folder of the file, made where it is missing.
        progress: called with cells done, cells in all, and what is next.
        measure: times tiles, the first of which is the rule's; default: on the current GPU (`GpuMeasure`).
        gpu: whose file it is; default: the current one.

    Returns:
        the file.

    Raises:
        ValueError: no GPU, shapes or batch sizes out of range, or the file there is broken.
        RuntimeError: a tile gives another result than the rule's.
    """
    buckets = sorted({bucket_of(M) for M in batch_sizes if M >= 1})
    if not buckets or min(batch_sizes) < 1:
        raise ValueError(f"tune: got batch sizes {list(batch_sizes)}, expected one at least, each from 1")
    shapes = list(dict.fromkeys(shapes))
    if not shapes or any(N < 1 or not 1 <= K <= MAX_K for N, K in shapes):
        raise ValueError(f"tune: got shapes {shapes}, expected one (N, K) at least, N from 1 and K from 1 to {MAX_K}")
    gpu = gpu or current_gpu()
    path = Path(out) / file_name(gpu.device_name)
    path.parent.mkdir(parents=True, exist_ok=True)
    cells = [(M, N, K) for N, K in shapes for M in buckets]
    own = _given(measure) if measure is not None else GpuMeasure(gpu)
    with own as timer:
        for i, (M, N, K) in enumerate(cells):
            if progress is not None:
                progress(i, len(cells), f"{N}x{K}, {M} rows")
            if not _has(path, gpu, M, N, K):
                entry = _best(_search(timer, M, N, K, gpu), M, N, K)
                _add(path, gpu, M, N, K, entry)
    if progress is not None:
        progress(len(cells), len(cells), "done")
    forget_files()
    return path


@contextmanager
def _given(measure: Measure) -> Iterator[Measure]:
    yield measure


def _search(timer: Measure, M: int, N: int, K: int, gpu: Gpu) -> Measurement:
    """Measure the candidates, then what is near the best of them."""
    where = M, N, K, gpu.capability, gpu.num_sms
    found = timer(M, N, K, candidates(*where))
    for _ in range(ROUNDS if found.us else 0):
        best = sorted(found.us, key=found.us.get)[:BEAM]
        before = found.us[best[0]]
        near = dict.fromkeys(other for tile in best for other in neighbours(tile, *where) if other not in found.us)
        later = timer(M, N, K, [best[0], *near])
        found = Measurement(later.us | found.us, later.others)
        if min(found.us.values()) > before * (1 - LEAST_GAIN):
            break
    return found


def _best(measured: Measurement, M: int, N: int, K: int) -> dict:
    if not measured.us:
        raise RuntimeError(f"tune: no tile ran for {N}x{K} and {M} rows, not even the rule's")
    tile = min(measured.us, key=measured.us.get)
    kernels = {"triton": measured.us[tile], **measured.others}
    fastest = min(kernels, key=kernels.get)
    kernel = {"kernel": fastest} if measured.others else {}
    return {**asdict(tile), **kernel, "us": round(kernels[fastest], 3)}


def installed_versions() -> dict[str, str | None]:
    """Versions of what a measurement depends on; None for what is not installed."""

    def installed(package: str) -> str | None:
        try:
            return version(package)
        except PackageNotFoundError:
            return None

    return {package: installed(package) for package in ("torch", "triton", "vllm")}


def _has(path: Path, gpu: Gpu, M: int, N: int, K: int) -> bool:
    if not path.exists():
        return False
    content = read_file(path, gpu.device_name, gpu.capability)
    return content["versions"] == installed_versions() and M in read_table(path, gpu.device_name, gpu.capability).get(
        (N, K), ()
    )


def _add(path: Path, gpu: Gpu, M: int, N: int, K: int, entry: dict) -> None:
    """Put one entry into the file as it is by then, which another process may have written meanwhile."""
    with path.with_name(f".{path.stem}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        versions, tiles = installed_versions(), {}
        if path.exists():
            content = read_file(path, gpu.device_name, gpu.capability)
            if content["versions"] == versions:
                tiles = content["tiles"]
            else:
                shutil.copyfile(path, path.with_suffix(".json.old"))
                log.warning("%s is from other versions (%s): put aside as .json.old", path, content["versions"])
        buckets = tiles.setdefault(f"{N}x{K}", {})
        buckets[str(M)] = entry
        tiles[f"{N}x{K}"] = dict(sorted(buckets.items(), key=lambda item: int(item[0])))
        content = {
            "device": gpu.device_name,
            "capability": list(gpu.capability),
            "date": datetime.now(timezone.utc).date().isoformat(),
            "versions": versions,
            "tiles": tiles,
        }
        # In the same folder, so that the rename is one step: a reader, or a run after a crash, sees the old file or the new.
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.stem}-", suffix=".tmp", delete=False) as file:
            try:
                json.dump(content, file, indent=1)
                file.write("\n")
                file.flush()
                os.fsync(file.fileno())
                os.chmod(file.name, 0o644)
                os.replace(file.name, path)
            except BaseException:
                os.unlink(file.name)
                raise


class _CompileTarget:
    """As much of a Triton driver as compiling needs: processes that only compile take no memory of the GPU."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self._capability = capability[0] * 10 + capability[1]

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def _use_compile_target(capability: tuple[int, int]) -> None:
    import triton

    triton.runtime.driver.set_active(_CompileTarget(capability))


def _compile(N: int, K: int, tile: Tile, pdl: bool) -> str | None:
    from w8a8_kernels.scaled_mm.split_k import compile_split_k

    try:
        compile_split_k(N, K, tile, DTYPE, pdl=pdl)
    except Exception as error:  # whatever a compiler says: the tile is out, the others still count
        return f"{type(error).__name__}: {error}"
    return None


class Compilers(AbstractContextManager):
    """Processes that compile tiles into Triton's cache on disk, where the measuring process finds them.

    Args:
        capability: of the GPU to compile for; it need not be there.
        workers: how many; default: one for each CPU, `MAX_WORKERS` at most.
    """

    def __init__(self, capability: tuple[int, int], workers: int | None = None) -> None:
        self._capability = capability
        # Not forked: CUDA does not outlive a fork.
        self._pool = ProcessPoolExecutor(
            workers or min(os.cpu_count() or 1, MAX_WORKERS),
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_use_compile_target,
            initargs=(capability,),
        )

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def compile(self, N: int, K: int, tiles: list[Tile]) -> Iterator[Tile]:
        """Compile what a product with weight [N, K] launches.

        Yields:
            the tiles that compile, in their order, each as soon as it is.
        """
        pdl = has_dependent_launch(self._capability)
        futures = [self._pool.submit(_compile, N, K, tile, pdl) for tile in tiles]
        for tile, future in zip(tiles, futures, strict=True):
            refusal = future.result()
            if refusal is None:
                yield tile
            else:
                log.warning("%s does not compile for %dx%d: %s", tile, N, K, refusal)


class GpuMeasure(AbstractContextManager):
    """Times tiles on the current GPU: quantizer and product, CUDA graphs, rotating weights that are cold in cache.

    Args:
        gpu: what the GPU is.
        device: where the tensors are; default: the current CUDA device.
    """

    def __init__(self, gpu: Gpu, device: torch.device | None = None) -> None:
        self._gpu = gpu
        self._device = device or torch.device("cuda", torch.cuda.current_device())
        self._compilers = Compilers(gpu.capability)

    def __exit__(self, *error: object) -> None:
        self._compilers.__exit__(*error)

    def __call__(self, M: int, N: int, K: int, tiles: list[Tile]) -> Measurement:
        """Time the tiles, the first of which is the rule's, for M rows and weights [N, K].

        Raises:
            RuntimeError: a tile gives other bits than the first one.
        """
        from triton.runtime.errors import OutOfResources

        from w8a8_kernels.ops import device_facts, quantize
        from w8a8_kernels.scaled_mm.cutlass import scaled_mm_cutlass
        from w8a8_kernels.scaled_mm.split_k import scaled_mm_split_k
        from w8a8_kernels.select import cutlass_refusal, pingpong_refusal
        from w8a8_kernels.timing import call_count, compare_us, graph_us

        gpu, device = self._gpu, self._device
        copies, n_calls = call_count(M, N, K, device)
        pdl = has_dependent_launch(gpu.capability)
        sets = [
            (
                torch.randn(M, K, dtype=DTYPE, device=device),
                torch.randint(-127, 128, (N, K), dtype=torch.int8, device=device),
                torch.rand(N, 1, device=device) / (127 * K**0.5),
            )
            for _ in range(copies)
        ]

        def ours(i: int, tile: Tile) -> torch.Tensor:
            x, weight, scale = sets[i % copies]
            facts = {"num_sms": gpu.num_sms, "capability": gpu.capability, "tile": tile, "pdl": pdl}
            return scaled_mm_split_k(*quantize(x), weight, scale, None, DTYPE, **facts)

        def cutlass(i: int) -> torch.Tensor:
            x, weight, scale = sets[i % copies]
            return scaled_mm_cutlass(*quantize(x), weight, scale, None, DTYPE)

        def pingpong(i: int) -> torch.Tensor:
            from w8a8_kernels.scaled_mm.pingpong import scaled_mm_pingpong

            x, weight, scale = sets[i % copies]
            return scaled_mm_pingpong(*quantize(x), weight, scale, None, DTYPE, num_sms=gpu.num_sms, pdl=pdl)

        us: dict[Tile, float] = {}
        expected: torch.Tensor | None = None
        for tile in self._compilers.compile(N, K, tiles):
            try:
                result = ours(0, tile)
            except OutOfResources as error:
                log.info("%s does not fit this GPU: %s", tile, error)
                continue
            if expected is None:
                expected = result
            elif not torch.equal(result, expected):
                raise RuntimeError(f"tune: {tile} gives other bits than others for {M} rows and a weight {N}x{K}")
            us[tile] = graph_us([lambda i=i, tile=tile: ours(i, tile) for i in range(n_calls)], WARM_UP_MS)
        facts, others = device_facts(device), {}
        if cutlass_refusal(facts, N, K, DTYPE) is None:
            others["cutlass"] = cutlass
        if M >= MIN_PINGPONG_ROWS and pingpong_refusal(facts, N, K, DTYPE) is None:
            if expected is not None and not torch.equal(pingpong(0), expected):
                raise RuntimeError(f"tune: the ping-pong product gives other bits than the tiles for {M} rows, {N}x{K}")
            others["pingpong"] = pingpong
        if not us or not others:
            return Measurement(us)
        best = min(us, key=us.get)
        ways = {"triton": lambda i: ours(i, best), **others}
        turns = compare_us({name: [lambda i=i, way=way: way(i) for i in range(n_calls)] for name, way in ways.items()})
        return Measurement(us, {name: us[best] * turns[name] / turns["triton"] for name in others})
