"""The frame of the page: sections, figures and tables, in one file without scripts."""

import dataclasses
import re
from collections.abc import Sequence
from html import escape as _escape

from jax_ep.tools.page import style, svg
from jax_ep.tools.page.drawing import Drawing

# A number and its unit stay on one line.
_UNIT = re.compile(r"(?<=\d) (?=(?:[nµm]?s|[kMGT]?B(?:/s)?)\b)")


def escape(text: str) -> str:
    """Text as HTML."""
    return _escape(_UNIT.sub("\u00a0", text))


@dataclasses.dataclass(frozen=True)
class Table:
    """The numbers behind a chart; the first column names the row."""

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclasses.dataclass(frozen=True)
class Figure:
    """A chart with its numbers."""

    drawing: Drawing
    table: Table


@dataclasses.dataclass(frozen=True)
class Facts:
    """Names and texts, always open."""

    caption: str
    rows: Sequence[tuple[str, str]]


@dataclasses.dataclass(frozen=True)
class Finding:
    """The sentence that a section comes down to."""

    text: str


Part = str | Finding | Figure | Facts


@dataclasses.dataclass(frozen=True)
class Section:
    """A heading and what is below it; a plain text is a paragraph.

    Attributes:
      name: of its place in the page.
      title: of its heading.
      parts: from top to bottom.
    """

    name: str
    title: str
    parts: Sequence[Part]


@dataclasses.dataclass(frozen=True)
class Page:
    """All of it.

    Attributes:
      title: of the window, and the small heading.
      verdict: the sentence at the top; only its first clause, up to a full stop, is
        large.
      setting: what was run, in a line.
      sections: from top to bottom.
    """

    title: str
    verdict: str
    setting: str
    sections: Sequence[Section]

    def drawings(self) -> list[Drawing]:
        """Of all figures, from top to bottom."""
        return [
            part.drawing
            for section in self.sections
            for part in section.parts
            if isinstance(part, Figure)
        ]

    def html(self) -> str:
        """The file: no script, no link out of it, nothing to load."""
        verdict, _, reason = self.verdict.partition(". ")
        links = "".join(
            f'<li><a href="#{s.name}">{escape(s.title)}</a></li>' for s in self.sections
        )
        return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<link rel="icon" href="data:,">
<title>{escape(self.title)}</title>
<style>{style.sheet()}</style>
</head>
<body>
{svg.patterns()}
<a class="skip" href="#content">To the content</a>
<header>
<h1>{escape(self.title)}</h1>
<p class="verdict">{escape(verdict.removesuffix("."))}.</p>
<p>{escape(reason[:1].upper() + reason[1:])}</p>
<p class="setting">{escape(self.setting)}</p>
<nav aria-label="Sections"><ul>{links}</ul></nav>
</header>
<main id="content">
{"".join(map(_section, self.sections))}</main>
<footer><p>Times are medians unless a text says otherwise. Bytes and rates are decimal:
1 GB is 10<sup>9</sup> bytes. Written by <code>jax_ep report</code>.</p>
</footer>
</body>
</html>
"""


def _section(section: Section) -> str:
    parts = "\n".join(map(_part, section.parts))
    return (
        f'<section id="{section.name}" aria-labelledby="{section.name}-title">\n'
        f'<h2 id="{section.name}-title">{escape(section.title)}</h2>\n'
        f"{parts}\n</section>\n"
    )


def _part(part: Part) -> str:
    if isinstance(part, str):
        return f"<p>{escape(part)}</p>"
    if isinstance(part, Finding):
        return f'<p class="finding">{escape(part.text)}</p>'
    if isinstance(part, Facts):
        rows = "".join(
            f'<tr><th scope="row">{escape(name)}</th><td>{escape(text)}</td></tr>'
            for name, text in part.rows
        )
        caption = f"<caption>{escape(part.caption)}</caption>"
        return f'<table class="facts">{caption}<tbody>{rows}</tbody></table>'
    drawing = part.drawing
    key = "".join(
        f"<li>{svg.swatch(fill)}{escape(text)}</li>" for fill, text in drawing.key
    )
    return (
        f"<figure>\n<figcaption>{escape(drawing.title)}</figcaption>\n"
        + (f'<ul class="key" aria-label="Key">{key}</ul>\n' if key else "")
        + f"{svg.element(drawing)}\n{_table(part.table)}\n</figure>"
    )


def _table(table: Table) -> str:
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in table.head)
    rows = "\n".join(
        f'<tr><th scope="row">{escape(row[0])}</th>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in row[1:])
        + "</tr>"
        for row in table.rows
    )
    caption = escape(table.caption)
    return (
        f"<details><summary>Numbers: {caption}</summary>\n"
        # A table wider than the page scrolls by itself; the keyboard must reach it.
        f'<div class="scroll" tabindex="0" role="region" aria-label="{caption}">'
        f"<table><caption>{caption}</caption><thead><tr>{head}</tr></thead>\n"
        f"<tbody>{rows}</tbody></table></div></details>"
    )
