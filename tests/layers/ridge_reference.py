"""Gated KalmaNet's and MesaNet's layers in NumPy, float64, token by token; see `reference.py`."""

import numpy as np

from .reference import identity, l2, linear, read, sigmoid, silu, softplus, state_space_decay, stream


def regress(solve, q, k, v, decay, weight, scale):
    """`H = decay H + weight k k^T`, `U = decay U + weight k v^T`, `o = scale U^T solve(t, h, H, q)`."""
    out = np.zeros_like(v)
    for h in range(v.shape[1]):
        H = np.zeros((k.shape[-1], k.shape[-1]))
        U = np.zeros((k.shape[-1], v.shape[-1]))
        for t in range(len(v)):
            H = decay[t, h] * H + weight[t, h] * np.outer(k[t, h], k[t, h])
            U = decay[t, h] * U + weight[t, h] * np.outer(k[t, h], v[t, h])
            out[t, h] = scale * U.T @ solve(t, h, H, q[t, h])
    return out


def chebyshev(A, b, smallest, largest, iterations):
    """Algorithm 1 of Gated KalmaNet, with omega_0 = 2."""
    rho, step = (largest - smallest) / (largest + smallest), 2 / (largest + smallest)
    before, x, omega = np.zeros_like(b), step * b, 2.0
    for _ in range(iterations):
        omega = 4 / (4 - rho**2 * omega)
        following = x - omega * step * (A @ x - b) + (omega - 1) * (x - before)
        before, x = x, following
    return x


def gated_kalmanet(p, x, sketch=False, key_gain=False, alpha=True):
    q, k, v = (stream(p[n], x) for n in ("query", "key", "value"))
    q, k = l2(q), l2(k)
    decay, _ = state_space_decay(p["decay"], x)
    weight = np.ones(k.shape[:2])
    if key_gain:  # both key and value are multiplied by beta
        weight = sigmoid(linear(p["gain"]["projection"], x)) ** 2
    share = sigmoid(linear(p["solve"]["alpha"], x)) if alpha else weight**0

    def solve(t, h, H, q):
        P = p["solve"]["projection"][h] if sketch else np.eye(len(q))
        H = P.T @ H @ P
        norm = np.linalg.norm(H)
        A = H + 0.02 * norm * np.eye(len(H))
        return q + share[t, h] * (P @ chebyshev(A, P.T @ q, 0.02 * norm, 1.02 * norm, 30) - q)

    return read(p["output_projection"], x, regress(solve, q, k, v, decay, weight, q.shape[-1] ** -0.5), silu)


def mesanet(p, x):
    q, k = (l2(stream(p[n], x)) for n in ("query", "key"))
    v = stream(p["value"], x, conv=False, act=identity)
    decay = sigmoid(linear(p["decay"]["projection"], x))
    beta = sigmoid(linear(p["gain"]["projection"], x))
    ridge = (0.25 + softplus(p["solve"]["ridge"])).reshape(k.shape[1:])

    def solve(t, h, H, q):
        return np.linalg.solve(H + np.diag(ridge[h]), q)

    return read(p["output_projection"], x, regress(solve, q, k, v, decay, beta, 1.0), eps=1e-5)


RIDGE_LAYERS = {layer.__name__: layer for layer in (gated_kalmanet, mesanet)}
