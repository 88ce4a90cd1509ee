"""Megatron-LM's names: its command line's and `TransformerConfig`'s (2026-08)."""

from jax_ep.names.source import Source, Values, first, known, refuse, same

_CONFIG = "core/transformer/transformer_config.py"
_ROUTING = "core/transformer/moe/moe_utils.py, topk_routing_with_score_function"
_LOSSES = "core/transformer/moe/router.py, TopKRouter"
READ = dict(
    # Sizes.
    num_experts="training/arguments.py, _add_moe_args",
    num_moe_experts=_CONFIG,
    hidden_size=_CONFIG,
    moe_ffn_hidden_size="training/arguments.py, validate_args: else ffn_hidden_size",
    ffn_hidden_size=_CONFIG,
    moe_latent_size=f"{_CONFIG}: experts in a narrower space",
    moe_shared_expert_intermediate_size=f"{_CONFIG}: of all of them together",
    moe_shared_expert_gate="core/transformer/moe/shared_experts.py",
    # Router.
    moe_router_topk=f"{_CONFIG}: 2 if not said",
    moe_router_pre_softmax=_ROUTING,
    moe_router_score_function=_ROUTING,
    moe_router_topk_scaling_factor=_ROUTING,
    moe_router_num_groups="core/transformer/moe/moe_utils.py, group_limited_topk",
    moe_router_group_topk="core/transformer/moe/moe_utils.py, group_limited_topk",
    moe_router_topk_limited_devices=f"{_CONFIG}: superseded by groups",
    moe_router_enable_expert_bias=_ROUTING,
    moe_router_bias_update_rate="core/transformer/moe/moe_utils.py, "
    "get_updated_expert_bias",
    moe_router_force_load_balancing="core/transformer/moe/moe_utils.py, "
    "apply_random_logits",
    moe_router_force_biased="core/transformer/moe/moe_utils.py, apply_biased_logits",
    moe_input_jitter_eps="core/transformer/moe/router.py, apply_input_jitter",
    # Experts.
    swiglu="training/arguments.py: silu, gated",
    squared_relu="training/arguments.py: relu squared, not gated",
    quick_geglu="training/arguments.py: x sigmoid(1.702 x), gated",
    openai_gelu="training/arguments.py: not gated",
    gated_linear_unit=_CONFIG,
    activation_func=f"{_CONFIG}: a function of torch",
    glu_linear_offset=f"{_CONFIG}: added to up",
    activation_func_clamp_value=f"{_CONFIG}: bounds gate and up",
    add_bias_linear=_CONFIG,
    disable_bias_linear="training/arguments.py",
    moe_apply_probs_on_input="core/transformer/moe/experts.py",
    # Rows.
    moe_expert_capacity_factor="core/transformer/moe/moe_utils.py, get_capacity",
    moe_expert_rank_capacity_factor=f"{_CONFIG}: a rank's rows, as ours",
    # Losses.
    moe_router_load_balancing_type=f"{_LOSSES}.get_aux_loss_coeff",
    moe_aux_loss_coeff=f"{_LOSSES}._apply_aux_loss, _apply_seq_aux_loss; moe_utils.py, "
    "switch_load_balancing_loss_func and compute_routing_scores_for_aux_loss",
    moe_z_loss_coeff="core/transformer/moe/moe_utils.py, z_loss_func",
)

# How rows travel, are padded, kept or counted; other layers; or so here anyway.
IGNORED = """
    dsa_indexer_skip_topk_offset dsa_indexer_topk dsa_indexer_topk_freq
    gtp_expert_remat_nccl_ub inference_dynamic_batching_prefix_caching_routing_alpha
    inference_moe_disable_fused_quant_kernels inference_moe_token_dispatcher_type
    logits_save_top_k mhc_init_gating_factor moe_combine_bwd_dtype moe_deepep_num_sms
    moe_dispatch_fwd_dtype moe_enable_deepep moe_enable_routing_replay
    moe_flex_dispatcher_backend moe_flex_dispatcher_num_sms moe_grouped_gemm
    moe_hybridep_num_blocks_permute moe_hybridep_num_blocks_unpermute
    moe_hybridep_num_sms moe_hybridep_num_sms_preprocessing
    moe_hybridep_pad_uneven_dispatch_inputs moe_layer_freq moe_layer_recompute
    moe_mlp_glu_interleave_size moe_ncclep_zero_copy moe_pad_expert_input_to_capacity
    moe_pad_experts_for_cuda_graph_inference moe_paged_stash
    moe_paged_stash_buffer_size_factor_cpu moe_paged_stash_buffer_size_factor_cuda
    moe_paged_stash_page_size moe_per_layer_logging moe_permute_fusion
    moe_permute_fusion_into_hybridep moe_router_dtype moe_router_fusion
    moe_router_padding_for_fp8 moe_router_padding_for_quantization
    moe_router_quantile_balancing_ema moe_shared_expert_glu_interleave_size
    moe_shared_expert_overlap moe_single_grouped_bias moe_single_grouped_weight
    moe_token_dispatcher_type moe_token_drop_policy moe_token_dropping
    moe_upcycling_granularity moe_use_grouped_tensor moe_use_upcycling
    moe_use_legacy_grouped_gemm retriever_report_topk_accuracies rl_default_top_k
    expert_model_parallel_size expert_tensor_parallel_size
    expert_tensor_parallel_num_weight_shards expert_gtp_weight_remat_size
    overlap_moe_expert_parallel_comm rl_inference_expert_model_parallel_size
    rl_inference_expert_tensor_model_parallel_size use_grouped_gemm_for_shared_expert
""".split()

MARKERS = {
    name for name in (*READ, *IGNORED) if name.startswith("moe_") or "_moe_" in name
} | {"disable_bias_linear", "add_bias_linear", "swiglu", "expert_model_parallel_size"}

_SCOPES = dict(aux_loss="global", seq_aux_loss="sequence", global_aux_loss="global")
_FUNCTIONS = dict(
    silu="silu", swish="silu", gelu="gelu", relu="relu", squared_relu="relu2"
)
_BIAS_UPDATE_RATE = 1e-3  # Where it is not said.
_GPT_OSS = dict(glu_linear_offset=1.0, activation_func_clamp_value=7.0)


def translate(given: Values, others: Values) -> Values:
    """Fields of `MoEConfig` for Megatron's arguments."""
    num_topk = given.get("moe_router_topk", others.get("num_experts_per_tok", 2))
    values = known(
        num_experts=same(given, "num_moe_experts", "num_experts"),
        num_experts_per_tok=num_topk,
        hidden_size=given.get("hidden_size"),
        moe_intermediate_size=first(given, "moe_ffn_hidden_size", "ffn_hidden_size"),
        shared_expert_intermediate_size=given.get(
            "moe_shared_expert_intermediate_size"
        ),
        router_jitter_noise=given.get("moe_input_jitter_eps"),
        router_z_loss_weight=given.get("moe_z_loss_coeff"),
        use_random_routing=given.get("moe_router_force_load_balancing"),
        weights_scale_input=given.get("moe_apply_probs_on_input"),
    )
    if "moe_intermediate_size" in others:
        values.pop("moe_intermediate_size", None)
    if given.get("moe_shared_expert_gate") and values.get(
        "shared_expert_intermediate_size"
    ):
        values["shared_expert_gate"] = True
    for name in (
        "moe_latent_size",
        "moe_router_force_biased",
        "moe_router_topk_limited_devices",
    ):
        if given.get(name):
            refuse(name, given[name], "must not be given: it is not offered")
    values.update(_router(given, num_topk))
    values.update(_experts(given))
    values.update(_loss(given, values))
    factor = first(
        given, "moe_expert_rank_capacity_factor", "moe_expert_capacity_factor"
    )
    if factor is not None and factor > 0:
        values["capacity_factor"] = factor
    return values


def _router(given: Values, num_topk: int) -> Values:
    score_func = given.get("moe_router_score_function", "softmax")
    before = given.get("moe_router_pre_softmax", False)
    values: Values = dict(score_func=score_func)
    if score_func == "softmax":
        if num_topk == 1 and not before:
            refuse(
                "moe_router_pre_softmax",
                before,
                "must be True where moe_router_topk is 1, as Megatron wants it too",
            )
        values["norm_topk_prob"] = not before
    else:
        values["norm_topk_prob"] = num_topk > 1
    values.update(
        known(routed_scaling_factor=given.get("moe_router_topk_scaling_factor"))
    )
    if given.get("moe_router_enable_expert_bias"):
        if score_func == "softmax":
            refuse(
                "moe_router_enable_expert_bias",
                True,
                "needs moe_router_score_function 'sigmoid' or 'sqrtsoftplus'",
            )
        values["selection_bias"] = True
        values["selection_bias_update_rate"] = given.get(
            "moe_router_bias_update_rate", _BIAS_UPDATE_RATE
        )
    topk_group = given.get("moe_router_group_topk")
    if topk_group:
        # A group's score is the sum of its best K / topk_group.
        best = num_topk // topk_group
        of_logits = score_func == "softmax" and not before
        if best not in (1, 2) or (best == 2 and of_logits):
            refuse(
                "moe_router_group_topk",
                topk_group,
                f"ranks groups by the sum of their {best} best "
                f"{'logits' if of_logits else 'scores'}: the best one, or two of "
                "scores, are offered",
            )
        values.update(
            n_group=given.get("moe_router_num_groups", 1),
            topk_group=topk_group,
            group_score="max" if best == 1 else "top2_sum",
        )
    return values


def _experts(given: Values) -> Values:
    has_bias = first(given, "add_bias_linear")
    if given.get("disable_bias_linear"):
        has_bias = False
    values = known(mlp_bias=has_bias)
    for name in ("squared_relu", "openai_gelu"):
        if given.get(name):
            refuse(name, given[name], "must be False: experts are gated (swiglu)")
    if given.get("quick_geglu"):
        for name, offered in _GPT_OSS.items():
            if given.get(name) != offered:
                refuse(name, given.get(name), f"must be {offered} with quick_geglu")
        values["activation"] = "clipped_swiglu"
        return values
    for name in _GPT_OSS:
        if given.get(name):
            refuse(name, given[name], "must not be given without quick_geglu")
    for name in ("swiglu", "gated_linear_unit"):
        if given.get(name) is False and not given.get("swiglu"):
            refuse(name, False, "must be True: experts are gated")
    function = given.get("activation_func")
    if given.get("swiglu"):
        values["activation"] = "silu"
    elif function is not None:
        name = getattr(function, "__name__", function)
        if name not in _FUNCTIONS:
            refuse("activation_func", name, f"must be one of {', '.join(_FUNCTIONS)}")
        values["activation"] = _FUNCTIONS[name]
    return values


def _loss(given: Values, values: Values) -> Values:
    kinds = given.get("moe_router_load_balancing_type", "aux_loss")
    weights = given.get("moe_aux_loss_coeff", 0.0)
    kinds = [kinds] if isinstance(kinds, str) else list(kinds)
    weights = list(weights) if isinstance(weights, list | tuple) else [weights]
    for kind in kinds:
        if kind not in (*_SCOPES, "none"):
            refuse(
                "moe_router_load_balancing_type",
                kind,
                f"must be one of {', '.join(_SCOPES)} or none",
            )
    if len(kinds) != len(weights):
        refuse("moe_aux_loss_coeff", weights, f"must have one for each of {kinds}")
    used = [
        (_SCOPES[kind], weight)
        for kind, weight in zip(kinds, weights, strict=True)
        if kind != "none" and weight
    ]
    if len({scope for scope, _ in used}) > 1:
        refuse("moe_router_load_balancing_type", kinds, "must have one scope in all")
    if not used:
        return {}
    loss = dict(
        load_balance_loss_weight=sum(weight for _, weight in used),
        load_balance_scope=used[0][0],
    )
    if values.get("selection_bias") or values.get("n_group", 1) > 1:
        # Its counts are of a top-k of its own, by the scores alone.
        loss["load_balance_counts"] = "best_scores"
    return loss


SOURCE = Source(
    label="Megatron",
    read=READ,
    ignored=frozenset(IGNORED),
    markers=frozenset(MARKERS),
    translate=translate,
)
