"""The site's Python runs as it stands, and its messages are ours.

The blocks of a page run in their order, in one namespace, on eight CPU devices. One
that cannot is marked by a line `<!-- parsed only: needs ... -->` before it; those that
the README has too are run by readme_test.py.
"""

import ast
import functools
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parent.parent
DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text()
FENCE = re.compile(r"^( *)```python\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
PARSED_ONLY = re.compile(r"<!-- parsed only: needs .+ -->")


def blocks_of(page: pathlib.Path) -> list[tuple[str, bool]]:
    """The Python of a page, at its own lines, and whether each block is to run."""
    text = page.read_text()
    found = []
    for match in FENCE.finditer(text):
        indent, source = match.groups()
        lines = [line.removeprefix(indent) for line in source.splitlines()]
        above = text[: match.start()].rstrip().rsplit("\n", 1)[-1].strip()
        start = text[: match.start()].count("\n") + 1
        is_run = not PARSED_ONLY.fullmatch(above) and match.group() not in README
        found.append(("\n" * start + "\n".join(lines), is_run))
    return found


PAGES = {str(p.relative_to(DOCS)): blocks_of(p) for p in sorted(DOCS.rglob("*.md"))}


def test_pages_have_examples():
    with_code = [name for name, blocks in PAGES.items() if blocks]
    assert {"concepts.md", "index.md", "migrate.md"} <= set(with_code)
    assert sum(run for blocks in PAGES.values() for _, run in blocks) >= 12


def test_readme_links():
    """Pages that the README names are there (those between pages mkdocs checks)."""
    links = re.findall(r"\]\(([^)#]+)[^)]*\)|src=\"([^\"]+)\"", README)
    paths = [one or other for one, other in links]
    assert len(paths) >= 12
    assert [path for path in paths if not (ROOT / path).is_file()] == []


def test_public_names_are_documented():
    """Each has an entry in the API, from its docstring. (Modules have pages.)"""
    import jax_ep

    api = "".join(page.read_text() for page in (DOCS / "api").glob("*.md"))
    entries = set(re.findall(r"^::: (\S+)$", api, re.MULTILINE))
    found = {f"jax_ep.{name}": getattr(jax_ep, name) for name in jax_ep.__all__}
    missing = [
        name
        for name, value in found.items()
        if hasattr(value, "__qualname__")
        and f"{value.__module__}.{value.__qualname__}" not in entries
    ]
    assert len(entries) > 40 and missing == []


@pytest.mark.timeout(300)  # A page is several programs.
@pytest.mark.parametrize("page", [name for name, blocks in PAGES.items() if blocks])
def test_page(page, tmp_path, monkeypatch):
    import jax

    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "__main__"}
    # A reader has no strict modes switched on.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for source, is_run in PAGES[page]:
            code = compile(source, str(DOCS / page), "exec")
            if is_run:
                exec(code, namespace)


@functools.cache
def our_literals() -> str:
    """All string literals of the package, adjacent ones joined, fields as newlines."""
    found = []
    for path in (ROOT / "jax_ep").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = (
                    v.value if isinstance(v, ast.Constant) else "\n"
                    for v in node.values
                )
                found.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    for path in [*(ROOT / "ffi").rglob("*.cc"), *(ROOT / "ffi").rglob("*.h")]:
        text = re.sub(r'"\s*\n\s*"', "", path.read_text())
        found += re.findall(r'"((?:[^"\\\n]|\\.)*)"', text)
    return "\n".join(found).replace('\\"', '"')


def quoted_messages() -> list[str]:
    """The headings of the troubleshooting page that quote a message of ours."""
    page = (DOCS / "troubleshooting.md").read_text()
    return [m for m in re.findall(r"^### `(.*)`$", page, re.MULTILINE) if "jax_ep" in m]


def test_messages_are_quoted():
    assert len(quoted_messages()) >= 15


@pytest.mark.parametrize("message", quoted_messages())
def test_message_is_ours(message):
    # What varies is written as an ellipsis, a number or an operation's name.
    literals = our_literals()
    message = re.sub(r"^jax_ep(\.\w+)*: ", "", message)
    fragments = [part.strip() for part in re.split(r"…", message)]
    fragments = [part for part in fragments if len(part) > 3]
    assert fragments
    for part in fragments:
        assert part in literals
