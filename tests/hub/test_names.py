"""Models of the hub by name, from a small server on the loopback: what is fetched, kept and found offline."""

import contextlib
import hashlib
import http.server
import json
import threading

import huggingface_hub.constants
import pytest
from flax import nnx

from rnnlib.hub import load_pretrained, pretrained_config, save_pretrained
from rnnlib.hub.names import local_folder
from rnnlib.models import DecoderLM, ModelConfig
from rnnlib.training import is_run

COMMIT = "0123456789abcdef0123456789abcdef01234567"
CONFIG = ModelConfig(20, width=16, num_layers=1, num_heads=2, mixers=("gated_deltanet",), mlp_width=8)


class _Hub(http.server.BaseHTTPRequestHandler):
    """The parts of the hub's interface that fetching a model asks for."""

    files: dict[str, bytes]
    fetched: list[str]

    def _answer(self, status, body=b"", **headers):
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def do_GET(self):
        path = self.path.split("?")[0]
        if path.startswith("/api/models/owner/tiny"):
            revision = path.partition("/revision/")[2] or "main"
            if revision not in ("main", "v1", COMMIT):
                self._answer(404, X_Error_Code="RevisionNotFound")
            elif "/tree/" in path:
                entries = [
                    {"type": "file", "path": name, "size": len(data), "oid": "0"} for name, data in self.files.items()
                ]
                self._answer(200, json.dumps(entries).encode(), Content_Type="application/json")
            else:
                siblings = [{"rfilename": name} for name in self.files]
                answer = {"id": "owner/tiny", "sha": COMMIT, "siblings": siblings}
                self._answer(200, json.dumps(answer).encode(), Content_Type="application/json")
        elif path.startswith("/owner/tiny/resolve/"):
            name = path.split("/", 5)[5]
            body = self.files[name]
            if self.command == "GET":
                self.fetched.append(name)
            etag = f'"{hashlib.sha256(body).hexdigest()}"'
            self._answer(200, body, ETag=etag, X_Repo_Commit=COMMIT, Accept_Ranges="none")
        else:
            self._answer(404, X_Error_Code="RepoNotFound")

    do_HEAD = do_GET

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub with the model owner/tiny; its list of files that were fetched."""
    save_pretrained(DecoderLM(CONFIG, rngs=nnx.Rngs(0)), tmp_path / "tiny", family="gated_deltanet")
    files = {path.name: path.read_bytes() for path in (tmp_path / "tiny").iterdir()}
    files |= {"pytorch_model.bin": b"pickled", "modeling.py": b"code", "chat_template.jinja": b"{{ messages }}"}
    handler = type("_Handler", (_Hub,), {"files": files, "fetched": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", address)
    template = address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    with contextlib.closing(server.socket):
        yield handler.fetched
        server.shutdown()
        thread.join()


def test_a_model_by_name_is_fetched_once_and_found_offline(hub, monkeypatch):
    assert not is_run("hf://owner/tiny")
    assert sorted(hub) == ["chat_template.jinja", "config.json", "model.safetensors"], "no code, no pickled weights"
    assert pretrained_config("hf:/owner/tiny").width == 16  # as a path that was one spells it
    assert load_pretrained("hf://owner/tiny@v1").source.family == "gated_deltanet"
    assert len(hub) == 3
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert local_folder("hf://owner/tiny") == local_folder("hf://owner/tiny@v1")
    assert local_folder(f"hf://owner/tiny@{COMMIT}") == local_folder("hf://owner/tiny")
    with pytest.raises(ValueError, match=r"^hf://owner/other: it cannot be fetched, and is not in the cache \(.*\)$"):
        local_folder("hf://owner/other")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("hf://owner/absent", r"^hf://owner/absent: the hub has no such model, or does not show it"),
        ("hf://owner/tiny@v9", r"^hf://owner/tiny@v9: the model has no such revision, expected a branch"),
        ("hf://tiny", r"^hf://tiny: expected hf://owner/name or hf://owner/name@revision$"),
        ("hf://owner/tiny/extra", r"expected hf://owner/name"),
    ],
)
def test_names_that_are_none_are_one_line(hub, name, message):
    with pytest.raises(ValueError, match=message) as error:
        local_folder(name)
    assert "\n" not in str(error.value) and not hub


def test_paths_stay_paths(tmp_path):
    assert local_folder(tmp_path) == tmp_path
