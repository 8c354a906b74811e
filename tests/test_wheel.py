"""The wheel, built and installed into a fresh environment: what it holds, what it needs, what it says is missing."""

import importlib.metadata
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile

import pytest

import rnnlib

ROOT = pathlib.Path(__file__).parents[1]


def run(*command, **options):
    process = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=300, **options)
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


@pytest.fixture(scope="module")
def uv():
    """The uv that runs these tests, or the one installed."""
    found = os.environ.get("UV") or shutil.which("uv")
    if found:
        return [found]
    python = shutil.which("python3")
    assert python is not None, "the README's `python3 -m pip install uv` comes first"
    return [python, "-m", "uv"]


@pytest.fixture(scope="module")
def wheel(uv, tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist")
    run(*uv, "build", "--quiet", "--wheel", "--out-dir", folder, ROOT)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def core(uv, wheel, tmp_path_factory):
    """The Python of an environment with the wheel and what it requires, in the versions that are installed here."""
    folder = tmp_path_factory.mktemp("core")
    installed = {entry.name: entry.version for entry in importlib.metadata.distributions() if entry.name != "rnnlib"}
    (folder / "versions.txt").write_text("".join(f"{name}=={version}\n" for name, version in installed.items()))
    run(*uv, "venv", "--quiet", "--python", sys.executable, folder / "environment")
    python = folder / "environment" / "bin" / "python"
    # The versions in pyproject.toml do not count: the tests also run on newer ones.
    options = "--quiet", "--no-config", "--python", python, "--constraints", folder / "versions.txt"
    run(*uv, "pip", "install", *options, wheel)
    return python


@pytest.fixture
def environment(tmp_path):
    """For processes outside of the repository that see nothing of it; bytecode is kept for all of them."""
    bare = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return {"cwd": tmp_path, "env": bare | {"JAX_PLATFORMS": "cpu"}}


def test_the_wheel_holds_the_library_alone(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.partition("/")[0] for name in names}
    assert tops == {"rnnlib", "pallas_kernels", f"rnnlib-{rnnlib.__version__}.dist-info"}
    assert len(names) < 500
    assert {"rnnlib/py.typed", "pallas_kernels/delta_rule/tuned/nvidia_h200.json"} <= set(names)
    assert f"rnnlib-{rnnlib.__version__}.dist-info/licenses/LICENSE" in names


def test_the_core_runs_with_jax_and_flax_alone(core, environment):
    program = """
import importlib.util
for package in "chex grain lm_eval matplotlib pyarrow safetensors tensorboard tokenizers tyro".split():
    assert importlib.util.find_spec(package) is None, package
import jax.numpy as jnp
import rnnlib
from flax import nnx
assert "site-packages" in rnnlib.__file__
q = jnp.ones((1, 5, 2, 4))
out, state = rnnlib.ops.gated_delta_rule(q, q, q, beta=jnp.full((1, 5, 2), 0.1))
mixer = rnnlib.layers.mixer_preset("kda").build(width=16, num_heads=2, rngs=nnx.Rngs(0))
assert mixer(jnp.ones((1, 5, 16)))[0].shape == (1, 5, 16)
config = rnnlib.models.ModelConfig(vocabulary_size=9, width=16, num_layers=1, num_heads=2)
assert rnnlib.models.count_parameters(config).total > 0
assert rnnlib.analysis.gram_spectrum is not None
print(rnnlib.__version__)
"""
    assert run(core, "-c", program, **environment).strip() == rnnlib.__version__


def test_a_missing_extra_is_one_line_that_names_it(core, environment):
    program = """
import importlib
for part in ("rnnlib.data", "rnnlib.training", "rnnlib.data.tasks", "rnnlib.analysis.plots"):
    try:
        importlib.import_module(part)
    except ImportError as error:
        print(error)
"""
    lines = run(core, "-c", program, **environment).splitlines()
    assert len(lines) == 4
    assert all("which is not installed: pip install 'rnnlib[train]'" in line for line in lines)
    program = "import rnnlib\ntry: rnnlib.hub\nexcept ImportError as error: print(error)"
    line = run(core, "-c", program, **environment)
    assert "which is not installed: pip install 'rnnlib[hub]'" in line


def test_published_models_need_the_hub_extra_alone():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    packages = ["safetensors", "tokenizers", "jinja2"]
    assert [re.split("[^a-z0-9]", requirement)[0] for requirement in extras["hub"]] == packages
    weights = ROOT / "experiments" / "demonstration" / "model" / "model.safetensors"
    program = f"""
import sys, rnnlib
from rnnlib.safetensors_files import open_safetensors
rnnlib.hub.load_pretrained, rnnlib.tokenizers.load_tokenizer, open_safetensors({str(weights)!r})
print(*sys.modules)
"""
    imported = set(run(sys.executable, "-c", program).split())
    assert {"safetensors", "tokenizers"} <= imported
    assert not imported & {"chex", "grain", "lm_eval", "matplotlib", "pyarrow", "tensorboard", "tyro"}


def test_the_command_line_outside_of_the_repository(core, environment):
    rnnlib_command = core.parent / "rnnlib"
    assert run(rnnlib_command, "--version", **environment).strip() == rnnlib.__version__
    assert "usage: rnnlib COMMAND" in run(rnnlib_command, "--help", **environment)
    process = subprocess.run([rnnlib_command, "train"], capture_output=True, text=True, **environment)
    assert process.returncode == 2
    assert process.stderr.startswith("rnnlib train: error: rnnlib train needs ")
    assert process.stderr.endswith("which is not installed: pip install 'rnnlib[train]'\n")
    assert process.stderr.count("\n") == 1
    shown = run(rnnlib_command, "train", "--help", **environment)
    assert "usage: rnnlib train" in shown and "pip install 'rnnlib[train]'" in shown


def test_the_wheel_trains_outside_of_the_repository(uv, wheel, environment, tmp_path):
    """The wheel's files in place of the checkout's, with the packages that are installed here."""
    install = [*uv, "pip", "install", "--quiet", "--python", sys.executable, "--no-deps"]
    run(*install, "--target", tmp_path / "wheel", wheel)
    environment["env"]["PYTHONPATH"] = str(tmp_path / "wheel")
    (tmp_path / "text.txt").write_text(" ".join(f"{i} plus {i} is {2 * i};" for i in range(200)))
    (tmp_path / "train.py").write_text(
        "import sys, rnnlib\n"
        "assert rnnlib.__file__.startswith(sys.argv.pop(1)), rnnlib.__file__\n"
        "sys.exit(rnnlib.cli.main.main())\n"
    )
    flags = "--steps 2 --prompt= --model.width 16 --model.num-layers 1 --model.mlp-width 16 --data.sequence-length 16"
    text = "--data.paths text.txt"
    output = run(sys.executable, "train.py", tmp_path / "wheel", "train", *flags.split(), *text.split(), **environment)
    assert "step 2/2" in output
    assert (tmp_path / "runs" / "001" / "checkpoints" / "2").is_dir()


def test_operators_cost_little_more_to_import_than_jax(core, environment):
    """Processor time of `import rnnlib.ops` once jax is there; the least of three, as other work only adds to it."""
    program = "import jax, time; start = time.process_time(); import rnnlib.ops; print(time.process_time() - start)"
    assert min(float(run(core, "-c", program, **environment)) for _ in range(3)) < 0.15
