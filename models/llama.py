"""Llama 3.1 in Flax Linen: RMSNorm, rotary positions, grouped-query attention, SwiGLU, tied or untied head.

The model knows nothing of FP4. It is quantized from outside by `linear_dot(path, layer, key, shared)`, which returns the
`dot_general` of one linear layer: `path` is one of `LINEAR_PATHS`, `layer` the layer index (a traced int32 scalar when
scanned, a Python int when unrolled, None for the head), `key` whatever the caller passed to the model, `shared` a dict that
the layers which read one input (q, k, v; gate, up) are given in common. Scanned layers share one traced program, so random
bits must come from path, layer and key. `linear_dot=None` is plain `nn.Dense`.

Parameters are float32; activations are `config.dtype`; norms, rotary angles, softmax, logits and losses are float32.
Shapes: B batch, T time, D d_model, V vocabulary, N query heads, K key/value heads, G = N/K, H head size, R = H/2
rotated pairs, F d_ff, S and C query and key positions within one attention block; U all positions where T are some of them.

With `document_end` a row is several documents that do not see each other: a token attends to its own document only, its rotary
position counts from that document's beginning, and the first token of a document is not predicted from the one before.

Not supported: a key/value cache, padding masks, dropout, biases.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax import lax

LinearDot = Callable[[str, Any, Any, dict[Any, Any]], Callable[..., jax.Array]]
Constrain = Callable[[str, jax.Array], jax.Array]
Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]

LINEAR_PATHS = ("attn/q", "attn/k", "attn/v", "attn/o", "mlp/gate", "mlp/up", "mlp/down", "lm_head")
PACKED_NAME = "fp4_residual"  # what a `linear_dot` calls the packed operands it keeps for the backward pass
_CHOICES = {
    "rope_scaling": ("none", "linear", "llama3.1"),
    "remat": ("none", "full", "dots", "packed"),
    "attention": ("dot_product", "blockwise"),
    "dtype": ("float32", "bfloat16"),
}
_MAY_BE_ZERO = ("head_dim", "attention_block", "loss_chunk")


class Rope(NamedTuple):
    """What the blocks know of positions: cos and sin of each pair's angle, float32 [1, T, R], or [B, T, R] with documents.

    document: the number of each token's document within its row, int32 [B, T], None where rows are not separated.
    """

    cos: jax.Array
    sin: jax.Array
    document: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """Shape and execution of a Llama; wrong values raise ValueError at construction."""

    vocab_size: int
    d_model: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    d_ff: int
    head_dim: int = 0  # 0: d_model // n_heads; read it through `head_size`
    max_seq_len: int = 8192  # the model itself accepts any length; callers check against this
    rope_theta: float = 500000.0
    rope_scaling: str = "none"
    rope_factor: float = 8.0  # this and the next three: the published Llama 3.1 values
    rope_low_freq_factor: float = 1.0
    rope_high_freq_factor: float = 4.0
    rope_original_len: int = 8192
    norm_eps: float = 1e-5
    init_std: float = 0.02
    tie_embeddings: bool = False
    scan_layers: bool = True
    remat: str = "none"
    attention: str = "dot_product"
    attention_block: int = 0  # positions per block of "blockwise", a divisor of T; 0 with "dot_product"
    dtype: str = "float32"
    loss_chunk: int = 0  # positions per chunk of `token_losses`, a divisor of T; 0: the whole sequence at once
    document_end: int = -1  # the id that ends a document (EOS); −1: a row is one text, whatever it holds

    @property
    def head_size(self) -> int:
        return self.head_dim or self.d_model // self.n_heads

    @property
    def compute_dtype(self) -> jnp.dtype:
        return jnp.dtype(self.dtype)

    def __post_init__(self):
        for field in dataclasses.fields(self):
            name, value = field.name, self.__dict__[field.name]
            allowed = (int, float) if field.type is float else (field.type,)
            if type(value) not in allowed:  # not isinstance: True is no size
                raise ValueError(f"{name}={value!r} is not {field.type}")
            if name in _CHOICES and value not in _CHOICES[name]:
                raise ValueError(f"{name}={value!r} is not one of {_CHOICES[name]}")
            if field.type is int and value >= 2**31:
                raise ValueError(f"{name}={value} is not below 2^31")
            if (
                name != "document_end"
                and field.type in (int, float)
                and not (0 < value < math.inf or (value == 0 and name in _MAY_BE_ZERO))
            ):
                raise ValueError(f"{name}={value!r} is not a positive finite number")
        if not -1 <= self.document_end < self.vocab_size:
            raise ValueError(f"document_end={self.document_end} is neither an id below vocab_size={self.vocab_size} nor -1")
        if self.head_dim == 0 and self.d_model % self.n_heads:
            raise ValueError(f"d_model={self.d_model} is not a multiple of n_heads={self.n_heads}; set head_dim")
        if self.head_size % 2:
            raise ValueError(f"head size {self.head_size} is odd; rotary positions rotate pairs")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"n_heads={self.n_heads} is not a multiple of n_kv_heads={self.n_kv_heads}")
        if self.rope_low_freq_factor >= self.rope_high_freq_factor:
            raise ValueError(f"{self.rope_low_freq_factor=} is not below {self.rope_high_freq_factor=}")
        if (self.attention == "blockwise") != (self.attention_block > 0):
            raise ValueError(f"attention={self.attention!r} does not go with attention_block={self.attention_block}")


def num_params(config: LlamaConfig) -> int:
    """Count the parameters exactly, embedding and head included."""
    c, head = config, config.head_size
    attention = 2 * c.d_model * head * (c.n_heads + c.n_kv_heads)
    layer = attention + 3 * c.d_model * c.d_ff + 2 * c.d_model
    return c.n_layers * layer + c.d_model + c.vocab_size * c.d_model * (1 if c.tie_embeddings else 2)


def linear_kernels(params: Any, config: LlamaConfig) -> dict[str, jax.Array]:
    """Return the kernel of every linear layer by path, those of the blocks stacked, [n_layers, in, out]; lm_head [D, V]."""

    def of_path(block: Any, path: str) -> jax.Array:
        for name in path.split("/"):
            block = block[name]
        return block["kernel"]

    c, out = config, {}
    for path in LINEAR_PATHS:
        if path == "lm_head":
            out[path] = params["embed"]["embedding"].T if c.tie_embeddings else params["lm_head"]["kernel"]
        elif c.scan_layers:
            out[path] = of_path(params["layers"], path)
        else:
            out[path] = jnp.stack([of_path(params[f"layers_{i}"], path) for i in range(c.n_layers)])
    return out


def rope_frequencies(config: LlamaConfig) -> np.ndarray:
    """Return the rotation per position of each pair, in radians, [R] float64: θ^(−r/R), or stretched to a longer context.

    "linear" divides all by `factor` (2306.15595). "llama3.1" divides frequencies that turn at most `low_freq_factor` times
    within the original context by `factor`, keeps those that turn at least `high_freq_factor` times, and interpolates linearly
    in the number of turns between.
    """
    c, pairs = config, config.head_size // 2
    freq_R = float(c.rope_theta) ** (-np.arange(pairs) / pairs)
    if c.rope_scaling == "none":
        return freq_R
    if c.rope_scaling == "linear":
        return freq_R / c.rope_factor
    turns_R = c.rope_original_len * freq_R / (2 * np.pi)
    kept_R = (turns_R - c.rope_low_freq_factor) / (c.rope_high_freq_factor - c.rope_low_freq_factor)
    kept_R = np.clip(kept_R, 0.0, 1.0)
    return freq_R * (kept_R + (1.0 - kept_R) / c.rope_factor)


def rope_tables(config: LlamaConfig, tokens_BT: jax.Array) -> Rope:
    """Return the tables for positions 0 … T − 1, or for positions within the documents of each row."""
    position = jnp.arange(tokens_BT.shape[1], dtype=jnp.int32)[None]
    document = None
    if config.document_end >= 0:
        begins_BT = jnp.pad(tokens_BT[:, :-1] == config.document_end, ((0, 0), (1, 0)), constant_values=True)
        document = jnp.cumsum(begins_BT, axis=1, dtype=jnp.int32)
        position -= lax.cummax(jnp.where(begins_BT, position, 0), axis=1)
    angle = position.astype(jnp.float32)[..., None] * jnp.asarray(rope_frequencies(config), jnp.float32)[None, None]
    return Rope(jnp.cos(angle), jnp.sin(angle), document)


def rotate(x_BTNH: jax.Array, rope: Rope) -> jax.Array:
    """Rotate the pairs (x[r], x[r + R]) by their angles in float32 (split-half, the Hugging Face convention)."""
    cos, sin = rope.cos[:, :, None, :], rope.sin[:, :, None, :]
    first, second = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x_BTNH.dtype)


def attention(
    config: LlamaConfig,
    q_BTNH: jax.Array,
    k_BUKH: jax.Array,
    v_BUKH: jax.Array,
    first: Any = 0,
    document_BT: jax.Array | None = None,
) -> jax.Array:
    """Return causal softmax(q kᵀ / √H) v of the queries at positions first … first + T − 1, by the config's implementation.

    document_BT: numbers of documents, T = U; a query sees the keys of its own.
    """
    if config.attention == "blockwise":
        return blockwise_attention(q_BTNH, k_BUKH, v_BUKH, block=config.attention_block, first=first, document_BT=document_BT)
    if document_BT is not None:
        same_B1TU = (document_BT[:, :, None] == document_BT[:, None, :])[:, None]
        return jax.nn.dot_product_attention(q_BTNH, k_BUKH, v_BUKH, mask=same_B1TU, is_causal=True)
    if q_BTNH.shape[1] == k_BUKH.shape[1]:
        return jax.nn.dot_product_attention(q_BTNH, k_BUKH, v_BUKH, is_causal=True)
    query_T, key_U = first + jnp.arange(q_BTNH.shape[1]), jnp.arange(k_BUKH.shape[1])
    visible_TU = query_T[:, None] >= key_U[None]
    return jax.nn.dot_product_attention(q_BTNH, k_BUKH, v_BUKH, mask=visible_TU[None, None])


def blockwise_attention(
    q_BTNH: jax.Array,
    k_BUKH: jax.Array,
    v_BUKH: jax.Array,
    *,
    block: int,
    first: Any = 0,
    document_BT: jax.Array | None = None,
) -> jax.Array:
    """Compute `attention` in O(T · block) memory, in the backward pass too; block divides T, U and first.

    Each query block visits the key blocks up to its own with an online softmax, and is recomputed in the backward pass.
    """
    B, T, N, H = q_BTNH.shape
    U, K = k_BUKH.shape[1:3]
    if T % block:
        raise ValueError(f"{T=} is not a multiple of attention_block={block}")
    causal_1SC = jnp.tril(jnp.ones((block, block), bool))[None]
    document = None if document_BT is None else jnp.moveaxis(document_BT.reshape(B, -1, block), 1, 0)

    def split(x):  # B T … -> T/block B block …
        return jnp.moveaxis(x.reshape(B, -1, block, *x.shape[2:]), 1, 0)

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def attend_to_past(args):
        row, q_BSKGH, document_BS = args

        def visit(carry, key_block):
            column, k_BCKH, v_BCKH, document_BC = key_block
            visible = causal_1SC | (column < row)
            if document_BS is not None:
                visible = visible & (document_BS[:, :, None] == document_BC[:, None, :])
            operands = (carry, q_BSKGH, k_BCKH, v_BCKH, visible)
            return lax.cond(column <= row, _attend, lambda carry, *_: carry, *operands), None

        zeros = jnp.zeros(q_BSKGH.shape, jnp.float32)
        start = (zeros, zeros[..., 0], jnp.full_like(zeros[..., 0], -1e30))
        blocks = (jnp.arange(U // block), split(k_BUKH), split(v_BUKH), document)
        (sum_BSKGH, total_BSKG, _), _ = lax.scan(visit, start, blocks)
        return sum_BSKGH / total_BSKG[..., None]

    rows = (first // block + jnp.arange(T // block), split(q_BTNH.reshape(B, T, K, N // K, H)), document)
    out = lax.map(attend_to_past, rows)
    return jnp.moveaxis(out, 0, 1).reshape(B, T, N, H).astype(q_BTNH.dtype)


def _attend(carry, q_BSKGH, k_BCKH, v_BCKH, visible_BSC):
    """Add one key block to the weighted sum of values, the total weight and the top score of one query block."""
    sum_BSKGH, total_BSKG, top_BSKG = carry
    scores = jnp.einsum("BSKGH,BCKH->BSKGC", q_BSKGH, k_BCKH, preferred_element_type=jnp.float32)
    scores = jnp.where(visible_BSC[:, :, None, None, :], scores * q_BSKGH.shape[-1] ** -0.5, -jnp.inf)
    # Finite from the start, where no key of a block may be visible. The shift cancels in the result: it carries no gradient.
    new_top_BSKG = lax.stop_gradient(jnp.maximum(top_BSKG, scores.max(axis=-1)))
    shrink_BSKG = jnp.exp(top_BSKG - new_top_BSKG)
    weights = jnp.exp(scores - new_top_BSKG[..., None])
    values = weights.astype(v_BCKH.dtype), v_BCKH
    update = jnp.einsum("BSKGC,BCKH->BSKGH", *values, preferred_element_type=jnp.float32)
    total_BSKG = total_BSKG * shrink_BSKG + weights.sum(axis=-1)
    return sum_BSKGH * shrink_BSKG[..., None] + update, total_BSKG, new_top_BSKG


def cross_entropy(logits_BTV: jax.Array, targets_BT: jax.Array) -> jax.Array:
    """Return −log softmax(logits)[target] per token, in nats; NaN where the target is ≥ V."""
    target_logits_BT = jnp.take_along_axis(logits_BTV, targets_BT[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits_BTV, axis=-1) - target_logits_BT


class RMSNorm(nn.Module):
    """x / √(mean(x²) + ε) · scale over the last axis, computed in float32."""

    config: LlamaConfig

    @nn.compact
    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        scale_D = self.param("scale", nn.initializers.ones, (self.config.d_model,), jnp.float32)
        x = x_BTD.astype(jnp.float32)
        x = x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + self.config.norm_eps)
        return (x * scale_D[None, None, :]).astype(x_BTD.dtype)


def _dense(module: "Attention | MLP", path: str, features: int, layer: Any, key: Any, shared: dict[Any, Any]) -> nn.Dense:
    """Build the linear layer at `path`, named by its last part; Dense calls `dot_general_cls()` for its dot."""
    return nn.Dense(
        features,
        use_bias=False,
        dtype=module.config.compute_dtype,
        param_dtype=jnp.float32,
        kernel_init=nn.initializers.normal(module.config.init_std),
        dot_general_cls=module.linear_dot and functools.partial(module.linear_dot, path, layer, key, shared),
        name=path.split("/")[-1],
    )


class Attention(nn.Module):
    """Causal grouped-query attention: each key/value head serves N/K consecutive query heads."""

    config: LlamaConfig
    linear_dot: LinearDot | None = None
    attend: Attend | None = None

    @nn.compact
    def __call__(self, x_BTD: jax.Array, layer: Any, key: Any, rope: Rope) -> jax.Array:
        c, shared = self.config, {}

        def heads(path, count):
            y = _dense(self, path, count * c.head_size, layer, key, shared)(x_BTD)
            return y.reshape(*y.shape[:-1], count, c.head_size)

        q_BTNH = rotate(heads("attn/q", c.n_heads), rope)
        k_BTKH = rotate(heads("attn/k", c.n_kv_heads), rope)
        v_BTKH = heads("attn/v", c.n_kv_heads)
        attend = self.attend or functools.partial(attention, c, document_BT=rope.document)
        out_BTNH = attend(q_BTNH, k_BTKH, v_BTKH)
        out = out_BTNH.reshape(*x_BTD.shape[:-1], c.n_heads * c.head_size)
        return _dense(self, "attn/o", c.d_model, layer, key, {})(out)


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) · up(x))."""

    config: LlamaConfig
    linear_dot: LinearDot | None = None

    @nn.compact
    def __call__(self, x_BTD: jax.Array, layer: Any, key: Any) -> jax.Array:
        shared = {}
        gate_BTF = _dense(self, "mlp/gate", self.config.d_ff, layer, key, shared)(x_BTD)
        up_BTF = _dense(self, "mlp/up", self.config.d_ff, layer, key, shared)(x_BTD)
        return _dense(self, "mlp/down", self.config.d_model, layer, key, {})(nn.silu(gate_BTF) * up_BTF)


class Block(nn.Module):
    """x + attn(norm(x)), then x + mlp(norm(x)); returns (x, None), the shape of a scan step."""

    config: LlamaConfig
    linear_dot: LinearDot | None = None
    constrain: Constrain | None = None
    attend: Attend | None = None

    @nn.compact
    def __call__(self, x_BTD: jax.Array, layer: Any, key: Any, rope: Rope) -> tuple[jax.Array, None]:
        c = self.config
        normed_BTD = RMSNorm(c, name="attn_norm")(x_BTD)
        x_BTD = x_BTD + Attention(c, self.linear_dot, self.attend, name="attn")(normed_BTD, layer, key, rope)
        normed_BTD = RMSNorm(c, name="mlp_norm")(x_BTD)
        x_BTD = x_BTD + MLP(c, self.linear_dot, name="mlp")(normed_BTD, layer, key)
        return _constrain(self.constrain, "x_BTD", x_BTD), None


class LMHead(nn.Module):
    """x · kernel in the compute dtype, returned as float32; when tied, the kernel is the embedding transposed."""

    config: LlamaConfig
    linear_dot: LinearDot | None = None
    constrain: Constrain | None = None

    @nn.compact
    def __call__(self, x_BTD: jax.Array, embedding_VD: jax.Array, key: Any) -> jax.Array:
        c = self.config
        if c.tie_embeddings:
            kernel_DV = embedding_VD.T
        else:
            init = nn.initializers.normal(c.init_std)
            kernel_DV = self.param("kernel", init, (c.d_model, c.vocab_size), jnp.float32)
        dot = lax.dot_general if self.linear_dot is None else self.linear_dot("lm_head", None, key, {})
        logits_BTV = dot(x_BTD, kernel_DV.astype(x_BTD.dtype), (((2,), (0,)), ((), ())), precision=None)
        return _constrain(self.constrain, "logits_BTV", logits_BTV.astype(jnp.float32))


class Llama(nn.Module):
    """The language model: tokens to logits, or to per-token losses through `method="token_losses"`.

    `constrain(name, x)`, if given, wraps "tokens_BT" and "embedded_BTD" (the lookup's two ends), "x_BTD" (what every block
    takes and returns) and "logits_BTV"; it is where a caller puts `with_sharding_constraint`. attend(q, k, v), if given, takes
    the place of `attention`. pieces: into how many pieces the caller splits T over devices, each of which then holds one chunk
    of the loss.
    """

    config: LlamaConfig
    linear_dot: LinearDot | None = None
    constrain: Constrain | None = None
    attend: Attend | None = None
    pieces: int = 1

    def setup(self):
        c = self.config
        # Looked up in float32 and cast afterwards: in bfloat16 a frequent token's gradient would be summed in bfloat16.
        init = nn.initializers.normal(c.init_std)
        self.embed = nn.Embed(c.vocab_size, c.d_model, embedding_init=init)
        block, hooks = _remat_block(c), (self.linear_dot, self.constrain)
        if c.scan_layers:
            axes: Any = (0, nn.broadcast, nn.broadcast)  # layer, key, rope
            block = nn.scan(block, variable_axes={"params": 0}, split_rngs={"params": True}, in_axes=axes)
            self.layers: Any = block(c, *hooks, self.attend)
        else:
            self.layers = [block(c, *hooks, self.attend) for _ in range(c.n_layers)]
        self.final_norm = RMSNorm(c)
        self.lm_head = LMHead(c, *hooks)

    def __call__(self, tokens_BT: jax.Array, key: Any = None) -> jax.Array:
        """Return float32 logits_BTV; a token ≥ V gives NaN. `key` is handed to `linear_dot` untouched."""
        return self.lm_head(self._hidden(tokens_BT, key), self.embed.embedding, key)

    def token_losses(self, tokens_BT: jax.Array, targets_BT: jax.Array, key: Any = None) -> jax.Array:
        """Return the float32 negative log likelihood of each target, nll_BT, in nats.

        With `document_end` that of a document's first token is 0. With `loss_chunk`, neither pass holds more than loss_chunk
        positions of logits per piece. The head's dot is then the same program for every chunk and is not told which it sees.
        """
        x_BTD, embedding_VD = self._hidden(tokens_BT, key), self.embed.embedding
        (B, T), P = tokens_BT.shape, self.pieces
        chunk = self.config.loss_chunk or T // P
        if T % (P * chunk):
            raise ValueError(f"{T=} is not a multiple of loss_chunk={chunk} in each of {P} pieces")

        def losses(lm_head, x_BTD, targets_BT):
            return cross_entropy(lm_head(x_BTD, embedding_VD, key), targets_BT)

        def chunk_losses(lm_head, carry, x_BPCD, targets_BPC):
            nll = losses(lm_head, x_BPCD.reshape(B, P * chunk, -1), targets_BPC.reshape(B, P * chunk))
            return carry, nll.reshape(B, P, chunk)

        def of_documents(nll_BT):
            return nll_BT if self.config.document_end < 0 else jnp.where(tokens_BT == self.config.document_end, 0.0, nll_BT)

        if P * chunk == T:
            return of_documents(losses(self.lm_head, x_BTD, targets_BT))
        scan = nn.scan(
            nn.remat(chunk_losses, prevent_cse=False),
            variable_broadcast="params",
            split_rngs={"params": False},
            in_axes=2,
            out_axes=2,
        )
        chunks = (x_BTD.reshape(B, P, -1, chunk, x_BTD.shape[-1]), targets_BT.reshape(B, P, -1, chunk))
        return of_documents(scan(self.lm_head, None, *chunks)[1].reshape(B, T))

    def _hidden(self, tokens_BT: jax.Array, key: Any) -> jax.Array:
        c = self.config
        rope = rope_tables(c, tokens_BT)
        x_BTD = self.embed(_constrain(self.constrain, "tokens_BT", tokens_BT))
        x_BTD = _constrain(self.constrain, "embedded_BTD", x_BTD).astype(c.compute_dtype)
        x_BTD = _constrain(self.constrain, "x_BTD", x_BTD)
        if c.scan_layers:
            x_BTD, _ = self.layers(x_BTD, jnp.arange(c.n_layers, dtype=jnp.int32), key, rope)
        else:
            for i, block in enumerate(self.layers):
                x_BTD, _ = block(x_BTD, i, key, rope)
        return self.final_norm(x_BTD)


def _remat_block(config: LlamaConfig) -> Any:
    """Wrap Block in the rematerialisation policy; unrolled, `layer` (argument 2, after self) stays a Python int."""
    if config.remat == "none":
        return Block
    policies = jax.checkpoint_policies
    policy = {
        "full": None,
        "dots": policies.dots_with_no_batch_dims_saveable,
        "packed": policies.save_only_these_names(PACKED_NAME),
    }[config.remat]
    static = () if config.scan_layers else (2,)
    return nn.remat(Block, prevent_cse=not config.scan_layers, policy=policy, static_argnums=static)


def _constrain(constrain: Constrain | None, name: str, x: jax.Array) -> jax.Array:
    return x if constrain is None else constrain(name, x)
