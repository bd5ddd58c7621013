"""Llama against a plain-numpy forward, and against itself across scan, remat, chunking, attention, vmap, and mesh."""

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend import core as jex_core
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from models import llama

B, T = 2, 12
# θ and the original length make Llama 3.1 scaling keep, interpolate, and stretch at least one of the pairs each.
BASE = llama.LlamaConfig(
    vocab_size=37, d_model=16, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=20, head_dim=8, rope_theta=100.0,
    rope_original_len=32,
)  # fmt: skip
LLAMA_8B = llama.LlamaConfig(
    vocab_size=128256, d_model=4096, n_layers=32, n_heads=32, n_kv_heads=8, d_ff=14336, rope_scaling="llama3.1",
    dtype="bfloat16", remat="full", loss_chunk=1024, attention="blockwise", attention_block=512,
)  # fmt: skip

replace = dataclasses.replace


def random_params(config, seed=0, std=0.3):
    """Draw weights large enough that attention and logits are far from uniform, and norm scales away from one."""
    shapes = jax.eval_shape(llama.Llama(config).init, jax.random.key(0), jnp.zeros((1, T), jnp.int32))
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        x = rng.normal(size=leaf.shape) * std
        return jnp.asarray(1 + x if path[-1].key == "scale" else x, jnp.float32)

    return jax.tree.map_with_path(draw, shapes)


def random_tokens(seed=0, shape=(B, T), vocab=BASE.vocab_size):
    rng = np.random.default_rng(seed)
    return tuple(jnp.asarray(rng.integers(vocab, size=shape), jnp.int32) for _ in range(2))


@functools.cache
def jitted(function, config, **hooks):
    """Jit `function` of the model once per config and hooks, so that tests share compiled programs."""
    return jax.jit(function(config, **hooks))


def apply_fn(config, **hooks):
    return llama.Llama(config, **hooks).apply


def logits(config, params, tokens, key=None, **hooks):
    return jitted(apply_fn, config, **hooks)(params, tokens, key)


def loss_fn(config, **hooks):
    """A weighted sum of the token losses, so that no two positions are interchangeable."""

    def loss(params, tokens, targets, key=None):
        nll_BT = llama.Llama(config, **hooks).apply(params, tokens, targets, key, method="token_losses")
        return jnp.mean(nll_BT * jnp.linspace(0.5, 1.5, nll_BT.size).reshape(nll_BT.shape)), nll_BT

    return jax.value_and_grad(loss, has_aux=True)


def losses_and_grads(config, params, tokens, targets, key=None, **hooks):
    (_, nll_BT), grads = jitted(loss_fn, config, **hooks)(params, tokens, targets, key)
    return nll_BT, grads


def assert_trees_close(actual, expected, tol=1e-5):
    """Compare leaf by leaf, relative to the largest element of each leaf."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for (path, a), e in zip(jax.tree.leaves_with_path(actual), jax.tree.leaves(expected), strict=True):
        a, e = np.asarray(a, np.float64), np.asarray(e, np.float64)
        assert np.abs(e).max() > 1e-4, f"{jax.tree_util.keystr(path)} is empty evidence"
        np.testing.assert_allclose(a, e, rtol=0, atol=tol * np.abs(e).max(), err_msg=jax.tree_util.keystr(path))


def unroll_params(params):
    params = dict(params["params"])
    layers = params.pop("layers")
    n_layers = jax.tree.leaves(layers)[0].shape[0]
    return {"params": params | {f"layers_{i}": jax.tree.map(lambda x, i=i: x[i], layers) for i in range(n_layers)}}


def stack_params(params):
    params = dict(params["params"])
    names = sorted((name for name in params if name.startswith("layers_")), key=lambda name: int(name[7:]))
    layers = [params.pop(name) for name in names]
    return {"params": params | {"layers": jax.tree.map(lambda *x: jnp.stack(x), *layers)}}


# ----------------------------------------------------------------------------- the independent forward


def numpy_frequencies(config):
    """Published code in words: by wavelength, branch by branch."""
    head, out = config.head_dim, []
    low_wavelength = config.rope_original_len / config.rope_low_freq_factor
    high_wavelength = config.rope_original_len / config.rope_high_freq_factor
    for r in range(head // 2):
        freq = 1.0 / config.rope_theta ** (2 * r / head)
        wavelength = 2 * math.pi / freq
        if config.rope_scaling == "none" or wavelength < high_wavelength:
            out.append((freq, "kept"))
        elif wavelength > low_wavelength:
            out.append((freq / config.rope_factor, "stretched"))
        else:
            smooth = (config.rope_original_len / wavelength - config.rope_low_freq_factor) / (
                config.rope_high_freq_factor - config.rope_low_freq_factor
            )
            out.append(((1 - smooth) * freq / config.rope_factor + smooth * freq, "interpolated"))
    return out


def numpy_rotate(x_H, position, config):
    half, out = len(x_H) // 2, x_H.copy()
    for r, (freq, _) in enumerate(numpy_frequencies(config)):
        pair = (x_H[r] + 1j * x_H[r + half]) * np.exp(1j * position * freq)
        out[r], out[r + half] = pair.real, pair.imag
    return out


def numpy_attention(q_TNH, k_TKH, v_TKH):
    length, n_heads, head = q_TNH.shape
    group, out = n_heads // k_TKH.shape[1], np.zeros_like(q_TNH)
    for t, n in itertools.product(range(length), range(n_heads)):
        scores = np.array([q_TNH[t, n] @ k_TKH[s, n // group] / math.sqrt(head) for s in range(t + 1)])
        weights = np.exp(scores - scores.max())
        out[t, n] = (weights / weights.sum()) @ v_TKH[: t + 1, n // group]
    return out


def numpy_llama(config, params, tokens_BT):
    """Compute logits in float64, one sequence, layer, position, and head at a time; scanned parameters."""
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params["params"])

    def norm(x, scale):
        return np.stack([row / math.sqrt(np.mean(row**2) + config.norm_eps) * scale for row in x])

    def forward(tokens):
        x = np.stack([p["embed"]["embedding"][token] for token in tokens])
        for i in range(config.n_layers):
            layer = jax.tree.map(lambda leaf, i=i: leaf[i], p["layers"])
            h, w = norm(x, layer["attn_norm"]["scale"]), layer["attn"]
            q, k, v = (np.reshape(h @ w[name]["kernel"], (len(tokens), -1, config.head_dim)) for name in "qkv")
            q, k = (np.stack([[numpy_rotate(y, t, config) for y in x[t]] for t in range(len(x))]) for x in (q, k))
            x = x + numpy_attention(q, k, v).reshape(len(tokens), -1) @ w["o"]["kernel"]
            h, w = norm(x, layer["mlp_norm"]["scale"]), layer["mlp"]
            gate = h @ w["gate"]["kernel"]
            x = x + (gate / (1 + np.exp(-gate)) * (h @ w["up"]["kernel"])) @ w["down"]["kernel"]
        head = p["embed"]["embedding"].T if config.tie_embeddings else p["lm_head"]["kernel"]
        return norm(x, p["final_norm"]["scale"]) @ head

    return np.stack([forward(tokens) for tokens in np.asarray(tokens_BT)])


def numpy_losses(logits_BTV, targets_BT):
    log_z = np.log(np.exp(logits_BTV).sum(axis=-1))
    return log_z - np.take_along_axis(logits_BTV, np.asarray(targets_BT)[..., None], axis=-1)[..., 0]


@pytest.mark.parametrize(
    "changes",
    [
        {"n_kv_heads": 4},
        {"n_kv_heads": 2, "rope_scaling": "llama3.1"},
        {"n_kv_heads": 1, "tie_embeddings": True},
        {"n_heads": 6, "n_kv_heads": 3, "head_dim": 4, "d_model": 10, "norm_eps": 0.1},
    ],
    ids=str,
)
def test_logits_and_losses_match_numpy(changes):
    config = replace(BASE, **changes)
    params, (tokens, targets) = random_params(config), random_tokens()
    expected = numpy_llama(config, params, tokens)
    assert np.ptp(expected, axis=-1).min() > 1  # far from uniform
    np.testing.assert_allclose(logits(config, params, tokens), expected, rtol=0, atol=1e-4)
    nll_BT = jax.jit(llama.Llama(config).apply, static_argnames="method")(params, tokens, targets, method="token_losses")
    np.testing.assert_allclose(nll_BT, numpy_losses(expected, targets), rtol=0, atol=1e-4)


@pytest.mark.parametrize("tied", [False, True])
def test_gradients_match_differences_of_numpy_losses(tied):
    config = replace(BASE, tie_embeddings=tied, loss_chunk=4, remat="full")
    params, (tokens, targets) = random_params(config), random_tokens()
    weights_BT = np.linspace(0.5, 1.5, B * T).reshape(B, T) / (B * T)  # as in loss_fn
    _, grads = losses_and_grads(config, params, tokens, targets)
    for part in params["params"]:
        direction = jax.tree.map(lambda x: np.sign(np.asarray(x, np.float64)), grads["params"][part])

        def loss(step, part=part, direction=direction):
            values = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params["params"][part])
            moved = jax.tree.map(lambda leaf, sign: leaf + step * sign, values, direction)
            logits_BTV = numpy_llama(config, {"params": params["params"] | {part: moved}}, tokens)
            return np.vdot(weights_BT, numpy_losses(logits_BTV, targets))

        slope = (loss(1e-6) - loss(-1e-6)) / 2e-6
        expected = sum(np.abs(x).sum() for x in jax.tree.leaves(grads["params"][part]))
        np.testing.assert_allclose(slope, expected, rtol=1e-4, err_msg=part)


def test_rope_frequencies_follow_the_published_rule():
    for config in (replace(BASE, rope_scaling="llama3.1"), replace(LLAMA_8B, head_dim=128)):
        expected, branches = zip(*numpy_frequencies(config), strict=True)
        assert set(branches) == {"kept", "interpolated", "stretched"}
        np.testing.assert_allclose(llama.rope_frequencies(config), expected, rtol=1e-12)


def test_future_tokens_change_nothing():
    params, (tokens, _) = random_params(BASE), random_tokens()
    for config in (BASE, replace(BASE, attention="blockwise", attention_block=4)):
        before = np.asarray(logits(config, params, tokens))
        for t in (1, 6, T - 1):
            changed = np.array(tokens)
            changed[:, t] = (changed[:, t] + 1) % BASE.vocab_size
            after = np.asarray(logits(config, params, changed))
            np.testing.assert_array_equal(after[:, :t], before[:, :t])
            assert (after[:, t:] != before[:, t:]).any(axis=-1).all()


# ------------------------------------------------------------------------ two ways to the same numbers


@pytest.mark.parametrize("block", [1, 4, 16])
def test_blockwise_attention_matches_dot_product(block):
    keys = jax.random.split(jax.random.key(0), 4)
    heads = (4, 2, 2, 4)
    *qkv, weights = (3 * jax.random.normal(k, (B, 16, n, 8)) for k, n in zip(keys, heads, strict=True))

    def run(attention):
        def product(qkv):
            out = attention(*qkv)
            return jnp.vdot(weights, out), out

        return jax.jit(jax.value_and_grad(product, has_aux=True))(qkv)

    blockwise = functools.partial(llama.blockwise_attention, block=block)
    dot_product = functools.partial(jax.nn.dot_product_attention, is_causal=True)
    assert_trees_close(run(blockwise), run(dot_product))


def largest_array(function, *args):
    """Return the number of elements of the largest value computed anywhere in `function`, loop bodies included."""

    def visit(jaxpr):
        sizes = [math.prod(var.aval.shape) for eqn in jaxpr.eqns for var in eqn.outvars]
        is_jaxpr = lambda x: isinstance(x, jex_core.Jaxpr | jex_core.ClosedJaxpr)  # noqa: E731
        for leaf in jax.tree.leaves([eqn.params for eqn in jaxpr.eqns], is_leaf=is_jaxpr):
            if is_jaxpr(leaf):
                sizes.append(visit(leaf.jaxpr if isinstance(leaf, jex_core.ClosedJaxpr) else leaf))
        return max(sizes, default=0)

    return visit(jax.make_jaxpr(function)(*args).jaxpr)


def test_blockwise_attention_needs_linear_memory():
    length, block = 512, 8
    q, k = jax.ShapeDtypeStruct((1, length, 2, 2), jnp.float32), jax.ShapeDtypeStruct((1, length, 1, 2), jnp.float32)
    blockwise = functools.partial(llama.blockwise_attention, block=block)
    dot_product = functools.partial(jax.nn.dot_product_attention, is_causal=True)
    sizes = [
        largest_array(jax.grad(lambda *qkv, f=f: f(*qkv).sum(), argnums=(0, 1, 2)), q, k, k) for f in (blockwise, dot_product)
    ]
    assert sizes[0] <= 2 * length * block
    assert sizes[1] >= length**2  # the measure sees what it should


def test_chunked_loss_never_holds_all_logits():
    config = replace(BASE, vocab_size=1000)
    params, (tokens, targets) = random_params(config), random_tokens()
    chunked, whole = (
        largest_array(loss_fn(replace(config, loss_chunk=n)), params, tokens, targets) for n in (2, 0)
    )  # fmt: skip
    assert chunked < whole == B * T * 1000


@pytest.mark.parametrize(("chunk", "tied"), [(1, False), (4, False), (4, True)])
def test_chunked_loss_matches_whole(chunk, tied):
    config = replace(BASE, tie_embeddings=tied)
    params, (tokens, targets) = random_params(config), random_tokens()
    hooks = {"linear_dot": scaling_dot}
    whole = losses_and_grads(config, params, tokens, targets, KEY, **hooks)
    assert_trees_close(losses_and_grads(replace(config, loss_chunk=chunk), params, tokens, targets, KEY, **hooks), whole)


def test_scanned_matches_unrolled():
    params, batch = random_params(BASE), random_tokens()
    nll_BT, grads = losses_and_grads(BASE, params, *batch)
    unrolled_nll_BT, unrolled_grads = losses_and_grads(replace(BASE, scan_layers=False), unroll_params(params), *batch)
    assert_trees_close((unrolled_nll_BT, stack_params(unrolled_grads)), (nll_BT, grads))


@pytest.mark.parametrize("scan", [True, False])
def test_remat_recomputes_and_keeps_the_gradients(scan):
    config = replace(BASE, scan_layers=scan)
    params, batch = random_params(config), random_tokens()
    expected, dots = losses_and_grads(config, params, *batch), {}
    for remat in ("none", "full", "dots"):
        config = replace(config, remat=remat)
        assert_trees_close(losses_and_grads(config, params, *batch), expected)
        dots[remat] = jitted(loss_fn, config).lower(params, *batch).as_text().count("dot_general")
    assert dots["none"] < dots["dots"] < dots["full"]  # "dots" recomputes only attention, whose dots have batch axes


def test_vmap_over_sequences_matches_batch():
    config = replace(BASE, loss_chunk=4, attention="blockwise", attention_block=4)
    params, (tokens, targets) = random_params(config), random_tokens()
    apply = functools.partial(llama.Llama(config).apply, params, method="token_losses")
    one_by_one = jax.jit(jax.vmap(lambda x_T, y_T: apply(x_T[None], y_T[None])[0]))(tokens, targets)
    np.testing.assert_allclose(one_by_one, jax.jit(apply)(tokens, targets), rtol=0, atol=1e-5)


def test_sharded_matches_unsharded():
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    sharded = lambda *axes: NamedSharding(mesh, PartitionSpec(*axes))  # noqa: E731
    config = replace(BASE, vocab_size=40, loss_chunk=4, remat="full")
    params, batch = random_params(config), random_tokens(shape=(8, T))
    expected = losses_and_grads(config, params, *batch)

    def place(path, x):
        return jax.device_put(x, sharded(*[None] * (x.ndim - 1), "model" if path[-1].key == "kernel" else None))

    def constrain(name, x):
        axes = ("data", *[None] * (x.ndim - 2), "model" if name == "logits_BTV" else None)
        return lax.with_sharding_constraint(x, sharded(*axes))

    params = jax.tree.map_with_path(place, params)
    batch = jax.device_put(batch, sharded("data", None))
    assert_trees_close(losses_and_grads(config, params, *batch, constrain=constrain), expected)


def test_bfloat16_compute_gives_float32_results():
    config = replace(BASE, dtype="bfloat16", loss_chunk=4, attention="blockwise", attention_block=4)
    params, batch = random_params(config), random_tokens()
    computed = np.asarray(logits(config, params, batch[0]))
    (nll_BT, grads), exact = losses_and_grads(config, params, *batch), np.asarray(logits(BASE, params, batch[0]))
    assert {x.dtype for x in jax.tree.leaves((computed, nll_BT, grads))} == {np.dtype("float32")}
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((nll_BT, grads)))
    error = np.abs(computed - exact).max() / np.abs(exact).max()
    assert 1e-4 < error < 0.1  # the compute really was bfloat16, and right


# ------------------------------------------------------------------------------------------- the hooks

KEY = jnp.array([3, 5], jnp.uint32)


def scaling_dot(path, layer, key, shared):
    """A dot whose output depends on every argument of the hook."""
    scale = 1 + 0.1 * llama.LINEAR_PATHS.index(path) + 0.01 * key[1].astype(jnp.float32)
    scale += 0.0 if layer is None else 0.5 * jnp.float32(layer)
    return lambda *args, **kwargs: lax.dot_general(*args, **kwargs) * scale


@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize("remat", ["none", "full"])
def test_linear_dot_receives_path_layer_and_key(scan, remat):
    config = replace(BASE, scan_layers=scan, remat=remat, loss_chunk=4)
    calls = set()

    def record(path, layer, key, shared):
        assert key.shape == (2,)
        assert key.dtype == jnp.uint32
        if isinstance(layer, jax.Array):
            assert layer.shape == ()
            assert layer.dtype == jnp.int32
        calls.add((path, "traced" if isinstance(layer, jax.Array) else layer))
        return lax.dot_general

    jax.eval_shape(loss_fn(config, linear_dot=record), random_params(config), *random_tokens(), KEY)
    layers = ["traced"] if scan else range(config.n_layers)
    assert calls == {*itertools.product(llama.LINEAR_PATHS[:-1], layers), ("lm_head", None)}


@pytest.mark.parametrize("scan", [True, False])
def test_linear_dot_is_applied_to_its_own_layer(scan):
    params, (tokens, _) = random_params(BASE), random_tokens()
    scaled = jax.tree.map(lambda x: x, params)["params"]  # a copy with the hook's factors folded into the kernels
    for path in llama.LINEAR_PATHS:
        *group, name = path.split("/")
        holder = scaled["layers"][group[0]] if group else scaled
        kernel = holder[name]["kernel"]
        layers = range(BASE.n_layers) if group else [None]
        scales = jnp.array([scaling_dot(path, i, KEY, {})(1.0, 1.0, (((), ()), ((), ()))) for i in layers])
        holder[name] = {"kernel": kernel * (scales[:, None, None] if group else jnp.full_like(kernel, scales[0]))}
    expected = logits(BASE, {"params": scaled}, tokens)
    config = replace(BASE, scan_layers=scan)
    actual = logits(config, params if scan else unroll_params(params), tokens, KEY, linear_dot=scaling_dot)
    assert_trees_close(actual, expected)
    assert not np.allclose(logits(BASE, params, tokens), expected, atol=0.1)


@pytest.mark.parametrize("changes", [{}, {"scan_layers": False, "remat": "dots", "loss_chunk": 4}], ids=str)
def test_plain_hook_lowers_to_the_program_without_a_hook(changes):
    config = replace(BASE, **changes)
    args = (random_params(config), *random_tokens(), KEY)

    def lower(**hooks):
        return jitted(loss_fn, config, **hooks).lower(*args).as_text()

    assert lower(linear_dot=lambda path, layer, key, shared: lax.dot_general) == lower()
    assert lower(linear_dot=scaling_dot) != lower()


def test_constrain_sees_activations_and_logits():
    seen = []

    def double(name, x):
        seen.append((name, x.shape))
        return 2 * x if name == "logits_BTV" else x

    config = replace(BASE, scan_layers=False)
    params, (tokens, _) = random_params(config), random_tokens()
    doubled = logits(config, params, tokens, constrain=double)
    lookup = [("tokens_BT", (B, T)), ("embedded_BTD", (B, T, 16))]
    assert seen == [*lookup, *[("x_BTD", (B, T, 16))] * (1 + config.n_layers), ("logits_BTV", (B, T, 37))]
    np.testing.assert_allclose(doubled, 2 * logits(config, params, tokens), rtol=1e-5)


# ------------------------------------------------------------------------------- parameters and config


def shapes_of(config):
    tokens = jax.ShapeDtypeStruct((1, 8192), jnp.int32)
    return jax.eval_shape(llama.Llama(config).init, jax.random.key(0), tokens)["params"]


@pytest.mark.parametrize("changes", [{}, {"tie_embeddings": True, "head_dim": 10}, {"scan_layers": False}], ids=str)
def test_num_params_counts_what_init_creates(changes):
    config = replace(BASE, **changes)
    leaves = jax.tree.leaves(shapes_of(config))
    assert llama.num_params(config) == sum(leaf.size for leaf in leaves)
    assert {leaf.dtype for leaf in leaves} == {jnp.dtype("float32")}


def test_8b_has_the_published_size_and_the_documented_paths():
    leaves = jax.tree.leaves_with_path(shapes_of(LLAMA_8B))
    assert llama.num_params(LLAMA_8B) == sum(leaf.size for _, leaf in leaves) == 8_030_261_248
    assert {jax.tree_util.keystr(path, simple=True, separator="/"): leaf.shape for path, leaf in leaves} == {
        "embed/embedding": (128256, 4096),
        "layers/attn_norm/scale": (32, 4096),
        "layers/attn/q/kernel": (32, 4096, 4096),
        "layers/attn/k/kernel": (32, 4096, 1024),
        "layers/attn/v/kernel": (32, 4096, 1024),
        "layers/attn/o/kernel": (32, 4096, 4096),
        "layers/mlp_norm/scale": (32, 4096),
        "layers/mlp/gate/kernel": (32, 4096, 14336),
        "layers/mlp/up/kernel": (32, 4096, 14336),
        "layers/mlp/down/kernel": (32, 14336, 4096),
        "final_norm/scale": (4096,),
        "lm_head/kernel": (4096, 128256),
    }


def test_8b_trains_abstractly():
    params, tokens = {"params": shapes_of(LLAMA_8B)}, jax.ShapeDtypeStruct((4, 8192), jnp.int32)
    (_, nll_BT), grads = jax.eval_shape(loss_fn(LLAMA_8B), params, tokens, tokens)
    assert nll_BT.shape == (4, 8192)
    assert jax.tree.map(jnp.shape, grads) == jax.tree.map(jnp.shape, params)


def test_init_draws_the_configured_std():
    config = replace(BASE, d_model=64, d_ff=128, vocab_size=200, init_std=0.07)
    params = jax.jit(llama.Llama(config).init)(jax.random.key(0), random_tokens()[0])["params"]
    params = jax.tree.map(np.asarray, params)
    for path, leaf in jax.tree.leaves_with_path(params):
        std, expected = (np.std(leaf), 0.07) if path[-1].key != "scale" else (leaf.min(), 1.0)
        assert abs(std / expected - 1) < 0.05, path
    q = params["layers"]["attn"]["q"]["kernel"]
    assert not np.array_equal(q[0], q[1])  # each layer its own draws


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_kv_heads": 3}, "n_heads=4 is not a multiple of n_kv_heads=3"),
        ({"head_dim": 7}, "7 is odd"),
        ({"head_dim": 0, "d_model": 18}, "d_model=18 is not a multiple of n_heads=4"),
        ({"head_dim": 0, "d_model": 12}, "3 is odd"),
        ({"head_dim": -8}, "head_dim=-8"),
        ({"d_ff": 0}, "d_ff=0"),
        ({"n_layers": True}, "n_layers=True"),
        ({"d_model": 16.0}, "d_model=16.0"),
        ({"norm_eps": math.nan}, "norm_eps=nan"),
        ({"rope_theta": math.inf}, "rope_theta=inf"),
        ({"rope_low_freq_factor": 4.0}, "4.0"),
        ({"rope_scaling": "yarn"}, "rope_scaling='yarn'"),
        ({"remat": "all"}, "remat='all'"),
        ({"remat": None}, "remat=None"),
        ({"scan_layers": 1}, "scan_layers=1"),
        ({"attention": "flash"}, "attention='flash'"),
        ({"attention": "blockwise"}, "attention_block=0"),
        ({"attention_block": 4}, "attention='dot_product'"),
        ({"dtype": "float16"}, "dtype='float16'"),
        ({"loss_chunk": -1}, "loss_chunk=-1"),
    ],
    ids=str,
)
def test_invalid_config_raises(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(BASE, **changes)


def test_ids_beyond_the_vocabulary_give_nan():
    params, (tokens, _), beyond = random_params(BASE), random_tokens(), np.full((B, T), BASE.vocab_size, np.int32)
    assert np.isnan(logits(BASE, params, beyond)).all()
    assert np.isnan(losses_and_grads(BASE, params, tokens, beyond)[0]).all()


def test_blocks_and_chunks_must_divide_the_sequence():
    batch = random_tokens()
    for changes in ({"loss_chunk": 5}, {"attention": "blockwise", "attention_block": 5}):
        config = replace(BASE, **changes)
        with pytest.raises(ValueError, match=r"T=12 is not a multiple of \w+=5"):
            llama.Llama(config).apply(random_params(BASE), *batch, method="token_losses")
