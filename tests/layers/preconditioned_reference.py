"""Preconditioned DeltaNet's layers and their compositions in NumPy, float64, token by token; see `reference.py`."""

import numpy as np

from .reference import l2, linear, read, run, sigmoid, silu, softplus, state_space_decay, stream


def gram(k, alpha, beta):
    """A_t = alpha_t A_(t-1) + beta_t k_t^2, inclusive of t."""
    out, state = np.zeros_like(k), np.zeros_like(k[0])
    for t in range(len(k)):
        state = alpha[t] * state + beta[t] * k[t] ** 2
        out[t] = state
    return out


def own_gates(p, x):
    """The preconditioner's own decay and gain, with a channel axis."""
    alpha, _ = state_space_decay(p["gram"]["decay"], x)
    return alpha[..., None], sigmoid(linear(p["gram"]["gain"]["projection"], x))[..., None]


def apply_to_key(p, a):
    """B of equation 9 with x = 1.5."""
    r = np.log(a + 1e-6) - p["center"][:, None]
    return np.exp(-np.log(1.5) * r / (1 + np.abs(r)))


def apply_to_query(p, q, a):
    return q / (a + softplus(p["ridge"]["ridge"])[:, None])


def delta(q, k, write_key, v, erase, write, alpha=None):
    """S = (I - k~ (b * k)^T) Diag(alpha) S + k~ (w * v)^T; gates have a channel axis."""

    def step(t, h, S):
        kept = S if alpha is None else alpha[t, h].reshape(-1, 1) * S
        transition = np.eye(k.shape[-1]) - np.outer(write_key[t, h], erase[t, h] * k[t, h])
        return transition @ kept + np.outer(write_key[t, h], write[t, h] * v[t, h])

    return run(step, q, v, q.shape[-1] ** -0.5)


def offline(q, k, v, alpha, beta):
    def step(t, h, S):
        return alpha[t, h].reshape(-1, 1) * S + beta[t, h] * np.outer(k[t, h], v[t, h])

    return run(step, q, v, q.shape[-1] ** -0.5)


def streams(p, x):
    q, k, v = (stream(p[n], x) for n in ("query", "key", "value"))
    return l2(q), k, v


def beta_gate(p, x):
    return sigmoid(linear(p["gain"]["projection"], x))[..., None]


def pdn(p, x):
    q, k, v = streams(p, x)
    k, beta = l2(k), beta_gate(p, x)
    b = apply_to_key(p["keys"], gram(k, *own_gates(p["keys"], x)))
    return read(p["output_projection"], x, delta(q, k, b * k, v, beta, beta))


def pgdn(p, x):
    q, k, v = streams(p, x)
    k, beta = l2(k), beta_gate(p, x)
    b = apply_to_key(p["keys"], gram(k, *own_gates(p["keys"], x)))
    alpha, _ = state_space_decay(p["decay"], x)
    return read(p["output_projection"], x, delta(q, k, b * k, v, beta, beta, alpha))


def pkda(p, x):
    q, k, v = streams(p, x)
    k, beta = l2(k), beta_gate(p, x)
    b = apply_to_key(p["keys"], gram(k, *own_gates(p["keys"], x)))
    alpha, _ = state_space_decay(p["decay"], x, channels=True)
    return read(p["output_projection"], x, delta(q, k, b * k, v, beta, beta, alpha), sigmoid)


def pla(p, x):
    q, k, v = streams(p, x)
    k = l2(k)
    one = np.ones((len(x), k.shape[1], 1))
    q = apply_to_query(p["keys"], q, gram(k, one, one))
    return read(p["output_projection"], x, offline(q, k, v, one, one))


def pmamba2(p, x):
    q, k, v = streams(p, x)
    k, beta = l2(k), sigmoid(linear(p["gain"]["projection"], x))[..., None]
    alpha = state_space_decay(p["decay"], x)[0][..., None]
    q = apply_to_query(p["keys"], q, gram(k, alpha, beta))
    return read(p["output_projection"], x, offline(q, k, v, alpha, beta))


def mamba2_atk(p, x):
    q, k, v = streams(p, x)
    k, beta = l2(k), sigmoid(linear(p["gain"]["projection"], x))[..., None]
    b = apply_to_key(p["keys"], gram(k, *own_gates(p["keys"], x)))
    return read(p["output_projection"], x, offline(q, b * k, v, state_space_decay(p["decay"], x)[0][..., None], beta))


def pgla(p, x):
    q, k, v = streams(p, x)
    k, one = l2(k), np.ones((len(x), k.shape[1], 1))
    alpha = (sigmoid(linear(p["decay"]["projection"], x)) ** (1 / 16)).reshape(k.shape)
    q = apply_to_query(p["keys"], q, gram(k, alpha, one))
    return read(p["output_projection"], x, offline(q, k, v, alpha, one))


def pgdn_atq(p, x):
    q, k, v = streams(p, x)
    k, beta = l2(k), beta_gate(p, x)
    key_map, query_map = p["keys"]["key_map"], p["keys"]["query_map"]
    b = apply_to_key(key_map, gram(k, *own_gates(key_map, x)))
    alpha = state_space_decay(p["decay"], x)[0][..., None]
    q = apply_to_query(query_map, q, gram(k, alpha, beta))
    return read(p["output_projection"], x, delta(q, k, b * k, v, beta, beta, alpha))


def pgdn2(p, x):
    q, k, v = streams(p, x)
    k = l2(k)
    b = apply_to_key(p["keys"], gram(k, *own_gates(p["keys"], x)))
    alpha, _ = state_space_decay(p["decay"], x, channels=True)
    gates = p["gain"]
    erase = sigmoid(linear(gates["erase_projection"], x)).reshape(k.shape)
    write = sigmoid(linear(gates["projection"], x)).reshape(v.shape)
    return read(p["output_projection"], x, delta(q, k, b * k, v, erase, write, alpha), silu, eps=1e-5)


def pkla(p, x):
    q, k, v = streams(p, x)
    beta = beta_gate(p, x) / (np.sum(k * k, axis=-1, keepdims=True) + 1e-6)
    b = apply_to_key(p["keys"], gram(l2(k), *own_gates(p["keys"], x)))
    alpha, _ = state_space_decay(p["decay"], x)
    return read(p["output_projection"], x, delta(q, k, b * k, v, beta, beta, alpha), silu)


def plonghorn(p, x):
    q, k, v = streams(p, x)
    b = apply_to_key(p["keys"], gram(l2(k), *own_gates(p["keys"], x)))
    step = sigmoid(linear(p["gain"]["projection"], x))[..., None]
    beta = step / (1 + step * np.sum(k * b * k, axis=-1, keepdims=True))
    return read(p["output_projection"], x, delta(q, k, b * k, v, beta, beta))


def kla_atq(p, x):
    q, k, v = streams(p, x)
    eta = sigmoid(linear(p["gain"]["projection"], x))[..., None]
    beta = eta / (np.sum(k * k, axis=-1, keepdims=True) + 1e-6)
    alpha = state_space_decay(p["decay"], x)[0][..., None]
    q = apply_to_query(p["keys"], q, gram(l2(k), alpha, eta))
    return read(p["output_projection"], x, delta(q, k, k, v, beta, beta, alpha), silu)


_LAYERS = (pdn, pgdn, pkda, pla, pmamba2, mamba2_atk, pgla, pgdn_atq, pgdn2, pkla, plonghorn, kla_atq)
PRECONDITIONED_LAYERS = {layer.__name__: layer for layer in _LAYERS}
