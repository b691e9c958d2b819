"""Recipes: how one tensor of the Hugging Face model, or one of every expert, comes from tensors of a GGUF file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from w8a8_converters.gguf.values import Stored, Values


@dataclass(frozen=True)
class Recipe:
    """Made by `stored` or `joined`, refined by the methods, each of which returns a new one.

    Attributes:
        sources: GGUF name, after `blk.N.` in a layer, -> the shape that the metadata ask for, in torch's order.
        build: the sources' values -> the values of the tensor.
        is_optional: whether a file may lack it, all sources together.
        keeps_fp32: whether it is written as fp32 whatever the model's dtype.
        per_expert: whether the sources' first dimension counts experts: a tensor for each, `{}` in the name is its number.
    """

    sources: Mapping[str, tuple[int, ...]]
    build: Callable[..., Values]
    is_optional: bool = False
    keeps_fp32: bool = False
    per_expert: bool = False

    def then(self, step: Callable[[Values], Values]) -> Recipe:
        return replace(self, build=lambda *parts: step(self.build(*parts)))

    def take(self, order: Tensor) -> Recipe:
        """Rows in another order: int64 [rows], the stored row of each row."""
        return self.then(lambda values: values.take(order))

    def take_columns(self, order: Tensor) -> Recipe:
        """The last dimension in another order."""
        return self.then(lambda values: values.take_columns(order))

    def reshape(self, *shape: int) -> Recipe:
        """Another shape with the same first dimension."""
        return self.then(lambda values: values.reshape(*shape))

    def map(self, function: Callable[[Tensor], Tensor]) -> Recipe:
        """A function of each element, as what undoes a file's `-exp(x)`."""
        return self.then(lambda values: values.map(function))

    def minus_one(self) -> Recipe:
        """For norms that multiply by 1 + weight, whose file holds the sum."""
        return self.map(lambda values: values - 1)

    def optional(self, is_optional: bool = True) -> Recipe:
        return replace(self, is_optional=is_optional)

    def fp32(self) -> Recipe:
        return replace(self, keeps_fp32=True)

    def experts(self) -> Recipe:
        """One tensor for each entry of the first dimension. Steps that follow or went before are of one expert's tensor."""
        return replace(self, per_expert=True)

    def under(self, prefix: str) -> Recipe:
        """With `prefix` before the names of its sources."""
        return replace(self, sources={prefix + name: shape for name, shape in self.sources.items()})

    def outputs(self, name: str, parts: list[Stored]) -> dict[str, Values]:
        """Hugging Face name -> values.

        Args:
            name: the name of the tensor, with `{}` where it is one of every expert.
            parts: the values of `sources`, in their order.
        """
        if not self.per_expert:
            return {name: self.build(*parts)}
        count = parts[0].shape[0]
        return {name.format(expert): self.build(*(part.part(expert) for part in parts)) for expert in range(count)}


def stored(name: str, *shape: int) -> Recipe:
    """A tensor as the file holds it.

    Args:
        name: its GGUF name, without `blk.N.` in a layer.
        shape: what the metadata ask for, in torch's order; of the whole stack for experts.
    """
    return Recipe({name: shape}, lambda values: values)


def joined(build: Callable[..., Values], *recipes: Recipe) -> Recipe:
    """One tensor of several, none of them per expert."""
    counts = [len(recipe.sources) for recipe in recipes]

    def build_all(*parts: Values) -> Values:
        values, first = [], 0
        for recipe, count in zip(recipes, counts, strict=True):
            values.append(recipe.build(*parts[first : first + count]))
            first += count
        return build(*values)

    return Recipe({name: shape for recipe in recipes for name, shape in recipe.sources.items()}, build_all)
