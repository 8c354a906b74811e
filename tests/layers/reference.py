"""The papers' layers in NumPy, float64, token by token: written from the equations, sharing nothing with the library.

Each takes a module's parameters (nested dicts of arrays) and one document `x [T, D]`, and gives the layer's output.
Heads: 2 of every kind (one key head in Mamba-2), channels follow from the parameters' shapes.
"""

import math

import numpy as np

HEADS = 2


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def softplus(x):
    return np.log1p(np.exp(x))


def l2(x):
    return x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def rms(x, scale, eps=1e-6):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * scale


def linear(p, x):
    if "down" in p:
        return linear(p["up"], linear(p["down"], x))
    return x @ p["kernel"] + p.get("bias", 0.0)


def convolve(p, x):
    width = len(p["kernel"])
    padded = np.concatenate([np.zeros((width - 1, x.shape[1])), x])
    y = sum(p["kernel"][i] * padded[i : i + len(x)] for i in range(width))
    return y + p.get("bias", 0.0)


def stream(p, x, *, heads=HEADS, conv=True, act=silu):
    y = linear(p["projection"], x)
    if conv:
        y = convolve(p["convolution"], y)
    return act(y).reshape(len(x), heads, -1)


def rotate(x, base=10000.0):
    half = x.shape[-1] // 2
    angle = np.arange(len(x))[:, None] * base ** (-np.arange(half) / half)
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle)[:, None]
    return np.concatenate([turned.real, turned.imag], axis=-1)


def state_space_decay(p, x, channels=False):
    """alpha = exp(-exp(A_log) softplus(W x + dt_bias)), and dt."""
    dt = softplus(linear(p["projection"], x) + p["dt_bias"])
    rate = np.exp(p["A_log"])
    if channels:
        dt, rate = dt.reshape(len(x), len(rate), -1), rate[:, None]
    return np.exp(-rate * dt), dt


def run(step, q, v, scale):
    """Applies `S = step(t, h, S)` per head h, and reads with q."""
    heads = v.shape[1]
    out = np.zeros((len(v), heads, v.shape[-1]))
    for h in range(heads):
        g = h * q.shape[1] // heads
        S = np.zeros((q.shape[-1], v.shape[-1]))
        for t in range(len(v)):
            S = step(t, h, S)
            out[t, h] = scale * S.T @ q[t, g]
    return out


def read(p, x, o, gate=None, eps=1e-6):
    y = rms(o, p["norm"]["scale"], eps)
    if gate is not None:
        y = y * gate(linear(p["gate"], x)).reshape(o.shape)
    return linear(p["output"], y.reshape(len(x), -1))


def identity(x):
    return x


def linear_attention(p, x):
    q, k, v = (stream(p[n], x, conv=False, act=identity) for n in ("query", "key", "value"))
    o = run(lambda t, h, S: S + np.outer(k[t, h], v[t, h]), q, v, q.shape[-1] ** -0.5)
    return read(p["output_projection"], x, o)


def retnet(p, x):
    q, k, v = (stream(p[n], x, conv=False, act=identity) for n in ("query", "key", "value"))
    q, k = rotate(q), rotate(k)
    gamma = [1 - 2.0 ** (-5 - h) for h in range(HEADS)]
    o = run(lambda t, h, S: gamma[h] * S + np.outer(k[t, h], v[t, h]), q, v, q.shape[-1] ** -0.5)
    return read(p["output_projection"], x, o, silu)


def mamba2(p, x):
    c, b = (stream(p[n], x, heads=1) for n in ("query", "key"))
    v = stream(p["value"], x)
    alpha, dt = state_space_decay(p["decay"], x)
    o = run(lambda t, h, S: alpha[t, h] * S + dt[t, h] * np.outer(b[t, 0], v[t, h]), c, v, 1.0)
    r = p["output_projection"]
    y = (o + r["skip"][:, None] * v).reshape(len(x), -1) * silu(linear(r["gate"], x))
    return linear(r["output"], rms(y, r["norm"]["scale"], 1e-5))


def zamba2(p, x):
    """The layer of figure 2 in arXiv 2411.15242, as a model's first: the stream is the embeddings."""
    f, own = p["transformer"], p["adapters"]
    z = rms(np.concatenate([x, x], axis=-1), f["norm"]["scale"], 1e-5)
    q, k, v = (
        (linear(f["attention"][n], z) + linear(own[n], z)).reshape(len(x), HEADS, -1) for n in ("query", "key", "value")
    )
    scores = np.exp(np.einsum("thk,shk->hts", q, k) / np.sqrt(q.shape[-1] / 2)) * np.tri(len(x))
    mixed = np.einsum("hts,shk->thk", scores / scores.sum(-1, keepdims=True), v).reshape(len(x), -1)
    z = rms(linear(f["attention"]["output"], mixed), f["feed_forward_norm"]["scale"], 1e-5)
    inner = z @ own["down"]["kernel"]
    gate, up = (linear(f["feed_forward"][n], z) + linear(own[n], inner) for n in ("gate", "up"))
    gelu = gate * (1 + np.vectorize(math.erf)(gate / np.sqrt(2))) / 2
    t = linear(p["projection"], linear(f["feed_forward"]["down"], gelu * up))
    return mamba2(p["mixer"], rms(x + t, p["norm"]["scale"], 1e-5))


def gla(p, x):
    q, k, v = (stream(p[n], x, conv=False, act=identity) for n in ("query", "key", "value"))
    alpha = (sigmoid(linear(p["decay"]["projection"], x)) ** (1 / 16)).reshape(k.shape)
    o = run(lambda t, h, S: alpha[t, h][:, None] * S + np.outer(k[t, h], v[t, h]), q, v, q.shape[-1] ** -0.5)
    return read(p["output_projection"], x, o, silu)


def delta(q, k, v, beta, alpha=None):
    """S = (I - beta k k^T) Diag(alpha) S + beta k v^T."""
    eye = np.eye(k.shape[-1])

    def step(t, h, S):
        kept = S if alpha is None else alpha[t, h].reshape(-1, 1) * S
        transition = eye - beta[t, h] * np.outer(k[t, h], k[t, h])
        return transition @ kept + beta[t, h] * np.outer(k[t, h], v[t, h])

    return run(step, q, v, q.shape[-1] ** -0.5)


def hgrn2(p, x):
    q, f, v = (linear(p[n]["projection"], x).reshape(len(x), HEADS, -1) for n in ("query", "key", "value"))
    alpha, q = sigmoid(f), silu(q)
    out = run(lambda t, h, S: alpha[t, h, :, None] * S + np.outer(1 - alpha[t, h], v[t, h]), q, v, q.shape[-1] ** -0.5)
    return linear(
        p["output_projection"]["output"],
        rms(out.reshape(len(x), -1), p["output_projection"]["norm"]["scale"], eps=1e-5),
    )


def gsa(p, x):
    q, k, v = (silu(linear(p[n]["projection"], x)).reshape(len(x), HEADS, -1) for n in ("query", "key", "value"))
    decay = (sigmoid(linear(p["decay"]["projection"], x)) ** (1 / 8)).reshape(len(x), HEADS, -1)
    out = np.zeros_like(v)
    for h in range(HEADS):
        keys, values = np.zeros((decay.shape[-1], k.shape[-1])), np.zeros((decay.shape[-1], v.shape[-1]))
        for t in range(len(x)):
            kept = decay[t, h][:, None]
            keys, values = kept * keys + (1 - kept) * k[t, h], kept * values + (1 - kept) * v[t, h]
            weights = np.exp(keys @ q[t, h])
            out[t, h] = weights @ values / weights.sum()
    return linear(
        p["output_projection"]["output"],
        rms(silu(out.reshape(len(x), -1)), p["output_projection"]["norm"]["scale"], eps=1e-5),
    )


def deltanet(p, x, gain=None):
    q, k, v = (stream(p[n], x) for n in ("query", "key", "value"))
    if gain is None:
        k = l2(k)
        beta = sigmoid(linear(p["gain"]["projection"], x))
    else:
        beta = gain(p.get("gain"), x, np.sum(k * k, axis=-1))
    return read(p["output_projection"], x, delta(l2(q), k, v, beta))


def longhorn(p, x):
    def gain(g, x, kk):
        b = sigmoid(linear(g["projection"], x))
        return b / (1 + b * kk)

    return deltanet(p, x, gain)


def nlms(p, x):
    return deltanet(p, x, lambda g, x, kk: 1 / (kk + 1e-6))


def efla(p, x):
    return deltanet(p, x, lambda g, x, kk: (1 - np.exp(-sigmoid(linear(g["projection"], x)) * kk)) / kk)


def gated_deltanet(p, x):
    q, k, v = (stream(p[n], x) for n in ("query", "key", "value"))
    alpha, _ = state_space_decay(p["decay"], x)
    beta = sigmoid(linear(p["gain"]["projection"], x))
    return read(p["output_projection"], x, delta(l2(q), l2(k), v, beta, alpha), silu)


def kla(p, x):
    q, k, v = (stream(p[n], x) for n in ("query", "key", "value"))
    alpha, _ = state_space_decay(p["decay"], x)
    beta = sigmoid(linear(p["gain"]["projection"], x)) / (np.sum(k * k, axis=-1) + 1e-6)
    return read(p["output_projection"], x, delta(l2(q), k, v, beta, alpha), silu)


def kda(p, x):
    q, k, v = (stream(p[n], x) for n in ("query", "key", "value"))
    alpha, _ = state_space_decay(p["decay"], x, channels=True)
    beta = sigmoid(linear(p["gain"]["projection"], x))
    return read(p["output_projection"], x, delta(l2(q), l2(k), v, beta, alpha), sigmoid)


def gated_deltanet2(p, x):
    q, k, v = (stream(p[n], x) for n in ("query", "key", "value"))
    q, k = l2(q), l2(k)
    alpha, _ = state_space_decay(p["decay"], x, channels=True)
    b = sigmoid(linear(p["gain"]["erase_projection"], x)).reshape(k.shape)
    w = sigmoid(linear(p["gain"]["projection"], x)).reshape(v.shape)

    def step(t, h, S):
        transition = np.eye(k.shape[-1]) - np.outer(k[t, h], b[t, h] * k[t, h])
        return transition @ np.diag(alpha[t, h]) @ S + np.outer(k[t, h], w[t, h] * v[t, h])

    return read(p["output_projection"], x, run(step, q, v, q.shape[-1] ** -0.5), silu, eps=1e-5)


def comba(p, x):
    q, k, v = (stream(p[n], x) for n in ("query", "key", "value"))
    q, k = l2(q), l2(k)
    alpha, _ = state_space_decay(p["decay"], x)
    beta = sigmoid(linear(p["gain"]["projection"], x))
    s = sigmoid(p["gain"]["feedback"])

    def step(t, h, S):
        transition = alpha[t, h] * np.eye(k.shape[-1]) - s[h] * beta[t, h] * np.outer(k[t, h], k[t, h])
        return transition @ S + beta[t, h] * np.outer(k[t, h], v[t, h])

    query = q - p["keys"]["correction"][:, None] * k
    return read(p["output_projection"], x, run(step, query, v, q.shape[-1] ** -0.5), sigmoid)


def token_before(x):
    return np.concatenate([np.zeros_like(x[:1]), x[:-1]])


def rwkv7(p, x):
    """The equations of arXiv 2503.14456, section 4.1, for a first layer."""

    def low_rank(p, x, between):
        return linear(p["up"], between(linear(p["down"], x)))

    def heads(y):
        return y.reshape(len(x), HEADS, -1)

    r, w, k, v, a, g = (x + (token_before(x) - x) * m for m in p["mixtures"])
    gate, rate = low_rank(p["gate"], g, sigmoid), sigmoid(low_rank(p["gain"], a, lambda y: y))
    kept = heads(np.exp(-np.exp(-0.5) * sigmoid(low_rank(p["decay"], w, np.tanh))))
    r, k, v = linear(p["query"], r), linear(p["key"], k), linear(p["value"], v)
    removal, k = heads(k * p["key_removal"]), heads(k * (1 + (rate - 1) * p["key_gain"]))
    removal = removal / np.sqrt(np.sum(removal**2, axis=-1, keepdims=True) + 1e-6)
    r, v, rate = heads(r), heads(v), heads(rate)

    def step(t, h, S):
        transition = np.diag(kept[t, h]) - np.outer(removal[t, h] * rate[t, h], removal[t, h])
        return transition @ S + np.outer(k[t, h], v[t, h])

    out = run(step, r, v, 1.0)
    centred = out - out.mean(-1, keepdims=True)
    out = centred / np.sqrt(np.mean(centred**2, axis=-1, keepdims=True) + 1e-5 * out.shape[-1])
    out = out * heads(np.tile(p["norm_scale"], (len(x), 1))) + heads(np.tile(p["norm_bias"], (len(x), 1)))
    out = out + np.sum(r * k * p["bonus"], axis=-1, keepdims=True) * v
    return linear(p["output"], out.reshape(len(x), -1) * gate)


def rwkv7_channel_mix(p, x):
    read = x + (token_before(x) - x) * p["mixture"]
    return linear(p["down"], np.maximum(linear(p["up"], read), 0) ** 2)


def attention(p, x, window=None):
    q, k, v = (linear(p[n], x).reshape(len(x), HEADS, -1) for n in ("query", "key", "value"))
    q, k = rotate(q), rotate(k)
    out = np.zeros_like(v)
    for h in range(HEADS):
        for t in range(len(x)):
            first = 0 if window is None else max(0, t + 1 - window)
            weights = np.exp(k[first : t + 1, h] @ q[t, h] / np.sqrt(q.shape[-1]))
            out[t, h] = weights @ v[first : t + 1, h] / weights.sum()
    return linear(p["output"], out.reshape(len(x), -1))


def sliding_window_attention(p, x):
    return attention(p, x, window=5)


def forgetting_attention(p, x):
    q, k, v = (linear(p[n], x).reshape(len(x), HEADS, -1) for n in ("query", "key", "value"))
    forget, out = sigmoid(linear(p["forget_gate"], x)), np.zeros_like(v)
    for h in range(HEADS):
        for t in range(len(x)):
            kept = np.array([np.prod(forget[s + 1 : t + 1, h]) for s in range(t + 1)])
            weights = np.exp(k[: t + 1, h] @ q[t, h] / np.sqrt(q.shape[-1])) * kept
            out[t, h] = weights @ v[: t + 1, h] / weights.sum()
    return linear(p["output"], out.reshape(len(x), -1))


def latent_attention(p, x):
    """DeepSeek-V2, equations 9 to 19, with keys and values of all tokens written out."""
    down, size = linear(p["latent"], x), len(p["latent_norm"]["scale"])
    latent = rms(down[:, :size], p["latent_norm"]["scale"])
    shared = down[:, size:]
    q = linear(p["query"], x).reshape(len(x), HEADS, -1)
    k, v = (linear(p[name], latent).reshape(len(x), HEADS, -1) for name in ("key", "value"))
    own = k.shape[-1]
    q = np.concatenate([q[..., :own], rotate(q[..., own:])], axis=-1)
    k = np.concatenate([k, np.repeat(rotate(shared[:, None]), HEADS, axis=1)], axis=-1)
    out = np.zeros_like(v)
    for h in range(HEADS):
        for t in range(len(x)):
            weights = np.exp(k[: t + 1, h] @ q[t, h] / np.sqrt(q.shape[-1]))
            out[t, h] = weights @ v[: t + 1, h] / weights.sum()
    return linear(p["output"], out.reshape(len(x), -1))


LAYERS = {
    layer.__name__: layer
    for layer in (
        linear_attention,
        retnet,
        mamba2,
        zamba2,
        gla,
        hgrn2,
        gsa,
        deltanet,
        gated_deltanet,
        kda,
        gated_deltanet2,
        kla,
        longhorn,
        nlms,
        efla,
        comba,
        rwkv7,
        rwkv7_channel_mix,
        attention,
        sliding_window_attention,
        forgetting_attention,
        latent_attention,
    )
}
