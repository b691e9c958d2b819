"""Every type of GGUF tensors: random packed bytes against the gguf library, or a loop over the layout that it lacks."""

import os
import struct
import time

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Q
from gguf_models import TOKENIZER, TOKENS

from w8a8_converters.convert import convert
from w8a8_converters.errors import ConversionError
from w8a8_converters.gguf.dequant import _SCALES_OF, check_type, dequantize_rows, known_finite
from w8a8_converters.gguf.reader import GGUFFile
from w8a8_converters.gguf.tensor_types import BLOCK_SIZES, TensorType

OF_THE_LIBRARY = [
    "F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ1_S", "IQ1_M",
    "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS", "TQ1_0", "TQ2_0", "MXFP4", "NVFP4",
]  # fmt: skip
OF_OUR_OWN = ["Q1_0", "Q2_0"]
# Intermediate results of ggml's products, and types that no weight matrix has.
NOT_READ = ["Q8_1", "Q8_K", "I8", "I16", "I32", "I64", "F64"]


def q1_0(data: bytes) -> list[float]:
    values = []
    for start in range(0, len(data), 18):
        (scale,) = struct.unpack_from("<e", data, start)
        for i in range(128):
            bit = data[start + 2 + i // 8] >> (i % 8) & 1
            values.append(scale if bit else -scale)
    return values


def q2_0(data: bytes) -> list[float]:
    values = []
    for start in range(0, len(data), 18):
        (scale,) = struct.unpack_from("<e", data, start)
        for i in range(64):
            code = data[start + 2 + i // 4] >> (2 * (i % 4)) & 3
            values.append((-1, 0, 1, 2)[code] * scale)
    return values


LOOPS = {"Q1_0": q1_0, "Q2_0": q2_0}


def reference(packed: np.ndarray, name: str) -> np.ndarray:
    """uint8 [rows, row_bytes] -> fp32 [rows, K]."""
    if name in LOOPS:
        return np.array([LOOPS[name](row.tobytes()) for row in packed], dtype=np.float32)
    with np.errstate(all="ignore"):
        return gguf.quants.dequantize(packed, Q[name])


def random_rows(name: str, rows: int, blocks: int) -> np.ndarray:
    """Random bytes uint8 [rows, row_bytes] of blocks whose values are finite."""
    random = np.random.default_rng(TensorType[name])
    size = BLOCK_SIZES[TensorType[name]][1]
    kept = np.empty((0, size), dtype=np.uint8)
    while len(kept) < rows * blocks:
        drawn = random.integers(0, 256, (rows * blocks, size), dtype=np.uint8)
        kept = np.concatenate([kept, drawn[np.isfinite(reference(drawn, name)).all(axis=1)]])
    return kept[: rows * blocks].reshape(rows, blocks * size)


def test_no_type_is_forgotten():
    assert {*OF_THE_LIBRARY, *OF_OUR_OWN, *NOT_READ} == set(TensorType.__members__)
    assert {kind.name for kind in Q} <= set(TensorType.__members__)
    assert all(TensorType[kind.name] == kind for kind in Q)
    assert BLOCK_SIZES.keys() == set(TensorType)


@pytest.mark.parametrize("name", [*OF_THE_LIBRARY, *OF_OUR_OWN])
def test_values(name):
    kind = TensorType[name]
    check_type("x", kind)
    # More than one piece of 256 K values, for two threads, the last one not full.
    values = 300_000 if name not in LOOPS else 280_000
    packed = random_rows(name, rows=7, blocks=values // 7 // BLOCK_SIZES[kind][0])
    expected = reference(packed, name)
    got = dequantize_rows(packed, kind)
    assert got.dtype == torch.float32
    assert len(np.unique(expected[0])) > 1
    np.testing.assert_array_equal(got.numpy(), expected)
    got += 1  # memory of its own: neither the file's nor read-only
    np.testing.assert_array_equal(dequantize_rows(packed[2:5], kind).numpy(), expected[2:5])
    np.testing.assert_array_equal(dequantize_rows(packed[[4, 0]], kind).numpy(), expected[[4, 0]])
    assert dequantize_rows(packed[:0], kind).shape == (0, expected.shape[1])


@pytest.mark.parametrize("name", [*OF_THE_LIBRARY, *OF_OUR_OWN])
def test_rows_of_a_file(tmp_path, name):
    """The bytes of the right place, between two other tensors, mapped read-only."""
    kind = TensorType[name]
    block, size = BLOCK_SIZES[kind]
    packed = random_rows(name, rows=5, blocks=2)
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("before", np.full((3, 5), 7, dtype=np.float32))
    # The writer does not know of Q2_0: its bytes go in as an I8 tensor, whose entry in the table is changed then.
    known = name in Q.__members__
    writer.add_tensor("x.weight", packed if known else packed.view(np.int8), raw_dtype=Q[name] if known else Q.I8)
    writer.add_tensor("after", np.full(9, 8, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if not known:
        raw = path.read_bytes()
        entry = b"x.weight" + struct.pack("<IQQI", 2, 2 * size, 5, Q.I8)
        assert raw.count(entry) == 1
        path.write_bytes(raw.replace(entry, b"x.weight" + struct.pack("<IQQI", 2, 2 * block, 5, kind)))

    file = GGUFFile(path)
    tensor = file.tensors["x.weight"]
    assert (tensor.type, tensor.shape) == (kind, (5, 2 * block))
    assert (tensor.row_bytes, tensor.nbytes) == (2 * size, 5 * 2 * size)
    rows = file.packed_rows(tensor)
    assert not rows.flags.writeable
    np.testing.assert_array_equal(rows, packed)
    np.testing.assert_array_equal(dequantize_rows(rows[1:4], tensor.type).numpy(), reference(packed[1:4], name))


@pytest.mark.parametrize("name", NOT_READ)
def test_types_that_are_not_read(name):
    with pytest.raises(ConversionError, match=rf"tensor blk\.0\.x has type {name}, which cannot be dequantized"):
        check_type("blk.0.x", TensorType[name])


@pytest.mark.parametrize("threads", [1, 3])
def test_threads(threads):
    packed = random_rows("Q4_K", rows=3, blocks=1100)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        got = dequantize_rows(packed, TensorType.Q4_K)
    finally:
        torch.set_num_threads(before)
    np.testing.assert_array_equal(got.numpy(), reference(packed, "Q4_K"))


@pytest.fixture
def q4_k_model(tmp_path):
    """A llama of one layer, 30 million values in Q4_K."""
    hidden, inner = 1024, 8192
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(16)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(hidden // 16)
    for key, value in TOKENIZER.items():
        {str: writer.add_string, int: writer.add_uint32, list: writer.add_array}[type(value)](key, value)
    writer.add_tensor("token_embd.weight", np.ones((len(TOKENS), hidden), dtype=np.float32))
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(hidden, dtype=np.float32))
    shapes = {f"attn_{name}": (hidden, hidden) for name in ("q", "k", "v", "output")}
    shapes |= {"ffn_gate": (inner, hidden), "ffn_up": (inner, hidden), "ffn_down": (hidden, inner)}
    for name, (rows, columns) in shapes.items():
        packed = np.tile(random_rows("Q4_K", 64, columns // 256), (rows // 64, 1))
        writer.add_tensor(f"blk.0.{name}.weight", packed, raw_dtype=Q.Q4_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.slow
def test_speed(q4_k_model, tmp_path):
    """Processor time against a loop that reads, dequantizes and writes without checking, on one thread.

    The converter reads each value twice, once to check it. It took 0.9 of the loop's time where this was written.
    """

    def plain():
        with (tmp_path / "plain.bin").open("wb") as file:
            for tensor in gguf.GGUFReader(q4_k_model).tensors:
                values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
                file.write(torch.tensor(values).bfloat16().view(torch.int16).numpy().tobytes())
            os.fsync(file.fileno())

    def seconds(function):
        start = time.process_time()
        function()
        return time.process_time() - start

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        theirs = min(seconds(plain) for _ in range(3))
        ours = min(seconds(lambda: convert(q4_k_model, tmp_path / "out", format="bf16", overwrite=True)) for _ in range(3))
    finally:
        torch.set_num_threads(before)
    assert theirs / ours > 0.6, f"converted in {ours:.2f} s, the plain loop took {theirs:.2f} s"


@pytest.mark.parametrize("kind", sorted(_SCALES_OF), ids=lambda kind: TensorType(kind).name)
def test_scales_tell_what_is_finite(kind: int) -> None:
    """For each byte of a block, changed alone: the scales say so where the values are not all finite, and only there."""
    block_bytes = BLOCK_SIZES[kind][1]
    blocks = np.random.default_rng(kind).integers(0, 256, (2 * block_bytes, block_bytes), dtype=np.uint8)
    where = np.zeros(block_bytes, dtype=bool)
    where[_SCALES_OF[kind]] = True
    blocks[:, where] = 17  # a finite fp16 scale
    for byte in range(block_bytes):
        blocks[2 * byte, byte] = 0xFF
        blocks[2 * byte + 1, byte] = 0x7C
    finite = dequantize_rows(blocks, kind).isfinite().all(dim=1)
    assert not finite.all()
    told = [known_finite(block[None], kind) for block in blocks]
    assert told == finite.tolist()
    assert known_finite(blocks[finite.numpy()], kind)
    assert not known_finite(blocks, kind)


def test_unknown_types_are_not_known_to_be_finite() -> None:
    assert not known_finite(np.zeros((1, 4), dtype=np.uint8), TensorType.F32)
