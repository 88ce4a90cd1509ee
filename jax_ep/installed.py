"""How this jax_ep was installed, so that messages say what to type here."""

import functools
import importlib.metadata
import json
import os
from urllib.parse import unquote, urlsplit


def pip_install(extra: str, *options: str) -> str:
    """The pip command that gives this installation an extra.

    By name where it came from an index, else by what it came from, as pip recorded it:
    a checkout, a wheel or a repository, which works before a release and after it.

    Args:
      extra: one of pyproject.toml's, or "" for jax_ep alone.
      options: of `pip install`.

    Returns:
      The command, e.g. `pip install 'jax_ep[cuda13]'`.

    Source: `direct_url.json`, PEP 610.
    """
    extras = f"[{extra}]" if extra else ""
    origin = _origin()
    url = origin.get("url", "")
    path = unquote(urlsplit(url).path) if url.startswith("file:") else ""
    target = f"jax_ep{extras}"
    if path and os.path.exists(path):
        target = path + extras
        if origin.get("dir_info", {}).get("editable"):
            options += ("-e",)
    elif "vcs_info" in origin:
        vcs = origin["vcs_info"]
        target += f" @ {vcs['vcs']}+{url}@{vcs['commit_id']}"
    return " ".join(("pip install", *options, f"'{target}'"))


@functools.cache
def _origin() -> dict:
    """What pip recorded; empty where an index gave the package, or nobody knows."""
    try:
        found = importlib.metadata.distribution("jax_ep")
    except importlib.metadata.PackageNotFoundError:
        return {}
    return json.loads(found.read_text("direct_url.json") or "{}")
