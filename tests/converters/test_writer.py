import json

import pytest
import torch
from safetensors import safe_open

from w8a8_converters.writer import OutputTensor, ShardWriter, split_into_shards


def test_pieces_in_any_order(tmp_path):
    codes = torch.randint(-127, 128, (5, 3), dtype=torch.int8)
    scale = torch.rand(5, 1)
    half = torch.randn(7).to(torch.bfloat16)
    planned = [OutputTensor("codes", (5, 3), torch.int8), OutputTensor("scale", (5, 1), torch.float32)]
    planned += [OutputTensor("half", (7,), torch.bfloat16), OutputTensor("scalar", (), torch.float32)]
    with ShardWriter(tmp_path / "x.safetensors", planned, {"format": "pt"}) as writer:
        writer.write("codes", 6, codes[2:])
        writer.write("scale", 0, scale)
        writer.write("half", 0, half)
        writer.write("codes", 0, codes[:2].t().contiguous().t())
        writer.write("scalar", 0, torch.tensor(2.5))
    with safe_open(tmp_path / "x.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert torch.equal(file.get_tensor("codes"), codes)
        assert torch.equal(file.get_tensor("scale"), scale)
        assert torch.equal(file.get_tensor("half"), half)
        assert torch.equal(file.get_tensor("scalar"), torch.tensor(2.5))
    raw = (tmp_path / "x.safetensors").read_bytes()
    header_size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + header_size])
    assert header_size % 8 == 0
    for tensor in planned:
        assert header[tensor.name]["data_offsets"][0] % tensor.dtype.itemsize == 0, f"{tensor.name} is not aligned"


def test_an_existing_file_is_not_overwritten(tmp_path):
    (tmp_path / "x").write_text("old")
    with pytest.raises(FileExistsError):
        ShardWriter(tmp_path / "x", [], {})


def test_split_into_shards():
    def group(name, size):
        return [OutputTensor(name, (size,), torch.int8), OutputTensor(f"{name}_scale", (1,), torch.float32)]

    groups = [group("a", 6), group("b", 6), group("c", 50), group("d", 1), group("e", 2)]
    shards = split_into_shards(groups, max_bytes=20)
    assert [[t.name for t in shard if "_" not in t.name] for shard in shards] == [["a", "b"], ["c"], ["d", "e"]]
    assert all(len(shard) % 2 == 0 for shard in shards)
