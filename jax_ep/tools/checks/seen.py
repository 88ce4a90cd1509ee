"""A process of its own: which GPUs JAX sees under the user's settings, as JSON."""

import json
import logging

from jax_ep.tools.checks.outcome import one_line


class Failures(logging.Handler):
    """What JAX logs where a plugin fails to start: it goes on without that plugin."""

    def __init__(self):
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps the exception that was logged."""
        error = record.exc_info and record.exc_info[1]
        if error and "plugin" in record.getMessage():
            self.found.append(one_line(error))


def main() -> None:
    """Prints one line: the kinds of the GPUs, or why there are none."""
    import jax

    failures = Failures()
    logging.getLogger("jax").addHandler(failures)
    try:
        found = dict(kinds=[device.device_kind for device in jax.devices("cuda")])
    except Exception as error:  # of a plugin, which may be any
        found = dict(error=one_line(f"{type(error).__name__}: {error}"))
    print(json.dumps(found | dict(plugin=failures.found)), flush=True)


if __name__ == "__main__":
    main()
