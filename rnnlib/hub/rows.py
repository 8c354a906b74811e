"""Rows that the tables of many families share, whose names differ in where they begin."""

from rnnlib.hub.weight_mapping import Row, filter_, linear


def stream_rows(theirs: str, ours: str = "mixer") -> tuple[Row, ...]:
    """The projections of queries, keys and values."""
    return (
        *linear(f"{theirs}.q_proj", f"{ours}.input_projection.query"),
        *linear(f"{theirs}.k_proj", f"{ours}.input_projection.key"),
        *linear(f"{theirs}.v_proj", f"{ours}.input_projection.value"),
    )


def filter_rows(theirs: str) -> tuple[Row, ...]:
    """The short convolutions of queries, keys and values."""
    return (
        *filter_(f"{theirs}.q_conv1d", "mixer.query.convolution"),
        *filter_(f"{theirs}.k_conv1d", "mixer.key.convolution"),
        *filter_(f"{theirs}.v_conv1d", "mixer.value.convolution"),
    )


def attention_rows(theirs: str, ours: str = "mixer") -> tuple[Row, ...]:
    """The four projections of attention."""
    return *stream_rows(theirs, ours), *linear(f"{theirs}.o_proj", f"{ours}.output")


def swiglu_rows(theirs: str, ours: str = "feed_forward") -> tuple[Row, ...]:
    """The three maps of a SwiGLU."""
    return (
        *linear(f"{theirs}.gate_proj", f"{ours}.gate"),
        *linear(f"{theirs}.up_proj", f"{ours}.up"),
        *linear(f"{theirs}.down_proj", f"{ours}.down"),
    )
