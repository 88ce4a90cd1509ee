"""Examples of docstrings (`>>>`) as code: in Markdown they would be quotations."""

import re

import griffe

_EXAMPLE = re.compile(r"^(?:>>>.*\n)(?:(?!\n).*\n?)*", re.MULTILINE)


class Doctests(griffe.Extension):
    """Puts every block that begins with `>>>` into a fence."""

    def on_object(self, *, obj: griffe.Object, **kwargs) -> None:
        """Rewrites the object's docstring."""
        if obj.docstring is not None:
            obj.docstring.value = _EXAMPLE.sub(_fenced, obj.docstring.value + "\n")


def _fenced(match: re.Match[str]) -> str:
    return f"```pycon\n{match.group().rstrip()}\n```\n"
