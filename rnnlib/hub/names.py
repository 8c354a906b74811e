"""Folders by name: `hf://owner/name` and `hf://owner/name@revision` are models of the Hugging Face hub."""

import os
import pathlib
import re

from rnnlib.extras import from_extra

SCHEME = "hf:/"
# `Path` makes one slash of two.
_NAME = re.compile(r"hf:/{1,2}(?P<repository>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?/?")
# Weights and texts: no other file is fetched. Pickled weights and code are none of them.
_FILES = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.md", "LICENSE*"]


def local_folder(folder: str | os.PathLike[str]) -> pathlib.Path:
    """The folder itself, or that of a model of the hub, which is fetched first.

    `huggingface_hub` keeps what it fetched in its cache (`HF_HOME`), and takes it from there with `HF_HUB_OFFLINE=1`.

    Args:
        folder: a path, or `hf://owner/name` with or without `@revision` (a branch, tag or commit).

    Raises:
        ValueError: the name is none, the hub has no such model or revision, or there is no connection and the model is
            not in the cache. The message is one line.
    """
    name = os.fspath(folder)
    if not name.startswith(SCHEME):
        return pathlib.Path(folder)
    found = _NAME.fullmatch(name)
    if found is None:
        shown = "hf://" + name.removeprefix(SCHEME).lstrip("/")
        raise ValueError(f"{shown}: expected hf://owner/name or hf://owner/name@revision")
    with from_extra("hub", "rnnlib.hub"):
        import huggingface_hub  # which `tokenizers` requires
        import huggingface_hub.constants
        import huggingface_hub.errors

    shown = f"hf://{found['repository']}" + (f"@{found['revision']}" if found["revision"] else "")
    try:
        return pathlib.Path(
            huggingface_hub.snapshot_download(
                found["repository"],
                revision=found["revision"],
                allow_patterns=_FILES,
                library_name="rnnlib",
                # Said here, too: for a commit, huggingface_hub asks for the list of files even in its offline mode.
                local_files_only=huggingface_hub.constants.HF_HUB_OFFLINE,
            )
        )
    except huggingface_hub.errors.RepositoryNotFoundError:
        raise ValueError(f"{shown}: the hub has no such model, or does not show it without a token") from None
    except huggingface_hub.errors.RevisionNotFoundError:
        raise ValueError(f"{shown}: the model has no such revision, expected a branch, tag or commit") from None
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{shown}: it cannot be fetched, and is not in the cache ({reason})") from error
