"""Mixers with options of published models in NumPy, float64, token by token: written from the equations.

As in `reference`, each takes a module's parameters and one document `x [T, D]`; the options are those of the case in
`test_options` that names it.
"""

import numpy as np

from .reference import (
    delta,
    identity,
    l2,
    linear,
    read,
    rms,
    rotate,
    run,
    sigmoid,
    silu,
    softplus,
    state_space_decay,
    stream,
)


def mamba2(p, x, *, groups=1, limits=(0.0, np.inf), norm=True, gate_first=True):
    """Mamba-2 of 4 heads in `groups` key heads: biases throughout, a clamp of dt, a norm per group."""
    c, b = (stream(p[n], x, heads=groups) for n in ("query", "key"))
    v = stream(p["value"], x, heads=4)
    dt = np.clip(softplus(linear(p["decay"]["projection"], x) + p["decay"]["dt_bias"]), *limits)
    alpha = np.exp(-np.exp(p["decay"]["A_log"]) * dt)

    def step(t, h, S):
        return alpha[t, h] * S + dt[t, h] * np.outer(b[t, h * groups // 4], v[t, h])

    r = p["output_projection"]
    y = run(step, c, v, 1.0) + r["skip"].reshape(4, -1) * v
    gate = silu(linear(r["gate"], x)).reshape(y.shape)
    y = y * gate if gate_first else y
    if norm:
        y = rms(y.reshape(len(x), groups, -1), r["norm"]["scale"].reshape(groups, -1), 1e-5).reshape(y.shape)
    y = y if gate_first else y * gate
    return linear(r["output"], y.reshape(len(x), -1))


def bounded_kda(p, x, *, bound):
    """KDA whose log decay is `bound * sigmoid(exp(A_log) (W x + dt_bias))`."""
    q, k, v = (stream(p[n], x) for n in ("query", "key", "value"))
    logits = (linear(p["decay"]["projection"], x) + p["decay"]["dt_bias"]).reshape(k.shape)
    alpha = np.exp(bound * sigmoid(np.exp(p["decay"]["A_log"])[:, None] * logits))
    beta = sigmoid(linear(p["gain"]["projection"], x))
    return read(p["output_projection"], x, delta(l2(q), l2(k), v, beta, alpha), sigmoid)


def shared(x, heads=4):
    """Heads of keys, values or decays for consecutive query heads."""
    return np.repeat(x, heads // x.shape[1], axis=1)


def shared_gla(p, x):
    """GLA of 4 query heads and 2 of keys, values and decays, with filters; a norm without a scale."""
    q = stream(p["query"], x, heads=4)
    k, v = (shared(stream(p[n], x)) for n in ("key", "value"))
    alpha = sigmoid(linear(p["decay"]["projection"], x)) ** (1 / 16)
    o = attend(q, k, v, shared(alpha.reshape(len(x), 2, -1)))
    return read({**p["output_projection"], "norm": {"scale": 1.0}}, x, o, silu)


def shared_retnet(p, x):
    """RetNet of 4 query heads, each with its decay, and 1 of keys and values."""
    q = stream(p["query"], x, heads=4, conv=False, act=identity)
    k, v = (stream(p[n], x, heads=1, conv=False, act=identity) for n in ("key", "value"))
    gamma = np.broadcast_to(1 - 2.0 ** (-5 - np.arange(4)), (len(x), 4))
    o = attend(rotate(q), shared(rotate(k)), shared(v), gamma)
    return read(p["output_projection"], x, o, silu)


def comba(p, x):
    """Comba with the correction before the norms, of 2 key and 4 value heads."""
    q, k = (stream(p[n], x) for n in ("query", "key"))
    v = stream(p["value"], x, heads=4)
    alpha, _ = state_space_decay(p["decay"], x)
    beta = sigmoid(linear(p["gain"]["projection"], x))
    erased = sigmoid(p["keys"]["feedback"])[:, None] * k
    q, k, e = l2(q - p["keys"]["correction"][:, None] * erased), l2(k), l2(erased)

    def step(t, h, S):
        return alpha[t, h] * S + beta[t, h] * np.outer(k[t, h // 2], v[t, h] - S.T @ e[t, h // 2])

    return read(p["output_projection"], x, run(step, q, v, q.shape[-1] ** -0.5), sigmoid)


def grouped_pkda(p, x):
    """Preconditioned KDA of 2 key and 4 value heads: a preconditioner per value head, a gain per key head."""
    q, k = (l2(stream(p[n], x)) for n in ("query", "key"))
    v = stream(p["value"], x, heads=4)
    logits = linear(p["decay"]["projection"], x) + p["decay"]["dt_bias"]
    alpha = np.exp(-np.exp(p["decay"]["A_log"])[:, None] * softplus(logits).reshape(len(x), 4, -1))
    beta = sigmoid(linear(p["gain"]["projection"], x))
    gram, _ = state_space_decay(p["keys"]["gram"]["decay"], x)
    weight = sigmoid(linear(p["keys"]["gram"]["gain"]["projection"], x))
    A = np.zeros((4, k.shape[-1]))
    written = np.zeros((len(x), *A.shape))
    for t in range(len(x)):
        for h in range(4):
            A[h] = gram[t, h] * A[h] + weight[t, h] * k[t, h // 2] ** 2
        r = np.log(A + 1e-6) - p["keys"]["center"][:, None]
        written[t] = 1.5 ** -(r / (1 + np.abs(r))) * np.repeat(k[t], 2, axis=0)

    def step(t, h, S):
        kept, b, key = alpha[t, h][:, None] * S, beta[t, h // 2], k[t, h // 2]
        return kept + b * np.outer(written[t, h], v[t, h] - kept.T @ key)

    return read(p["output_projection"], x, run(step, q, v, q.shape[-1] ** -0.5), sigmoid)


def clamped_gla(p, x, *, lowest):
    """GLA with filters and SiLU, a squared rectifier on top of q and k, and a log decay of at least `lowest`."""
    q, k, v = (stream(p[n], x) for n in ("query", "key", "value"))
    q, k = (np.maximum(y, 0) ** 2 for y in (q, k))
    log_decay = np.maximum(np.log(sigmoid(linear(p["decay"]["projection"], x))) / 16, lowest).reshape(k.shape)
    o = attend(q, k, v, alpha=np.exp(log_decay))
    return read(p["output_projection"], x, o, silu)


def attend(q, k, v, alpha=None):
    """S = Diag(alpha) S + k v^T, alpha per head or per channel."""

    def step(t, h, S):
        return (1.0 if alpha is None else alpha[t, h].reshape(-1, 1)) * S + np.outer(k[t, h], v[t, h])

    return run(step, q, v, q.shape[-1] ** -0.5)


def product_map(p, x):
    return linear(p["first"], x) * linear(p["second"], x)


def relu_map(p, x):
    return np.maximum(linear(p["linear"], x), 0)


def hedgehog_map(p, x):
    y = linear(p["linear"], x)
    e = np.exp(2 * np.concatenate([y, -y], axis=-1))
    return e / e.sum(axis=-1, keepdims=True)


def dpfp_map(p, x, *, nu):
    """Feature j * 2X + i is r_i r_(i - j - 1)."""
    r = np.concatenate([np.maximum(x, 0), np.maximum(-x, 0)], axis=-1)
    size = r.shape[-1]
    features = [r[..., i] * r[..., (i - j - 1) % size] for j in range(nu) for i in range(size)]
    return np.stack(features, axis=-1)


def over_sum(x):
    return x / (x.sum(axis=-1, keepdims=True) + 1e-4)


def over_size(x):
    return x / np.maximum(np.abs(x).sum(axis=-1, keepdims=True), 1e-6)


def mapped_attention(p, x, *, feature_map, norm=identity, tied=False, normalize=False):
    """Linear attention of 2 heads with a feature map, then a norm, of q and k; perhaps over the sum of weights."""
    q, k, v = (stream(p[n], x, conv=False, act=identity) for n in ("query", "key", "value"))
    maps = [p["query" if tied else n].get("feature_map") for n in ("query", "key")]
    q, k = (norm(feature_map(m, y)) for m, y in zip(maps, (q, k), strict=True))
    o = attend(q, k, v)
    if normalize:
        o = o / (attend(q, k, np.ones_like(v[..., :1])) + 1e-10)
    return read(p["output_projection"], x, o)


def sum_normalised_deltanet(p, x):
    """DeltaNet with elu + 1 and the L1 norm of q and k."""
    q, k = (stream(p[n], x, act=lambda y: np.where(y > 0, y + 1, np.exp(y))) for n in ("query", "key"))
    v = stream(p["value"], x)
    beta = sigmoid(linear(p["gain"]["projection"], x))
    return read(p["output_projection"], x, delta(over_size(q), over_size(k), v, beta))
