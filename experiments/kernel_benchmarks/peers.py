"""The peers' calls for each operator; what they need is imported only when they are asked for.

A call takes tensors named as `operators.ARGUMENTS` names them and returns the output and the final state. That of a
peer in torch gives None for the state unless `final` asks for it, and takes the boundaries of packed documents as
`bounds`; that of a peer in JAX always gives both, as ours do, and takes `segment_ids`.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from experiments.kernel_benchmarks.operators import CENTER

Tensors = Mapping[str, Any]
Call = Callable[..., tuple[Any, Any]]


@dataclass(frozen=True)
class Peer:
    """A library with kernels of these operators.

    Attributes:
        title: its name in tables.
        module: what must be importable.
        packages: distributions whose versions are recorded, of those that are installed.
        framework: a peer in JAX is measured in the process that measures ours, by the same code.
        note: what a reader must know of how it was called.
        operators: what `calls` has.
        calls: gives the calls by operator.
        decoded: what `decode` has.
        decode: gives the calls that continue a state by single tokens, by operator.
        environment: variables of its processes.
        by_shape: whether it has kernels of its own for one row (short or long) and for batches.
        not_same: operators for which the peer's nearest call does something else besides, and parts of the names of the
            kernels that do it: their device time is left out, and errors and wall time aren't compared.
        forward_only: whether it is for inference: there is no backward pass to measure.
        prepare: makes of our arguments those that the calls take, before anything is timed; only where nothing is
            differentiated.
    """

    title: str
    module: str
    packages: tuple[str, ...]
    operators: tuple[str, ...]
    calls: Callable[[], dict[str, Call]]
    framework: Literal["torch", "jax"] = "torch"
    note: str = ""
    decoded: tuple[str, ...] = ()
    decode: Callable[[], dict[str, Call]] = dict
    environment: tuple[tuple[str, str], ...] = ()
    by_shape: bool = False
    not_same: tuple[tuple[str, tuple[str, ...]], ...] = ()
    forward_only: bool = False
    prepare: Callable[[Tensors], Tensors] = lambda x: x


def _fla_call(function: Callable[..., Any], *names: str, **fixed: Any) -> Call:
    def call(x: Tensors, *, final: bool, bounds: Any = None) -> tuple[Any, Any]:
        return function(*(x[name] for name in names), output_final_state=final, cu_seqlens=bounds, **fixed)[:2]

    return call


def _fla_safe_gate_calls() -> dict[str, Call]:
    from fla.ops.gdn2 import chunk_gdn2
    from fla.ops.kda import chunk_kda

    return {
        "kda": _fla_call(chunk_kda, "q", "k", "v", "channel_decay", "beta", safe_gate=True),
        "gated_deltanet2": _fla_call(chunk_gdn2, "q", "k", "v", "channel_decay", "erase", "write", safe_gate=True),
    }


def _fla_calls() -> dict[str, Call]:
    import fla.ops.common.chunk_o as chunk_o
    import torch
    from fla.ops.delta_rule import chunk_delta_rule
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from fla.ops.gdn2 import chunk_gdn2
    from fla.ops.gla import chunk_gla
    from fla.ops.kda import chunk_kda
    from fla.ops.linear_attn import chunk_linear_attn
    from fla.ops.precond_gated_delta_rule import chunk_precond_gated_delta_rule
    from fla.ops.precond_kda.chunk import ChunkPrecondKDAFunction
    from fla.ops.simple_gla import chunk_simple_gla

    # FLA refuses its gated backward on Hopper with Triton 3.4 to 3.7.0 as numerically wrong, unless TileLang is there
    # to take that kernel's place. It is measured all the same, and its errors are reported beside its times. With a
    # later Triton this is what FLA finds itself.
    chunk_o.TRITON_ABOVE_3_7_1 = True

    def write_key(x: Tensors, *, final: bool, bounds: Any = None) -> tuple[Any, Any]:
        # FLA has a separate write key only together with the preconditioner that makes it.
        decay, beta = x["head_decay"], x["beta"]
        scale = torch.zeros(decay.shape[2], device=decay.device)
        return chunk_precond_gated_delta_rule(
            *(x["q"], x["k"], x["v"], decay, decay, beta, beta),
            output_final_state=final,
            use_qk_l2norm_in_kernel=False,
            cu_seqlens=bounds,
            log_atk_scale=scale,
        )[:2]

    def pgdn(x: Tensors, *, final: bool, bounds: Any = None) -> tuple[Any, Any]:
        # FLA has the rule without a decay (PDN) only as the one whose decays are all 1.
        decay = x["head_decay"] if "head_decay" in x else torch.zeros_like(x["gram_decay"])
        return chunk_precond_gated_delta_rule(
            *(x["q"], x["k"], x["v"], x["gram_decay"], decay, x["gram_gain"], x["beta"]),
            output_final_state=final,
            use_qk_l2norm_in_kernel=False,
            cu_seqlens=bounds,
        )[:2]

    def pkda(x: Tensors, *, final: bool, bounds: Any = None) -> tuple[Any, Any]:
        # `chunk_precond_kda` always normalises q and k besides; the function under it leaves the choice.
        center = torch.full(x["beta"].shape[2:], CENTER, device=x["q"].device)
        options: dict[str, Any] = {
            "use_qk_l2norm_in_kernel": False,
            "use_gate_in_kernel": False,
            "A_log": None,
            "dt_bias": None,
        }
        options |= {"cu_seqlens": bounds, "cu_seqlens_cpu": None, "chunk_indices": None, "safe_gate": False}
        options |= {"cp_context": None, "transpose_state_layout": False, "x": 1.5, "eps": 1e-6, "log_atk_scale": center}
        return ChunkPrecondKDAFunction.apply(
            *(x["q"], x["k"], x["v"], x["channel_decay"], x["gram_decay"], x["gram_gain"], x["beta"]),
            *(x["q"].shape[3] ** -0.5, None, None, final),
            *options.values(),
        )[:2]

    return {
        "linear_attention": _fla_call(chunk_linear_attn, "q", "k", "v", normalize=False),
        "simple_gla": _fla_call(chunk_simple_gla, "q", "k", "v", "head_decay"),
        "gla": _fla_call(chunk_gla, "q", "k", "v", "channel_decay"),
        "deltanet": _fla_call(chunk_delta_rule, "q", "k", "v", "beta"),
        "gated_deltanet": _fla_call(chunk_gated_delta_rule, "q", "k", "v", "head_decay", "beta"),
        "kda": _fla_call(chunk_kda, "q", "k", "v", "channel_decay", "beta"),
        "gated_deltanet2": _fla_call(chunk_gdn2, "q", "k", "v", "channel_decay", "erase", "write"),
        "write_key": write_key,
        "pdn": pgdn,
        "pgdn": pgdn,
        "pkda": pkda,
    }


def _fla_decode() -> dict[str, Call]:
    from fla.ops.delta_rule import fused_recurrent_delta_rule
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule
    from fla.ops.kda import fused_recurrent_kda

    def of(function: Callable[..., Any], *names: str, **keywords: str) -> Call:
        def call(x: Tensors, state: Any) -> tuple[Any, Any]:
            named = {argument: x[name] for argument, name in keywords.items()}
            return function(*(x[name] for name in names), **named, initial_state=state, output_final_state=True)[:2]

        return call

    return {
        "deltanet": of(fused_recurrent_delta_rule, "q", "k", "v", "beta"),
        "gated_deltanet": of(fused_recurrent_gated_delta_rule, "q", "k", "v", g="head_decay", beta="beta"),
        "kda": of(fused_recurrent_kda, "q", "k", "v", g="channel_decay", beta="beta"),
    }


def _flash_qla_calls() -> dict[str, Call]:
    import flash_qla

    def gated_deltanet(x: Tensors, *, final: bool, bounds: Any = None) -> tuple[Any, Any]:
        return flash_qla.chunk_gated_delta_rule(
            *(x["q"], x["k"], x["v"], x["head_decay"], x["beta"]),
            output_final_state=final,
            cu_seqlens=None if bounds is None else bounds.long(),
        )

    return {"gated_deltanet": gated_deltanet}


@functools.cache
def _row_starts(batch: int, length: int, device: Any) -> Any:
    """Boundaries of rows as documents of one row, as peers without a batch take them."""
    import torch

    return torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=device)


def _cudnn_calls() -> dict[str, Call]:
    from cudnn.linear_attention import kimi_delta_attention

    def kda(x: Tensors, *, final: bool, bounds: Any = None) -> tuple[Any, Any]:
        batch, length = x["q"].shape[:2]
        # [batch, length, ...] -> [batch * length, ...]: cuDNN takes rows as documents of one row.
        packed = (x[name].flatten(0, 1) for name in ("q", "k", "v", "channel_decay"))
        beta = x["beta"].flatten(0, 1).float()  # its backward pass on Hopper takes no other dtype
        starts = _row_starts(batch, length, x["q"].device) if bounds is None else bounds.int()
        out, state = kimi_delta_attention(*packed, beta, starts, output_final_state=final)
        return out.unflatten(0, (batch, length)), state.transpose(-1, -2) if final else None

    return {"kda": kda}


def _flashinfer_calls() -> dict[str, Call]:
    import flashinfer

    def gated_deltanet(x: Tensors, *, final: bool, bounds: Any = None) -> tuple[Any, Any]:
        batch, length = x["q"].shape[:2]
        packed = (x[name].flatten(0, 1) for name in ("q", "k", "v", "decay", "beta"))
        starts = _row_starts(batch, length, x["q"].device) if bounds is None else bounds.int()
        # Where rows and heads are few it splits rows into segments by itself.
        found = flashinfer.chunk_gated_delta_rule(
            *packed, output_final_state=final, cu_seqlens=starts, max_seqlen=length
        )
        out, state = (found[0], found[1].transpose(-1, -2)) if final else (found, None)
        return out.unflatten(0, (batch, length)), state

    return {"gated_deltanet": gated_deltanet}


def _flashinfer_arguments(x: Tensors) -> Tensors:
    # It takes the decay itself, not its logarithm, and gates in float32, as a model's own kernel would write them.
    return {**x, "decay": x["head_decay"].exp(), "beta": x["beta"].float()}


def _jla_calls() -> dict[str, Call]:
    import jax.numpy as jnp
    import jla.ops.mosaic_gpu  # noqa: F401
    from jla.ops import linear_attention

    # Its kernels are imported here, in full: left to its first call, they are said to be loaded before they are, and
    # whatever another thread compiles meanwhile is its XLA form.

    def of(kind: str, **gates: str) -> Call:
        def call(x: Tensors, *, segment_ids: Any = None) -> tuple[Any, Any]:
            named = {name: x[ours] for name, ours in gates.items()}
            if "beta" in named:
                named["beta"] = named["beta"].astype(jnp.float32)  # which its kernels compute with
            return linear_attention(
                *(kind, x["q"], x["k"], x["v"]), **named, output_final_state=True, segment_ids=segment_ids
            )

        return call

    return {
        "simple_gla": of("simple_gla", g="head_decay"),
        "gla": of("gla", g="channel_decay"),
        "deltanet": of("deltanet", beta="beta"),
        "gated_deltanet": of("gated_deltanet", g="head_decay", beta="beta"),
        "kda": of("kda", g="channel_decay", beta="beta"),
        "gated_deltanet2": of("gdn2", g="channel_decay", b="erase", w="write"),
    }


PEERS = {
    "fla": Peer(
        title="FLA",
        module="fla",
        packages=("fla-core", "triton", "tilelang"),
        note="with Triton 3.4 to 3.7.0 its check is off, which refuses its gated backward passes on Hopper as "
        "numerically wrong; TileLang takes their place where it is installed",
        operators=(
            *("linear_attention", "simple_gla", "gla", "deltanet", "gated_deltanet", "kda", "gated_deltanet2"),
            *("write_key", "pdn", "pgdn", "pkda"),
        ),
        calls=_fla_calls,
        decoded=("deltanet", "gated_deltanet", "kda"),
        decode=_fla_decode,
        environment=(("FLA_FLASH_QLA", "0"),),  # where FlashQLA is installed, FLA would call it
        not_same=(("write_key", ("_atk_", "_forward_chunk_summary", "_forward_pass_chunks", "_forward_chunk_out")),),
    ),
    # With decays above -5 a token, KDA as Ling-3.0 and GLM-5.3 have it: the scores of a block are one product. The
    # inputs that are timed are within the bound; those of the special cases are not, so that errors aren't compared.
    "fla_safe_gate": Peer(
        title="FLA, safe gate",
        module="fla",
        packages=("fla-core", "triton", "tilelang"),
        operators=("kda", "gated_deltanet2"),
        calls=_fla_safe_gate_calls,
        not_same=(("kda", ()), ("gated_deltanet2", ())),
        note="`safe_gate=True`, for decays above -5 a token",
    ),
    "flash_qla": Peer(
        title="FlashQLA",
        module="flash_qla",
        packages=("flash-qla", "tilelang"),
        operators=("gated_deltanet",),
        calls=_flash_qla_calls,
        by_shape=True,
    ),
    "cudnn": Peer(
        title="cuDNN",
        module="cudnn",
        packages=("nvidia-cudnn-frontend",),
        operators=("kda",),
        calls=_cudnn_calls,
    ),
    "flashinfer": Peer(
        title="FlashInfer",
        module="flashinfer",
        packages=("flashinfer-python", "nvidia-cutlass-dsl"),
        operators=("gated_deltanet",),
        calls=_flashinfer_calls,
        forward_only=True,
        prepare=_flashinfer_arguments,
    ),
    "jla": Peer(
        title="jla",
        module="jla",
        packages=("jax-linear-attention", "equinox"),
        framework="jax",
        operators=("simple_gla", "gla", "deltanet", "gated_deltanet", "kda", "gated_deltanet2"),
        calls=_jla_calls,
        note='`jla.ops.linear_attention` of jax-linear-attention, `impl="auto"`',
    ),
}


def supports(peer: str, operator: str, kind: str) -> bool:
    """Whether a peer can be measured: `kind` is as in `config.Measurement`."""
    described = PEERS[peer]
    if kind == "decode":
        return operator in described.decoded
    return operator in described.operators and not (kind == "error" and operator in dict(described.not_same))
