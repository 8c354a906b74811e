"""The README's advice for a paper of one's own: a script that registers it and then is the command line."""

import re
import subprocess
import sys

SCRIPT = '''
import dataclasses
import sys

import jax.numpy as jnp

import rnnlib
from rnnlib.layers import KeyEnergyGain, mixer_preset, register_preset


@dataclasses.dataclass(frozen=True)
class PowerGain(KeyEnergyGain):
    power: float = 0.5

    def formula(self, key, gate):
        return gate / (jnp.sum(key**2, axis=-1) + 1e-6) ** self.power

    def describe(self):
        return f"b / (k.k)^{self.power}"


@register_preset("Mine", "a paper of one's own")
def mine():
    """Kaczmarz with a power."""
    return mixer_preset("kla", gain=PowerGain(0.25))


if __name__ == "__main__":
    sys.exit(rnnlib.cli.main.main())
'''


def test_a_script_trains_and_evaluates_a_mixer_of_its_own(tmp_path, process_environment):
    (tmp_path / "mine.py").write_text(SCRIPT)
    (tmp_path / "text.txt").write_text(" ".join(f"{i} plus {i} is {2 * i};" for i in range(100)))

    def run(*command):
        options = {"cwd": tmp_path, "env": process_environment, "capture_output": True, "text": True, "timeout": 300}
        return subprocess.run([sys.executable, *command], **options)

    flags = "--steps 1 --prompt= --model.width 16 --model.num-layers 1 --model.mlp-width 16 --data.sequence-length 16"
    text = "--data.paths text.txt"
    trained = run("mine.py", "train", "--model.mixers", "mine", *flags.split(), *text.split())
    assert trained.returncode == 0, trained.stderr
    assert re.search(r"more of them: (uv run )?python mine.py generate runs/001 --prompt TEXT\n$", trained.stdout)
    evaluated = run("mine.py", "eval", "runs/001")
    assert evaluated.returncode == 0 and "bits per byte" in evaluated.stdout, evaluated.stderr
    alone = run("-m", "rnnlib.cli.main", "eval", "runs/001")
    assert alone.returncode == 2 and alone.stderr.count("\n") == 1
    assert "'mine' is no mixer" in alone.stderr
    assert "or one of your own, which is known after register_preset: run the script that calls it" in alone.stderr
