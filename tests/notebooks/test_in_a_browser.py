"""The documented command's notebooks in a browser: controls are there, and moving one redraws the picture.

Runs where Chromium and JupyterLab are installed: `apt-get install chromium`, `uv run --with jupyterlab --with
websocket-client pytest -m slow tests/notebooks/test_in_a_browser.py`.
"""

import contextlib
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request

import nbformat
import pytest

NOTEBOOKS = pathlib.Path(__file__).parents[2] / "notebooks"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

SOURCE = """
import matplotlib.pyplot as plt
from explore import explore, slider
%matplotlib inline

def draw(height, other):
    figure, ax = plt.subplots(figsize=(3, 2))
    ax.bar([0], [height])
    ax.set(ylim=(0, 10))
    return figure

def other_does_nothing(height, other):
    return ["other"] if height < 5 else []

controls = {"height": slider("height", 2, 0, 10, 1), "other": slider("other", 1, 0, 2, 1)}
explore(draw, without_effect=other_does_nothing, **controls)
"""

pytestmark = pytest.mark.slow


def until(found, *, seconds=90):
    """What a function returns once that is something."""
    end = time.monotonic() + seconds
    while not (value := found()):
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.3)
    return value


class Page:
    """A page of a browser, by the protocol of its developer tools."""

    def __init__(self, socket):
        self._socket, self._number = socket, 0

    def call(self, method, **parameters):
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": parameters}))
        while (answer := json.loads(self._socket.recv())).get("id") != self._number:
            pass
        assert "error" not in answer, answer
        return answer["result"]

    def value(self, script):
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        return answer["result"].get("value")


@contextlib.contextmanager
def process(*command, **options):
    started = subprocess.Popen(command, start_new_session=True, **options)
    try:
        yield started
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGTERM)
        started.wait(20)


@pytest.fixture
def page(tmp_path):
    websocket = pytest.importorskip("websocket", reason="websocket-client is not installed")
    pytest.importorskip("jupyterlab", reason="JupyterLab is not installed")
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed")
    folder = tmp_path / "notebooks"
    folder.mkdir()
    shutil.copy(NOTEBOOKS / "explore.py", folder)
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}  # or JupyterLab asks for one
    cells = [nbformat.v4.new_code_cell(SOURCE)]
    notebook = nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel})
    nbformat.write(notebook, folder / "moved.ipynb")
    log = open(tmp_path / "log", "w+")  # noqa: SIM115 (open as long as the server is)
    server = process(
        *(sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--IdentityProvider.token=t"),
        *("--LabApp.expose_app_in_browser=True", f"--ServerApp.root_dir={folder}", "--ServerApp.port=0"),
        stdout=log,
        stderr=subprocess.STDOUT,
        env=os.environ | {"JUPYTER_CONFIG_DIR": str(tmp_path / "config"), "JAX_PLATFORMS": "cpu"},
    )
    browser = process(
        *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0"),
        *("--remote-allow-origins=*", f"--user-data-dir={tmp_path / 'profile'}", "about:blank"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    with log, server, browser:
        port = until(lambda: re.search(r"http://(?:localhost|127\.0\.0\.1):(\d+)/", (tmp_path / "log").read_text()))[1]
        debugging = tmp_path / "profile" / "DevToolsActivePort"
        until(lambda: debugging.exists() and debugging.read_text().strip())
        tools = f"http://127.0.0.1:{debugging.read_text().split()[0]}/json"
        targets = until(lambda: [t for t in json.load(urllib.request.urlopen(tools)) if t["type"] == "page"])
        socket = websocket.create_connection(targets[0]["webSocketDebuggerUrl"], timeout=60)
        page = Page(socket)
        page.call("Page.navigate", url=f"http://127.0.0.1:{port}/lab/tree/moved.ipynb?token=t")
        yield page
        socket.close()


def test_a_slider_redraws_the_picture(page):
    until(lambda: page.value("!!document.querySelector('.jp-Notebook .jp-CodeCell') && !!window.jupyterapp"))
    time.sleep(3)  # the kernel is chosen after the notebook is shown
    page.value("window.jupyterapp.commands.execute('notebook:run-all-cells'); 1")
    picture = "(document.querySelector('.jp-OutputArea img') || {}).src || ''"
    before = until(lambda: page.value(picture))
    sliders = "document.querySelectorAll('.widget-slider')"
    until(lambda: page.value(f"{sliders}.length") == 2)
    disabled = f"{sliders}[1].querySelector('[disabled]') != null"
    until(lambda: page.value(disabled))
    page.value("document.querySelector('.widget-slider .noUi-handle').focus()")
    for _ in range(4):
        for kind in ("keyDown", "keyUp"):
            key = {"key": "ArrowRight", "code": "ArrowRight", "windowsVirtualKeyCode": 39}
            page.call("Input.dispatchKeyEvent", type=kind, **key)
        time.sleep(0.3)
    until(lambda: page.value(picture) != before)
    until(lambda: page.value(f"!({disabled})"))  # above 5 the other slider matters
