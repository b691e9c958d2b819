"""What an error of a linear layer's output costs at the end of the model, told without running the model again.

The divergence from the unquantized model is, to second order, half the mean square of the error times the gradient of the
log-probability of a next token that the model itself draws: its Fisher information. One pass forward and one back give these
gradients for all layers; what any change of one layer costs is then a product. The errors of tokens are taken to be
independent of each other, as rounding errors nearly are. `benchmarks/quality_by_layer.py` holds this against the measured
divergence: 3 % apart for all layers of SmolLM2-135M together.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from w8a8_converters.folding.source import FoldedSource
from w8a8_converters.folding.stream import Streamer, fake_quantize, fake_quantize_weight

# Tokens that are drawn at every position: the second halves the noise of the estimate, more gain little.
_SAMPLES = 2


@dataclass(frozen=True)
class Sensitive:
    """A linear layer, what it reads, and how much its outputs matter.

    Attributes:
        x: [tokens, K] fp32, the tokens that reach it.
        weight: [N, K] fp32.
        gradients: [samples, tokens, N], of log-probabilities with respect to its outputs.
    """

    x: Tensor
    weight: Tensor
    gradients: Tensor

    def error(self, block: int, scale: Tensor | None = None, every: int = 1) -> Tensor:
        """Errors of the int8 outputs, every so many tokens: [tokens, N].

        Args:
            block: of the Hadamard transform.
            scale: [K], by which inputs are divided and the weight's input channels multiplied before.
            every: 1 for all tokens.
        """
        x = self.x[::every]
        scaled, weight = (x, self.weight) if scale is None else (x / scale, self.weight * scale)
        return F.linear(fake_quantize(scaled, block), fake_quantize_weight(weight, block)) - F.linear(x, self.weight)

    def cost(self, block: int, scale: Tensor | None = None, every: int = 1) -> float:
        """What these errors add to the divergence, in nats for each token that reaches the layer."""
        return 0.5 * float((self.gradients[:, ::every] * self.error(block, scale, every)).sum(dim=-1).square().mean())


def sensitivities(
    source: FoldedSource, streamer: Streamer, ids: Tensor, progress: Callable[[int, int], None] = lambda done, total: None
) -> Iterator[tuple[int, dict[str, Sensitive]]]:
    """(number of a decoder layer, its linear layers by name), the last layer first.

    The weights of one layer are in memory, and the hidden states before all of them. `source` may be changed in between where
    the layers that are still to come, and the function of the others, stay as they are.

    Args:
        source: a checkpoint.
        streamer: runs it.
        ids: int64 [chunks, length].
        progress: called with (steps done, steps), two for each layer.
    """
    hidden = streamer.start(source, ids)
    before, total = [], 2 * len(streamer.model.layers)
    for index, layer in streamer.layers(source):
        before.append(hidden)
        hidden = streamer.run(index, layer, hidden)
        progress(index + 1, total)
        del layer  # before the next one comes
    gradients = streamer.sampled_gradients(source, hidden, _SAMPLES)
    del hidden
    for index, layer in streamer.layers(source, backwards=True):
        weights = {name: parent.get_submodule(last).weight for name, (parent, last) in streamer.linears(index, layer).items()}
        gradients, inputs, of_outputs = streamer.run_back(index, layer, before.pop(), gradients)
        yield index, {name: Sensitive(inputs[name], weights[name], of_outputs[name]) for name in of_outputs}
        del layer, weights, inputs, of_outputs
        progress(total - index, total)


def predict(
    source: FoldedSource,
    streamer: Streamer,
    ids: Tensor,
    blocks: Mapping[str, Iterable[int]],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, dict[int, float]]:
    """What int8 costs at each linear layer alone: name -> block of its transform -> nats per token of the text.

    Args:
        source, streamer, ids, progress: as in `sensitivities`.
        blocks: names of linear layers -> the blocks to try. A layer that no token reaches costs nothing.
    """
    costs = {name: dict.fromkeys(tried, 0.0) for name, tried in blocks.items()}
    for _, layers in sensitivities(source, streamer, ids, progress):
        for name, layer in layers.items():
            for block in costs.get(name, ()):
                costs[name][block] = layer.cost(block) * len(layer.x) / ids.numel()
    return costs
