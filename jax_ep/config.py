"""The description of a MoE layer, in the names its users already type."""

import dataclasses
import difflib
import math
from collections.abc import Sequence
from numbers import Integral
from typing import Any, Literal, Self

from jax_ep.exchange import Exchange

ScoreFunc = Literal["softmax", "sigmoid", "sqrtsoftplus"]
GroupScore = Literal["top2_sum", "max"]
Activation = Literal["silu", "gelu", "gelu_tanh", "clipped_swiglu"]
BalanceScope = Literal["global", "sequence"]

_CHOICES = dict(
    score_func=("softmax", "sigmoid", "sqrtsoftplus"),
    group_score=("top2_sum", "max"),
    activation=("silu", "gelu", "gelu_tanh", "clipped_swiglu"),
    load_balance_scope=("global", "sequence"),
    implementation=(None, "ffi", "xla"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """A MoE layer: sizes, router, experts, exchange and auxiliary losses.

    Frozen and hashable, so it can be a static argument. `MoEConfig.from_names` takes
    the names of other libraries' configs.

    Attributes:
      num_experts: E, over all ranks.
      num_experts_per_tok: K.
      hidden_size: H.
      moe_intermediate_size: F, the hidden width of one expert.
      score_func: scores of the router's logits: "softmax" over all experts, "sigmoid"
        (DeepSeek-V3), or "sqrtsoftplus".
      norm_topk_prob: whether a token's K weights are divided by their sum. With
        "softmax" that is Mixtral's softmax over the chosen logits, and Qwen3's
        renormalisation; False is OLMoE and Qwen2-MoE. Ignored where K = 1: the weight
        would always be 1, and the router would learn nothing from the loss.
      routed_scaling_factor: multiplies the weights (2.5 in DeepSeek-V3).
      n_group: groups of consecutive experts for group-limited routing; 1 is none.
      topk_group: groups that a token may choose from.
      group_score: a group's score: the sum of its two best (DeepSeek-V3), or its best
        (DeepSeek-V2).
      router_bias: whether the router's logits have a trained bias (GPT-OSS).
      selection_bias: whether a bias that no gradient trains is added to the scores for
        the choice of experts only (DeepSeek-V3).
      selection_bias_update_rate: step of `selection_bias_update`.
      router_jitter_noise: eps of the multiplicative noise on the router's input
        (Switch); needs a `key` in the call, without one there is no noise.
      use_random_routing: benchmarks: random logits in place of the router's.
      activation: "silu" and "gelu" gate as `act(gate) * up`; "gelu_tanh" is its tanh
        form; "clipped_swiglu" is GPT-OSS's.
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
      expert_alignment: A; each expert's rows start on a multiple of it. The default, 1,
        is what `grouped_matmul` does best with: its kernels begin their tiles at each
        expert's first row, wherever that is, so padding only adds rows. Kernels of
        your own may want more.
      implementation: None, "ffi" or "xla", see `dispatch_layout`.
      num_sms: most SMs that a CUDA kernel may use; None for the default.
      timeout_s: seconds after which a wait for another rank becomes an error.
      load_balance_loss_weight: of `load_balance_loss` in `MoEStats.aux_loss`. The loss
        is 1 at balance, as Megatron's and DeepSeek's; Hugging Face's is K at balance,
        so multiply its `router_aux_loss_coef` by K.
      load_balance_scope: over all tokens of all ranks, or per sequence.
      router_z_loss_weight: of `router_z_loss` in `MoEStats.aux_loss`.
    """

    num_experts: int
    num_experts_per_tok: int
    hidden_size: int
    moe_intermediate_size: int
    # Router.
    score_func: ScoreFunc = "softmax"
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    n_group: int = 1
    topk_group: int = 1
    group_score: GroupScore = "top2_sum"
    router_bias: bool = False
    selection_bias: bool = False
    selection_bias_update_rate: float = 1e-3
    router_jitter_noise: float = 0.0
    use_random_routing: bool = False
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
    expert_alignment: int = 1
    implementation: Literal["ffi", "xla"] | None = None
    num_sms: int | None = None
    timeout_s: float = 100.0
    # Losses.
    load_balance_loss_weight: float = 0.0
    load_balance_scope: BalanceScope = "global"
    router_z_loss_weight: float = 0.0

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            # 2.0 equals 2, and would take its place in caches.
            is_int = isinstance(value, Integral) and not isinstance(value, bool)
            if field.type in (int, int | None) and not is_int:
                if value is not None or field.type is int:
                    self._refuse(field.name, "must be an int")
            if field.type is bool and not (isinstance(value, int) and value in (0, 1)):
                self._refuse(field.name, "must be True or False")
        for name in (
            "num_experts",
            "num_experts_per_tok",
            "hidden_size",
            "moe_intermediate_size",
            "n_group",
            "topk_group",
            "expert_alignment",
        ):
            if getattr(self, name) < 1:
                self._refuse(name, "must be at least 1")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                self._refuse(name, f"must be one of {choices}")
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
            capacity=capacity,
            expert_alignment=self.expert_alignment,
            implementation=self.implementation,
            num_sms=self.num_sms,
            timeout_s=self.timeout_s,
        )

    @classmethod
    def from_names(cls, **names: Any) -> Self:
        """Makes a config from the names of MaxText, Megatron, TE or Hugging Face.

        Every field of `MoEConfig` is a name, and so are these: see `ALIASES`;
        `use_pre_softmax` (`norm_topk_prob` unless that is given, inverted);
        `float32_gate_logits`, `float32_weight_sum` and `report_capacity_overflow`
        (always so here, whatever they say); `use_ring_of_experts`,
        `num_moe_token_chunks`, `expert_chunks` and other libraries' values of
        `moe_implementation` (how rows travel: our exchange takes their place);
        `shared_experts` and its aliases count experts. A name given as None is as if it
        were not given.

        Args:
          **names: what the user's config says.

        Returns:
          A `MoEConfig`.

        Raises:
          TypeError: an unknown name, with the nearest known one; or a needed one is
            missing. ValueError: two aliases of one field with different values, or a
            value that is out of range or asks for what is not offered.

        >>> MoEConfig.from_names(
        ...     n_routed_experts=64, top_k=6, hidden_size=2048, intermediate_size=1408
        ... ).num_experts
        64
        """
        fields = {field.name for field in dataclasses.fields(cls)}
        values: dict[str, Any] = {}
        given: dict[str, str] = {}  # Field: the name that set it.
        pre_softmax = None
        for name, value in names.items():
            field = ALIASES.get(name, name)
            if name == "use_pre_softmax":
                pre_softmax = value
                continue
            if field in _HONOURED_ANYWAY:
                continue
            if field not in fields:
                raise TypeError(f"jax_ep.MoEConfig: {_unknown(name, fields)}")
            value = _translated(field, value)
            if value is None:
                continue
            if field in values and values[field] != value:
                raise ValueError(
                    f"jax_ep.MoEConfig: {name} (={value!r}) and {given[field]} "
                    f"(={values[field]!r}) both set {field}, and differ."
                )
            values[field] = value
            given[field] = name
        if pre_softmax is not None and values.get("score_func", "softmax") == "softmax":
            if not pre_softmax and values.get("norm_topk_prob") is False:
                raise ValueError(
                    "jax_ep.MoEConfig: use_pre_softmax (=False) and norm_topk_prob "
                    "(=False) differ: weights of a softmax over the top k sum to 1."
                )
            values.setdefault("norm_topk_prob", not pre_softmax)
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


# Other names of a field.
ALIASES = dict(
    num_local_experts="num_experts",
    n_routed_experts="num_experts",
    num_experts_per_token="num_experts_per_tok",
    top_k="num_experts_per_tok",
    moe_topk="num_experts_per_tok",
    base_moe_mlp_dim="moe_intermediate_size",
    intermediate_dim="moe_intermediate_size",
    intermediate_size="moe_intermediate_size",
    ragged_buffer_factor="capacity_factor",
    eval_ragged_buffer_factor="eval_capacity_factor",
    routed_score_func="score_func",
    score_function="score_func",
    scoring_func="score_func",
    routed_bias="selection_bias",
    expert_bias="selection_bias",
    routed_bias_update_rate="selection_bias_update_rate",
    scaling_factor="routed_scaling_factor",
    n_routing_groups="n_group",
    num_groups="n_group",
    topk_routing_group="topk_group",
    group_topk="topk_group",
    aux_loss_coeff="load_balance_loss_weight",
    router_aux_loss_coef="load_balance_loss_weight",
    z_loss="router_z_loss_weight",
    router_z_loss_coef="router_z_loss_weight",
    shared_experts="num_shared_experts",
    n_shared_experts="num_shared_experts",
    prefuse_moe_weights="fuse_gate_up",
    moe_dropless_fallback="dropless_fallback",
    moe_implementation="implementation",
    hidden_act="activation",
)

# What these ask for holds here anyway, or is about a transport that ours replaces.
_HONOURED_ANYWAY = (
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

_OTHER_ACTIVATIONS = dict(gelu_pytorch_tanh="gelu_tanh", gelu_new="gelu_tanh")


def _translated(field: str, value: Any) -> Any:
    """Another library's value of a field as ours."""
    if field == "implementation" and value in _OTHER_TRANSPORTS:
        return None
    if field == "activation":
        return _OTHER_ACTIVATIONS.get(value, value)
    if field == "dropless_fallback" and value in ("layer", "step"):
        return True  # MaxText's: where it starts over. Here rounds go on.
    if field in ("n_group", "topk_group") and value in (-1, 0):
        return None  # No groups.
    return value


def _unknown(name: str, fields: set[str]) -> str:
    known = [*fields, *ALIASES, *_HONOURED_ANYWAY, "use_pre_softmax"]
    nearest = difflib.get_close_matches(name, sorted(known), n=1)
    hint = f": did you mean {nearest[0]}?" if nearest else "."
    return f"{name} is not a name of a MoE layer{hint}"
