"""The least time that a machine's rates allow, and the SMs that it takes."""

import dataclasses
import math
from collections.abc import Mapping

from jax_ep.sizing.targets import positive
from jax_ep.sizing.traffic import Traffic

# Measured on 4 H200s with NVSwitch, 2026-11-30: examples/benchmarks/results/h200.md.
# Out of each GPU to all others at once, by a kernel that only copies rows.
H200_LINK = 352e9
# Read plus written, by the same kernel inside one GPU.
H200_MEMORY = 3860e9
# What one SM stores to memory at most, by a kernel that only stores.
H200_SM_WRITE = 60e9
# What one SM reads and adds in combine: 32 SMs at R = 2 took 669 us for 1057 MB.
H200_SM_ADD = 50e9

# Wires of a 400 Gb/s adapter, one for each GPU of these machines; nothing of a protocol
# is taken off.
_NIC_400G = 50e9


@dataclasses.dataclass(frozen=True)
class Machine:
    """Rates of one GPU and its network, bytes a second.

    Attributes:
      name: for messages.
      link_rate: out of a GPU to others of its NVLink domain, one way.
      nic_rate: out of a GPU to other domains, one way.
      memory_rate: read plus written in its memory.
      num_sms: SMs of the GPU.
      domain_size: GPUs of a domain.
      sm_write_rate: what one SM stores; None where it was not measured.
      sm_add_rate: what one SM reads and adds; None where it was not measured.
      source: where the rates are from.
      origin: of each rate by its name, "measured", "data sheet" or "given"; what is
        not in it is a data sheet's.
    """

    name: str
    link_rate: float
    nic_rate: float
    memory_rate: float
    num_sms: int
    domain_size: int
    sm_write_rate: float | None
    sm_add_rate: float | None
    source: str
    origin: Mapping[str, str] = dataclasses.field(default_factory=dict, hash=False)

    def origin_of(self, rate: str) -> str:
        """Of a rate by its name."""
        return self.origin.get(rate, "data sheet")

    def __post_init__(self):
        positive("Machine", num_sms=self.num_sms, domain_size=self.domain_size)
        for name in (
            "link_rate",
            "nic_rate",
            "memory_rate",
            "sm_write_rate",
            "sm_add_rate",
        ):
            rate = getattr(self, name)
            if rate is not None and not 0 < rate < math.inf:
                raise ValueError(
                    f"jax_ep.sizing.Machine: {name} (={rate}) must be positive and "
                    "finite."
                )


MACHINES = {
    machine.name: machine
    for machine in (
        Machine(
            name="h100",
            link_rate=450e9,
            nic_rate=_NIC_400G,
            memory_rate=3350e9,
            num_sms=132,
            domain_size=8,
            sm_write_rate=None,
            sm_add_rate=None,
            source="data sheets of H100 SXM (NVLink 900 GB/s both ways together, HBM3 "
            "3.35 TB/s) and DGX H100 (ConnectX-7, 400 Gb/s a GPU); not measured",
        ),
        Machine(
            name="h200",
            link_rate=H200_LINK,
            nic_rate=_NIC_400G,
            memory_rate=H200_MEMORY,
            num_sms=132,
            domain_size=8,
            sm_write_rate=H200_SM_WRITE,
            sm_add_rate=H200_SM_ADD,
            source="link, memory and SMs measured on 4 H200s with NVSwitch, 2026-11-30 "
            "(examples/benchmarks/results/h200.md); NIC from the data sheet of DGX "
            "H200 (ConnectX-7, 400 Gb/s a GPU), not measured",
            origin={
                "link_rate": "measured",
                "memory_rate": "measured",
                "sm_write_rate": "measured",
                "sm_add_rate": "measured",
            },
        ),
        Machine(
            name="b200",
            link_rate=900e9,
            nic_rate=_NIC_400G,
            memory_rate=7670e9,
            num_sms=148,
            domain_size=8,
            sm_write_rate=None,
            sm_add_rate=None,
            source="data sheet of DGX B200 (NVLink 14.4 TB/s of 8 GPUs, both ways "
            "together, ConnectX-7, 400 Gb/s a GPU); HBM3e from the bus and clock that "
            "its driver reports, 7680 bits at 3996 MHz; not measured",
        ),
    )
}


@dataclasses.dataclass(frozen=True)
class Bound:
    """The least seconds of a stage for each thing that may hold it back.

    Attributes:
      link: its bytes over the link's rate.
      nic: over the NIC's; 0 in one domain.
      memory: over the memory's.
      sms: its bytes through the SMs it may use; None where no number of SMs or no rate
        was given.
    """

    link: float
    nic: float
    memory: float
    sms: float | None

    @property
    def seconds(self) -> float:
        """The largest of them: all can run at once, and none can be hidden."""
        return max(self.link, self.nic, self.memory, self.sms or 0)

    @property
    def binds(self) -> str:
        """Which one that is: "link", "nic", "memory" or "sms"."""
        parts = dataclasses.asdict(self)
        return max(parts, key=lambda name: parts[name] or 0)


def time_bound(
    traffic: Traffic, machine: Machine, *, num_sms: int | None = None
) -> Bound:
    """The least time of a stage.

    Args:
      traffic: its bytes.
      machine: the rates.
      num_sms: SMs that the kernel may use; None leaves SMs out.

    Returns:
      Bytes over rates. Latency, waits and launches come on top: with few tokens they
      are most of the time.

    Raises:
      ValueError: more SMs than the machine has, or fewer than 1.
    """
    sms = None
    if num_sms is not None:
        positive("time_bound", num_sms=num_sms)
        if num_sms > machine.num_sms:
            raise ValueError(
                f"jax_ep.sizing.time_bound: num_sms (={num_sms}) must be at most the "
                f"{machine.num_sms} of {machine.name}."
            )
        work = _sm_seconds(traffic, machine)
        sms = None if work is None else work / num_sms
    return Bound(
        traffic.link / machine.link_rate,
        traffic.nic / machine.nic_rate,
        traffic.memory / machine.memory_rate,
        sms,
    )


def sms_to_fill(traffic: Traffic, machine: Machine) -> int | None:
    """The fewest SMs with which they are not what holds a stage back.

    Args:
      traffic: its bytes.
      machine: the rates.

    Returns:
      SMs that store and add the stage's bytes in the time that link, NIC and memory
      need; may exceed what the machine has. None where the rates of one SM are not
      known. A kernel wants some more: an SM also waits.

    Source: bytes over rates, as DeepEP's `get_theoretical_num_sms`, with our kernels'
    bytes and measured rates in place of its 50 and 200 GB/s and its factor of 1.25.
    """
    work = _sm_seconds(traffic, machine)
    if work is None:
        return None
    least = time_bound(traffic, machine).seconds
    return max(1, math.ceil(work / least)) if least else 1


def _sm_seconds(traffic: Traffic, machine: Machine) -> float | None:
    """Seconds that one SM would need; it stores and adds at once."""
    if machine.sm_write_rate is None or machine.sm_add_rate is None:
        return None
    return max(
        traffic.written / machine.sm_write_rate, traffic.added / machine.sm_add_rate
    )
