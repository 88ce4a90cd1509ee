"""Names that set one field of `MoEConfig`, whoever uses them, to their value."""

# Of TransformerEngine's JAX layer and its router (`score_function`, `use_pre_softmax`,
# `num_groups`, `group_topk`, `scaling_factor`, `expert_bias`, `aux_loss_coeff`: the
# arguments of transformer_engine/jax/router.py), Marin (`top_k`, `intermediate_dim`,
# `shared_experts`, `z_loss`, `expert_chunks`, `moe_implementation`) and of config files
# where nothing else hangs on the name.
ALIASES = dict(
    num_local_experts="num_experts",
    n_routed_experts="num_experts",
    num_moe_experts="num_experts",
    num_experts_per_token="num_experts_per_tok",
    top_k="num_experts_per_tok",
    moe_topk="num_experts_per_tok",
    moe_router_topk="num_experts_per_tok",
    base_emb_dim="hidden_size",
    emb_dim="hidden_size",
    base_moe_mlp_dim="moe_intermediate_size",
    moe_mlp_dim="moe_intermediate_size",
    moe_ffn_hidden_size="moe_intermediate_size",
    intermediate_dim="moe_intermediate_size",
    intermediate_size="moe_intermediate_size",
    eval_ragged_buffer_factor="eval_capacity_factor",
    score_function="score_func",
    scoring_func="score_func",
    expert_bias="selection_bias",
    scaling_factor="routed_scaling_factor",
    num_groups="n_group",
    group_topk="topk_group",
    aux_loss_coeff="load_balance_loss_weight",
    z_loss="router_z_loss_weight",
    router_z_loss_coef="router_z_loss_weight",
    shared_experts="num_shared_experts",
    n_shared_experts="num_shared_experts",
    prefuse_moe_weights="fuse_gate_up",
    moe_dropless_fallback="dropless_fallback",
    moe_implementation="implementation",
    hidden_act="activation",
    hidden_activation="activation",
)

# What these ask for holds here anyway, or is about a transport that ours replaces.
HONOURED_ANYWAY = (
    "float32_gate_logits",
    "float32_weight_sum",
    "report_capacity_overflow",
    "use_ring_of_experts",
    "num_moe_token_chunks",
    "expert_chunks",
)

# Values of `moe_implementation` elsewhere, all of them ways to move rows.
_OTHER_TRANSPORTS = (
    "deepep",
    "fixed_all_to_all",
    "fixed_pooled_wave_all_to_all",
    "ragged_all_to_all",
    "ring",
    "scatter",
    "sonic",
    "sonic_cute",
)

# PyTorch's and transformers' names (ACT2FN in transformers/activations.py).
_OTHER_ACTIVATIONS = dict(
    swish="silu", gelu_pytorch_tanh="gelu_tanh", gelu_new="gelu_tanh"
)


def value_of(field: str, value):
    """Another library's value of a field as ours; None is as if it were not given."""
    if field == "implementation" and value in _OTHER_TRANSPORTS:
        return None
    if field == "activation" and isinstance(value, str):
        return _OTHER_ACTIVATIONS.get(value, value)
    if field == "dropless_fallback" and value in ("layer", "step"):
        return True  # Where it starts over. Here rounds go on.
    if field in ("n_group", "topk_group") and value in (-1, 0):
        return None  # No groups.
    return value
