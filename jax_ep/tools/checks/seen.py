"""A process of its own: which GPUs JAX sees under the user's settings, as JSON."""

import json


def main() -> None:
    """Prints one line: the kinds of the GPUs, or why there are none."""
    import jax

    try:
        kinds = [device.device_kind for device in jax.devices("cuda")]
    except Exception as error:  # of a plugin, which may be any
        print(
            json.dumps(
                dict(error=" ".join(f"{type(error).__name__}: {error}".split()))
            ),
            flush=True,
        )
        return
    print(json.dumps(dict(kinds=kinds)), flush=True)


if __name__ == "__main__":
    main()
