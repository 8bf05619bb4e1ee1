"""Sizes as people write them: ``24GiB`` is 24 * 2**30 bytes, ``24GB`` is 24 * 10**9 bytes."""

import re

from dinfer.errors import InputError

_BYTES = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(text: str | int) -> int:
    """Bytes in ``text``: a plain number, or one with B, KB/MB/GB/TB (powers of 1000) or KiB/MiB/GiB/TiB.

    Raises InputError for anything else, or for a fraction of a byte.
    """
    match = _SIZE.fullmatch(str(text))
    unit = match[2].upper() if match else "?"
    if match is None or unit not in _BYTES:
        raise InputError(f"size {text!r} is not a number with B, KB, MB, GB, KiB, MiB or GiB; write 8GiB or 8GB")
    whole, _, fraction = match[1].partition(".")
    scaled = int(whole + fraction) * _BYTES[unit]
    count, rest = divmod(scaled, 10 ** len(fraction))
    if rest and _BYTES[unit] == 1:
        raise InputError(f"size {text!r} is a fraction of a byte; write whole bytes")
    return count + (2 * rest >= 10 ** len(fraction))


def format_bytes(count: int) -> str:
    """``count`` bytes as text with the largest binary unit that it fills, two decimals: ``23.64 GiB``."""
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(count) >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} B"


def exact_bytes(count: int) -> str:
    """``count`` bytes as text that ``parse_bytes`` reads back exactly: ``24GiB``, ``24GB`` or plain bytes."""
    for unit in ("TiB", "TB", "GiB", "GB", "MiB", "MB", "KiB", "KB"):  # the largest first
        if count and count % _BYTES[unit.upper()] == 0:
            return f"{count // _BYTES[unit.upper()]}{unit}"
    return f"{count}B"
