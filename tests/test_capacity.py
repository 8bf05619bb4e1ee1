"""What runs on a GPU: against the closed forms, the simulator and the arithmetic of memory."""

import re
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from dinfer.capacity import COLUMNS, capacity, for_reading
from dinfer.errors import InputError
from dinfer.machine import Machine, load_machine
from dinfer.model import catalogue_models, load_model


def with_memory(machine: Machine, ram: int) -> Machine:
    return replace(machine, cpu=replace(machine.cpu, memory_bytes=ram))


@pytest.fixture(scope="module")
def table() -> pd.DataFrame:
    names = ["prosparse-7b", "llama-2-7b", "llama-3.1-70b", "opt-13b"]
    return capacity(load_machine("rtx4090"), names, target=20).set_index("model")


def test_a_row_a_model_the_fastest_first(table):
    assert list(table.reset_index().columns) == list(COLUMNS)
    speeds = table["tokens_per_second"].to_numpy()
    assert np.all(np.diff(speeds[~np.isnan(speeds)]) <= 0)


def test_what_fits_whole_reads_all_of_its_bytes_from_the_gpus_memory(table):
    # dense Llama-2-7B in fp16: at most memory rate / bytes, at least half of it with launches
    row, spec = table.loc["llama-2-7b"], load_model("llama-2-7b")
    read = spec.ffn_bytes + spec.layers * spec.attention_bytes + spec.head_bytes
    limit = load_machine("rtx4090").gpu.neuron.bytes_per_second / read
    assert (row["way"], row["dtype"], row["bound_by"], row["verdict"]) == ("gpu", "float16", "GPU", "reaches it")
    assert 0.5 * limit < row["tokens_per_second"] < limit
    assert row["ram_bytes"] == 0
    assert row["gpu_share"] == 1


def test_a_dense_model_that_does_not_fit_is_split_by_layers(table):
    # 70B in int4: 37 GiB, what does not fit on the card is read by the CPU at 49 GB/s: never above that
    row, spec = table.loc["llama-3.1-70b"], load_model("llama-3.1-70b").with_dtype("int4")
    assert (row["way"], row["dtype"], row["bound_by"], row["verdict"]) == ("layers", "int4", "CPU", "too slow")
    assert row["tokens_per_second"] < 49e9 / row["ram_bytes"]
    whole = spec.ffn_bytes + spec.layers * spec.attention_bytes
    assert row["ram_bytes"] == pytest.approx((1 - row["gpu_share"]) * whole, abs=1)


def test_less_memory_takes_precisions_away_and_then_the_model():
    machine = load_machine("rtx3090")
    machine = replace(machine, gpu=replace(machine.gpu, memory_bytes=8 * 2**30))
    slab = {dtype: load_model("opt-13b").with_dtype(dtype).ffn_bytes for dtype in ("int8", "int4")}

    def at(ram):
        return capacity(with_memory(machine, ram), ["opt-13b"], dtypes=("int8", "int4")).iloc[0]

    roomy, tight, small = at(2 * slab["int8"]), at(slab["int8"]), at(slab["int4"])
    assert (roomy["dtype"], roomy["ram_bytes"], roomy["verdict"]) == ("int8", slab["int8"], "runs")
    assert (tight["dtype"], tight["ram_bytes"], tight["verdict"]) == ("int4", slab["int4"], "runs")
    assert (small["bound_by"], small["verdict"]) == ("RAM", "does not fit")
    assert np.isnan(small["tokens_per_second"])
    assert re.match(r"needs [\d.]+ GiB of RAM, [\d.]+ GiB are free; synthetic, 97% sparse as opt-6.7b$", small["note"])


def test_a_model_whose_dense_part_is_above_the_card_lacks_vram():
    machine = load_machine("rtx4080")
    small = replace(machine, gpu=replace(machine.gpu, memory_bytes=4 * 2**30))
    row = capacity(small, ["relullama-7b"], dtypes=["float16"]).iloc[0]
    assert (row["bound_by"], row["verdict"]) == ("VRAM", "does not fit")
    assert row["note"].startswith("budget 4.00 GiB on RTX 4080 is below the ")


def test_the_target_chooses_the_precision():
    machine = load_machine("rtx4080")
    machine = replace(machine, gpu=replace(machine.gpu, memory_bytes=10 * 2**30))
    speeds = {
        dtype: capacity(machine, ["relullama-7b"], dtypes=[dtype]).iloc[0]["tokens_per_second"]
        for dtype in ("float16", "int4")
    }
    assert speeds["int4"] > 1.5 * speeds["float16"]
    easy = capacity(machine, ["relullama-7b"], dtypes=["float16", "int4"], target=0.9 * speeds["float16"]).iloc[0]
    hard = capacity(machine, ["relullama-7b"], dtypes=["float16", "int4"], target=1.1 * speeds["float16"]).iloc[0]
    never = capacity(machine, ["relullama-7b"], dtypes=["float16", "int4"], target=1e6).iloc[0]
    assert (easy["dtype"], easy["verdict"]) == ("float16", "reaches it")
    assert (hard["dtype"], hard["verdict"]) == ("int4", "reaches it")
    assert (never["dtype"], never["verdict"], never["tokens_per_second"]) == ("int4", "too slow", speeds["int4"])


def test_sizes_are_text_for_reading(table):
    shown = for_reading(table.reset_index()).set_index("model")
    assert shown.loc["llama-2-7b", "vram"].endswith("GiB")
    assert shown.loc["llama-2-7b", "ram"] == "0 B"
    assert "vram_bytes" not in shown


def refuses(message: str):
    return pytest.raises(InputError, match=f"^{re.escape(message)}")


def test_bad_input_is_refused():
    machine = load_machine("rtx4080")
    with refuses(f"model 'gpt-9' is not in the catalogue ({', '.join(catalogue_models())})"):
        capacity(machine, ["gpt-9"])
    with refuses("dtype 'int3' is not one of float32, bfloat16, float16, int8, int4"):
        capacity(machine, dtypes=["int3"])
    with refuses("no dtype given; name some of float32"):
        capacity(machine, dtypes=[])
    with refuses("target is 0 tokens/s; it must be above 0"):
        capacity(machine, target=0.0)
    with refuses("context is 0; it must be at least 1 token"):
        capacity(machine, context=0)
