"""A model run one decoder layer at a time, by transformers' own layers, in fp32 on the CPU.

Only one layer's weights are in memory, and the hidden states of the tokens. transformers says what every layer is called
with: its decoder runs once with layers that do nothing but note their arguments.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from w8a8_converters.checkpoint import Source
from w8a8_converters.errors import ConversionError
from w8a8_converters.folding.architectures import Model
from w8a8_converters.folding.calibration import model_folder, require_transformers
from w8a8_converters.layers import lm_head_of
from w8a8_kernels.quantize.reference import quantize_reference
from w8a8_kernels.quantize.weight import quantize_weight

# fp32 bytes of the rows of an lm_head that are held at a time.
_HEAD_PART_BYTES = 64 * 1024**2
_SEED = 4002


def fake_quantize(x: Tensor, block: int) -> Tensor:
    """Activations as the int8 product sees them: transformed, rounded to int8 per row, and scaled back.

    Args:
        x: [M, K] floating.
        block: of the Hadamard transform, 0 for none.

    Returns:
        [M, K] fp32, still transformed.
    """
    codes, scale = quantize_reference(x, block)
    return codes.float().mul_(scale)


def fake_quantize_weight(weight: Tensor, block: int) -> Tensor:
    """A weight [N, K] as the int8 product sees it, fp32 and still transformed: see `quantize_weight`."""
    codes, scale = quantize_weight(weight, hadamard=block)
    return codes.float().mul_(scale)


class FakeQuantLinear(nn.Module):
    """A linear layer with int8 weights and activations, computed in fp32.

    Args:
        weight: [N, K] fp32.
        bias: [N] or None.
        block: of the Hadamard transform, 0 for none.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, block: int) -> None:
        super().__init__()
        self.weight, self.bias, self.block = fake_quantize_weight(weight, block), bias, block

    def forward(self, x: Tensor) -> Tensor:
        rows = fake_quantize(x.reshape(-1, x.shape[-1]), self.block)
        return F.linear(rows, self.weight, self.bias).view(*x.shape[:-1], -1)


class _Experts(nn.Module):
    """Mixtral's block of experts with one linear layer per weight of the checkpoint.

    transformers 5 stacks them, so that no layer could be looked at or exchanged.
    """

    def __init__(self, config: Any, gives_logits: bool) -> None:
        super().__init__()
        from transformers.activations import ACT2FN

        hidden, inner = config.hidden_size, config.intermediate_size
        self.top_k, self.gives_logits, self.act = config.num_experts_per_tok, gives_logits, ACT2FN[config.hidden_act]
        self.gate = nn.Linear(hidden, config.num_local_experts, bias=False)
        sizes = {"w1": (hidden, inner), "w2": (inner, hidden), "w3": (hidden, inner)}
        self.experts = nn.ModuleList(
            nn.ModuleDict({name: nn.Linear(*size, bias=False) for name, size in sizes.items()})
            for _ in range(config.num_local_experts)
        )

    def forward(self, hidden_states: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        logits = self.gate(x)
        weights, chosen = torch.topk(logits.softmax(dim=-1), self.top_k, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        result = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            token, place = torch.where(chosen == i)
            if len(token):
                inner = self.act(expert["w1"](x[token])) * expert["w3"](x[token])
                result.index_add_(0, token, expert["w2"](inner) * weights[token, place, None])
        result = result.view_as(hidden_states)
        return (result, logits) if self.gives_logits else result


class Streamer:
    """Runs sources that share a config.

    Args:
        source: any of them.
        model: its names.

    Raises:
        ConversionError: transformers is missing, or does not know the model or names its parts otherwise.
    """

    def __init__(self, source: Source, model: Model) -> None:
        transformers = require_transformers()
        self.model = model
        try:
            with model_folder(source) as folder:
                config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False).get_text_config()
            with _parameters_on_meta():
                auto = transformers.AutoModelForCausalLM
                causal = auto.from_config(config, dtype=torch.float32, trust_remote_code=False).eval()
            self._decoder = causal.get_decoder()
            self._decoder.layers, self._decoder.norm, self._decoder.embed_tokens  # noqa: B018
        except Exception as error:  # whatever a library raises for a model that it does not know
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise ConversionError(f"{source.path}: transformers cannot build the model: {reason[0]}") from None
        self._config = config
        self._softcap = getattr(config, "final_logit_softcapping", None)
        self._calls: list[tuple[tuple, dict]] = []

    def start(self, source: Source, ids: Tensor) -> Tensor:
        """Embeds tokens and notes what every layer will be called with.

        Args:
            source: where the embedding is.
            ids: int64 [chunks, length].

        Returns:
            hidden states [chunks, length, hidden] fp32, before the first layer.
        """
        used, inverse = ids.unique(return_inverse=True)
        rows = [source.rows(self.model.embedding, int(i), int(i) + 1).float() for i in used]
        decoder = copy.deepcopy(self._decoder)
        decoder.embed_tokens.padding_idx = None
        decoder.embed_tokens.weight = nn.Parameter(torch.cat(rows), requires_grad=False)
        self._calls = []
        first: list[Tensor] = []

        def note(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            first.append(hidden_states)
            self._calls.append((args, {**kwargs, "past_key_values": None, "use_cache": False}))
            return hidden_states

        for layer in decoder.layers:
            layer.forward = note
        decoder.norm.forward = lambda hidden_states: hidden_states
        with torch.no_grad():  # not inference_mode: a graph may hold what is noted here
            decoder(input_ids=inverse, use_cache=False)
        return first[0]

    def layers(self, source: Source, backwards: bool = False) -> Iterator[tuple[int, nn.Module]]:
        """(number, decoder layer with the weights of `source` in fp32), one after the other, from the first or the last."""
        numbers = range(len(self.model.layers))
        for i in reversed(numbers) if backwards else numbers:
            yield i, self._load(source, i)

    def run(self, index: int, layer: nn.Module, hidden: Tensor) -> Tensor:
        """The layer's output [chunks, length, hidden]."""
        with torch.no_grad():
            return self._call(index, layer, hidden)

    def run_back(
        self, index: int, layer: nn.Module, hidden: Tensor, above: Tensor
    ) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """Carries gradients of the layer's output back through it.

        Args:
            index, layer: as `layers` yields them.
            hidden: [chunks, length, hidden], the layer's input.
            above: [samples, chunks, length, hidden], gradients with respect to its output.

        Returns:
            the gradients with respect to `hidden`; and of linear layers by name, as far as a token reached them, the inputs
            [tokens, K] and the gradients with respect to their outputs [samples, tokens, N].
        """
        hidden = hidden.detach().requires_grad_()
        linears = self.linears(index, layer)
        with torch.enable_grad(), recorded(layer, linears) as (inputs, outputs):
            result = self._call(index, layer, hidden)
        wanted = [hidden, *outputs.values()]
        found: list[list[Tensor]] = [[] for _ in wanted]
        for sample in above:
            for of_one, gradient in zip(found, torch.autograd.grad(result, wanted, sample, retain_graph=True), strict=True):
                of_one.append(gradient)
        below, *others = (torch.stack(of_one) for of_one in found)
        return below, inputs, {name: each.flatten(1, -2) for name, each in zip(outputs, others, strict=True)}

    def _call(self, index: int, layer: nn.Module, hidden: Tensor) -> Tensor:
        args, kwargs = self._calls[index]
        output = layer(hidden, *args, **kwargs)
        return output[0] if isinstance(output, tuple) else output

    def linears(self, index: int, layer: nn.Module) -> dict[str, tuple[nn.Module, str]]:
        """Linear layers of a decoder layer: name in the checkpoint -> (the module that holds it, attribute or key)."""
        prefix = self.model.layers[index].prefix
        found = {}
        for path, module in layer.named_modules():
            if isinstance(module, nn.Linear):
                parent, _, last = path.rpartition(".")
                found[prefix + self._stored(path)] = (layer.get_submodule(parent), last)
        return found

    def quantize(self, index: int, layer: nn.Module, blocks: dict[str, int]) -> None:
        """Puts int8 layers in place of those that `blocks` names: name in the checkpoint -> block of the transform."""
        for name, (parent, last) in self.linears(index, layer).items():
            if name in blocks:
                linear = parent.get_submodule(last)
                parent.add_module(last, FakeQuantLinear(linear.weight, linear.bias, blocks[name]))

    def logits(self, source: Source, hidden: Tensor, blocks: dict[str, int]) -> Iterator[Tensor]:
        """Logits from the last layer's output, some columns of the vocabulary after the other.

        Args:
            source: where final norm and lm_head are.
            hidden: [chunks, length, hidden] fp32.
            blocks: as in `quantize`.

        Yields:
            [chunks * length, columns] fp32; the columns are the same for every source of a model.
        """
        own = self._head_module()
        # Not held over a yield: two generators that take turns would leave the mode in another order than they enter it.
        with torch.no_grad():
            x = self._final_norm(source)(hidden).flatten(0, 1)
            x = fake_quantize(x, blocks[own]) if own in blocks else x
        for _, weight in self._head_parts(source):
            with torch.no_grad():
                weight = fake_quantize_weight(weight, blocks[own]) if own in blocks else weight
                part = self._capped(x @ weight.T)
            yield part

    def sampled_gradients(self, source: Source, hidden: Tensor, samples: int) -> Tensor:
        """Gradients of the log-probability of a next token, drawn by the model, with respect to the last layer's output.

        Args:
            source: where final norm and lm_head are.
            hidden: [chunks, length, hidden] fp32.
            samples: how many tokens to draw at every position.

        Returns:
            [samples, chunks, length, hidden] fp32.
        """
        generator = torch.Generator().manual_seed(_SEED)
        hidden = hidden.detach().requires_grad_()
        with torch.enable_grad():
            normed = self._final_norm(source)(hidden).flatten(0, 1)
        x = normed.detach().requires_grad_()
        mass = torch.full((len(x), 1), -float("inf"))
        highest, drawn = torch.full((samples, len(x)), -float("inf")), torch.zeros(samples, len(x), dtype=torch.int64)
        with torch.no_grad():
            for first, weight in self._head_parts(source):
                logits = self._capped(x @ weight.T)
                mass = torch.logaddexp(mass, logits.logsumexp(dim=1, keepdim=True))
                for i in range(samples):
                    # The largest of logits with Gumbel noise is a draw from their softmax.
                    noise = torch.empty_like(logits).exponential_(generator=generator).log_()
                    value, column = (logits - noise).max(dim=1)
                    drawn[i] = torch.where(value > highest[i], first + column, drawn[i])
                    highest[i] = torch.maximum(value, highest[i])
        gradients = torch.zeros(samples, *x.shape)
        for first, weight in self._head_parts(source):
            with torch.enable_grad():
                logits = self._capped(x @ weight.T)
            slope = -(logits.detach() - mass).exp()
            for i in range(samples):
                inside = ((drawn[i] >= first) & (drawn[i] < first + len(weight))).nonzero()[:, 0]
                of_one = slope.index_put((inside, drawn[i][inside] - first), torch.ones(1), accumulate=True)
                gradients[i] += torch.autograd.grad(logits, x, of_one, retain_graph=True)[0]
        return torch.stack([torch.autograd.grad(normed, hidden, each, retain_graph=True)[0] for each in gradients])

    def _final_norm(self, source: Source) -> nn.Module:
        norm = copy.deepcopy(self._decoder.norm)
        norm.load_state_dict({"weight": _whole(source, f"{self.model.norm}.weight")}, assign=True)
        return norm

    def _head_module(self) -> str:
        return lm_head_of(self.model.embedding)

    def _head_parts(self, source: Source) -> Iterator[tuple[int, Tensor]]:
        """(first row, rows of the lm_head's weight in fp32)."""
        # Tied or not as `source` says: it may have been untied since.
        own = f"{self._head_module()}.weight"
        stored = self.model.head or (own if _is_computed(source, own) else self.model.embedding)
        info = source.tensors[stored]
        rows = max(1, _HEAD_PART_BYTES // (4 * info.shape[1]))
        for start in range(0, info.shape[0], rows):
            yield start, source.rows(stored, start, min(start + rows, info.shape[0])).float()

    def _capped(self, logits: Tensor) -> Tensor:
        return (logits / self._softcap).tanh() * self._softcap if self._softcap else logits

    def _load(self, source: Source, index: int) -> nn.Module:
        layer = copy.deepcopy(self._decoder.layers[index])
        prefix, experts = self.model.layers[index].prefix, self.model.architecture.experts
        if experts:
            gives_logits = hasattr(layer, experts)  # transformers 4 names the block as checkpoints do
            self._experts = experts if gives_logits else "mlp"
            with torch.device("meta"):
                setattr(layer, self._experts, _Experts(self._config, gives_logits))
        state = {}
        for path, _ in layer.named_parameters():
            name = prefix + self._stored(path)
            if name not in source.tensors:
                raise ConversionError(f"{source.path}: transformers asks for tensor {name}, which is missing")
            state[path] = _whole(source, name)
        layer.load_state_dict(state, assign=True, strict=False)
        return layer.requires_grad_(False)

    def _stored(self, path: str) -> str:
        """Name in the checkpoint of a part of a layer."""
        experts = self.model.architecture.experts
        if experts and path.startswith(f"{self._experts}."):
            return experts + path.removeprefix(self._experts)
        return path


@contextmanager
def recorded(
    layer: nn.Module, linears: dict[str, tuple[nn.Module, str]]
) -> Iterator[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """While the block runs, collects inputs [tokens, K] and outputs, as they are, of linear layers by name."""
    inputs: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}

    def hook_for(name: str) -> Any:
        def hook(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            inputs[name], outputs[name] = args[0].detach().reshape(-1, args[0].shape[-1]), output

        return hook

    handles = [parent.get_submodule(last).register_forward_hook(hook_for(name)) for name, (parent, last) in linears.items()]
    try:
        yield inputs, outputs
    finally:
        for handle in handles:
            handle.remove()


def _is_computed(source: Source, name: str) -> bool:
    return name in source.tensors and source.tensors[name].computed


def _whole(source: Source, name: str) -> Tensor:
    # A copy: a view of a mapped file must not become a parameter that something may write to.
    return source.rows(name, 0, source.tensors[name].n_rows).to(torch.float32, copy=True)


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Modules made in this block have parameters without memory, and buffers, which are computed and small, as ever."""
    original = nn.Module.register_parameter

    def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=False)
        original(module, name, parameter)

    nn.Module.register_parameter = register
    try:
        yield
    finally:
        nn.Module.register_parameter = original
