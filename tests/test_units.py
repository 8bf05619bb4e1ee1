"""Sizes in bytes: GB is not GiB, and nothing is lost on the way to text and back."""

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dinfer.errors import InputError
from dinfer.units import exact_bytes, format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("24GiB", 24 * 2**30),
        ("24GB", 24 * 10**9),
        ("25769803776", 25_769_803_776),
        (25_769_803_776, 25_769_803_776),
        ("0", 0),
        ("1B", 1),
        ("8 gib", 8 * 2**30),
        (" 512 KiB ", 2**19),
        ("3kB", 3000),
        ("2MB", 2 * 10**6),
        ("2MiB", 2 * 2**20),
        ("1.5TiB", 3 * 2**39),
        ("0.5TB", 5 * 10**11),
        ("9007199254740993B", 9_007_199_254_740_993),  # 2**53 + 1, which a float cannot hold
    ],
)
def test_parse_bytes_reads_binary_decimal_and_plain_sizes(text: str | int, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "1e9", "8 gallons", "8Gi", "1,5GB", "½GB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    message = (
        f"size {text!r} is not a number with B, KB, MB, GB, KiB, MiB or GiB; write 8GiB or 8GB"
    )
    with pytest.raises(InputError, match=f"^{re.escape(message)}$"):
        parse_bytes(text)


@pytest.mark.parametrize("text", ["1.5", "0.5B"])
def test_a_fraction_of_a_byte_is_refused(text: str) -> None:
    message = f"size {text!r} is a fraction of a byte; write whole bytes"
    with pytest.raises(InputError, match=f"^{re.escape(message)}$"):
        parse_bytes(text)


@given(st.integers(min_value=0, max_value=2**70))
@example(24 * 2**30)
@example(24 * 10**9)
@example(2**53 + 1)
def test_exact_bytes_round_trips(count: int) -> None:
    assert parse_bytes(exact_bytes(count)) == count


@given(st.integers(1, 999), st.sampled_from(["KiB", "MiB", "GiB", "KB", "MB", "GB", "TB"]))
def test_exact_bytes_uses_the_largest_whole_unit(count: int, unit: str) -> None:
    text = exact_bytes(parse_bytes(f"{count}{unit}"))
    assert int(text.rstrip("KMGTiB")) <= count


@pytest.mark.parametrize(
    ("count", "text"),
    [(24 * 2**30, "24GiB"), (24 * 10**9, "24GB"), (1000, "1KB"), (0, "0B"), (12345, "12345B")],
)
def test_exact_bytes_names_the_unit_that_fits(count: int, text: str) -> None:
    assert exact_bytes(count) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (24 * 2**30, "24.00 GiB"),
        (24 * 10**9, "22.35 GiB"),
        (2**40, "1.00 TiB"),
        (3 * 2**19, "1.50 MiB"),
        (24_576, "24.00 KiB"),
        (-(2**30), "-1.00 GiB"),
        (1023, "1023 B"),
    ],
)
def test_format_bytes_prints_binary_units_with_the_i(count: int, text: str) -> None:
    assert format_bytes(count) == text


@given(st.integers(min_value=0, max_value=2**50))
def test_formatted_sizes_read_back_to_the_printed_digits(count: int) -> None:
    assert abs(parse_bytes(format_bytes(count)) - count) <= 0.00501 * max(count, 1)
