"""What became of the CUDA exchanges of this process."""

from jax_ep import _ffi


def check() -> None:
    """Raises if an exchange between GPUs has failed in this process.

    A kernel cannot raise: a rank whose peer stays away for `timeout_s` ends with NaN in
    its float results, zero counts and slots of -1, and with a record of what it waited
    for. The next execution of any jax_ep call raises that as an error; call this after
    `jax.block_until_ready` to know at once. On CPU devices calls fail by themselves.

    Raises:
      RuntimeError: naming the rank that waited, the rank it waited for, the phase, and
        what it expected and saw. The state is final: the process must be restarted.
    """
    error = _ffi.check_error()
    if error:
        raise RuntimeError(error)
