"""Mamba-3's layers in NumPy, float64, token by token; see `reference.py`."""

import numpy as np

from .reference import HEADS, linear, rms, sigmoid, silu, softplus


def turned_pairs(p, stream, bias, x, angle, rank):
    """`[T, 2 heads, rank, K]`: norm, bias and rotation of queries or keys."""
    y = linear(stream["projection"], x).reshape(len(x), 1, rank, -1)
    y = rms(y, stream["norm"]["scale"], 1e-5) + p["keys"][bias].reshape(HEADS, rank, -1)
    half, count = y.shape[-1] // 2, angle.shape[-1]
    phase = np.ones((*angle.shape[:2], 1, half), complex)
    phase[..., :count] = np.exp(1j * angle)[:, :, None]
    turned = (y[..., :half] + 1j * y[..., half:]) * phase
    return np.concatenate([turned.real, turned.imag], axis=-1)


def mamba3(p, x, rank=1):
    dt = softplus(linear(p["decay"]["projection"], x) + p["decay"]["dt_bias"])
    A = -np.maximum(softplus(linear(p["decay"]["rate_projection"], x)), 1e-4)
    lam = sigmoid(linear(p["gain"]["projection"], x))
    angle = np.cumsum(np.pi * np.tanh(linear(p["keys"]["angle"], x))[:, None] * dt[..., None], axis=0)
    q = turned_pairs(p, p["query"], "query_bias", x, angle, rank)
    k = turned_pairs(p, p["key"], "key_bias", x, angle, rank)
    value = linear(p["value"]["projection"], x).reshape(len(x), HEADS, -1)
    u = c = np.ones((HEADS, 1, 1))
    if rank > 1:
        u, c = (p["solve"][name].reshape(HEADS, rank, -1) for name in ("value_scale", "read_scale"))
    v = value[:, :, None] * u

    o = np.zeros_like(value)
    for h in range(HEADS):
        S = np.zeros((k.shape[-1], v.shape[-1]))
        for t in range(len(x)):
            alpha = np.exp(dt[t, h] * A[t, h])
            S = alpha * S + lam[t, h] * dt[t, h] * k[t, h].T @ v[t, h]
            if t > 0:
                S = S + (1 - lam[t, h]) * dt[t, h] * alpha * k[t - 1, h].T @ v[t - 1, h]
            o[t, h] = np.sum(c[h] * (q[t, h] @ S), axis=0)
    r = p["output_projection"]
    y = (o + r["skip"][:, None] * value).reshape(len(x), -1) * silu(linear(r["gate"], x))
    return linear(r["output"], y)


def mamba3_mimo(p, x):
    return mamba3(p, x, rank=4)


MAMBA3_LAYERS = {layer.__name__: layer for layer in (mamba3, mamba3_mimo)}
