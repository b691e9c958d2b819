"""Tile shapes of the tensor-core GEMM: measured ones, from one JSON file per GPU, and a rule for all else. Needs no Triton.

A file is called as its GPU, `NVIDIA H200` in nvidia-h200.json, and lies in the folder that `VLLM_W8A8_CONFIG_DIR` names or
in `configs/` beside this module; the folder wins where both know a weight. `w8a8_kernels.tune` writes such files:

    {"device": "NVIDIA H200", "capability": [9, 0], "date": ..., "versions": {...},
     "tiles": {"<N>x<K>": {"<rows, a power of two>": {"block_m": 16, ..., "us": 10.8, "kernel": "triton"}}}}

`us`, microseconds, is for the reader. `kernel`, triton, cutlass or pingpong, says which won where several were measured, and
overrides the rule of `w8a8_kernels.select`; with the last two, the tile, which is Triton's, may be left out.
"""

import functools
import json
import os
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from w8a8_kernels.select import MAX_K, MEASURED_KERNELS, PINGPONG_CAPABILITY, has_dependent_launch

CONFIG_DIR_VARIABLE = "VLLM_W8A8_CONFIG_DIR"
CONFIG_DIR = Path(__file__).parent / "configs"

# The tensor memory accelerator exists from here on; that it is faster was measured on one.
MIN_TMA_CAPABILITY = TMA_MEASURED = (9, 0)

# Shared memory that one program can have.
MAX_SHARED_BYTES = {(8, 0): 163 * 1024, (9, 0): 227 * 1024, (10, 0): 227 * 1024, (10, 3): 227 * 1024}
SMALL_MAX_SHARED_BYTES = 99 * 1024

# Shared memory that the rule gives to a tile's stages. The rest is for what Triton adds, and on the large ones for the next
# kernel's programs to start beside this one's. A fifth stage of 64 x 64 x 256 is 10 % on an H200 (6144 x 4096, 64 rows).
H200_SHARED_BYTES, SHARED_BYTES, SMALL_SHARED_BYTES = 160 * 1024, 144 * 1024, 80 * 1024


@dataclass(frozen=True)
class Tile:
    """Tile of one program, and how many programs share one tile's K dimension.

    `swap` multiplies weight x activations.T: the weight's rows take the instruction's wide side, so that few rows of x waste
    less of it. `prefetch`, capability 9.0 and newer: so many bytes of each weight row are asked of L2 while the kernel before
    still runs, and the next kernel starts only after that; with 0 it starts at once. `tma`, the same: blocks are loaded by the
    tensor memory accelerator instead of by threads. `preload` so many of the weight's first blocks into registers, before the
    wait for the kernel before; where block_k * split_k divides K, and then no more than K has.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    split_k: int = 1
    swap: bool = False
    prefetch: int = 0
    tma: bool = False
    preload: int = 0

    @property
    def stage_bytes(self) -> int:
        """Shared memory of all stages; one holds a block of x and one of the weight, a byte a value."""
        return (self.block_m + self.block_n) * self.block_k * self.num_stages


@dataclass(frozen=True)
class Entry:
    """What was measured for one weight and bucket of rows: the best tile, and which kernel won where two were compared."""

    tile: Tile | None
    kernel: str | None


OPTIONAL_FIELDS = ("split_k", "swap", "prefetch", "tma", "preload")

Table = dict[tuple[int, int], dict[int, Entry]]


def max_shared_bytes(capability: tuple[int, int]) -> int:
    """Shared memory that one program can have, in bytes."""
    return MAX_SHARED_BYTES.get(capability, SMALL_MAX_SHARED_BYTES)


def power_of_two(n: int) -> int:
    """The smallest power of two that is no smaller than n, from 1."""
    return 1 << (n - 1).bit_length()


def bucket_of(M: int) -> int:
    """The bucket of M rows, from 1: the next power of two."""
    return power_of_two(M)


def file_name(device_name: str) -> str:
    """Name of a GPU's file."""
    return device_name.lower().replace(" ", "-").replace("/", "-") + ".json"


def _with_stages(tile: Tile, shared_bytes: int) -> Tile:
    """`tile` with as many of its stages as fit."""
    stage = replace(tile, num_stages=1).stage_bytes
    return replace(tile, num_stages=max(2, min(tile.num_stages, shared_bytes // stage)))


def default_tile(M: int, N: int, K: int, *, num_sms: int, capability: tuple[int, int]) -> Tile:
    """A tile by rule, for capability 8.0 and newer.

    The numbers are near the best of several hundred on an H200 at seven shapes of weights and M 1, 16, 64, 128 and 512
    (benchmarks/results/chained-tiles-nvidia-h200-2026-11-29.json, tile-search-nvidia-h200-2026-11-30.json). Few rows stream
    the weight once, in blocks small enough that every multiprocessor has one, and K is split where there are too few.
    """
    large = capability in MAX_SHARED_BYTES
    shared_bytes = SHARED_BYTES if large else SMALL_SHARED_BYTES
    if capability == TMA_MEASURED:
        shared_bytes = H200_SHARED_BYTES
    if K % 16 != 0:
        # Rows are loaded code by code, with an address each: larger blocks spill registers.
        return Tile(16 if M <= 16 else 32, 32, 64, num_warps=4, num_stages=2)
    if M <= 64:
        wide, very_wide = N >= 96 * num_sms, N >= 256 * num_sms
        block_n = 128 if very_wide else 64
        tiles = -(-N // block_n)
        split_k = 1 if K < 2048 else 4 if tiles * 4 <= num_sms else 2 if tiles * 2 <= num_sms else 1
        # One line lets the next kernel start later, which wins where the weight is large: 25.8 us instead of 27.1 for
        # 24576 x 4096 and one row.
        prefetch = 0 if not has_dependent_launch(capability) else 512 if N * K <= 2**25 else 128
        if M <= 16:
            tile = Tile(16, block_n, 256, 4, 3 if wide else 6, split_k, swap=True, prefetch=prefetch)
        else:
            rows = 32 if M <= 32 else 64
            tma = rows == 64 and capability == TMA_MEASURED
            block_k, stages = (128, 4) if wide else (256, 5)
            # With 4 warps, 64 rows spill up to 64 bytes on sm_100 (Triton 3.6, or 3.9, or both).
            num_warps = 8 if rows == 64 and capability[0] == 10 else 4
            tile = Tile(rows, block_n, block_k, num_warps, stages, split_k, swap=M <= 32, prefetch=prefetch, tma=tma)
        return _with_stages(tile, shared_bytes)
    if capability == TMA_MEASURED:
        return _tma_tile(M, N, K, num_sms)
    if M <= 128:
        tiles = -(-N // 64)
        split_k = 1 if K < 2048 else 4 if tiles * 4 <= num_sms else 2 if tiles * 2 <= num_sms else 1
        block_k = 256 if large and N < 96 * num_sms else 128
        return _with_stages(Tile(128, 64, block_k, 8, 3, split_k), shared_bytes)
    # A mask along K takes registers: with 128 columns 16 bytes were spilled on sm_120 (Triton 3.6).
    return _with_stages(Tile(128, 128 if K % 128 == 0 else 64, 128, num_warps=8, num_stages=4), shared_bytes)


def _tma_tile(M: int, N: int, K: int, num_sms: int) -> Tile:
    """The rule from 65 rows on where blocks are loaded by the tensor memory accelerator: the smaller the product, the smaller
    the tile, and the more of its loads under way."""

    def programs(block_m: int, block_n: int) -> int:
        return -(-M // block_m) * -(-N // block_n)

    if programs(64, 64) <= num_sms:
        split_k = 2 if K >= 2048 and programs(64, 64) * 2 <= num_sms else 1
        return Tile(64, 64, 256, 4, 6, split_k, tma=True)
    if K < 2048 and programs(64, 64) <= 2 * num_sms:
        return Tile(64, 64, 128, 4, 5, tma=True)
    if programs(128, 64) <= num_sms:
        return Tile(128, 64, 256, 4, 4, tma=True)
    if programs(128, 64) <= 4 * num_sms:
        # Two or three programs at a time on each multiprocessor: with room for three, two of 4096 x 4096 and 512 rows ran as
        # unevenly as 25.3 us instead of 19.3.
        return Tile(128, 64, 128, 4, 4 if programs(128, 64) <= 2 * num_sms else 3, tma=True)
    return Tile(128, 256, 128, 8, 4, tma=True)


def tile_for(M: int, N: int, K: int, *, device_name: str, capability: tuple[int, int], num_sms: int) -> Tile:
    """The measured tile of this weight for M rows, or that of the next larger bucket measured, or `default_tile`.

    Args:
        M: rows of activations, from 1.
        N, K: rows of the weight, and their length.
        device_name: as `torch.cuda.get_device_name` says it, all of it.
        capability: compute capability.
        num_sms: multiprocessors, for the rule.

    Raises:
        ValueError: the GPU's file is broken; the message names it and says what to do.
    """
    measured = _measured(device_name, capability).get((N, K))
    if measured:
        bucket = bucket_of(M)
        larger = [other for other, entry in measured.items() if other >= bucket and entry.tile is not None]
        if larger:
            return measured[min(larger)].tile
    return default_tile(M, N, K, num_sms=num_sms, capability=capability)


def kernel_for(M: int, N: int, K: int, *, device_name: str, capability: tuple[int, int]) -> str | None:
    """The kernel that won for this weight and exactly this bucket of rows, or None. Arguments and errors as in `tile_for`."""
    entry = _measured(device_name, capability).get((N, K), {}).get(bucket_of(M))
    return None if entry is None else entry.kernel


def _measured(device_name: str, capability: tuple[int, int]) -> Table:
    return _measured_in(device_name, capability, os.environ.get(CONFIG_DIR_VARIABLE) or None)


@functools.cache  # asked at every call of the op
def _measured_in(device_name: str, capability: tuple[int, int], config_dir: str | None) -> Table:
    table: Table = {}
    if config_dir is not None and not os.path.isdir(config_dir):  # Path.is_dir raises for a name that is too long
        raise ValueError(
            f"{CONFIG_DIR_VARIABLE}={config_dir!r}: got no such folder, expected one that holds what `vllm-w8a8 tune` writes. "
            "Correct it or unset it."
        )
    for folder in (CONFIG_DIR, Path(config_dir) if config_dir is not None else None):
        if folder is not None and (path := folder / file_name(device_name)).is_file():
            table |= read_table(path, device_name, capability)
    return table


def forget_files() -> None:
    """Read the files again at the next lookup."""
    _measured_in.cache_clear()


def read_file(path: Path, device_name: str, capability: tuple[int, int]) -> dict[str, Any]:
    """Content of a GPU's file, with everything but its `tiles` checked.

    Raises:
        ValueError: it is not JSON, or not of this GPU.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise _broken(path, f"what is not JSON ({error})", "a file as `vllm-w8a8 tune` writes it") from None
    keys = {"device", "capability", "date", "versions", "tiles"}
    if not isinstance(content, dict) or set(content) != keys:
        got = sorted(content) if isinstance(content, dict) else type(content).__name__
        raise _broken(path, f"{got}", f"an object with {', '.join(sorted(keys))}")
    if content["device"] != device_name:
        raise _broken(path, f"device {content['device']!r}", f"{device_name!r}")
    if content["capability"] != list(capability):
        raise _broken(path, f"capability {content['capability']}", f"{list(capability)}, which this {device_name} has")
    if not isinstance(content["tiles"], dict):
        raise _broken(path, f"tiles {content['tiles']!r}", 'an object {"<N>x<K>": {"<rows>": {...}}}')
    return content


def read_table(path: Path, device_name: str, capability: tuple[int, int]) -> Table:
    """All entries of a GPU's file, each checked.

    Raises:
        ValueError: the file is broken; the message names it, what it holds, what is expected and what to do.
    """
    table: Table = {}
    for shape, buckets in read_file(path, device_name, capability)["tiles"].items():
        N, _, K = shape.partition("x")
        if not (_is_count(N) and _is_count(K) and isinstance(buckets, dict)):
            raise _broken(path, f"tiles[{shape!r}] = {buckets!r}", '"<N>x<K>": {"<rows>": {...}}')
        table[int(N), int(K)] = {}
        for rows, values in buckets.items():
            where = f"tiles[{shape!r}][{rows!r}]"
            if not _is_count(rows) or bucket_of(int(rows)) != int(rows):
                raise _broken(path, where, "a number of rows that is a power of two")
            table[int(N), int(K)][int(rows)] = _entry(path, where, values, capability)
    return table


def _is_count(text: str) -> bool:
    """Whether it is a whole number from 1, below 10^9, as Python writes it: two keys for one shape would hide one of them."""
    return text.isdecimal() and len(text) < 10 and str(int(text)) == text != "0"


def _entry(path: Path, where: str, values: Any, capability: tuple[int, int]) -> Entry:
    if not isinstance(values, dict):
        raise _broken(path, f"{where} = {values!r}", "an object with the fields of a tile")
    names = [field.name for field in fields(Tile)]
    unknown = set(values) - {*names, "us", "kernel"}
    if unknown:
        raise _broken(path, f"unknown fields {sorted(unknown)} in {where}", f"{', '.join(names)}, us, kernel")
    kernel = values.get("kernel")
    if kernel not in (None, *MEASURED_KERNELS):
        raise _broken(path, f"kernel {kernel!r} in {where}", " or ".join(MEASURED_KERNELS))
    if kernel == "pingpong" and capability != PINGPONG_CAPABILITY:
        raise _broken(path, f"kernel 'pingpong' in {where}", "another: it runs on compute capability 9.0 only")
    tile_values = {name: values[name] for name in names if name in values}
    if not tile_values and kernel not in (None, "triton"):
        return Entry(None, kernel)
    missing = [name for name in names if name not in values and name not in OPTIONAL_FIELDS]
    if missing:
        raise _broken(path, f"no {', '.join(missing)} in {where}", "all fields of a tile")
    for name, value in tile_values.items():
        if name in ("swap", "tma"):
            fits, expected = isinstance(value, bool), "true or false"
        elif name == "preload":
            fits, expected = type(value) is int and 0 <= value <= 8, "a whole number from 0 to 8"
        elif name == "prefetch":
            fits = type(value) is int and 0 <= value <= MAX_K and value % 16 == 0
            expected = f"a multiple of 16 up to {MAX_K}, or 0"
        elif name in ("num_stages", "split_k"):
            most = 16 if name == "num_stages" else 256
            fits, expected = type(value) is int and 1 <= value <= most, f"a whole number from 1 to {most}"
        else:
            # A program has at most 1,024 threads; tl.dot takes no fewer than 32 int8 columns.
            least, most = {"num_warps": (1, 32), "block_k": (32, 4096)}.get(name, (16, 4096))
            fits = type(value) is int and least <= value <= most and bucket_of(value) == value
            expected = f"a power of two from {least} to {most}"
        if not fits:
            raise _broken(path, f"{name} {value!r} in {where}", expected)
    tile = Tile(**tile_values)
    if tile.tma and capability < MIN_TMA_CAPABILITY:
        raise _broken(path, f"tma in {where}", "false below capability 9.0")
    limit = max_shared_bytes(capability)
    if tile.stage_bytes > limit:
        raise _broken(
            path, f"{where}, whose stages take {tile.stage_bytes} bytes", f"at most {limit}, the shared memory of this GPU"
        )
    return Entry(tile, kernel)


def _broken(path: Path, got: str, expected: str) -> ValueError:
    return ValueError(f"{path}: got {got}, expected {expected}. Correct it, or delete it and run `vllm-w8a8 tune` again.")
