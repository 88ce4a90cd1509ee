"""How many rows a rank's receive buffer holds, for a layer of a config."""

import math

from jax_ep.config import MoEConfig


def receive_capacity(
    config: MoEConfig, num_tokens: int, num_ranks: int, *, num_slots: int | None = None
) -> int | None:
    """Rows C of a rank's receive buffer, for `dispatch_layout`.

    `capacity_factor * T * K`, rounded up to the alignment, and never more than a router
    that repeats no id in a row can fill, `R*T*min(K, L) + L*(A-1)`; dropless, that.

    Args:
      config: the layer.
      num_tokens: T.
      num_ranks: R.
      num_slots: slots of a `Placement` over all ranks; None is one for each expert.

    Returns:
      C; None where there are no tokens.

    Source: the capacity factor of Switch Transformer, arXiv:2101.03961, equation 3, per
    rank in place of per expert, so that its experts share what room there is.
    """
    if not num_tokens:
        return None
    num_topk, alignment = config.num_experts_per_tok, config.expert_alignment
    num_local = max((num_slots or config.num_experts) // num_ranks, 1)
    bound = num_ranks * num_tokens * min(num_topk, num_local)
    bound += num_local * (alignment - 1)
    if config.capacity_factor is None:
        return bound
    # Rounded first, since 1.1 * 10 is a little more than 11.
    rows = math.ceil(round(config.capacity_factor * num_tokens * num_topk, 6))
    return min(-(-rows // alignment) * alignment, bound)
