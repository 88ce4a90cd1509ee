"""The description of a MoE layer, in the names its users already type."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any, Literal, Self

from jax_ep.block_scaled import BlockScaled
from jax_ep.exchange import Exchange, wire_format
from jax_ep.names import fields_of

ScoreFunc = Literal["softmax", "sigmoid", "sqrtsoftplus"]
GroupScore = Literal["top2_sum", "max"]
Activation = (
    Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "sigmoid", "clipped_swiglu"]
    | Callable[[Any], Any]
)
BalanceScope = Literal["global", "sequence"]
BalanceProbs = Literal["scores", "softmax_of_scores", "softmax_of_logits"]
BalanceCounts = Literal["chosen", "best_scores"]

ACTIVATIONS = (
    "silu",
    "gelu",
    "gelu_tanh",
    "relu",
    "relu2",
    "sigmoid",
    "clipped_swiglu",
)

_CHOICES = dict(
    score_func=("softmax", "sigmoid", "sqrtsoftplus"),
    group_score=("top2_sum", "max"),
    load_balance_scope=("global", "sequence"),
    load_balance_probs=("scores", "softmax_of_scores", "softmax_of_logits"),
    load_balance_counts=("chosen", "best_scores"),
    implementation=(None, "ffi", "xla"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """A MoE layer: sizes, router, experts, exchange and auxiliary losses.

    Frozen and hashable, so it can be a static argument. `MoEConfig.from_names` takes
    whole configs of other libraries.

    Attributes:
      num_experts: E, over all ranks.
      num_experts_per_tok: K.
      hidden_size: H.
      moe_intermediate_size: F, the hidden width of one expert.
      score_func: scores of the router's logits: "softmax" over all experts, "sigmoid"
        (DeepSeek-V3), or "sqrtsoftplus".
      norm_topk_prob: whether a token's K weights are divided by their sum. With
        "softmax" that is Mixtral's softmax over the chosen logits, and Qwen3's
        renormalisation; False is OLMoE and Qwen2-MoE. With K = 1 the weight is then
        always 1 (times the scaling), and the router learns nothing from the model's
        loss: right for a model that was trained so, wrong for one to be trained. So
        None, the default, is True where K > 1 and no division where K = 1. (It becomes
        True here if K > 1: in a `dataclasses.replace` to K = 1 give None again.)
      routed_scaling_factor: multiplies the weights (2.5 in DeepSeek-V3).
      n_group: groups of consecutive experts for group-limited routing; 1 is none.
      topk_group: groups that a token may choose from.
      group_score: a group's score: the sum of its two best (DeepSeek-V3), or its best
        (DeepSeek-V2).
      router_bias: whether the router's logits have a trained bias (GPT-OSS).
      selection_bias: whether a bias that no gradient trains is added to the scores for
        the choice of experts only (DeepSeek-V3).
      selection_bias_update_rate: step of `selection_bias_update`, which the Flax layers
        apply in training calls (1e-3 in DeepSeek-V3); 0 leaves the bias alone.
      selection_bias_update_every: training calls whose loads one update takes together:
        the micro-batches of a step where gradients are accumulated.
      router_jitter_noise: eps of the multiplicative noise on the router's input
        (Switch); needs a `key` in the call, without one there is no noise.
      use_random_routing: benchmarks: random logits in place of the router's.
      expert_scale: whether each expert has a trained factor that multiplies its
        weights (Gemma 4's router, which also normalises what it sees: that is not
        offered, and its configs are refused).
      weights_scale_input: whether a weight multiplies what its expert sees in place of
        what it gives (Llama 4).
      activation: "silu" and "gelu" gate as `act(gate) * up`, and so do "gelu_tanh" (its
        tanh form), "relu", "relu2" (its square) and "sigmoid"; "clipped_swiglu" is
        GPT-OSS's. Or a function `act` of a float32 array, elementwise and hashable, as
        `jax.nn.mish` is.
      mlp_bias: whether the routed experts' projections have biases.
      fuse_gate_up: whether gate and up are one parameter `[E, H, 2F]`, gate first,
        and one grouped GEMM.
      num_shared_experts: experts that see every token (DeepSeek).
      shared_expert_intermediate_size: their hidden width in all. None is
        `num_shared_experts * moe_intermediate_size`.
      shared_expert_gate: whether a sigmoid gate scales their output (Qwen2-MoE).
      capacity_factor: rows of a rank's receive buffer over the `T*K` it receives when
        routing is balanced, at least 1/K. What does not fit is dropped and counted.
        None (or -1) is dropless.
      dropless_fallback: with a capacity_factor, send what does not fit in further
        rounds in place of dropping it (`in_rounds`): memory stays at the capacity.
      max_rounds: most rounds of it; None is as many as the worst routing needs.
      eval_capacity_factor: what `evaluation()` puts in its place; None keeps it, -1 is
        dropless.
      num_chunks: parts that a rank's tokens are exchanged in, so that on CUDA a part's
        exchange runs beside another's experts, and the shared experts beside both (see
        `in_chunks`). 1 has the shared experts alone to run beside; None, the default,
        has plain calls. A capacity is each part's own share, so that with drops others
        are dropped; losses and statistics are of all tokens. Not with dropless_fallback
        or a quantised wire or an output bias (mlp_bias).
      domain_size: G, ranks of an NVLink domain where the expert axis spans several,
        see `dispatch_layout`; None is one domain.
      network_capacity_factor: room between domains over what uniform routing needs.
        None is 1.06 from eight domains on with `dropless_fallback`, else room for all.
      expert_alignment: A; each expert's rows start on a multiple of it. The default, 1,
        is what `grouped_matmul` does best with: its kernels begin their tiles at each
        expert's first row, wherever that is, so padding only adds rows. Kernels of
        your own may want more.
      implementation: None, "ffi" or "xla", see `dispatch_layout`.
      num_sms: most SMs that a CUDA kernel may use; None for the default.
      timeout_s: seconds after which a wait for another rank becomes an error.
      wire: what crosses the link forward: None, float32 (combine's sums unrounded), or
        a `BlockScaled` or its name ("float8_e4m3fn", "mxfp8"): dispatch sends FP8, and
        the experts compute with the rows multiplied back.
      grad_wire: the same for the backward; "float8_e5m2" sends the cotangents' rows as
        FP8. Sums are never FP8.
      load_balance_loss_weight: of `load_balance_loss` in `MoEStats.aux_loss`. The loss
        is 1 at balance, as Megatron's and DeepSeek's; Hugging Face's and MaxText's are
        K at balance, so multiply their weight by K, as `from_names` does.
      load_balance_scope: over all tokens of all ranks, or per sequence.
      load_balance_probs: the probabilities in it: the scores over their sum, or a
        softmax of scores plus selection bias or of the logits (MaxText's, where scores
        are not a softmax).
      load_balance_counts: the slots counted in it: the chosen ones, or those of the K
        best scores, without selection bias and groups (Megatron's).
      router_z_loss_weight: of `router_z_loss` in `MoEStats.aux_loss`.
    """

    num_experts: int
    num_experts_per_tok: int
    hidden_size: int
    moe_intermediate_size: int
    # Router.
    score_func: ScoreFunc = "softmax"
    norm_topk_prob: bool | None = None
    routed_scaling_factor: float = 1.0
    n_group: int = 1
    topk_group: int = 1
    group_score: GroupScore = "top2_sum"
    router_bias: bool = False
    selection_bias: bool = False
    selection_bias_update_rate: float = 0.0
    selection_bias_update_every: int = 1
    router_jitter_noise: float = 0.0
    use_random_routing: bool = False
    expert_scale: bool = False
    weights_scale_input: bool = False
    # Experts.
    activation: Activation = "silu"
    mlp_bias: bool = False
    fuse_gate_up: bool = True
    num_shared_experts: int = 0
    shared_expert_intermediate_size: int | None = None
    shared_expert_gate: bool = False
    # Exchange.
    capacity_factor: float | None = None
    dropless_fallback: bool = False
    max_rounds: int | None = None
    eval_capacity_factor: float | None = None
    num_chunks: int | None = None
    domain_size: int | None = None
    network_capacity_factor: float | None = None
    expert_alignment: int = 1
    implementation: Literal["ffi", "xla"] | None = None
    num_sms: int | None = None
    timeout_s: float = 100.0
    wire: Any = None
    grad_wire: Any = None
    # Losses.
    load_balance_loss_weight: float = 0.0
    load_balance_scope: BalanceScope = "global"
    load_balance_probs: BalanceProbs = "scores"
    load_balance_counts: BalanceCounts = "chosen"
    router_z_loss_weight: float = 0.0

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            # 2.0 equals 2, and would take its place in caches.
            is_int = isinstance(value, Integral) and not isinstance(value, bool)
            if field.type in (int, int | None) and not is_int:
                if value is not None or field.type is int:
                    self._refuse(field.name, "must be an int")
            if field.type in (bool, bool | None):
                if value is None and field.type is not bool:
                    continue
                if not (isinstance(value, int) and value in (0, 1)):
                    self._refuse(field.name, "must be True or False")
        for name in (
            "num_experts",
            "num_experts_per_tok",
            "hidden_size",
            "moe_intermediate_size",
            "n_group",
            "topk_group",
            "expert_alignment",
            "selection_bias_update_every",
        ):
            if getattr(self, name) < 1:
                self._refuse(name, "must be at least 1")
        if self.num_chunks is not None and self.num_chunks < 1:
            self._refuse("num_chunks", "must be at least 1")
        for name in ("wire", "grad_wire"):
            found = wire_format("MoEConfig", name, getattr(self, name))
            object.__setattr__(self, name, found)
            if self.num_chunks is not None and isinstance(found, BlockScaled):
                self._refuse(name, "must not quantise rows with num_chunks")
        for name in ("dropless_fallback", "mlp_bias"):
            if self.num_chunks is not None and getattr(self, name):
                self._refuse(name, "must be False with num_chunks")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                self._refuse(name, f"must be one of {choices}")
        if callable(self.activation):
            try:
                hash(self.activation)
            except TypeError:
                self._refuse("activation", "must be hashable, as functions are")
        elif self.activation not in ACTIVATIONS:
            self._refuse("activation", f"must be one of {ACTIVATIONS} or a function")
        if self.norm_topk_prob is None and self.num_experts_per_tok > 1:
            object.__setattr__(self, "norm_topk_prob", True)
        both = self.load_balance_probs, self.load_balance_counts
        if both == ("softmax_of_scores", "best_scores"):
            self._refuse("load_balance_counts", "must be 'chosen' with these probs")
        if self.weights_scale_input and self.expert_scale:
            self._refuse("weights_scale_input", "must be False with expert_scale")
        if self.num_experts_per_tok > self.num_experts:
            self._refuse(
                "num_experts_per_tok",
                f"must be at most num_experts (={self.num_experts})",
            )
        if self.num_experts % self.n_group:
            self._refuse("n_group", f"must divide num_experts (={self.num_experts})")
        if self.topk_group > self.n_group:
            self._refuse("topk_group", f"must be at most n_group (={self.n_group})")
        group_size = self.num_experts // self.n_group
        if self.topk_group * group_size < self.num_experts_per_tok:
            self._refuse(
                "topk_group",
                f"must leave num_experts_per_tok (={self.num_experts_per_tok}) experts "
                f"to choose from: {self.topk_group} groups have "
                f"{self.topk_group * group_size}",
            )
        if self.n_group > 1 and self.group_score == "top2_sum" and group_size < 2:
            self._refuse("n_group", "must leave two experts a group for top2_sum")
        if not 0 <= self.router_jitter_noise < 1:
            self._refuse("router_jitter_noise", "must be in [0, 1)")
        if self.max_rounds is not None and self.max_rounds < 1:
            self._refuse("max_rounds", "must be at least 1")
        if self.num_shared_experts < 0:
            self._refuse("num_shared_experts", "must be at least 0")
        if self.shared_expert_gate and not self.shared_size:
            self._refuse("shared_expert_gate", "needs shared experts")
        if self.capacity_factor == -1:
            object.__setattr__(self, "capacity_factor", None)
        self._check_factor("capacity_factor", self.capacity_factor)
        if self.eval_capacity_factor != -1:
            self._check_factor("eval_capacity_factor", self.eval_capacity_factor)

    @property
    def shared_size(self) -> int:
        """Hidden width of the shared experts in all; 0 without any."""
        if self.shared_expert_intermediate_size is not None:
            return self.shared_expert_intermediate_size
        return self.num_shared_experts * self.moe_intermediate_size

    def evaluation(self) -> Self:
        """The same layer with `eval_capacity_factor` and without jitter."""
        factor = self.eval_capacity_factor
        factor = self.capacity_factor if factor is None else factor
        return dataclasses.replace(
            self, capacity_factor=factor, router_jitter_noise=0.0
        )

    def exchange(
        self,
        *,
        axis_name: str | Sequence[str] = "expert",
        num_slots: int | None = None,
        capacity: int | None = None,
    ) -> Exchange:
        """What the exchanges of this layer are told.

        Args:
          axis_name: the mesh axes of the experts.
          num_slots: slots of a `Placement` over all ranks; None is one per expert.
          capacity: rows of the receive buffer; None is dropless.

        Returns:
          An `Exchange`.
        """
        return Exchange(
            num_experts=num_slots or self.num_experts,
            axis_name=axis_name,
            domain_size=self.domain_size,
            network_capacity_factor=self.network_capacity_factor,
            capacity=capacity,
            expert_alignment=self.expert_alignment,
            implementation=self.implementation,
            num_sms=self.num_sms,
            timeout_s=self.timeout_s,
            wire=self.wire,
            grad_wire=self.grad_wire,
        )

    @classmethod
    def from_names(
        cls,
        *,
        source: Literal["maxtext", "hf", "megatron"] | None = None,
        **names: Any,
    ) -> Self:
        """Makes a config from a whole one of MaxText, Hugging Face or Megatron.

        The same name asks for different things in different libraries, so what a name
        and its value mean is its source's: the layer computes, and trains, what that
        library's does. `jax_ep/names/` has a table for each, which says where it was
        read. What a config does not say is as `MoEConfig` has it.

        - MaxText: resolved values of `base.yml`. Weights are a softmax over the chosen
          logits whatever `norm_topk_prob` says, but for DeepSeek's and Llama 4's
          decoder blocks; `routed_bias` is the logits' bias, or with a score function
          the choice's; the load-balance loss is per sequence.
        - Hugging Face: `config.json`. With its `model_type` as `hf_moe_config` has it,
          and with the load-balance loss, unless `output_router_logits` is False.
        - Megatron: the command line's names or those of `TransformerConfig`, without
          dashes or with them.

        `load_balance_loss_weight` becomes K times MaxText's and Hugging Face's, whose
        losses are K at balance. Over layers, Megatron adds the losses up, and so does
        `MoEStats.aux_loss` of stacked calls; MaxText takes their mean, and Hugging Face
        one loss over all layers' tokens, so divide by the number of MoE layers there.
        Megatron's `aux_loss` is over a micro-batch of one data-parallel rank, here over
        the tokens of a call on all ranks, as its `global_aux_loss`. A capacity factor
        bounds a rank's buffer here and each expert's share of it elsewhere: as many
        rows in all, of which fewer are dropped.

        Args:
          source: whose names they are; None is told by names that only one has, and
            without any they are `MoEConfig`'s own and plain ones of other libraries
            (TransformerEngine, Marin), see `jax_ep/names/plain.py`.
          **names: what the user's config says. None is as if it were not said. Names of
            a known source that are not about a MoE layer are ignored.

        Returns:
          A `MoEConfig`.

        Raises:
          TypeError: a name that is not known and is about a MoE layer (or any, without
            a source), with the nearest known one; or a needed one is missing.
            ValueError: names of two sources; two names that set one field to different
            values; a value that is out of range, or asks for what is not offered.

        >>> config = MoEConfig.from_names(
        ...     base_emb_dim=2048, base_moe_mlp_dim=768, num_experts=128,
        ...     num_experts_per_tok=8, norm_topk_prob=False, vocab_size=151936,
        ...     load_balance_loss_weight=0.001)
        >>> config.norm_topk_prob, config.load_balance_loss_weight
        (True, 0.008)
        """
        fields = tuple(field.name for field in dataclasses.fields(cls))
        values = fields_of(names, source, fields)
        missing = [
            field.name
            for field in dataclasses.fields(cls)
            if field.default is dataclasses.MISSING and field.name not in values
        ]
        if missing:
            raise TypeError(f"jax_ep.MoEConfig: {', '.join(missing)} must be given.")
        return cls(**values)

    def _check_factor(self, name: str, factor: float | None) -> None:
        # Below 1/K the buffer is smaller than T rows.
        if factor is not None and not 1 <= factor * self.num_experts_per_tok < math.inf:
            self._refuse(
                name,
                f"must be at least 1/num_experts_per_tok "
                f"(=1/{self.num_experts_per_tok}) and finite, or -1 for dropless",
            )

    def _refuse(self, name: str, rule: str) -> None:
        raise ValueError(f"jax_ep.MoEConfig: {name} (={getattr(self, name)!r}) {rule}.")
