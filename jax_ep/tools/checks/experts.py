"""Whether the experts' grouped products run on the kernels measured fastest."""

from collections.abc import Sequence

from jax_ep import grouped_matmul
from jax_ep.installed import pip_install
from jax_ep.tools.checks.outcome import NO_CUDA, Outcome, Subject

SUBJECT = Subject("experts")

_NAME = "grouped products"


def check(kinds: Sequence[str]) -> Outcome:
    """Judges what is installed for these devices.

    Args:
      kinds: of the GPUs that JAX sees.
    """
    if not kinds:
        return SUBJECT.not_applicable(_NAME, NO_CUDA)
    chosen = [grouped_matmul.FASTEST.get(kind) for kind in sorted(set(kinds))]
    kernels = [
        kernel
        for each in chosen
        if each is not None
        for kernel in (each.forward, each.dgrad, each.wgrad)
    ]
    if not kernels:
        found = f"jax.lax.ragged_dot; nothing else was measured on {kinds[0]}"
        return SUBJECT.healthy(_NAME, found)
    if all(grouped_matmul.is_installed(kernel) for kernel in kernels):
        names = " and ".join(sorted({kernel.name for kernel in kernels}))
        return SUBJECT.healthy(_NAME, f"{names} of tokamax, in bfloat16")
    return SUBJECT.problem(
        _NAME,
        f"jax.lax.ragged_dot, which multiplies every row with every expert on "
        f"{kinds[0]}: 40 times the time at 64 experts",
        f"{pip_install('tokamax')} (tokamax, jax-triton and triton >= 3.9).",
    )
