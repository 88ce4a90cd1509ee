"""MaxText's names: `configs/base.yml`, as `layers/moe.py` takes them (2026-08)."""

from jax_ep.names.source import Source, Values, first, known, refuse

_ROUTED = "layers/moe.py, RoutedMoE"
READ = dict(
    # What is computed hangs on these two.
    decoder_block=f"{_ROUTED}.get_topk, apply_ffn_activation, permute; models/*.py",
    model_name="layers/moe.py, GateLogit: who keeps scores apart from the bias",
    # Sizes. Those without base_ are after global_parameter_scale.
    num_experts=f"{_ROUTED}",
    num_experts_per_tok=f"{_ROUTED}.get_topk",
    base_emb_dim="configs/types.py, emb_dim",
    emb_dim="configs/types.py",
    base_mlp_dim="configs/types.py, mlp_dim",
    mlp_dim="utils/maxtext_utils.py, get_shared_expert_mlp_dim",
    base_moe_mlp_dim="configs/types.py, moe_mlp_dim",
    moe_mlp_dim="configs/types.py",
    padded_base_moe_mlp_dim="configs/types.py",
    moe_expert_input_dim=f"{_ROUTED}.gate",
    global_parameter_scale="configs/types.py: sizes are the base ones times it",
    shared_experts="layers/moe.py, RoutedAndSharedMoE",
    # Router.
    norm_topk_prob=f"{_ROUTED}.get_topk: divides what a softmax made sum to 1",
    routed_score_func="layers/moe.py, GateLogit; RoutedMoE.deepseek_scale_weights",
    routed_bias="layers/moe.py, GateLogit",
    routed_bias_update_rate="layers/moe.py, calculate_load_balance_updates",
    routed_scaling_factor=f"{_ROUTED}.deepseek_scale_weights",
    n_routing_groups=f"{_ROUTED}.deepseek_routing, expert_group_mask",
    topk_routing_group=f"{_ROUTED}.expert_group_mask",
    first_num_hash_layers=f"{_ROUTED}.get_topk",
    use_random_routing=f"{_ROUTED}.get_topk",
    # Experts.
    mlp_activations="layers/linears.py, _convert_to_activation_function",
    mlp_activations_limit=f"{_ROUTED}.apply_ffn_activation",
    mlp_bias=f"{_ROUTED}",
    prefuse_moe_weights=f"{_ROUTED}",
    # Rows.
    sparse_matmul=f"{_ROUTED}.__call__",
    capacity_factor=f"{_ROUTED}.dense_matmul, generate_masks",
    ragged_buffer_factor=f"{_ROUTED}.get_ragged_buffer_size",
    # Losses.
    load_balance_loss_weight=f"{_ROUTED}.load_balance_loss",
)

# Kernels, shardings, remat, other layers; or so here anyway.
IGNORED = """
    context_parallel_load_balance dcn_expert_parallelism decode_sampling_top_k
    enable_expert_parallel float32_gate_logits float32_weight_sum fuse_expert_scales
    ici_expert_parallelism indexer_approx_top_k_recall indexer_mask_exact_topk
    indexer_topk indexer_use_approx_top_k interleave_moe_layer_step log_moe_bias_norms
    megablox merge_gating_gmm moba_topk moe_chunk_barrier
    moe_dispatch_no_expert_sharding
    moe_fsdp_use_two_stage_all_gather moe_mlpwi_0 moe_mlpwi_1 moe_mlpwo
    num_moe_emb_chunks num_moe_token_chunks rollout_expert_parallelism
    use_ring_of_experts z_loss_multiplier
""".split()

MARKERS = (set(READ) | set(IGNORED)) - {
    # Also ours, or of others.
    "capacity_factor",
    "emb_dim",
    "float32_gate_logits",
    "float32_weight_sum",
    "load_balance_loss_weight",
    "mlp_bias",
    "mlp_dim",
    "model_name",
    "norm_topk_prob",
    "num_experts",
    "num_experts_per_tok",
    "num_moe_token_chunks",
    "routed_scaling_factor",
    "shared_experts",
    "use_random_routing",
    "use_ring_of_experts",
    "prefuse_moe_weights",
    "global_parameter_scale",
}

# flax.linen's functions; its gelu is the tanh form unless told otherwise.
_ACTIVATIONS = dict(
    silu="silu",
    swish="silu",
    gelu="gelu_tanh",
    relu="relu",
    sigmoid="sigmoid",
)
_GPT_OSS_LIMIT = 7.0
_DEEPSEEK = ("deepseek", "deepseek4")
_SHARED = (*_DEEPSEEK, "llama4")
_GATED_SHARED = ("qwen3_next", "qwen3_5")
# models/*.py: those that make a RoutedMoE and give it one input.
_BLOCKS = (
    *_DEEPSEEK,
    *_GATED_SHARED,
    "envy",
    "gpt_oss",
    "llama4",
    "mixtral",
    "qwen3_custom_moe",
    "qwen3_moe",
)


def translate(given: Values, others: Values) -> Values:
    """Fields of `MoEConfig` for resolved values of base.yml."""
    score_func = given.get("routed_score_func") or None  # "" is none.
    block = _block(given)
    if block is None and score_func:
        block = "deepseek"
    num_topk = first({**others, **given}, "num_experts_per_tok") or 1
    values = _sizes(given, block)
    values.update(_router(given, block, score_func))
    values.update(_experts(given, block))
    values.update(_capacity(given))
    weight = given.get("load_balance_loss_weight")
    if weight:
        # Its density counts all K slots of a token: K at balance.
        values.update(
            load_balance_loss_weight=weight * num_topk, load_balance_scope="sequence"
        )
        # A softmax over what the gate gives, whatever the weights are made of.
        if score_func is not None:
            values["load_balance_probs"] = "softmax_of_scores"
        elif block == "llama4":
            values["load_balance_probs"] = "softmax_of_logits"
    return values


def _block(given: Values) -> str | None:
    """The decoder block's name; MaxText takes any case, and its config has an enum."""
    block = given.get("decoder_block")
    if block is None:
        return None
    block = getattr(block, "value", block)
    name = block.lower() if isinstance(block, str) else block
    if name == "gemma4":
        refuse(
            "decoder_block",
            block,
            "has a router that sees its input normalised, times a trained scale, and "
            "experts that see it normalised otherwise (models/gemma4.py, Gemma4MoE): "
            "two inputs are not offered",
        )
    if name not in _BLOCKS:
        refuse(
            "decoder_block",
            block,
            f"must be one of {', '.join(_BLOCKS)}: no other is known to have experts",
        )
    return name


def _sizes(given: Values, block) -> Values:
    if given.get("global_parameter_scale", 1) != 1:
        for resolved in ("emb_dim", "moe_mlp_dim"):
            if resolved not in given and f"base_{resolved}" in given:
                refuse(
                    "global_parameter_scale",
                    given["global_parameter_scale"],
                    f"changes base_{resolved}: give the resolved {resolved}",
                )
    hidden = first(given, "emb_dim", "base_emb_dim")
    width = first(given, "moe_mlp_dim", "base_moe_mlp_dim")
    if width in (None, -1):
        # Where every layer has experts, base.yml wants the two to be the same.
        width = first(given, "mlp_dim", "base_mlp_dim")
    experts_input = given.get("moe_expert_input_dim", -1)
    if experts_input not in (-1, hidden):
        refuse("moe_expert_input_dim", experts_input, f"must be emb_dim (={hidden})")
    values = known(
        num_experts=given.get("num_experts"),
        num_experts_per_tok=given.get("num_experts_per_tok"),
        hidden_size=hidden,
        moe_intermediate_size=width,
    )
    num_shared = given.get("shared_experts", 0)
    if block in _GATED_SHARED:
        values.update(num_shared_experts=1, shared_expert_gate=True)
    elif num_shared and (block is None or block in _SHARED):
        values["num_shared_experts"] = num_shared
    return values


def _router(given: Values, block, score_func) -> Values:
    if given.get("first_num_hash_layers", 0) > 0:
        refuse(
            "first_num_hash_layers",
            given["first_num_hash_layers"],
            "must be 0: routing by a table of token ids is not offered",
        )
    values = known(use_random_routing=given.get("use_random_routing"))
    has_bias = given.get("routed_bias", False)
    scaling = given.get("routed_scaling_factor", 1.0)
    if block is None and has_bias and "routed_score_func" not in given:
        raise ValueError(
            "jax_ep.MoEConfig: routed_bias (=True) is router_bias, the logits', "
            "without a score function, and selection_bias, the choice's, with one "
            "(DeepSeek-V3): give decoder_block or routed_score_func too."
        )
    if block in _DEEPSEEK:
        if score_func is None:
            refuse(
                "routed_score_func",
                given.get("routed_score_func", ""),
                f"must be 'softmax', 'sigmoid' or 'sqrtsoftplus' in decoder_block "
                f"{block!r}: logits as weights are not offered",
            )
        values.update(score_func=score_func, routed_scaling_factor=scaling)
        # Softmax scores stay as they are; the others are divided, for one expert too.
        values["norm_topk_prob"] = score_func != "softmax"
        name = given.get("model_name")
        is_v3 = name is None or name.startswith(("deepseek3", "deepseek4"))
        if has_bias and not is_v3:
            refuse(
                "routed_bias",
                has_bias,
                f"with model_name (={name!r}) is in the weights too: names must begin "
                "with deepseek3 or deepseek4 for the choice alone",
            )
        if has_bias:
            values["selection_bias"] = True
            rate = given.get("routed_bias_update_rate", 0.0)
            values["selection_bias_update_rate"] = rate
        if is_v3:
            values.update(_groups(given))
        return values
    if score_func is not None:
        refuse(
            "routed_score_func",
            score_func,
            f"must be '' in decoder_block {block!r}: there it would be the input of a "
            "softmax, which is not offered",
        )
    if has_bias:
        values["router_bias"] = True
    if block is None:  # Else nothing there reads them.
        values.update(routed_scaling_factor=scaling, **_groups(given))
    if block == "llama4":
        if given.get("norm_topk_prob"):
            refuse(
                "norm_topk_prob",
                True,
                "must be False in decoder_block 'llama4': there it would divide logits "
                "before their sigmoid, which is not offered",
            )
        values.update(
            score_func="sigmoid", norm_topk_prob=False, weights_scale_input=True
        )
    else:
        values["norm_topk_prob"] = True  # A softmax over the chosen logits.
    return values


def _groups(given: Values) -> Values:
    if given.get("n_routing_groups", -1) < 1:
        return {}
    groups = dict(n_group=given["n_routing_groups"], group_score="top2_sum")
    return groups | known(topk_group=given.get("topk_routing_group"))


def _experts(given: Values, block) -> Values:
    values = known(
        mlp_bias=given.get("mlp_bias"), fuse_gate_up=given.get("prefuse_moe_weights")
    )
    activations = given.get("mlp_activations", ["silu", "linear"])
    limit = given.get("mlp_activations_limit", -1.0)
    names = [activations] if isinstance(activations, str) else list(activations)
    if block == "gpt_oss":
        if names != ["sigmoid", "linear"] or limit != _GPT_OSS_LIMIT:
            refuse(
                "mlp_activations",
                activations,
                f"with mlp_activations_limit (={limit!r}) must be "
                f"['sigmoid', 'linear'] with {_GPT_OSS_LIMIT} in decoder_block "
                "'gpt_oss'",
            )
        values["activation"] = "clipped_swiglu"
        return values
    if limit > 0 and block is None:
        refuse(
            "mlp_activations_limit",
            limit,
            "holds in some decoder blocks alone: give decoder_block too",
        )
    if limit > 0 and block in _DEEPSEEK:
        refuse(
            "mlp_activations_limit",
            limit,
            f"must be -1 in decoder_block {block!r}: a bounded gate is not offered",
        )
    # The routed experts take the first alone, times a linear up.
    if names[1:] != ["linear"] or names[0] not in _ACTIVATIONS:
        refuse(
            "mlp_activations",
            activations,
            f"must be one of {', '.join(_ACTIVATIONS)} and then 'linear'",
        )
    values["activation"] = _ACTIVATIONS[names[0]]
    return values


def _capacity(given: Values) -> Values:
    """The buffer's factor is ours; the other one holds for dense products alone."""
    buffer = given.get("ragged_buffer_factor", -1)
    factor = given.get("capacity_factor", -1)
    sparse = given.get("sparse_matmul")
    if buffer > 0 and sparse is not False:
        return dict(capacity_factor=buffer)
    if factor > 0 and sparse is not True:
        return dict(capacity_factor=factor)
    return {}


SOURCE = Source(
    label="MaxText",
    read=READ,
    ignored=frozenset(IGNORED),
    markers=frozenset(MARKERS),
    translate=translate,
)
