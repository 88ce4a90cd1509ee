"""The terminal: one console, one way to refuse, one way to speak to machines."""

import json
import sys
from typing import Any

import rich.console
import rich.measure
import rich.padding
import rich.table

console = rich.console.Console()
errors = rich.console.Console(stderr=True)

_ANY_WIDTH = 10_000


class UserError(Exception):
    """What the user asked for cannot be done: one line that names value and rule."""


def print_json(document: Any) -> None:
    """What `--json` prints: one document and nothing else on standard output."""
    json.dump(document, sys.stdout, indent=1)
    sys.stdout.write("\n")


def show_table(table: rich.table.Table, *, least: int | None = None) -> None:
    """Prints a table, or where it is too wide for this terminal a list of its rows.

    Args:
      table: columns of text.
      least: the width that it can be read at; None is that of its widest cells, the
        first column's wrapped between words.
    """
    if least is None and (least := _least_width(table)) > console.width:
        table.show_edge = table.pad_edge = False
        least = _least_width(table)
    if least <= console.width:
        console.print(table)
        return
    if table.title:
        console.print(f"[bold]{table.title}[/]", highlight=False)
    heads = [
        " ".join(str(column.header).split()).replace("/ ", "/")
        for column in table.columns
    ]
    for first, *cells in zip(*(column.cells for column in table.columns), strict=True):
        console.print(f"{heads[0]} [bold]{first}[/]", highlight=False)
        pairs = zip(heads[1:], cells, strict=True)
        text = ", ".join(f"{head} {cell}" for head, cell in pairs if cell)
        console.print(rich.padding.Padding(text, (0, 0, 0, 2)), highlight=False)
    if table.caption:
        console.print(table.caption, highlight=False)
    console.print()


def _least_width(table: rich.table.Table) -> int:
    options = console.options.update(width=_ANY_WIDTH)
    widest = rich.measure.Measurement.get(console, options, table).maximum
    first = table.columns[0]
    if first.no_wrap:
        return widest
    texts = [str(cell) for cell in (first.header, *first.cells)]
    lines = [line for text in texts for line in text.splitlines()]
    words = [word for line in lines for word in line.split()]
    return widest - max(map(len, lines), default=0) + max(map(len, words), default=0)
