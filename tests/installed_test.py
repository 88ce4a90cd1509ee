"""What messages tell a reader to type: it must work in the installation at hand."""

import json

import pytest

from jax_ep import installed


@pytest.fixture
def recorded(monkeypatch):
    """Sets what pip recorded of the installation; None is an index."""

    def put(origin):
        class Distribution:
            def read_text(self, name):
                assert name == "direct_url.json"
                return None if origin is None else json.dumps(origin)

        monkeypatch.setattr(
            installed.importlib.metadata, "distribution", lambda name: Distribution()
        )
        installed._origin.cache_clear()

    yield put
    installed._origin.cache_clear()


def test_index(recorded):
    recorded(None)
    assert installed.pip_install("cuda13") == "pip install 'jax_ep[cuda13]'"
    assert installed.pip_install("flax", "-U") == "pip install -U 'jax_ep[flax]'"
    assert installed.pip_install("") == "pip install 'jax_ep'"


def test_checkout(recorded, tmp_path):
    folder = tmp_path / "a b"
    folder.mkdir()
    recorded(dict(url=folder.as_uri(), dir_info={}))
    assert installed.pip_install("tools") == f"pip install '{folder}[tools]'"
    recorded(dict(url=folder.as_uri(), dir_info=dict(editable=True)))
    want = f"pip install -U -e '{folder}[tools]'"
    assert installed.pip_install("tools", "-U") == want


def test_checkout_that_is_gone(recorded, tmp_path):
    recorded(dict(url=(tmp_path / "gone").as_uri(), dir_info={}))
    assert installed.pip_install("tools") == "pip install 'jax_ep[tools]'"


def test_wheel(recorded, tmp_path):
    wheel = tmp_path / "jax_ep-1-py3-none-any.whl"
    wheel.touch()
    recorded(dict(url=wheel.as_uri(), archive_info={}))
    assert installed.pip_install("flax") == f"pip install '{wheel}[flax]'"


def test_repository(recorded):
    recorded(
        dict(
            url="https://example.org/jax_ep",
            vcs_info=dict(vcs="git", commit_id="0123abc"),
        )
    )
    assert installed.pip_install("flax") == (
        "pip install 'jax_ep[flax] @ git+https://example.org/jax_ep@0123abc'"
    )


def test_not_installed(monkeypatch):
    def missing(name):
        raise installed.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(installed.importlib.metadata, "distribution", missing)
    installed._origin.cache_clear()
    assert installed.pip_install("flax") == "pip install 'jax_ep[flax]'"
    installed._origin.cache_clear()
