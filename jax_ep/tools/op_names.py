"""Which instruction of a profiled program comes from which scope, and who uses it.

A profile holds the programs that ran, as serialised HloProto in the metadata of its
plane "/host:metadata", where `jax.profiler.ProfileData` does not reach. The few fields
needed here are read from protocol buffers' wire format; their numbers are those of
xplane.proto (tsl) and hlo.proto, xla_data.proto (XLA), which may gain fields but never
renumber them.
"""

import dataclasses
from collections.abc import Iterator

_SPACE_PLANES = 1
_PLANE_NAME, _PLANE_EVENT_METADATA = 2, 4
_MAP_VALUE = 2
_METADATA_NAME, _METADATA_STATS = 2, 5
_STAT_BYTES = 6
_HLO_MODULE = 1
_MODULE_COMPUTATIONS = 3
_COMPUTATION_INSTRUCTIONS = 2
_INSTRUCTION_NAME, _INSTRUCTION_OPCODE, _INSTRUCTION_METADATA = 1, 2, 7
_INSTRUCTION_TARGET, _INSTRUCTION_ID, _INSTRUCTION_OPERANDS = 28, 35, 36
_OP_NAME = 2


@dataclasses.dataclass(frozen=True)
class Instruction:
    """Of a compiled program.

    Attributes:
      opcode: HLO's, "fusion" or "custom-call".
      op_name: JAX's, with the scopes: "jit(step)/jax_ep.experts/dot_general".
      target: of a custom call, else "".
      users: names of the instructions that take its result, or a part of it.
    """

    opcode: str
    op_name: str
    target: str
    users: tuple[str, ...] = ()


# What only names a part of a result, or the same bytes.
_PARTS = ("get-tuple-element", "tuple", "bitcast", "optimization-barrier")


def programs(data: bytes) -> dict[str, dict[str, Instruction]]:
    """By program, "jit_step(7)" with its number, the instructions by name.

    Args:
      data: an .xplane.pb file.

    Raises:
      ValueError: it is no protocol buffer.
    """
    found = {}
    for plane in _values(data, _SPACE_PLANES):
        if _text(plane, _PLANE_NAME) != "/host:metadata":
            continue
        for entry in _values(plane, _PLANE_EVENT_METADATA):
            for metadata in _values(entry, _MAP_VALUE):
                for stat in _values(metadata, _METADATA_STATS):
                    for hlo in _values(stat, _STAT_BYTES):
                        name = _text(metadata, _METADATA_NAME)
                        found[name] = _instructions(hlo)
    return found


def _instructions(hlo: bytes) -> dict[str, Instruction]:
    found, ids, operands = {}, {}, {}
    for module in _values(hlo, _HLO_MODULE):
        for computation in _values(module, _MODULE_COMPUTATIONS):
            for each in _values(computation, _COMPUTATION_INSTRUCTIONS):
                name = _text(each, _INSTRUCTION_NAME)
                metadata = b"".join(_values(each, _INSTRUCTION_METADATA))
                ids[_number(each, _INSTRUCTION_ID)] = name
                operands[name] = _numbers(each, _INSTRUCTION_OPERANDS)
                found[name] = Instruction(
                    _text(each, _INSTRUCTION_OPCODE),
                    _text(metadata, _OP_NAME),
                    _text(each, _INSTRUCTION_TARGET),
                )
    users: dict[str, list[str]] = {name: [] for name in found}
    for name, numbers in operands.items():
        for number in numbers:
            if number in ids:
                users[ids[number]].append(name)
    return {
        name: dataclasses.replace(each, users=tuple(_real_users(name, found, users)))
        for name, each in found.items()
    }


def _real_users(name: str, instructions, users) -> Iterator[str]:
    for user in users[name]:
        if instructions[user].opcode in _PARTS:
            yield from _real_users(user, instructions, users)
        else:
            yield user


def _text(message: bytes, number: int) -> str:
    return b"".join(_values(message, number)).decode(errors="replace")


def _number(message: bytes, number: int) -> int:
    return next((v for v in _fields(message, number) if isinstance(v, int)), 0)


def _numbers(message: bytes, number: int) -> list[int]:
    """Of a repeated field, packed or not."""
    found = []
    for value in _fields(message, number):
        if isinstance(value, int):
            found.append(value)
            continue
        at = 0
        while at < len(value):
            each, at = _varint(value, at)
            found.append(each)
    return found


def _values(message: bytes, number: int) -> Iterator[bytes]:
    return (v for v in _fields(message, number) if not isinstance(v, int))


def _fields(message: bytes, number: int) -> Iterator[bytes | int]:
    """The values of a field: integers, and what has a length."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        kind, is_wanted = key & 7, key >> 3 == number
        if kind == 0:
            value, at = _varint(message, at)
            if is_wanted:
                yield value
        elif kind == 1:
            at += 8
        elif kind == 5:
            at += 4
        elif kind == 2:
            size, at = _varint(message, at)
            if at + size > len(message):
                raise ValueError("a field is longer than its message")
            if is_wanted:
                yield message[at : at + size]
            at += size
        else:
            raise ValueError(f"no wire type {kind}")


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(message) or shift > 63:
            raise ValueError("a number does not end")
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, at
