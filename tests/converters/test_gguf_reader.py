"""What the reader gives, against the library's own reader; split files; files cut at every byte."""

import os
import random
import re
import shutil
import struct
import time

import gguf
import numpy as np
import pytest
from gguf import GGUFValueType
from gguf_pieces import SHAPES, Entry, Row, string, take_apart, write_llama

from w8a8_converters.errors import BrokenFileError, ConversionError
from w8a8_converters.gguf.reader import GGUFFile

VALUES = {
    GGUFValueType.UINT8: [0, 255],
    GGUFValueType.INT8: [-128, 127],
    GGUFValueType.UINT16: [0, 2**16 - 1],
    GGUFValueType.INT16: [-(2**15), 2**15 - 1],
    GGUFValueType.UINT32: [0, 2**32 - 1],
    GGUFValueType.INT32: [-(2**31), 2**31 - 1],
    GGUFValueType.UINT64: [0, 2**64 - 1],
    GGUFValueType.INT64: [-(2**63), 2**63 - 1],
    GGUFValueType.FLOAT32: [0.5, -1000.0],
    GGUFValueType.FLOAT64: [0.1, -1e300],
    GGUFValueType.BOOL: [False, True],
    GGUFValueType.STRING: ["", "a", "▁日本", "two\nlines", "x" * 300],
}


@pytest.fixture
def model(tmp_path):
    (path,) = write_llama(tmp_path / "model.gguf")
    return path


def library_metadata(path):
    return {key: item.contents() for key, item in gguf.GGUFReader(path).fields.items() if not key.startswith("GGUF.")}


def check_tensors(file, path):
    """Tensors of one file as the library reads them."""
    for theirs in gguf.GGUFReader(path).tensors:
        ours = file.tensors[theirs.name]
        assert ours.shape == tuple(reversed(theirs.shape.tolist())) == SHAPES[ours.name]
        assert (ours.type, ours.offset, ours.nbytes) == (theirs.tensor_type, theirs.data_offset, theirs.n_bytes)
        assert file.packed_rows(ours).tobytes() == theirs.data.tobytes()
        assert file.packed_rows(ours).shape == (ours.nbytes // ours.row_bytes, ours.row_bytes)


@pytest.mark.parametrize("version", [2, 3])
def test_a_file(model, version):
    pieces = take_apart(model)
    pieces.version = version
    model.write_bytes(pieces.pack())
    file = GGUFFile(model)
    assert file.path == model
    assert file.files == [model]
    assert file.metadata == library_metadata(model)
    assert list(file.tensors) == list(SHAPES)
    check_tensors(file, model)
    assert file.required("llama.block_count") == 1
    with pytest.raises(ConversionError, match=r"model\.gguf lacks the metadata llama\.nothing"):
        file.required("llama.nothing")


def test_every_type_of_value(tmp_path):
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for kind, values in VALUES.items():
        for i, value in enumerate(values):
            writer.add_key_value(f"{kind.name}.{i}", value, kind)
        writer.add_key_value(f"{kind.name}.list", values, GGUFValueType.ARRAY, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    read = GGUFFile(path).metadata
    assert read == library_metadata(path)
    for kind, values in VALUES.items():
        assert read[f"{kind.name}.list"] == values
        assert [type(value) for value in read[f"{kind.name}.list"]] == [type(value) for value in values]
        assert [read[f"{kind.name}.{i}"] for i in range(len(values))] == values
        assert type(read[f"{kind.name}.0"]) is type(values[0])


def test_empty_array_and_no_tensors(model):
    pieces = take_apart(model)
    pieces.tensors, pieces.data = {}, b""
    pieces.extra_metadata = [
        Entry(string("none"), GGUFValueType.ARRAY, struct.pack("<IQ", GGUFValueType.STRING, 0)),
        Entry(string("no.numbers"), GGUFValueType.ARRAY, struct.pack("<IQ", GGUFValueType.FLOAT32, 0)),
    ]
    model.write_bytes(pieces.pack())
    file = GGUFFile(model)
    assert file.tensors == {}
    assert (file.metadata["none"], file.metadata["no.numbers"]) == ([], [])


@pytest.mark.parametrize("alignment", [8, 64, 4096])
def test_alignment(tmp_path, alignment):
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(alignment)
    for name, shape in (("a", (3, 5)), ("b", (7,)), ("c", (2, 3, 4, 5))):
        writer.add_tensor(name, np.arange(np.prod(shape), dtype=np.float32).reshape(shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUFFile(path)
    for theirs in gguf.GGUFReader(path).tensors:
        ours = file.tensors[theirs.name]
        assert ours.offset % alignment == 0
        assert file.packed_rows(ours).tobytes() == theirs.data.tobytes()


def test_every_cut_is_refused(model):
    """From the empty file to one that lacks the last byte of the last tensor."""
    raw = model.read_bytes()
    last = max(GGUFFile(model).tensors.values(), key=lambda tensor: tensor.offset)
    end = last.offset + last.nbytes
    header = min(tensor.offset for tensor in GGUFFile(model).tensors.values())
    cuts = [*range(0, header, 7), *range(header, end, 509), header, end - 1]
    for size in sorted(cuts, reverse=True):
        os.truncate(model, size)
        with pytest.raises(BrokenFileError, match=r"model\.gguf") as error:
            GGUFFile(model)
        assert "\n" not in str(error.value)
    model.write_bytes(raw[:end])
    assert len(GGUFFile(model).tensors) == len(SHAPES), "the padding after the last tensor holds nothing"


def test_damaged_bytes_never_crash_it(model):
    """Any change of the header's bytes gives a file that is read, or one line."""
    raw = model.read_bytes()
    header = min(tensor.offset for tensor in GGUFFile(model).tensors.values())
    choose = random.Random(0)
    refused = []
    for _ in range(600):
        damaged = bytearray(raw)
        for _ in range(choose.choice((1, 1, 4))):
            damaged[choose.randrange(header)] = choose.choice((0, 1, 0x7F, 0xFF, choose.randrange(256)))
        model.write_bytes(damaged)
        try:
            GGUFFile(model)
        except BrokenFileError as error:
            refused.append(str(error))
    assert len(refused) > 100
    assert all("\n" not in line and str(model) in line for line in refused)


def test_large_vocabulary_is_read_fast(tmp_path):
    """A 250,000-entry vocabulary in under 3 s; it takes some 0.3 s where nothing else runs."""
    count = 250_000
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    tokens = [f"Ġtoken{i}é" for i in range(count)]
    columns = {
        "tokens": tokens,
        "scores": [-float(i) for i in range(count)],
        "token_type": [1] * count,
        "merges": [f"a{i} b{i}" for i in range(count)],
    }
    for name, values in columns.items():
        writer.add_array(f"tokenizer.ggml.{name}", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    seconds = []
    for _ in range(2):
        start = time.perf_counter()
        file = GGUFFile(path)
        seconds.append(time.perf_counter() - start)
    for name, values in columns.items():
        assert file.metadata[f"tokenizer.ggml.{name}"] == values
    assert min(seconds) < 1.5, f"{min(seconds):.2f} s"


def test_tensor_data_are_not_read(model):
    """A file with a tensor of 16 GB, a hole on disk."""
    pieces = take_apart(model)
    end = -(-len(pieces.data) // 32) * 32
    pieces.data = pieces.data.ljust(end, b"\0")
    pieces.extra_tensors = [Row(string("huge.weight"), [2**16, 2**16], gguf.GGMLQuantizationType.F32, end)]
    raw = pieces.pack()
    model.write_bytes(raw)
    os.truncate(model, len(raw) + 4 * 2**32)
    start = time.perf_counter()
    file = GGUFFile(model)
    assert time.perf_counter() - start < 1
    assert file.tensors["huge.weight"].nbytes == 4 * 2**32
    assert not file.packed_rows(file.tensors["huge.weight"])[-2:].any()


@pytest.fixture
def parts(tmp_path):
    """Three files of a split one."""
    paths = write_llama(tmp_path / "llama.gguf", tensors_per_part=4)
    assert [path.name for path in paths] == [f"llama-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    return paths


@pytest.mark.parametrize("opened", [0, 1, 2])
def test_any_part_opens_all(parts, opened):
    file = GGUFFile(parts[opened])
    assert file.path == parts[opened]
    assert file.files == parts
    assert list(file.tensors) == list(SHAPES)
    for path in parts:
        check_tensors(file, path)
    assert file.metadata == library_metadata(parts[0])
    assert [file.tensors[name].part for name in SHAPES] == [0] * 4 + [1] * 4 + [2] * 3


def test_a_split_file_of_one_part(tmp_path, model):
    """Joined by llama.cpp, which leaves a count of 0, or never split."""
    pieces = take_apart(model)
    for count in (0, 1):
        pieces.extra_metadata = [
            Entry(string(key), GGUFValueType.UINT16, struct.pack("<H", value))
            for key, value in (("split.no", 0), ("split.count", count), ("split.tensors.count", len(SHAPES)))
        ]
        for name in ("model.gguf", "model-00001-of-00001.gguf"):
            path = tmp_path / name
            path.write_bytes(pieces.pack())
            assert list(GGUFFile(path).tensors) == list(SHAPES)


def change_split(path, key, value):
    pieces = take_apart(path)
    kind = GGUFValueType(pieces.metadata[key].type)
    pieces.metadata[key].value = struct.pack("<H" if kind == GGUFValueType.UINT16 else "<i", value)
    path.write_bytes(pieces.pack())


def without(path, key):
    pieces = take_apart(path)
    del pieces.metadata[key]
    path.write_bytes(pieces.pack())


def change_alike(path, key, value):
    """In all parts."""
    for other in path.parent.glob("*.gguf"):
        change_split(other, key, value)


def swap(path, other):
    kept = path.read_bytes()
    path.write_bytes(other.read_bytes())
    other.write_bytes(kept)


def rename(path, name):
    shutil.move(path, path.with_name(name))


def replace_tensor_name(path, name, by):
    raw = path.read_bytes()
    assert len(name) == len(by)
    assert raw.count(name) == 1
    path.write_bytes(raw.replace(name, by))


def other_model(path):
    pieces = take_apart(path)
    pieces.extra_metadata = [Entry(string("general.architecture"), GGUFValueType.STRING, string("qwen2"))]
    path.write_bytes(pieces.pack())


@pytest.mark.parametrize(
    ("surgery", "match"),
    [
        (lambda a, b, c: b.unlink(), r"one of 3 parts, and .* lacks 1 of them: <2>"),
        (lambda a, b, c: (a.unlink(), b.unlink()), "lacks 2 of them: <1>, <2>"),
        (lambda a, b, c: swap(b, c), r"<3> is part 2 of 3 by its metadata|<2>: .*expected \(1, 3, 11\)"),
        (lambda a, b, c: c.write_bytes(b.read_bytes()), r"<3> is part 2 of 3|<3>.* are \(1, 3, 11\), exp"),
        (lambda a, b, c: change_split(b, "split.count", 4), r"<2>: metadata split.no, .* are \(1, 4, 11\), expected"),
        (lambda a, b, c: change_split(b, "split.tensors.count", 10), r"<2>: .* are \(1, 3, 10\), expected"),
        (lambda a, b, c: change_alike(a, "split.tensors.count", 12), "tensors.count is 12, its 3 parts hold 11 tensors"),
        (lambda a, b, c: change_split(c, "split.no", 3), r"<3> is one of several parts .* are 3, 3, 11: expected"),
        (lambda a, b, c: change_split(c, "split.no", 1), r"<3> is part 2 of 3|<3>.* are \(1, 3, 11\), exp"),
        (lambda a, b, c: without(b, "split.no"), r"<2> is one of several parts .* are missing, 3, 11: expected"),
        (lambda a, b, c: without(b, "split.count"), r"<2> is one of several parts .* are 1, missing, 11"),
        (lambda a, b, c: without(c, "split.tensors.count"), r"<3> is one of several parts .* are 2, 3, missing"),
        (
            lambda a, b, c: replace_tensor_name(b, b"blk.0.attn_k.weight", b"blk.0.attn_q.weight"),
            r"tensor blk\.0\.attn_q\.weight is in both .*<1> and .*<2>",
        ),
        (lambda a, b, c: other_model(b), r"<2> and <1> contradict .* general\.architecture"),
        (lambda a, b, c: os.truncate(b, b.stat().st_size - 100), r"<2> is truncated: tensor blk\.0\.ffn_norm\.weight"),
        (lambda a, b, c: b.write_bytes(b"GGML" + b.read_bytes()[4:]), r"<2> is not a GGUF file"),
    ],
    ids=lambda value: "" if callable(value) else value[:40],
)
def test_parts_that_do_not_match(parts, surgery, match):
    surgery(*parts)
    for path in filter(os.path.exists, parts[::2]):
        with pytest.raises(BrokenFileError, match=re.sub("<(.)>", r"llama-0000\1-of-00003\.gguf", match)) as error:
            GGUFFile(path)
        assert "\n" not in str(error.value)


def test_a_part_by_another_name(parts):
    for name in ("part2.gguf", "llama-00002-of-00004.gguf", "llama-00001-of-00001.gguf"):
        rename(parts[1], name)
        path = parts[1].with_name(name)
        with pytest.raises(BrokenFileError, match=rf"{name} is part 2 of 3 by its metadata: parts are named NAME-00001-of"):
            GGUFFile(path)
        shutil.move(path, parts[1])


@pytest.mark.parametrize("name", ["model-00001-of-00002.gguf", "model-00003-of-00001.gguf", "model-00000-of-00000.gguf"])
def test_a_whole_file_by_a_parts_name(model, name):
    rename(model, name)
    with pytest.raises(BrokenFileError, match=r"one of several parts by its name .* missing, missing, missing"):
        GGUFFile(model.with_name(name))


def test_a_file_that_cannot_be_opened(tmp_path):
    with pytest.raises(ConversionError, match=r"nowhere\.gguf cannot be read: No such file"):
        GGUFFile(tmp_path / "nowhere.gguf")
