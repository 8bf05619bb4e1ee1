"""Timelines: the bytes of the format, the way back, what viewers read, and what is refused."""

import gzip
import json
import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dinfer.errors import InputError
from dinfer.timeline import SPAN_DTYPE, STEPS, STREAMS, Answer, Run, Span, Timeline, save_together

SPANS = [
    Span(0, 0, "attention", "gpu", 0.0, 0.25),
    Span(0, 0, "prefetch", "h2d", 0.25, 0.75, 3, 192),
    Span(0, -1, "head", "gpu", 0.5, 1.0),
]
TIMELINE = Timeline.from_spans(SPANS, 1, 1.0, {"source": "simulated", "machine": "box"})

TEXT = (
    '{"traceEvents": ['
    '{"ph": "M", "pid": 1, "tid": 0, "name": "process_name", "args": {"name": "simulated box"}}, '
    '{"ph": "M", "pid": 1, "tid": 0, "name": "thread_name", "args": {"name": "gpu"}}, '
    '{"ph": "M", "pid": 1, "tid": 1, "name": "thread_name", "args": {"name": "cpu"}}, '
    '{"ph": "M", "pid": 1, "tid": 2, "name": "thread_name", "args": {"name": "h2d"}}, '
    '{"ph": "M", "pid": 1, "tid": 3, "name": "thread_name", "args": {"name": "d2h"}}, '
    '{"ph": "M", "pid": 1, "tid": 4, "name": "thread_name", "args": {"name": "scheduler"}}, '
    '{"ph": "X", "pid": 1, "tid": 0, "name": "attention", "ts": 0.0, "dur": 250000.0, '
    '"args": {"token": 0, "layer": 0, "neurons": 0, "bytes": 0}}, '
    '{"ph": "X", "pid": 1, "tid": 2, "name": "prefetch", "ts": 250000.0, "dur": 500000.0, '
    '"args": {"token": 0, "layer": 0, "neurons": 3, "bytes": 192}}, '
    '{"ph": "X", "pid": 1, "tid": 0, "name": "head", "ts": 500000.0, "dur": 500000.0, '
    '"args": {"token": 0, "layer": -1, "neurons": 0, "bytes": 0}}], "displayTimeUnit": "ms", '
    '"dinfer": {"format": "dinfer-timeline", "version": 1, "tokens": 1, "seconds": 1.0, '
    '"meta": {"source": "simulated", "machine": "box"}, '
    '"spans": {"token": [0, 0, 0], "layer": [0, 0, -1], "step": [0, 3, 8], "stream": [0, 2, 0], '
    '"start_seconds": [0.0, 0.25, 0.5], "end_seconds": [0.25, 0.75, 1.0], "neurons": [0, 3, 0], '
    '"bytes": [0, 192, 0]}}}'
)


def same(one: Timeline, other: Timeline) -> None:
    np.testing.assert_equal(one.spans, other.spans)
    assert one.spans.dtype == other.spans.dtype == SPAN_DTYPE
    assert (one.tokens, one.seconds, one.meta) == (other.tokens, other.seconds, other.meta)


def refuses(message: str):
    return pytest.raises(InputError, match=f"^{re.escape(message)}$")


# the format


def test_the_text_of_a_tiny_timeline(tmp_path):
    TIMELINE.save(tmp_path / "run.json")
    assert (tmp_path / "run.json").read_text() == TEXT
    TIMELINE.save(tmp_path / "run.json.gz")
    assert gzip.decompress((tmp_path / "run.json.gz").read_bytes()).decode() == TEXT


@pytest.mark.parametrize("name", ["run.json", "run.json.gz"])
def test_a_timeline_comes_back_equal(tmp_path, name):
    TIMELINE.save(tmp_path / name)
    same(Timeline.load(tmp_path / name), TIMELINE)


seconds = st.floats(0, 1e6)
spans = st.builds(
    Span,
    st.integers(0, 2**31 - 1),
    st.integers(-1, 100),
    st.sampled_from(STEPS),
    st.sampled_from(STREAMS),
    seconds,
    seconds,
    st.integers(0, 2**31 - 1),
    st.integers(0, 2**62),
)


@given(
    st.lists(spans, max_size=5),
    st.integers(0, 99),
    seconds,
    st.dictionaries(st.text(), st.text(), max_size=3),
)
def test_any_timeline_comes_back_equal(tmp_path_factory, rows, tokens, total, meta):
    path = tmp_path_factory.mktemp("timeline") / "run.json.gz"
    timeline = Timeline.from_spans(rows, tokens, total, meta)
    timeline.save(path)
    same(Timeline.load(path), timeline)
    path.unlink()


def test_totals_are_kept_where_spans_are_not(tmp_path):
    bare = Timeline(TIMELINE.spans[:0], 2, 1.0, {}, np.arange(9.0))
    assert bare.step_seconds().tolist() == (np.arange(9) / 2).tolist()
    bare.save(tmp_path / "run.json")
    assert (
        Timeline.load(tmp_path / "run.json").step_seconds().tolist() == bare.step_seconds().tolist()
    )


# what it says


def test_times_by_step_and_stream():
    assert TIMELINE.step_seconds().to_dict() == dict.fromkeys(STEPS, 0.0) | {
        "attention": 0.25,
        "prefetch": 0.5,
        "head": 0.5,
    }
    assert [TIMELINE.busy(stream) for stream in STREAMS] == [0.75, 0, 0.5, 0, 0]
    waiting = Timeline.from_spans([*SPANS, Span(0, 0, "wait", "gpu", 0.25, 0.5)], 1, 1.0)
    assert waiting.busy("gpu") == 0.75


def test_speed_is_tokens_over_seconds():
    assert replace(TIMELINE, tokens=3, seconds=2.0).tokens_per_second == 1.5
    assert replace(TIMELINE, seconds=0.0).tokens_per_second == np.inf


def test_the_table_has_words():
    frame = TIMELINE.to_frame()
    assert list(frame) == [
        "token",
        "layer",
        "step",
        "stream",
        "start_seconds",
        "end_seconds",
        "neurons",
        "bytes",
    ]
    assert [Span(*row) for row in frame.itertuples(index=False)] == SPANS
    assert tuple(frame["step"].cat.categories) == STEPS
    assert tuple(frame["stream"].cat.categories) == STREAMS


def test_chrome_gets_a_process_a_run_and_a_thread_a_stream():
    document = json.loads(json.dumps(TIMELINE.to_chrome(process=7)))
    events = document["traceEvents"]
    assert {e["pid"] for e in events} == {7}
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == dict(enumerate(STREAMS))
    shown = [e for e in events if e["ph"] == "X"]
    assert [(e["name"], names[e["tid"]]) for e in shown] == [(s.step, s.stream) for s in SPANS]
    assert [(e["ts"], e["ts"] + e["dur"]) for e in shown] == [
        (s.start_seconds * 1e6, s.end_seconds * 1e6) for s in SPANS
    ]


def test_a_run_gives_its_share_and_compares_its_decisions():
    work = np.array([[[3, 1, 2, 0]], [[1, 3, 0, 0]]], np.int32)
    ids = np.array([5, 7], np.int32)
    run = Run(TIMELINE, work, ids, ids + 1)
    assert run.gpu_share == 0.5
    assert run.same_decisions(replace(run, work=work * [2, 1, 1, 5], answers=(Answer("other", (1,)),)))
    assert not run.same_decisions(replace(run, fetch=ids[::-1]))
    assert not run.same_decisions(replace(run, evict=ids))
    assert not run.same_decisions(replace(run, work=work[::-1]))
    assert Run(TIMELINE, work * 0, ids, ids).gpu_share == 0


# what is refused


def test_a_missing_timeline_is_named(tmp_path):
    path = tmp_path / "run.json"
    with refuses(f"timeline {path} does not exist; write one with --timeline {path}"):
        Timeline.load(path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe\x00",
        b"\x1f\x8b",
        gzip.compress(b"{}", mtime=0)[:-4],
        b"[1]",
        b'"dinfer"',
        b'{"traceEvents": []}',
        b'{"dinfer": 3}',
        b'{"dinfer": {"version": 1}}',
        b'{"dinfer": {"version": "one"}}',
        TEXT.replace('"dinfer-timeline"', '"dinfer-plan"').encode(),
        TEXT.replace("[0, 3, 8]", "[0, 3, 99]").encode(),
        TEXT.replace("[0, 3, 8]", '[0, 3, "head"]').encode(),
        TEXT.replace("[0, 3, 8]", "[0, 3]").encode(),
        TEXT.replace('"stream": [0, 2, 0]', '"stream": [0, 2, 5]').encode(),
    ],
)
def test_a_foreign_file_is_refused(tmp_path, content):
    path = tmp_path / "run.json"
    path.write_bytes(content)
    with refuses(f"{path} is no timeline of dinfer; write one with `dinfer simulate --timeline`"):
        Timeline.load(path)


def test_a_later_version_is_refused(tmp_path):
    path = tmp_path / "run.json"
    path.write_text(TEXT.replace('"version": 1', '"version": 2'))
    with refuses(f"{path} has version 2, this dinfer reads up to 1"):
        Timeline.load(path)


def test_two_timelines_go_into_one_file_as_two_processes(tmp_path):
    """Perfetto shows them beside each other: the same rows with the same names."""
    both = TIMELINE, replace(TIMELINE, meta={"source": "executed"})
    save_together(both, tmp_path / "both.json")
    events = json.loads((tmp_path / "both.json").read_text())["traceEvents"]
    assert events == both[0].to_chrome(1)["traceEvents"] + both[1].to_chrome(2)["traceEvents"]
    rows = {(event["pid"], event["args"]["name"]) for event in events if event["name"] == "thread_name"}
    assert rows == {(process, stream) for process in (1, 2) for stream in STREAMS}
