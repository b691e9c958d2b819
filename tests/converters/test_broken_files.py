"""Broken files of every kind: exit code 1, one line that names the file and what is wrong with it, nothing written."""

import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Q
from gguf import GGUFValueType as V
from gguf_pieces import Entry, Pieces, Row, string, take_apart, write_llama
from typer.testing import CliRunner

from vllm_w8a8_plugin.cli import app

ABSURD = 2**60
QUERY = "blk.0.attn_q.weight"
NORM = "output_norm.weight"


@pytest.fixture
def refuses(tmp_path):
    """Runs `convert` in this process; returns the one line of its error."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}

    def run(source: Path) -> str:
        before = sorted(tmp_path.rglob("*"))
        result = CliRunner().invoke(app, ["convert", str(source), str(tmp_path / "out")])
        assert result.exit_code == 1, result.stderr
        assert result.stdout == ""
        (line,) = [line for line in result.stderr.split("\n") if line.strip()]
        assert line.startswith("error: ")
        assert len(line) < 600
        assert sorted(tmp_path.rglob("*")) == before
        return line

    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def good_gguf(tmp_path_factory) -> Path:
    (path,) = write_llama(tmp_path_factory.mktemp("good") / "model.gguf")
    return path


@pytest.fixture
def pieces(good_gguf) -> Pieces:
    return take_apart(good_gguf)


def array(kind: int, count: int, data: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + data


def scalar(name: str, layout: str, value, kind: V) -> Entry:
    return Entry(string(name), kind, struct.pack(layout, value))


def change(piece: str, **changes):
    """Changes a tensor's row of the table or, if there is no such tensor, a metadata entry."""

    def surgery(pieces: Pieces) -> None:
        where = pieces.tensors if piece in pieces.tensors else pieces.metadata
        where[piece] = replace(where[piece], **changes)

    return surgery


def header(**changes):
    def surgery(pieces: Pieces) -> None:
        for name, value in changes.items():
            setattr(pieces, name, value)

    return surgery


def add_metadata(key: bytes, kind: int, value: bytes):
    return header(extra_metadata=[Entry(key, kind, value)])


def align(layout: str, value: float, kind: V):
    return header(extra_metadata=[scalar("general.alignment", layout, value, kind)])


def add_tensor(name: bytes, offset: int = 0):
    return header(extra_tensors=[Row(name, [32], Q.F32, offset)])


def move(name: str, by: int):
    def surgery(pieces: Pieces) -> None:
        pieces.tensors[name].offset += by

    return surgery


def hole(pieces: Pieces) -> None:
    """Everything from the query matrix on is 32 bytes further."""
    at = pieces.tensors[QUERY].offset
    for row in pieces.tensors.values():
        row.offset += 32 * (row.offset >= at)
    pieces.data = pieces.data[:at] + bytes(32) + pieces.data[at:]


def cut(size: int):
    return lambda raw: raw[:size]


def keep(part: float):
    return lambda raw: raw[: int(len(raw) * part)]


def first_tensor_past_the_end(pieces: Pieces) -> None:
    pieces.tensors = {QUERY: replace(pieces.tensors[QUERY], offset=2**40)}


TOKENS, ARCHITECTURE, BLOCKS = "tokenizer.ggml.tokens", "general.architecture", "llama.block_count"

# What is done to the pieces of the good file -> what the line says, after the name of the file.
PIECES = {
    "wrong magic": (header(magic=b"GGML"), "is not a GGUF file: it begins with b'GGML'"),
    "byte-swapped magic": (header(magic=b"FUGG"), "is not a GGUF file: it begins with b'FUGG'"),
    "a zip file": (header(magic=b"PK\3\4"), "is not a GGUF file"),
    "version 0": (header(version=0), "version 0, not known"),
    "version 1": (header(version=1), "version 1, too old"),
    "version 4": (header(version=4), "version 4, not known"),
    "absurd version": (header(version=2**32 - 1), "version 4294967295, not known"),
    "big-endian": (header(version=3 << 24), "is a big-endian GGUF file, which is not read"),
    "absurd number of tensors": (header(n_tensors=ABSURD), "it counts 1,152,921,504,606,846,976 tensors, more than"),
    "one tensor too many": (header(n_tensors=12), "the name of tensor 11 takes 0 bytes|header cannot be read"),
    "absurd number of metadata": (header(n_metadata=ABSURD), "it counts 1,152,921,504,606,846,976 metadata entries"),
    "2^64 - 1 metadata": (header(n_metadata=2**64 - 1), "metadata entries, more than the file's"),
    "one metadata entry too many": (header(n_metadata=16), "header cannot be read|unknown value type"),
    "one metadata entry too few": (header(n_metadata=14), r"tensor tokenizer\.ggml\.eos_token_id has unknown type"),
    "key of absurd length": (add_metadata(string("x", ABSURD), V.UINT8, b"\0"), "the key of metadata entry .* expected 1 to"),
    "key of 70,000 bytes": (add_metadata(string("x" * 70_000), V.UINT8, b"\0"), "the key of metadata entry .* takes 70,000"),
    "empty key": (add_metadata(string(""), V.UINT8, b"\0"), "the key of metadata entry 15 takes 0 bytes"),
    "key that is not UTF-8": (add_metadata(string(b"\xff\xfe"), V.UINT8, b"\0"), "the key of metadata entry 15 is not UTF-8"),
    "key of two lines": (add_metadata(string("a\nb"), V.UINT8, b"\0"), "entry 15 holds control characters: 'a.nb'"),
    "key twice": (add_metadata(string(BLOCKS), V.UINT32, bytes(4)), f"has the metadata {BLOCKS} twice"),
    "unknown type of value": (add_metadata(string("x.y"), 13, bytes(8)), r"metadata x\.y has unknown value type 13"),
    "absurd type of value": (change(BLOCKS, type=2**31), f"metadata {BLOCKS} has unknown value type 2147483648"),
    "string of absurd length": (change(ARCHITECTURE, value=string("llama", ABSURD)), f"metadata {ARCHITECTURE} needs bytes"),
    "string of length 2^64 - 1": (change(ARCHITECTURE, value=string("llama", 2**64 - 1)), f"metadata {ARCHITECTURE} needs"),
    "string that is not UTF-8": (change(ARCHITECTURE, value=string(b"llam\xe9")), f"metadata {ARCHITECTURE} is not UTF-8"),
    "array of absurd length": (change(TOKENS, value=array(V.STRING, ABSURD)), f"metadata {TOKENS} is an array of 1,152,9"),
    "numbers of absurd length": (change(TOKENS, value=array(V.FLOAT64, ABSURD)), f"metadata {TOKENS} is an array of 1,152,9"),
    "array longer than the file": (change(TOKENS, value=array(V.UINT8, 3_000_000)), f"metadata {TOKENS} needs bytes up to"),
    "strings longer than the file": (
        change(TOKENS, value=array(V.STRING, 3, string("a") + string("b") + string("c", 2**50))),
        f"metadata {TOKENS}, value 2, needs bytes up to",
    ),
    "array with a string that is not UTF-8": (
        change(TOKENS, value=array(V.STRING, 2, string("a") + string(b"\xc3"))),
        f"metadata {TOKENS}, value 1, is not UTF-8",
    ),
    "array of arrays": (change(TOKENS, value=array(V.ARRAY, 1, array(V.UINT8, 1, b"\0"))), f"{TOKENS} is an array of arrays"),
    "array of an unknown type": (change(TOKENS, value=array(99, 1, b"\0")), f"metadata {TOKENS} has unknown value type 99"),
    "alignment 0": (align("<I", 0, V.UINT32), "alignment is 0, expected"),
    "alignment 48": (align("<I", 48, V.UINT32), "alignment is 48, expected"),
    "negative alignment": (align("<i", -32, V.INT32), "alignment is -32, exp"),
    "alignment 32.0": (align("<f", 32, V.FLOAT32), "alignment is 32.0, exp"),
    "alignment that is a text": (add_metadata(string("general.alignment"), V.STRING, string("32")), "alignment is '32', exp"),
    "alignment 2^31": (align("<I", 2**31, V.UINT32), "no multiple of the alignment 2147483648"),
    "tensor name of absurd length": (change(QUERY, name=string(QUERY, ABSURD)), "the name of tensor 3 takes 1,152,"),
    "tensor name of 65 bytes": (change(QUERY, name=string("x" * 65)), "the name of tensor 3 takes 65 bytes, expected 1 to 64"),
    "tensor without a name": (change(QUERY, name=string("")), "the name of tensor 3 takes 0 bytes"),
    "tensor name that is not UTF-8": (change(QUERY, name=string(b"blk.\x80.x")), "the name of tensor 3 is not UTF-8"),
    "tensor name of two lines": (change(QUERY, name=string("a\nb")), "the name of tensor 3 holds control characters"),
    "tensor twice": (change(QUERY, name=string("blk.0.attn_k.weight")), r"has tensor blk\.0\.attn_k\.weight twice"),
    "no dimensions": (change(NORM, dims=[]), f"tensor {NORM} has 0 dimensions, expected 1 to 4"),
    "five dimensions": (change(NORM, dims=[32, 1, 1, 1, 1]), f"tensor {NORM} has 5 dimensions"),
    "absurd number of dimensions": (change(NORM, n_dims=2**32 - 1), f"tensor {NORM} has 4294967295 dimensions"),
    "dimension 0": (change(QUERY, dims=[32, 0]), rf"tensor {QUERY} has a dimension of 0: shape \[0, 32\]"),
    "absurd dimension": (change(QUERY, dims=[32, ABSURD]), f"tensor {QUERY} has more than 2.63 values"),
    "dimensions that overflow": (change(QUERY, dims=[2**33, 2**31, 2]), f"tensor {QUERY} has more than 2.63 values"),
    "a size that overflows to what is right": (change(NORM, dims=[32, 2**59 + 1, 32]), f"tensor {NORM} has more than 2.63"),
    "rows that cut a block": (change(QUERY, dims=[48, 32]), f"rows of tensor {QUERY} hold 48 values, no multiple of the 32"),
    "unknown tensor type": (change(QUERY, type=250), f"tensor {QUERY} has unknown type 250"),
    "tensor type that was taken out": (change(QUERY, type=31), f"tensor {QUERY} has unknown type 31"),
    "tensor of another type": (change(NORM, type=Q.F16), r"tensor blk\.0\.attn_norm\.weight begins at byte .* a hole"),
    "more rows than there are": (change(QUERY, dims=[32, 64]), r"blk\.0\.attn_k\.weight begins .* they overlap"),
    "fewer rows than there are": (change(QUERY, dims=[32, 16]), r"blk\.0\.attn_k\.weight begins .* expected .* a hole"),
    "two tensors at one place": (add_tensor(string("extra.weight")), "they overlap"),
    "offset that is not aligned": (move(QUERY, 4), f"tensor {QUERY} has offset .* no multiple of the alignment 32"),
    "tensors that overlap": (move(QUERY, -32), f"tensor {QUERY} begins at byte .* they overlap"),
    "hole between tensors": (hole, f"tensor {QUERY} begins at byte .* a hole"),
    "offset beyond the file": (first_tensor_past_the_end, f"is truncated: tensor {QUERY} ends at byte 1,099,5"),
    "absurd offset": (change(QUERY, offset=2**64 - 32), f"is truncated: tensor {QUERY} ends at byte 18,446,"),
    "half a split file": (
        header(extra_metadata=[scalar("split.count", "<H", 2, V.UINT16), scalar("split.no", "<H", 0, V.UINT16)]),
        "is one of several parts .* are 0, 2, missing",
    ),
    "a split file's part alone": (
        header(extra_metadata=[
            scalar("split.no", "<H", 0, V.UINT16), scalar("split.count", "<H", 2, V.UINT16),
            scalar("split.tensors.count", "<i", 11, V.INT32),
        ]),
        "is part 1 of 2 by its metadata",
    ),
    "last tensor longer than the file": (
        lambda pieces: setattr(pieces, "data", pieces.data[:-32]),
        r"is truncated: tensor blk\.0\.ffn_down\.weight ends at byte",
    ),
    "no data": (header(data=b""), r"is truncated: tensor token_embd\.weight ends at byte"),
}  # fmt: skip

# What is kept of the good file's bytes.
BYTES = {
    "empty file": (cut(0), "is empty: download it again"),
    "two bytes": (cut(2), "begins with b'GG'"),
    "magic alone": (cut(4), "header cannot be read: the version needs bytes up to 8, the file has 4"),
    "half a count": (cut(12), "header cannot be read: the number of tensors needs bytes up to 16"),
    "no metadata": (cut(24), "metadata entries, more than the file's 24 bytes can hold|tensors, more than"),
    "cut in the metadata": (keep(0.1), "header cannot be read"),
    "cut in the tensor table": (keep(0.25), "header cannot be read|is truncated"),
    "cut in the data": (keep(0.7), "is truncated: tensor .* ends at byte"),
    "zeros": (lambda raw: bytes(len(raw)), "is not a GGUF file"),
    "cut in the data, and filled up": (lambda raw: raw[: int(0.7 * len(raw))].ljust(len(raw), b"\0"), "nothing but zeros"),
    "a text": (lambda raw: b"<!doctype html><title>404</title>" * 40, "is not a GGUF file: it begins with b'<!do'"),
    "a text that says GGUF": (lambda raw: b"GGUF" * 400, "version 1179993927, not known"),
}


def test_the_good_file_is_converted(good_gguf, tmp_path):
    result = CliRunner().invoke(app, ["convert", str(good_gguf), str(tmp_path / "out")])
    assert result.exit_code == 0, result.stderr


@pytest.mark.parametrize("case", PIECES)
def test_gguf(pieces, refuses, tmp_path, case):
    surgery, match = PIECES[case]
    surgery(pieces)
    path = tmp_path / "model.gguf"
    path.write_bytes(pieces.pack())
    assert re.search(rf"model\.gguf\b.*({match})", refuses(path))


@pytest.mark.parametrize("case", BYTES)
def test_gguf_bytes(good_gguf, refuses, tmp_path, case):
    surgery, match = BYTES[case]
    path = tmp_path / "model.gguf"
    path.write_bytes(surgery(good_gguf.read_bytes()))
    assert re.search(rf"model\.gguf\b.*({match})", refuses(path))


def zeroed(pieces: Pieces, name: str, but: int = 0) -> bytes:
    """The file with zeros for a tensor, but for its last bytes."""
    begin = pieces.tensors[name].offset
    end = min((row.offset for row in pieces.tensors.values() if row.offset > begin), default=len(pieces.data)) - but
    pieces.data = pieces.data[:begin] + bytes(end - begin) + pieces.data[end:]
    return pieces.pack()


@pytest.mark.parametrize("name", ["token_embd.weight", QUERY, "blk.0.ffn_up.weight"])
def test_gguf_with_a_weight_of_zeros(pieces, refuses, tmp_path, name):
    path = tmp_path / "model.gguf"
    path.write_bytes(zeroed(pieces, name))
    assert f"error: tensor {name} of {path} holds nothing but zeros, expected weights: a download was cut" in refuses(path)


def test_gguf_with_a_layer_that_adds_nothing(pieces, tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(zeroed(pieces, "blk.0.ffn_down.weight"))
    result = CliRunner().invoke(app, ["convert", str(path), str(tmp_path / "out")])
    assert result.exit_code == 0, result.stderr
    said = " ".join((result.stdout + result.stderr).split())
    assert "tensor blk.0.ffn_down.weight holds nothing but zeros: its layer adds nothing" in said


def test_gguf_with_some_zeros(pieces, tmp_path):
    """A norm may be zero, as Gemma's are by what is added to them; of a weight one row is enough."""
    path = tmp_path / "model.gguf"
    zeroed(pieces, NORM)
    path.write_bytes(zeroed(pieces, QUERY, but=34))
    result = CliRunner().invoke(app, ["convert", str(path), str(tmp_path / "out")])
    assert result.exit_code == 0, result.stderr


@pytest.mark.parametrize("name", ["I32", "F64", "Q8_1"])
def test_gguf_with_a_type_that_is_no_weights(pieces, refuses, tmp_path, name):
    last = pieces.tensors["blk.0.ffn_down.weight"]
    last.type = Q[name]
    pieces.data = pieces.data.ljust(len(pieces.data) + 2**17, b"\0")
    path = tmp_path / "model.gguf"
    path.write_bytes(pieces.pack())
    assert re.search(rf"tensor blk\.0\.ffn_down\.weight has type {name}, which cannot", refuses(path))


# Safetensors folders of two shards.

INDEX = "model.safetensors.index.json"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
GATE = "model.layers.0.mlp.gate_proj.weight"


@pytest.fixture
def folder(checkpoint) -> Path:
    return checkpoint(shards=2)


def edit_index(edit):
    def surgery(folder: Path) -> None:
        index = json.loads((folder / INDEX).read_text())
        (folder / INDEX).write_text(json.dumps(edit(index)))

    return surgery


def put(tensor: str, file) -> dict:
    return edit_index(lambda index: {**index, "weight_map": {**index["weight_map"], tensor: file}})


def split_header(path: Path) -> tuple[dict, bytes]:
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + size]), raw[8 + size :]


def write_header(path: Path, content: dict | str | bytes, data: bytes) -> None:
    text = json.dumps(content) if isinstance(content, dict) else content
    encoded = text.encode() if isinstance(text, str) else text
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + data)


def edit_header(edit, name: str = SECOND):
    """`edit` returns the new header or changes the one that it gets."""

    def surgery(folder: Path) -> None:
        content, data = split_header(folder / name)
        result = edit(content)
        write_header(folder / name, content if result is None else result, data)

    return surgery


def entry(**changes):
    """Changes a header's entry of the gate's weight [24, 16]."""
    return edit_header(lambda content: content[GATE].update(changes), name=FIRST)


def shift_gate(by: int):
    def edit(content: dict) -> None:
        begin, end = content[GATE]["data_offsets"]
        content[GATE]["data_offsets"] = [begin + by, end + by]

    return edit_header(edit, name=FIRST)


def both_swapped(folder: Path) -> None:
    """Each file's tensors where the index has those of the other."""
    kept = (folder / FIRST).read_bytes()
    (folder / FIRST).write_bytes((folder / SECOND).read_bytes())
    (folder / SECOND).write_bytes(kept)


def data_hole(folder: Path) -> None:
    """The gate and all that come after it are 2 bytes further."""
    content, data = split_header(folder / FIRST)
    at = content[GATE]["data_offsets"][0]
    for name, item in content.items():
        if name != "__metadata__" and item["data_offsets"][0] >= at:
            item["data_offsets"] = [offset + 2 for offset in item["data_offsets"]]
    write_header(folder / FIRST, content, data[:at] + b"\0\0" + data[at:])


def tensor_in_both(folder: Path) -> None:
    content, data = split_header(folder / SECOND)
    content[GATE] = {"dtype": "BF16", "shape": [24, 16], "data_offsets": [len(data), len(data) + 768]}
    write_header(folder / SECOND, content, data + bytes(768))


def link(name: str, target: str):
    def surgery(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).symlink_to(target)

    return surgery


def without_index(surgery):
    def both(folder: Path) -> None:
        (folder / INDEX).unlink()
        surgery(folder)

    return both


def write(name: str, data: bytes):
    return lambda folder: (folder / name).write_bytes(data)


def begin_with(size: int, name: str = SECOND):
    return lambda folder: (folder / name).write_bytes(size.to_bytes(8, "little") + (folder / name).read_bytes()[8:])


def other_index(folder: Path) -> None:
    text = (folder / INDEX).read_text()
    (folder / INDEX).write_text(text.replace("mlp", "block_sparse_moe"))


def duplicate_in_index(folder: Path) -> None:
    text = (folder / INDEX).read_text()
    (folder / INDEX).write_text(text.replace('"weight_map": {', f'"weight_map": {{"{GATE}": "{SECOND}", '))


def duplicate_in_header(content: dict) -> str:
    names = [name for name in content if name != "__metadata__"]
    return json.dumps(content).replace(f'"{names[1]}"', f'"{names[0]}"')


def directory(folder: Path) -> None:
    (folder / SECOND).unlink()
    (folder / SECOND).mkdir()


DEEP = "[" * 100_000 + "]" * 100_000

# What is done to the folder -> what the line says. It names the file, and the tensor where there is one.
FOLDERS = {
    "shard missing": (lambda folder: (folder / SECOND).unlink(), f"lacks 1 of the 2 files that {INDEX} names: {SECOND}"),
    "shard missing, no index": (without_index(lambda folder: (folder / FIRST).unlink()), f"lacks {FIRST}, and has no {INDEX}"),
    "shard is a folder": (directory, f"lacks 1 of the 2 files .*{SECOND}"),
    "shard is a folder, no index": (without_index(directory), f"lacks {SECOND}"),
    "shard links to itself": (link(SECOND, SECOND), f"lacks 1 of the 2 files .*{SECOND}"),
    "shard links to nothing": (link(SECOND, "../blobs/0a1b"), f"lacks 1 of the 2 files .*{SECOND}"),
    "index links to itself": (link(INDEX, INDEX), f"{INDEX} cannot be read: Too many levels of symbolic links"),
    "index links to nothing": (link(INDEX, "../blobs/0a1b"), f"{INDEX} cannot be read: No such file"),
    "index names a file above": (put(GATE, "../model.safetensors"), f"{INDEX} names a file outside its folder: .*{GATE}"),
    "index names an absolute path": (put(GATE, "/etc/passwd"), f"{INDEX} names a file outside its folder: '/etc/passwd'"),
    "index names a file below": (put(GATE, "sub/model.safetensors"), f"{INDEX} names a file outside its folder"),
    "index names the folder above": (put(GATE, ".."), f"{INDEX} names a file outside its folder: '..'"),
    "index names no file": (put(GATE, ""), f"{INDEX} names a file outside its folder: ''"),
    "index names a number": (put(GATE, 7), f"{INDEX} is not a safetensors index: it puts '{GATE}' into '7'"),
    "index names a list": (put(GATE, [FIRST]), f"{INDEX} is not a safetensors index: it puts '{GATE}' into"),
    "index names a file of two lines": (put(GATE, "a\nb"), f"{INDEX} is not a safetensors index: .*{GATE}' into 'a.+nb'"),
    "index names a missing file": (put(GATE, "other.safetensors"), f"lacks 1 of the 3 files that {INDEX} names: other"),
    "index names a file that is no weights": (put("x.weight", "config.json"), f"{INDEX} names no safetensors file"),
    "index names a missing tensor": (put("x.weight", FIRST), f"{INDEX} names 1 tensors that no file holds: x.weight"),
    "index puts a tensor elsewhere": (put(GATE, SECOND), f"{INDEX} puts tensor {GATE} into {SECOND}, but {FIRST} holds it"),
    "index names a tensor twice": (duplicate_in_index, f"{INDEX} is not JSON: '{GATE}' appears twice"),
    "index without weight_map": (write(INDEX, b"{}"), f"{INDEX} is not a safetensors index"),
    "index with no tensors": (write(INDEX, b'{"weight_map": {}}'), f"{INDEX} is not a safetensors index"),
    "index is a list": (write(INDEX, b"[1]"), f"{INDEX} is not a safetensors index"),
    "index is empty": (write(INDEX, b""), f"{INDEX} is not JSON"),
    "index is cut": (lambda folder: os.truncate(folder / INDEX, 200), f"{INDEX} is not JSON"),
    "index nested too deeply": (write(INDEX, DEEP.encode()), f"{INDEX} is not JSON: it is nested too deeply"),
    "index of another checkpoint": (other_index, f"holds tensor model.*, which {INDEX} does not name"),
    "shards changed places": (both_swapped, f"{INDEX} puts tensor .* into {FIRST}, but {SECOND} holds it"),
    "tensor in two shards": (tensor_in_both, f"tensor {GATE} is in both {FIRST} and {SECOND} of .*src"),
    "empty file": (write(SECOND, b""), f"{SECOND} is truncated: its header needs 8 bytes, the file has 0"),
    "seven bytes": (write(SECOND, b"\x10" + bytes(6)), f"{SECOND} is truncated"),
    "header cut": (lambda folder: os.truncate(folder / SECOND, 100), f"{SECOND} is truncated: its header needs"),
    "data cut": (
        lambda folder: os.truncate(folder / SECOND, (folder / SECOND).stat().st_size - 1), f"{SECOND} is truncated: expected"
    ),
    "data too long": (
        lambda folder: (folder / SECOND).write_bytes((folder / SECOND).read_bytes() + b"x"),
        f"{SECOND} is longer than its header says",
    ),
    "header of 2^60 bytes": (begin_with(ABSURD), f"{SECOND} is truncated: its header needs 1,152,921,504,606,846,984 bytes"),
    "header of 2^64 - 1 bytes": (begin_with(2**64 - 1), f"{SECOND} is truncated: its header needs 18,446"),
    "header of 0 bytes": (begin_with(0), f"{SECOND} has no valid safetensors header"),
    "header a byte too long": (
        lambda folder: begin_with(int.from_bytes((folder / SECOND).read_bytes()[:8], "little") + 1)(folder),
        f"{SECOND} has no valid safetensors header",
    ),
    "header is not JSON": (edit_header(lambda content: "{]"), f"{SECOND} has no valid safetensors header"),
    "header is not UTF-8": (edit_header(lambda content: b'{"\xff": 1}'), f"{SECOND} has no valid safetensors header"),
    "header is a list": (edit_header(lambda content: "[1]"), f"{SECOND} has no valid safetensors header: it is a list"),
    "header is a number": (edit_header(lambda content: "7"), f"{SECOND} has no valid safetensors header: it is a int"),
    "header nested too deeply": (edit_header(lambda content: DEEP), f"{SECOND} has no valid .*: it is nested too deeply"),
    "a pickle by this name": (write(SECOND, b"\x80\x02}q\x00." * 100), f"{SECOND} is truncated: its header"),
    "tensor twice in a header": (edit_header(duplicate_in_header), f"{SECOND} has no valid .*'model.* appears twice"),
    "tensor name of two lines": (
        edit_header(lambda content: json.dumps(content).replace("layers.1.mlp", "layers.1.\\nmlp")),
        f"{SECOND}: the name of tensor 'model.layers.1..nmlp.*' holds control characters",
    ),
    "entry is no object": (edit_header(lambda c: c.update({GATE: 7}), FIRST), f"{FIRST}: .* {GATE} is malformed: '7'"),
    "entry without a shape": (edit_header(lambda c: c[GATE].pop("shape") and None, FIRST), f"{FIRST}: .* {GATE} is malformed"),
    "entry without offsets": (
        edit_header(lambda c: c[GATE].pop("data_offsets") and None, FIRST), f"{FIRST}: .* {GATE} is malformed"
    ),
    "unknown dtype": (entry(dtype="F6_E2M3"), f"{FIRST}: tensor {GATE} has unknown dtype F6_E2M3"),
    "dtype that is a number": (entry(dtype=16), f"{FIRST}: .* tensor {GATE} is malformed"),
    "dtype that is a list": (entry(dtype=["BF16"]), f"{FIRST}: .* tensor {GATE} is malformed"),
    "shape that is a text": (entry(shape="24"), f"{FIRST}: .* tensor {GATE} is malformed"),
    "shape that is a number": (entry(shape=384), f"{FIRST}: .* tensor {GATE} is malformed"),
    "negative dimensions": (entry(shape=[-24, -16]), f"{FIRST}: .* tensor {GATE} is malformed"),
    "boolean dimension": (entry(shape=[24, 16, True]), f"{FIRST}: .* tensor {GATE} is malformed"),
    "float dimension": (entry(shape=[24.0, 16.0]), f"{FIRST}: .* tensor {GATE} is malformed"),
    "nested shape": (entry(shape=[[24, 16]]), f"{FIRST}: .* tensor {GATE} is malformed"),
    "other shape": (entry(shape=[24, 17]), rf"{FIRST}: tensor {GATE} \(BF16, shape \[24, 17\]\) needs 816 bytes, .* 768"),
    "absurd dimension": (entry(shape=[ABSURD, 16]), f"{FIRST}: tensor {GATE} .* needs 36,893,488,147,419,103,232 bytes"),
    "dimension 0": (entry(shape=[24, 0]), f"{FIRST}: tensor {GATE} .* needs 0 bytes"),
    "other dtype": (entry(dtype="F32"), rf"{FIRST}: tensor {GATE} \(F32, shape \[24, 16\]\) needs 1,536 bytes"),
    "negative offsets": (entry(data_offsets=[-768, 0]), f"{FIRST}: .* tensor {GATE} is malformed"),
    "float offsets": (entry(data_offsets=[0.0, 768.0]), f"{FIRST}: .* tensor {GATE} is malformed"),
    "boolean offsets": (entry(data_offsets=[False, 768]), f"{FIRST}: .* tensor {GATE} is malformed"),
    "offsets the wrong way": (entry(data_offsets=[768, 0]), f"{FIRST}: tensor {GATE} .* its header gives it -768"),
    "three offsets": (entry(data_offsets=[0, 768, 768]), f"{FIRST}: .* tensor {GATE} is malformed"),
    "tensors that overlap": (shift_gate(-2), f"{FIRST}: tensor {GATE} (overlaps the tensor|leaves a hole) before it"),
    "two tensors at one place": (entry(data_offsets=[0, 768]), f"{FIRST}: tensor .* overlaps the tensor before it"),
    "hole between tensors": (data_hole, f"{FIRST}: tensor {GATE} leaves a hole before it"),
    "offsets beyond the file": (shift_gate(10**15), f"{FIRST}: tensor .* leaves a hole before it"),
}  # fmt: skip


def test_the_good_folder_is_converted(folder, tmp_path):
    result = CliRunner().invoke(app, ["convert", str(folder), str(tmp_path / "out")])
    assert result.exit_code == 0, result.stderr


@pytest.mark.parametrize("case", FOLDERS)
def test_safetensors(folder, refuses, case):
    surgery, match = FOLDERS[case]
    surgery(folder)
    assert re.search(match, refuses(folder))


@pytest.mark.parametrize("target", ["model.safetensors", "../blobs/0a1b"], ids=["itself", "nothing"])
def test_single_file_that_links_nowhere(folder, refuses, target):
    for name in (INDEX, FIRST, SECOND):
        (folder / name).unlink()
    (folder / "model.safetensors").symlink_to(target)
    assert re.search(r"src/model\.safetensors cannot be read: (Too many levels|No such file)", refuses(folder))


# Converts each file given; every one must be refused. Prints by how much the peak of resident memory has grown meanwhile.
# The limit turns memory that is asked for but not touched into a MemoryError, which the conversion does not catch.
MEMORY = textwrap.dedent(
    """
    import resource, sys, tempfile
    from pathlib import Path
    from w8a8_converters.convert import convert
    from w8a8_converters.errors import BrokenFileError

    good, out, *broken = map(Path, sys.argv[1:])
    convert(good, out)
    data = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmData")) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (data + 500 * 10**6,) * 2)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for path in broken:
        try:
            convert(path, out.with_name("none"))
        except BrokenFileError:
            continue
        sys.exit(f"{path} was not refused")
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
    """
)
LARGE = 8 * 2**30


@pytest.fixture
def absurd(tmp_path, checkpoint, good_gguf) -> list[Path]:
    """Absurd counts and lengths: in small files, and such as a file of 8 GiB, a hole on disk, could hold."""
    absurd = [case for case in PIECES if re.search(r"absurd|2\^64|overflow|longer than", case)]
    zeros = {
        "2^27 tensors": header(n_tensors=2**27),
        "2^28 metadata entries": header(n_metadata=2**28),
        "2^30 numbers": change(TOKENS, value=array(V.UINT8, 2**30)),
        "2^29 empty strings": change(TOKENS, value=array(V.STRING, 2**29)),
        "7,000,000 empty strings": change(TOKENS, value=array(V.STRING, 7_000_000)),
        "7,000,000 numbers": change(TOKENS, value=array(V.UINT64, 7_000_000)),
        "string of 4 GiB": change(ARCHITECTURE, value=string("llama", 2**32)),
        "name of 4 GiB": change(QUERY, name=string(QUERY, 2**32)),
    }
    paths = []
    for number, (name, surgery) in enumerate([*((case, PIECES[case][0]) for case in absurd), *zeros.items()]):
        pieces = take_apart(good_gguf)
        surgery(pieces)
        paths.append(tmp_path / f"{number}.gguf")
        paths[-1].write_bytes(pieces.pack())
        if name in zeros:
            os.truncate(paths[-1], LARGE)
    folder = checkpoint()
    for number, size in enumerate((ABSURD, 2**64 - 1, 2**32)):
        paths.append(tmp_path / f"folder{number}")
        shutil.copytree(folder, paths[-1])
        begin_with(size, "model.safetensors")(paths[-1])
        if size < LARGE:
            os.truncate(paths[-1] / "model.safetensors", LARGE)
    return paths


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_absurd_counts_take_no_memory(absurd, good_gguf, tmp_path):
    """On top of what importing torch and converting the good file take: under 500 MB, resident and asked for."""
    assert len(absurd) > 20
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", MEMORY, str(good_gguf), str(tmp_path / "out"), *map(str, absurd)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr[-2000:]
    assert int(result.stdout) < 500e6, f"{int(result.stdout):,} bytes"
    assert not (tmp_path / "none").exists()
