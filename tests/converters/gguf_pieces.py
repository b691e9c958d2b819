"""A GGUF file taken apart with the library's reader, to be put together again with something wrong in it."""

import struct
from dataclasses import dataclass, field
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Q
from gguf_models import TOKENIZER, TOKENS

HIDDEN, INNER, HEADS = 32, 64, 4
SHAPES = {
    "token_embd.weight": (len(TOKENS), HIDDEN),
    "output_norm.weight": (HIDDEN,),
    "blk.0.attn_norm.weight": (HIDDEN,),
    "blk.0.attn_q.weight": (HIDDEN, HIDDEN),
    "blk.0.attn_k.weight": (HIDDEN, HIDDEN),
    "blk.0.attn_v.weight": (HIDDEN, HIDDEN),
    "blk.0.attn_output.weight": (HIDDEN, HIDDEN),
    "blk.0.ffn_norm.weight": (HIDDEN,),
    "blk.0.ffn_gate.weight": (INNER, HIDDEN),
    "blk.0.ffn_up.weight": (INNER, HIDDEN),
    "blk.0.ffn_down.weight": (HIDDEN, INNER),
}


def write_llama(path: Path, tensors_per_part: int = 0) -> list[Path]:
    """A tiny llama of one layer, its matrices in Q8_0; in parts of so many tensors, if given. Returns the files."""
    writer = gguf.GGUFWriter(path, "llama", split_max_tensors=tensors_per_part)
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    for key, value in TOKENIZER.items():
        add = {str: writer.add_string, int: writer.add_uint32, list: writer.add_array}[type(value)]
        add(key, value)
    random = np.random.default_rng(0)
    for name, shape in SHAPES.items():
        values = random.standard_normal(shape).astype(np.float32)
        kind = Q.Q8_0 if values.ndim == 2 else Q.F32
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(path.parent.glob(f"{path.stem}*.gguf"))


def string(text: str | bytes, size: int | None = None) -> bytes:
    """A string with its length, or with `size` said to be its length."""
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data) if size is None else size) + data


@dataclass
class Entry:
    """A metadata entry: key with its length, type of the value, the value's bytes."""

    key: bytes
    type: int
    value: bytes


@dataclass
class Row:
    """An entry of the tensor table; `dims` as in the file, row length first."""

    name: bytes
    dims: list[int]
    type: int
    offset: int
    n_dims: int | None = None

    def pack(self) -> bytes:
        n_dims = len(self.dims) if self.n_dims is None else self.n_dims
        return self.name + struct.pack(f"<I{len(self.dims)}QIQ", n_dims, *self.dims, self.type, self.offset)


@dataclass
class Pieces:
    """A GGUF file, to be changed. Counts are those of the pieces unless they are set."""

    metadata: dict[str, Entry]
    tensors: dict[str, Row]
    data: bytes
    magic: bytes = b"GGUF"
    version: int = 3
    n_metadata: int | None = None
    n_tensors: int | None = None
    extra_metadata: list[Entry] = field(default_factory=list)
    extra_tensors: list[Row] = field(default_factory=list)
    alignment: int = 32

    def pack(self) -> bytes:
        entries = [*self.metadata.values(), *self.extra_metadata]
        rows = [*self.tensors.values(), *self.extra_tensors]
        counts = (
            len(rows) if self.n_tensors is None else self.n_tensors,
            len(entries) if self.n_metadata is None else self.n_metadata,
        )
        header = self.magic + struct.pack("<IQQ", self.version, *counts)
        header += b"".join(entry.key + struct.pack("<I", entry.type) + entry.value for entry in entries)
        header += b"".join(row.pack() for row in rows)
        return header + bytes(-len(header) % self.alignment) + self.data


def take_apart(path: Path) -> Pieces:
    reader = gguf.GGUFReader(path)
    metadata = {}
    for key, item in reader.fields.items():
        if key.startswith("GGUF."):
            continue
        size, name, kind, *value = (part.tobytes() for part in item.parts)
        metadata[key] = Entry(size + name, int.from_bytes(kind, "little"), b"".join(value))
    tensors = {}
    for tensor in reader.tensors:
        size, name, _, dims, kind, offset = tensor.field.parts
        tensors[tensor.name] = Row(size.tobytes() + name.tobytes(), dims.tolist(), int(kind[0]), int(offset[0]))
    pieces = Pieces(metadata, tensors, path.read_bytes()[reader.data_offset :])
    assert pieces.pack() == path.read_bytes(), "the pieces make the file"
    return pieces
