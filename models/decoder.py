"""The Llama family as one forward: Llama 2 and 3, Mistral, Qwen2, Qwen3, SmolLM2.

    x = embed(tokens);  x = x + attention(norm(x));  x = x + mlp(norm(x)), L times;  head(norm(x))

Attention is not here: `block` makes q, k and v, unrotated, and hands them to the `attend` it was
given. Nothing here knows of a cache, a mask, a position or a rotary embedding.

Params: {"embedding" [V, D], "norm" [D], "layers": a list of L dicts, "head" [D, V]}. A layer has
norm_attention [D], qkv [D, (N + 2K) H], out [N H, D], norm_mlp [D], gate_up [D, 2F], down [F, D]
and, where the family has them, qkv_bias [(N + 2K) H], out_bias [D], q_norm [H], k_norm [H].
Weights are [in, out]. A tied model may go without "head", or carry it as a transposed copy of the
embedding, which a CPU multiplies several times faster. Norms are float32 in every dtype.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from kvjax import rope as rotary
from kvjax.types import Attend, Model
from models.config import Config

Params = dict[str, Any]


def rms_norm(x: Array, weight: Array, epsilon: float) -> Array:
    """Divide by the root mean square of the last axis and scale, in float32.

    x * rsqrt(mean(x²) + epsilon) * weight

    Args:
        x: [..., D].
        weight: [D].
        epsilon: added to the mean square.

    Returns:
        [..., D] in x's dtype.
    """
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + epsilon)
    return (y * _row(weight, x).astype(jnp.float32)).astype(x.dtype)


def _row(vector: Array, x: Array) -> Array:
    return vector.reshape((1,) * (x.ndim - 1) + (-1,))


def _linear(x: Array, weight: Array, bias: Array | None = None) -> Array:
    # Multiplied in the weight's dtype: float32 activations may meet bfloat16 weights.
    y = jnp.matmul(
        x.astype(weight.dtype),
        weight,
        preferred_element_type=jnp.promote_types(x.dtype, weight.dtype),
    )
    return y if bias is None else y + _row(bias, y)


def embed(config: Config, params: Params, tokens: Array) -> Array:
    """Look tokens up.

    Args:
        config: the model's.
        params: the model's.
        tokens: i32[B, T]; ids outside the vocabulary are clamped, so a pad may hold anything.

    Returns:
        [B, T, D].
    """
    return params["embedding"][jnp.clip(tokens, 0, config.vocab_size - 1)]


def block(
    config: Config,
    layer: Params,
    x: Array,
    attend: Callable[[Array, Array, Array, Any], tuple[Array, Any]],
    state: Any,
) -> tuple[Array, Any]:
    """Run one layer.

    Args:
        config: the model's.
        layer: its params.
        x: [B, T, D].
        attend: (q [B, N, T, H], k [B, K, T, H], v [B, K, T, H], state) -> (out [B, N, T, H],
            state). q and k carry their norm and no rotation. No layer number: one trace serves
            every layer.
        state: what attend reads and returns, such as the layer's cache.

    Returns:
        x [B, T, D] and attend's state.
    """
    batch, length, _ = x.shape
    n, k, h = config.num_heads, config.num_kv_heads, config.head_dim
    y = rms_norm(x, layer["norm_attention"], config.norm_epsilon)
    qkv = _linear(y, layer["qkv"], layer.get("qkv_bias")).reshape(batch, length, n + 2 * k, h)
    query, key, value = jnp.split(qkv, (n, n + k), axis=2)
    if config.qk_norm:
        query = rms_norm(query, layer["q_norm"], config.norm_epsilon)
        key = rms_norm(key, layer["k_norm"], config.norm_epsilon)
    heads_first = (z.swapaxes(1, 2) for z in (query, key, value))
    out, state = attend(*heads_first, state)
    out = out.astype(x.dtype).swapaxes(1, 2).reshape(batch, length, n * h)
    x = x + _linear(out, layer["out"], layer.get("out_bias"))
    y = rms_norm(x, layer["norm_mlp"], config.norm_epsilon)
    gate, up = jnp.split(_linear(y, layer["gate_up"]), 2, axis=-1)
    return x + _linear(jax.nn.silu(gate) * up, layer["down"]), state


def head(config: Config, params: Params, x: Array) -> Array:
    """Turn the last layer's output into logits.

    Args:
        config: the model's.
        params: the model's.
        x: [..., D]; give it only the columns whose logits are wanted.

    Returns:
        f32[..., V].
    """
    x = rms_norm(x, params["norm"], config.norm_epsilon)
    if "head" in params:
        return jnp.matmul(x, params["head"], preferred_element_type=jnp.float32)
    return jnp.einsum("...d,vd->...v", x, params["embedding"], preferred_element_type=jnp.float32)


def forward(
    params: Params, config: Config, tokens: Array, attend: Attend, states: Sequence[Any]
) -> tuple[Array, tuple[Any, ...]]:
    """Run the whole model: a plain loop over its layers.

    Args:
        params: the model's.
        config: the model's.
        tokens: i32[B, T].
        attend: (layer, q, k, v, state) -> (out, state); see `kvjax.types.Attend`.
        states: one for each of the L layers.

    Returns:
        logits f32[B, T, V] and the layers' new states.

    Raises:
        ValueError: when there is not one state a layer.
    """
    if len(states) != config.num_layers:
        raise ValueError(f"{len(states)} states were given; {config.num_layers} layers need one.")
    x, after = embed(config, params, tokens), []
    for i, (layer, state) in enumerate(zip(params["layers"], states, strict=True)):
        x, state = block(config, layer, x, functools.partial(attend, i), state)
        after.append(state)
    return head(config, params, x), tuple(after)


def model(config: Config, num_tokens: int | None = None) -> Model:
    """What the decode loop needs of this family.

    Args:
        config: the model's.
        num_tokens: longest sequence to be served, in tokens; only rope type "dynamic" reads it.

    Returns:
        The hashable `Model`.
    """
    return Model(
        config=config,
        embed=embed,
        block=block,
        head=head,
        rope=rotary.build(config, num_tokens),
        windows=config.windows,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
    )


def layer_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Shape of every array of one layer's params."""
    d, f, h = config.hidden_size, config.intermediate_size, config.head_dim
    rows = (config.num_heads + 2 * config.num_kv_heads) * h
    shapes: dict[str, tuple[int, ...]] = {
        "norm_attention": (d,),
        "qkv": (d, rows),
        "out": (config.num_heads * h, d),
        "norm_mlp": (d,),
        "gate_up": (d, 2 * f),
        "down": (f, d),
    }
    optional = {"qkv_bias": (rows,)} if config.qkv_bias else {}
    optional |= {"out_bias": (d,)} if config.out_bias else {}
    optional |= {"q_norm": (h,), "k_norm": (h,)} if config.qk_norm else {}
    return shapes | optional


def init(config: Config, key: Array, dtype: Any = jnp.float32) -> Params:
    """Draw random weights, for tests: normal with standard deviation 1/sqrt(fan in).

    Args:
        config: the model's.
        key: PRNG key.
        dtype: of every array but the norms.

    Returns:
        Params of the model; norms are near 1, biases near 0 and neither is constant.
    """
    embedding_key, head_key, norm_key, *keys = jax.random.split(key, 3 + config.num_layers)

    def draw(key: Array, name: str, shape: tuple[int, ...]) -> Array:
        noise = jax.random.normal(key, shape, jnp.float32)
        if "norm" in name:
            return 1.0 + 0.1 * noise
        return (noise * (0.1 if name.endswith("bias") else shape[0] ** -0.5)).astype(dtype)

    def layer(key: Array) -> Params:
        shapes = layer_shapes(config)
        keys = jax.random.split(key, len(shapes))
        return {name: draw(k, name, s) for k, (name, s) in zip(keys, shapes.items(), strict=True)}

    d, v = config.hidden_size, config.vocab_size
    params: Params = {
        "embedding": draw(embedding_key, "embedding", (v, d)),
        "norm": draw(norm_key, "norm", (d,)),
        "layers": [layer(k) for k in keys],
    }
    if config.tied:
        params["embedding"] = (params["embedding"] * (v / d) ** 0.5).astype(dtype)
    else:
        params["head"] = draw(head_key, "head", (d, v))
    return params
