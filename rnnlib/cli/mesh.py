"""`rnnlib mesh`: what a training step takes and sends on a mesh of devices, which need not be there."""

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Literal

import jax

from rnnlib.cli.arguments import take_option
from rnnlib.cli.errors import CommandError, input_errors
from rnnlib.cli.train import Settings, parse_settings
from rnnlib.fields import Range
from rnnlib.models import model_preset
from rnnlib.training import StepPlan, TrainConfig, plan_step
from rnnlib.training.tpu import TPUS, described_tpus, missing_compiler

_LENGTH = 4096
_H200_BYTES = 141e9


@dataclasses.dataclass(frozen=True)
class MeshArguments(Settings):
    """Plans a training step on --devices of a kind: memory of each, and what it sends. None of them has to be there.

    Where this machine has so many GPUs, the step is compiled for them, and XLA's plan says what a device needs in all.
    With --tpu it is compiled for TPUs that need not be there, if libtpu is installed (`rnnlib[tpu]`).

    Takes the settings of `rnnlib train`. Left out, the batch has one row for each device and part (devices that share
    rows or layers have one together), and rows of 4096 tokens. No tokenizer is read: --model.vocabulary-size says how
    many tokens there are, or the preset.
    """

    tpu: Literal["v4", "v5e", "v5p", "v6e", "tpu7x"] | None = None
    """The devices are TPUs of this kind. A tpu7x chip is two devices."""
    memory: Annotated[float, Range(above=0)] | None = None
    """Gigabytes (1e9 bytes) of a device, left out 141 or the TPU's; --mesh.fsdp left out is as large as it takes."""


def _given(argv: Sequence[str], *names: str) -> bool:
    return any(take_option(argv, name)[0] is not None for name in names)


def _with_a_batch(config: TrainConfig, argv: Sequence[str], devices: int) -> TrainConfig:
    """A config whose batch fits the devices, and whose vocabulary is its preset's, where nothing was said of them."""
    data = config.data
    if not _given(argv, "--config", "--data.sequence-length", "--data.sequence_length"):
        data = dataclasses.replace(data, sequence_length=_LENGTH)
    if not _given(argv, "--config", "--data.batch-size", "--data.batch_size"):
        together = min(devices, config.mesh.context * config.mesh.tensor)  # they have the same rows
        data = dataclasses.replace(data, batch_size=devices // together * config.accumulation_steps)
    model, preset = config.model, take_option(argv, "--preset")[0]
    if preset is not None and not _given(argv, "--model.vocabulary-size", "--model.vocabulary_size"):
        model = model.replace(vocabulary_size=model_preset(preset).vocabulary_size)
    return dataclasses.replace(config, data=data, model=model)


def _with_any_batch(argv: Sequence[str]) -> list[str]:
    """A batch that splits over parts, where nothing was said of it: settings are checked before devices are known."""
    parts = take_option(argv, "--accumulation-steps")[0]
    if parts is None or _given(argv, "--config", "--data.batch-size", "--data.batch_size"):
        return list(argv)
    return [*argv, "--data.batch-size", parts]


def run(argv: Sequence[str]) -> int:
    """Runs the command; returns the exit code."""
    arguments = parse_settings(MeshArguments, _with_any_batch(argv), command="mesh")
    devices = arguments.train.devices
    if devices is None:
        raise CommandError("--devices is left out, expected how many there are, such as --devices 64")
    if arguments.memory is not None and not arguments.memory > 0:
        raise CommandError(f"--memory {arguments.memory}: expected gigabytes above 0")
    device_bytes = _H200_BYTES if arguments.tpu is None else float(TPUS[arguments.tpu].memory)
    if arguments.memory is not None:
        device_bytes = arguments.memory * 1e9
    with input_errors():
        config = _with_a_batch(arguments.train, argv, devices)
        described = _described(arguments.tpu, devices)
        plan = plan_step(config, devices, device_bytes=round(device_bytes), compile_for=described)
    _print(plan, devices, device_bytes, arguments.tpu)
    return 0


def _described(tpu: str | None, devices: int) -> list[jax.Device] | None:
    """The devices that the step is compiled for; None where it cannot be compiled."""
    if tpu is None:
        is_here = jax.default_backend() == "gpu" and jax.device_count() >= devices
        return jax.devices()[:devices] if is_here else None
    if devices not in TPUS[tpu].sizes():
        sizes = ", ".join(str(size) for size in TPUS[tpu].sizes())
        raise CommandError(f"--tpu {tpu} --devices {devices}: expected the devices of a slice, one of {sizes}")
    if missing_compiler() is not None:
        return None
    print(f"compiling for {devices} x {TPUS[tpu].device_kind}; this takes a minute or more", flush=True)
    return described_tpus(tpu, devices)


def _print(plan: StepPlan, devices: int, device_bytes: float, tpu: str | None) -> None:
    from rich.console import Console
    from rich.table import Table

    model = plan.model
    again = "nothing" if not model.remat else "blocks" if model.remat_keeps == "input" else "blocks but for products"
    mixers = " + ".join(dict.fromkeys(model.layer_mixers))
    memory = Table("on each device", title_justify="left", title="memory")
    memory.add_column("GB", justify="right")
    rows = {
        "parameters": plan.parameters,
        **({"matrices with their adapters": plan.merged} if plan.merged else {}),
        "gradients": plan.gradients,
        "optimizer state": plan.optimizer,
    }
    for name, size in rows.items():
        memory.add_row(name, f"{size / 1e9:.3f}")
    if plan.compiled is not None:
        memory.add_section()
        fits = "" if plan.compiled <= device_bytes else ", more than there is"
        memory.add_row(f"the compiled step, of {device_bytes / 1e9:.4g}{fits}", f"{plan.compiled / 1e9:.3f}")
    traffic = Table("collective", "of", "over", title_justify="left", title="communication in a step")
    for name in ("devices", "arrays", "GB", "GB sent"):
        traffic.add_column(name, justify="right")
    for one in plan.exchanges:
        numbers = (f"{one.devices}", f"{one.count}", f"{one.bytes / 1e9:.3f}", f"{one.sent / 1e9:.3f}")
        traffic.add_row(one.kind, one.what, " x ".join(one.over), *numbers)
    traffic.add_section()
    traffic.add_row("all", "", "", "", "", "", f"{plan.sent / 1e9:.3f}")
    console = Console(markup=False, highlight=False, width=110)
    console.print(
        f"{mixers}, {model.num_layers} layers, width {model.width}, vocabulary {model.vocabulary_size}: "
        f"{plan.num_parameters + plan.num_frozen:,} parameters"
        + (f", {plan.num_parameters:,} numbers trained" if plan.num_frozen else "")
    )
    console.print(
        f"{devices} devices, {plan.mesh}; rows of {plan.length} tokens on each in a step: {plan.rows}, "
        f"accumulation steps: {plan.parts}; recomputed: {again}"
    )
    console.print(memory)
    console.print(traffic)
    console.print("GB: of whole arrays. GB sent: by each device, round a ring.")
    if plan.compiled is None:
        how = missing_compiler() if tpu is not None else None
        console.print(
            "Activations are left out: only a compiled step tells what they take. "
            + (
                f"For {tpu}, {how}."
                if how is not None
                else "Run this on a machine with the GPUs, "
                "or compile for described ones (rnnlib.training.plan_step, compile_for=)."
            )
        )
