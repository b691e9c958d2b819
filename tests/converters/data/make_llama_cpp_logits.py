"""Makes <name>_logits.npz: llama.cpp's logits of a GGUF model at 200 positions of a text.

    pip install llama-cpp-python==0.3.36 gguf==0.19.0
    python make_llama_cpp_logits.py model.gguf smollm2

llama.cpp rounds activations to 8 bits before it multiplies them with quantized weights. Its logits are therefore taken from a
copy of the file whose weights the gguf library has dequantized to fp32, with an fp32 cache and without flash attention. With
`--as-it-is` the file itself is run instead and compared with the logits made before.
"""

import sys
import tempfile
from pathlib import Path

import gguf
import numpy as np
from gguf.quants import dequantize
from llama_cpp import GGML_TYPE_F32, Llama

DATA = Path(__file__).resolve().parent
TEXT = DATA.parent.parent / "engine" / "texts" / "alice.txt"
N_POSITIONS, N_LOGITS = 200, 512


def write_fp32(source: Path, target: Path) -> None:
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    left_out = ("GGUF.", "general.architecture", "general.file_type", "general.quantization_version")
    for key, field in reader.fields.items():
        if not key.startswith(left_out):
            inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(key, field.contents(), field.types[0], inner)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, dequantize(tensor.data, tensor.tensor_type).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def logits_of(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """The text's first ids [200] and their logits [200, vocabulary]."""
    options = {"type_k": GGML_TYPE_F32, "type_v": GGML_TYPE_F32, "flash_attn": False}
    model = Llama(str(path), n_ctx=256, n_batch=256, n_ubatch=256, logits_all=True, verbose=False, **options)
    ids = model.tokenize(TEXT.read_bytes(), add_bos=True, special=True)[:N_POSITIONS]
    model.eval(ids)
    return np.array(ids, np.int32), np.array(model.scores[:N_POSITIONS])


def main(source: Path, name: str, as_it_is: bool) -> None:
    out = DATA / f"{name}_logits.npz"
    if as_it_is:
        stored = np.load(out)
        _, logits = logits_of(source)
        top1 = (logits.argmax(-1) == stored["top1"]).mean()
        reference = stored["logits"].astype(np.float32)
        error = np.linalg.norm(logits[:, stored["vocabulary"]] - reference) / np.linalg.norm(reference)
        print(f"{name}: quantized weights give the same top-1 at {top1:.1%}, relative L2 {error:.4f}")
        return
    with tempfile.TemporaryDirectory() as folder:
        write_fp32(source, Path(folder) / "fp32.gguf")
        ids, logits = logits_of(Path(folder) / "fp32.gguf")
    vocabulary = np.sort(np.random.default_rng(0).choice(logits.shape[1], N_LOGITS, replace=False)).astype(np.int32)
    np.savez_compressed(
        out,
        ids=ids,
        top1=logits.argmax(-1).astype(np.int32),
        vocabulary=vocabulary,
        logits=logits[:, vocabulary].astype(np.float16),
    )


if __name__ == "__main__":
    arguments = [argument for argument in sys.argv[1:] if argument != "--as-it-is"]
    if len(arguments) != 2:
        sys.exit(__doc__)
    main(Path(arguments[0]), arguments[1], "--as-it-is" in sys.argv)
