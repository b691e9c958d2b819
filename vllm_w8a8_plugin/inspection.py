"""Tables of what `vllm-w8a8 inspect` found, for people."""

from collections.abc import Iterator
from typing import Any

from rich.markup import escape
from rich.table import Table

from w8a8_converters.errors import one_line
from w8a8_converters.inspect import Inspection


def tables(found: Inspection) -> Iterator[Table]:
    """All that is known, one table for each subject."""
    if found.format is not None:
        yield _facts(found)
    if found.tensor_types:
        table = Table("stored as", "tensors", "size", box=None)
        for row in found.tensor_types:
            table.add_row(row["type"], str(row["tensors"]), _size(row["bytes"]))
        yield table
    if found.convert:
        yield _conversion(found.convert)
    if found.memory:
        yield _memory(found.memory)


def _facts(found: Inspection) -> Table:
    tokenizer = found.tokenizer or {}
    known = {
        "path": found.path,
        "format": found.format,
        "files": f"{len(found.files)}, {_size(sum(file['bytes'] for file in found.files))}" if found.files else None,
        "architecture": found.architecture,
        "model type": found.model_type,
        "quantized": found.quantization,
        "parameters": f"{found.parameters:,}" if found.parameters else None,
        "layers": found.layers,
        "context length": f"{found.context_length:,}" if found.context_length else None,
        "tokenizer": tokenizer.get("kind"),
        "pre-tokenizer": tokenizer.get("pre"),
        "vocabulary": f"{tokenizer['tokens']:,}" if tokenizer.get("tokens") else None,
        "chat template": "yes" if found.chat_template else "no",
    }
    table = Table(box=None, show_header=False)
    for name, value in known.items():
        if value is not None:
            table.add_row(name, escape(one_line(value)))
    return table


def _conversion(convert: dict[str, Any]) -> Table:
    int8 = convert["int8"]
    blocks = ", ".join(f"{row['block'] or 'none'} in {row['layers']} layers" for row in convert["hadamard"])
    table = Table("convert would make", "tensors", "size", box=None)
    table.add_row("int8 layers", str(int8["layers"]), _size(int8["bytes"]))
    for row in convert["kept"]:
        table.add_row(f"as they are: {row['what']}", str(row["tensors"]), _size(row["bytes"]))
    table.add_row("in all", "", _size(convert["output_bytes"]))
    table.add_row(f"Hadamard blocks: {blocks}")
    table.add_row(f"tensor parallelism that fits: {', '.join(map(str, convert['tensor_parallel']))}")
    return table


def _memory(memory: list[dict[str, Any]]) -> Table:
    table = Table("tensor parallelism", "int8 model on a rank", "KV cache of a token, 16 bit", box=None)
    for row in memory:
        cache = row["kv_bytes_per_token"]
        if row["problem"]:
            table.add_row(str(row["tensor_parallel"]), f"no: {escape(row['problem'])}")
        else:
            table.add_row(
                str(row["tensor_parallel"]), _size(row["weight_bytes"]), "unknown" if cache is None else _size(cache)
            )
    return table


def _size(count: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} B"
