"""Which tile a shape gets: from a GPU's file, by exact name and capability, else from the rule."""

import json
from pathlib import Path

import pytest
import torch

from w8a8_kernels import ops, tiles
from w8a8_kernels.select import Facts
from w8a8_kernels.tiles import Tile, default_tile, kernel_for, tile_for

H200 = {"device_name": "NVIDIA H200", "capability": (9, 0)}
SMALL, MIDDLE = Tile(16, 32, 512, 4, 3, 2, True), Tile(64, 32, 128, 8, 4, 1, False)


def fields(tile: Tile) -> dict:
    return dict(vars(tile))


ENTRIES = {
    "6144x4096": {
        "16": {**fields(SMALL), "us": 10.5},
        "64": {**fields(MIDDLE), "kernel": "triton"},
        "128": {"kernel": "cutlass"},
        "256": {**fields(MIDDLE), "kernel": "cutlass"},
    },
    "512x512": {"16": {"kernel": "cutlass"}},
}


def content(**changes) -> dict:
    head = {"device": "NVIDIA H200", "capability": [9, 0], "date": "2026-11-29", "versions": {"triton": "3.6.0"}}
    return {**head, "tiles": ENTRIES, **changes}


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`shipped` stands for the package's folder; VLLM_W8A8_CONFIG_DIR is not set."""
    monkeypatch.setattr(tiles, "CONFIG_DIR", tmp_path / "shipped")
    monkeypatch.delenv(tiles.CONFIG_DIR_VARIABLE, raising=False)
    tiles.forget_files()
    yield
    tiles.forget_files()


def write(folder: Path, value: object, name: str = "nvidia-h200.json") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(value if isinstance(value, str) else json.dumps(value))
    return folder / name


def lookup(M: int, N: int = 6144, K: int = 4096, **gpu) -> Tile:
    return tile_for(M, N, K, num_sms=132, **{**H200, **gpu})


def rule(M: int, N: int = 6144, K: int = 4096, capability: tuple[int, int] = (9, 0)) -> Tile:
    return default_tile(M, N, K, num_sms=132, capability=capability)


@pytest.mark.parametrize(
    ("M", "tile", "kernel"),
    [
        (1, SMALL, None),  # the next larger bucket; a winner counts in its own only
        (9, SMALL, None),
        (16, SMALL, None),
        (17, MIDDLE, None),
        (33, MIDDLE, "triton"),
        (64, MIDDLE, "triton"),
        (65, MIDDLE, "cutlass"),  # the bucket 128 names no tile, 256 does
        (256, MIDDLE, "cutlass"),
        (257, rule(257), None),
    ],
)
def test_bucket(M: int, tile: Tile, kernel: str | None, tmp_path: Path) -> None:
    write(tmp_path / "shipped", content())
    assert lookup(M) == tile
    assert kernel_for(M, 6144, 4096, **H200) == kernel


def test_rule_for_what_no_file_knows(tmp_path: Path) -> None:
    assert lookup(16) == rule(16)
    write(tmp_path / "shipped", content())
    tiles.forget_files()
    assert lookup(16) == SMALL
    assert lookup(16, N=4096) == rule(16, 4096)
    assert lookup(16, K=6144, N=4096) == rule(16, 4096, 6144)
    assert lookup(16, N=512, K=512) == rule(16, 512, 512)


@pytest.mark.parametrize("name", ["NVIDIA H200 NVL", "NVIDIA H20", "H200", "NVIDIA GH200 480GB", "nvidia h2000"])
def test_name_is_matched_whole(name: str, tmp_path: Path) -> None:
    write(tmp_path / "shipped", content())
    assert lookup(16, device_name=name) == rule(16)
    assert kernel_for(64, 6144, 4096, device_name=name, capability=(9, 0)) is None


def test_a_file_of_a_longer_name_is_not_taken(tmp_path: Path) -> None:
    write(tmp_path / "shipped", content(device="NVIDIA H200 NVL"), "nvidia-h200-nvl.json")
    assert lookup(16) == rule(16)
    assert lookup(16, device_name="NVIDIA H200 NVL") == SMALL


def test_folder_of_the_user_is_looked_at_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "shipped", content(tiles={**ENTRIES, "96x64": {"16": fields(MIDDLE)}}))
    write(tmp_path / "own", content(tiles={"6144x4096": {"32": fields(MIDDLE)}}))
    assert lookup(16) == SMALL
    monkeypatch.setenv(tiles.CONFIG_DIR_VARIABLE, str(tmp_path / "own"))
    assert lookup(16) == MIDDLE
    assert lookup(64) == rule(64)  # of a weight that it knows, the folder's file is all that counts
    assert lookup(16, N=96, K=64) == MIDDLE
    monkeypatch.setenv(tiles.CONFIG_DIR_VARIABLE, str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match=r"nowhere'.*no such folder.*Correct it or unset it"):
        lookup(16)


def one(**entry) -> dict:
    return content(tiles={"64x64": {"16": entry}})


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("{", "what is not JSON"),
        ([], "got list, expected an object with capability, date, device, tiles, versions"),
        (content(gpu="H200"), "'gpu'"),
        (content(device="NVIDIA H200 NVL"), "got device 'NVIDIA H200 NVL', expected 'NVIDIA H200'"),
        (content(capability=[8, 0]), r"got capability [8, 0], expected [9, 0]"),
        (content(tiles=[]), "got tiles []"),
        (content(tiles={"6144": {}}), '"<N>x<K>"'),
        (content(tiles={"64x64": {"17": fields(SMALL)}}), "expected a number of rows that is a power of two"),
        (one(**fields(SMALL), group_m=8), "unknown fields ['group_m'] in tiles['64x64']['16'], expected block_m"),
        (one(block_m=16, block_n=64), "got no block_k, num_warps, num_stages"),
        (one(kernel="triton"), "got no block_m"),
        (one(kernel="gemlite"), "got kernel 'gemlite'"),
        (one(**{**fields(SMALL), "block_n": 48}), "got block_n 48"),
        (one(**{**fields(SMALL), "block_n": "64"}), "got block_n '64'"),
        (one(**{**fields(SMALL), "num_warps": True}), "got num_warps True"),
        (one(**{**fields(SMALL), "split_k": 0}), "got split_k 0"),
        (
            one(**{**fields(SMALL), "split_k": 257}),
            "got split_k 257 in tiles['64x64']['16'], expected a whole number from",
        ),
        (
            one(**{**fields(SMALL), "num_warps": 64}),
            "got num_warps 64 in tiles['64x64']['16'], expected a power of two from",
        ),
        (one(**{**fields(SMALL), "block_k": 16}), "got block_k 16 in tiles['64x64']['16'], expected a power of two from 32"),
        (one(**{**fields(SMALL), "prefetch": 1 << 40}), "got prefetch 1099511627776"),
        (content(tiles={"0x64": {}}), "got tiles['0x64']"),
        (content(tiles={"064x64": {}}), "got tiles['064x64']"),
        (content(tiles={"1" + "0" * 4999 + "x64": {}}), '"<N>x<K>"'),
        (content(tiles={"64x64": {"016": fields(SMALL)}}), "got tiles['64x64']['016'], expected a number of rows"),
        ("[" * 200_000, "what is not JSON"),
        (one(**{**fields(SMALL), "swap": 1}), "got swap 1 in tiles['64x64']['16'], expected true or false"),
        (one(**{**fields(SMALL), "num_stages": 10}), "stages take 245760 bytes, expected at most 232448"),
    ],
)
def test_broken_file(broken: object, message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "shipped", broken)
    for _ in range(2):  # it stays broken
        with pytest.raises(ValueError) as error:
            lookup(16)
        assert message in str(error.value)
        assert str(error.value).startswith(f"{path}: got ")
        assert "Correct it, or delete it and run `vllm-w8a8 tune` again." in str(error.value)


def test_shared_memory_of_the_gpu_counts(tmp_path: Path) -> None:
    entry = {"64x64": {"16": {**fields(SMALL), "num_stages": 5}}}  # 120 KB
    write(tmp_path / "shipped", content(tiles=entry))
    assert lookup(16, N=64, K=64).num_stages == 5
    write(tmp_path / "shipped", content(device="NVIDIA L40S", capability=[8, 9], tiles=entry), "nvidia-l40s.json")
    with pytest.raises(ValueError, match="at most 101376, the shared memory"):
        lookup(16, N=64, K=64, device_name="NVIDIA L40S", capability=(8, 9))


def test_file_is_read_once(tmp_path: Path) -> None:
    path = write(tmp_path / "shipped", content())
    assert lookup(16) == SMALL
    path.unlink()
    assert lookup(16) == SMALL


@pytest.mark.parametrize(
    ("M", "has_cutlass", "ran"),
    [(0, True, []), (9, True, [SMALL]), (64, True, [MIDDLE]), (100, True, ["cutlass"]), (100, False, [MIDDLE])],
)
def test_op_takes_what_was_measured(
    M: int, has_cutlass: bool, ran: list, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    split_k = pytest.importorskip("w8a8_kernels.scaled_mm.split_k")
    monkeypatch.delenv("VLLM_W8A8_KERNEL", raising=False)
    write(tmp_path / "shipped", content())
    launched = []
    monkeypatch.setattr(ops, "device_facts", lambda device: Facts((9, 0), has_triton=True, has_cutlass=has_cutlass))
    monkeypatch.setattr(ops, "_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(ops, "_num_sms", lambda device: 132)
    monkeypatch.setattr(split_k, "scaled_mm_split_k", lambda *args, tile, **options: launched.append(tile))
    monkeypatch.setattr(ops, "scaled_mm_cutlass", lambda *args: launched.append("cutlass"))
    N, K = 6144, 4096
    x, weight = (torch.zeros(rows, K, dtype=torch.int8, device="meta") for rows in (M, N))
    x_scale, weight_scale = (torch.ones(rows, 1, device="meta") for rows in (M, N))
    ops._scaled_mm_cuda(x, x_scale, weight, weight_scale, None, torch.bfloat16)
    assert launched == ran


@pytest.mark.parametrize("path", sorted(tiles.CONFIG_DIR.glob("*.json")), ids=lambda path: path.name)
def test_shipped_files_are_sound(path: Path) -> None:
    head = json.loads(path.read_text())
    assert path.name == tiles.file_name(head["device"])
    assert tiles.read_table(path, head["device"], tuple(head["capability"]))


@pytest.mark.parametrize(("M", "bucket"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (255, 256), (256, 256), (257, 512)])
def test_bucket_of(M: int, bucket: int) -> None:
    assert tiles.bucket_of(M) == bucket
