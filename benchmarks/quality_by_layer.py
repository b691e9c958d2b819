"""Where quantization error comes from: the divergence of a model of which only some layers are quantized.

Run: python benchmarks/quality_by_layer.py FOLDER NAME

Fake quantization as in `vllm-w8a8 convert --quality auto`, on its held-out text: each kind of projection alone, each sixth of
the layers alone, all of them, and all with blocks of 128 where they divide the inputs of down_proj. Mean KL from the
unquantized model in nats per token, measured, and as the converter predicts it from gradients. Writes
benchmarks/results/quality-by-layer-<name>-<date>.json.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

from gpu_timing import RESULTS, ROOT, provenance

sys.path.insert(0, str(ROOT / "converters"))

from w8a8_converters.checkpoint import HuggingFaceSource
from w8a8_converters.folding.architectures import Model
from w8a8_converters.folding.calibration import read_tokens
from w8a8_converters.folding.quality import divergence
from w8a8_converters.folding.sensitivity import predict
from w8a8_converters.folding.source import FoldedSource
from w8a8_converters.folding.stream import Streamer
from w8a8_kernels.hadamard import AUTO, chosen_block
from w8a8_kernels.names import is_row_parallel

KINDS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
CHUNKS = 2  # of the held-out text
PARTS = 6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="folder of the unquantized model")
    parser.add_argument("name", help="what the result calls it")
    args = parser.parse_args()
    base = FoldedSource(HuggingFaceSource(args.model))
    model = Model(base, "quality_by_layer")
    streamer, ids = Streamer(base, model), read_tokens(base).held_out[:CHUNKS]
    inputs = {
        name.removesuffix(".weight"): tensor.shape[1]
        for name, tensor in base.tensors.items()
        if name.endswith(tuple(f"{kind}.weight" for kind in KINDS))
    }
    blocks = {name: chosen_block(AUTO, K, row_parallel=is_row_parallel(name)) for name, K in inputs.items()}

    def last_hidden(chosen: dict[str, int]):
        hidden = streamer.start(base, ids)
        for index, layer in streamer.layers(base):
            streamer.quantize(index, layer, chosen)
            hidden = streamer.run(index, layer, hidden)
        return hidden

    reference = last_hidden({})

    def kl(chosen: dict[str, int]) -> float:
        logits = streamer.logits(base, reference, {}), streamer.logits(base, last_hidden(chosen), chosen)
        return divergence(*logits, ids.numel())

    def only(wanted: Callable[[str], bool]) -> dict[str, int]:
        return {name: block for name, block in blocks.items() if wanted(name)}

    found = {"all": kl(blocks)}
    for kind in KINDS:
        found[kind] = kl(only(lambda name, kind=kind: name.endswith(kind)))
    layers = len(model.layers)
    for part in range(PARTS):
        first, end = part * layers // PARTS, (part + 1) * layers // PARTS
        prefixes = tuple(f"{layer.prefix}" for layer in model.layers[first:end])
        found[f"layers {first} to {end - 1}"] = kl(only(lambda name, prefixes=prefixes: name.startswith(prefixes)))
    larger = {n: 128 if n.endswith("down_proj") and inputs[n] % 128 == 0 else block for n, block in blocks.items()}
    found["all, down_proj in blocks of 128"] = kl(larger)
    costs = {
        name: cost[blocks[name]] for name, cost in predict(base, streamer, ids, {n: (b,) for n, b in blocks.items()}).items()
    }
    predicted = {"all": sum(costs.values())}
    for kind in KINDS:
        predicted[kind] = sum(cost for name, cost in costs.items() if name.endswith(kind))
    for what, value in found.items():
        print(f"{what:34} {value:.5f}" + (f"  predicted {predicted[what]:.5f}" if what in predicted else ""))
    head = provenance()
    out = RESULTS / f"quality-by-layer-{args.name}-{head['date'][:10]}.json"
    out.write_text(
        json.dumps(head | {"model": args.name, "tokens": ids.numel(), "kl_mean": found, "kl_predicted": predicted}, indent=1)
        + "\n"
    )
    print(json.dumps({"result": str(out)}))


if __name__ == "__main__":
    main()
