"""The terminal: one console, one way to refuse, one way to speak to machines."""

import json
import sys
from typing import Any

import rich.console

console = rich.console.Console()
errors = rich.console.Console(stderr=True)


class UserError(Exception):
    """What the user asked for cannot be done: one line that names value and rule."""


def print_json(document: Any) -> None:
    """What `--json` prints: one document and nothing else on standard output."""
    json.dump(document, sys.stdout, indent=1)
    sys.stdout.write("\n")
