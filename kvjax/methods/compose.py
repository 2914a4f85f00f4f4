"""Two methods in a row: evict tokens, then quantize those that stay."""

import dataclasses
from typing import Any, Self

from kvjax.eviction import gather
from kvjax.methods.full import Full
from kvjax.pytree import pytree, static
from kvjax.types import LayerInfo, PromptKV, PromptShape


@pytree
class Composed:
    """An evictor, and a quantizer for the tokens that it keeps. Made by `compose`.

    The evictor is applied to the prompt; tokens decoded later are the quantizer's. Where the
    quantizer leaves a layer in full precision, the evictor alone is left.
    """

    evictor: Any
    quantizer: Any
    name: str = static()

    @property
    def flush_every(self) -> int | None:
        """The quantizer's."""
        return self.quantizer.flush_every

    @property
    def budget(self) -> int:
        """Tokens kept per KV head."""
        return self.evictor.budget

    @property
    def smallest(self) -> int:
        """The evictor's."""
        return self.evictor.smallest

    @property
    def column_sums(self) -> bool:
        """Whether prefill should gather what the evictor ranks by."""
        return getattr(self.evictor, "column_sums", False)

    def resolve(self, shape: PromptShape) -> Self:
        """Fix the static sizes of both."""
        both = []
        for method in (self.evictor, self.quantizer):
            both.append(method.resolve(shape) if hasattr(method, "resolve") else method)
            shape = shape._replace(num_tokens=min(self.evictor.budget, shape.num_tokens))
        return dataclasses.replace(self, evictor=both[0], quantizer=both[1])

    def for_layer(self, layer: int, num_layers: int) -> Any:
        """Both methods' own settings for the layer."""
        evictor = self.evictor.for_layer(layer, num_layers)
        quantizer = self.quantizer.for_layer(layer, num_layers)
        if isinstance(quantizer, Full):
            return evictor
        return dataclasses.replace(self, evictor=evictor, quantizer=quantizer)

    def layer_bytes(self, shape: PromptShape) -> int:
        """Live bytes of one row and layer right after the prompt."""
        tokens = min(self.evictor.budget, shape.num_tokens)
        return self.quantizer.layer_bytes(shape._replace(num_tokens=tokens))

    def fit(self, target_bytes: float, shape: PromptShape) -> Self:
        """The largest budget of the evictor within `target_bytes`, the quantizer as it is."""
        # Not a bisection: a quantizer that codes whole blocks gets cheaper where one fills up.
        smallest = min(self.smallest, shape.num_tokens)
        for tokens in range(shape.num_tokens, smallest, -1):
            if self.quantizer.layer_bytes(shape._replace(num_tokens=tokens)) <= target_bytes:
                return self.with_budget(tokens)
        return self.with_budget(self.smallest)

    def with_budget(self, tokens: int) -> Self:
        """The same with another budget of the evictor."""
        return dataclasses.replace(self, evictor=self.evictor.with_budget(tokens))

    def compress(self, prompt: PromptKV, info: LayerInfo) -> Any:
        """Select, then quantize what is left of the prompt."""
        columns, lengths = self.evictor.select(prompt, info)
        return self.quantizer.compress(gather(prompt, columns, lengths), info)


def compose(evictor: Any, quantizer: Any) -> Composed:
    """Evict, then quantize: `compose(make("snapkv", budget=512), make("kivi"))`.

    Removed fractions multiply as what is left does: half the tokens at a quarter of the bytes each
    removes 1 - 1/2 * 1/4. What is reported comes from the arrays all the same.

    Args:
        evictor: a method with `select`: as many tokens for every KV head, chosen once.
        quantizer: a method that stores rotated keys and knows a token by its index: kivi,
            quantized_cache, symmetric, gear, turboquant.

    Raises:
        ValueError: for methods that are not of these kinds.
    """
    if not hasattr(evictor, "select"):
        raise ValueError(f"{evictor.name} selects no columns that are the same for all KV heads.")
    if not hasattr(quantizer, "full_layers"):
        raise ValueError(f"{quantizer.name} is no quantizer of the tokens that are left.")
    if getattr(evictor, "positions", "absolute") != "absolute":
        raise ValueError(
            f"{evictor.name} with positions={evictor.positions!r} moves keys that a quantizer takes"
            " where they stand: it must be positions='absolute'."
        )
    if getattr(evictor, "when", "prompt") != "prompt":
        evictor = dataclasses.replace(evictor, when="prompt")
    return Composed(evictor, quantizer, name=f"{evictor.name}+{quantizer.name}")
