"""Figures are found at any cut of an answer, nothing of it is lost, and a handover's are those of the whole request."""

import itertools
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitproxy.api.figures import FigureReader, Rewrite, whole_request
from splitproxy.model import Figures, HandoverFigures
from tests.splits import cut, cuts

COST = HandoverFigures(
    prefill_ms=900.0,
    save_ms=60.0,
    restore_ms=40.0,
    session_bytes=5000,
    prefill_read_tokens=80,
    prefill_cached_tokens=19,
)
TIMINGS = (
    b'{"cache_n":99,"prompt_n":1,"prompt_ms":10.0,"prompt_per_token_ms":10.0,"prompt_per_second":100.0,'
    b'"predicted_n":7,"predicted_ms":350.5}'
)
FROM_TIMINGS = Figures(99, 1, 10.0, 7, 350.5)

CHAT_STREAM = (
    b'data: {"choices":[{"delta":{"content":"so \\"timings\\": {\\"prompt_n\\": 5} it is"}}]}\n\n'
    b'data: {"choices":[],"usage":{"completion_tokens":7,"prompt_tokens":100,"total_tokens":107,'
    b'"prompt_tokens_details":{"cached_tokens":99}},"timings":' + TIMINGS + b"}\n\n"
    b"data: [DONE]\n\n"
)
CHAT = (
    b'{"choices":[{"message":{"content":"hi \xc3\xa9 {"}}],"usage":{"completion_tokens":7,"prompt_tokens":100,'
    b'"prompt_tokens_details":{"cached_tokens":99}}, "timings" : ' + TIMINGS + b"}\n"
)
NATIVE = b'{"content":"x","stop":true,"prompt":"\\"usage\\":{","timings":' + TIMINGS + b',"tokens_cached":106}'
RESPONSES = (
    b"event: response.created\n"
    b'data: {"type":"response.created","response":{"usage":null}}\n\n'
    b"event: response.completed\n"
    b'data: {"type":"response.completed","response":{"usage":{"input_tokens":100,"output_tokens":7,"total_tokens":107,'
    b'"input_tokens_details":{"cached_tokens":99}}}}\n\n'
)
MESSAGES = (
    b"event: message_start\n"
    b'data: {"type":"message_start","message":{"usage":{"cache_read_input_tokens":99,"input_tokens":1,'
    b'"output_tokens":0}}}\n\n'
    b"event: message_delta\n"
    b'data: {"type":"message_delta","usage":{"output_tokens":7}}\n\n'
)
ERROR = b'{"error":{"code":400,"message":"no \\"usage\\": {","type":"invalid_request_error"}}'

SHAPES = [
    pytest.param(CHAT_STREAM, FROM_TIMINGS, id="chat stream"),
    pytest.param(CHAT, FROM_TIMINGS, id="chat"),
    pytest.param(NATIVE, FROM_TIMINGS, id="completion"),
    pytest.param(RESPONSES, Figures(99, 1, 0.0, 7, 0.0), id="responses stream"),
    pytest.param(MESSAGES, Figures(99, 1, 0.0, 7, 0.0), id="messages stream"),
    pytest.param(ERROR, None, id="error"),
    pytest.param(b"", None, id="empty"),
]


def pass_through(*pieces: bytes, rewrite: Rewrite | None = None) -> tuple[bytes, Figures | None]:
    reader = FigureReader(rewrite)
    out = b"".join([*(reader.feed(piece) for piece in pieces), reader.close()])
    return out, reader.figures()


# --- what is found


@pytest.mark.parametrize(("answer", "figures"), SHAPES)
def test_each_apis_figures_are_read(answer: bytes, figures: Figures | None) -> None:
    """Every API's answer gives its figures, and goes on byte for byte."""
    assert pass_through(answer) == (answer, figures)


@pytest.mark.parametrize(("answer", "figures"), SHAPES)
@pytest.mark.parametrize("rewritten", [False, True])
def test_figures_are_read_at_every_cut(answer: bytes, figures: Figures | None, rewritten: bool) -> None:
    """A cut anywhere changes neither the figures nor what the client gets."""
    rewrite = whole_request(COST) if rewritten else None
    whole = pass_through(answer, rewrite=rewrite)
    assert whole[1] == figures
    for place in range(len(answer) + 1):
        assert pass_through(answer[:place], answer[place:], rewrite=rewrite) == whole
    assert pass_through(*(answer[n : n + 1] for n in range(len(answer))), rewrite=rewrite) == whole


@pytest.mark.parametrize("rewritten", [False, True])
def test_figures_are_read_at_every_pair_of_cuts(rewritten: bool) -> None:
    """Nor do two cuts, around and within keys, colons and objects."""
    answer = (
        b'{"a":"\\"usage\\":{","usage":{"prompt_tokens":3,"x":"}"},"timings" : {"x":"}\\"{","prompt_n":2,"cache_n":1}}'
    )
    rewrite = whole_request(COST) if rewritten else None
    whole = pass_through(answer, rewrite=rewrite)
    assert whole[1] == Figures(1, 2, 0.0, 0, 0.0)
    for a, b in itertools.combinations(range(len(answer) + 1), 2):
        assert pass_through(answer[:a], answer[a:b], answer[b:], rewrite=rewrite) == whole


FRAGMENTS = st.sampled_from([
    b'"timings"', b'"usage"', b":", b" ", b"{", b"}", b'"', b"\\", b"\n", b"\n\n", b'"prompt_n":1', b",", b"data: ",
    b'"timings":{"prompt_n":1}', b'"usage":{"prompt_tokens":2,"x":"{"}', b"t", b'"tim', b"x" * 30, b"\xc3",
])  # fmt: skip


@given(st.lists(FRAGMENTS, max_size=25), st.data())
def test_nothing_is_lost_at_any_cut(parts: list[bytes], data: st.DataObject) -> None:
    """Whatever an answer holds and wherever it is cut, all of it goes on, in order."""
    answer = b"".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(answer)), max_size=6)))
    pieces = [answer[a:b] for a, b in itertools.pairwise([0, *cuts, len(answer)])]
    assert pass_through(*pieces)[0] == answer


ODD_FRAGMENTS = FRAGMENTS | st.sampled_from([
    b'"error":{"message":"x"}', b'"prompt_progress":{"processed":1}', b'{"reasoning_content":"', b'"thinking_delta"',
    b'"type":"thinking"', b'"reasoning_text.delta"', b'data: {"choices":[]}\n\n', b'"usage" : {"input_tokens":4}',
])  # fmt: skip


@given(st.lists(ODD_FRAGMENTS, max_size=25), cuts(), st.booleans(), st.booleans())
def test_any_cuts_give_the_same_figures(parts: list[bytes], places: list[int], rewritten: bool, whole: bool) -> None:
    """Whatever an answer holds and wherever it is cut, the same is read of it, and the same goes on."""
    answer = b"".join(parts)

    def seen(*pieces: bytes) -> object:
        reader = FigureReader(whole_request(COST) if rewritten else None, whole=whole)
        passed = b"".join([*map(reader.feed, pieces), reader.close()])
        return passed, reader.figures(), reader.reasoned, reader.failed

    assert seen(*cut(answer, places)) == seen(answer)


def test_only_figures_wait() -> None:
    """Text goes on at once and in full; only a key or figures object that is not complete is held back."""
    reader = FigureReader()
    for piece in (b'data: {"content":"a"}\n\n', b'data: {"content":"\\"timings\\": {"}\n\n', b": ping\n\n", b"data: {"):
        assert reader.feed(piece) == piece
    assert reader.feed(b'"x":1,"timings":') == b'"x":1,'
    assert reader.feed(b'{"prompt_n":1') == b""
    assert reader.feed(b'}}\n\ndata: {"y"') == b'"timings":{"prompt_n":1}}\n\ndata: {"y'


def test_what_was_held_back_goes_on_at_the_end() -> None:
    """An answer that breaks off in the middle of its figures is passed on as far as it came."""
    reader = FigureReader()
    assert reader.feed(b'{"timings":{"prompt_n":1') == b"{"
    assert reader.close() == b'"timings":{"prompt_n":1'
    assert reader.close() == b""
    assert reader.figures() is None


def test_an_object_without_an_end_is_let_through() -> None:
    """Nothing is kept without a limit: what is too long for figures goes on, and figures after it are still found."""
    endless = b'{"usage":{"x":"' + b"y" * 70_000
    reader = FigureReader()
    assert reader.feed(endless) == endless
    assert reader.feed(b'"},"timings":{"prompt_n":4}}') == b'"},"timings":{"prompt_n":4}}'
    assert reader.figures() == Figures(0, 4, 0.0, 0, 0.0)


@pytest.mark.parametrize(
    "answer",
    [
        b'{"content":"\\"timings\\":{\\"prompt_n\\":1}"}',
        b'{"content":"\\\\\\"timings\\":{\\"prompt_n\\":1}"}',
        b'{"a":"timings","b":{"prompt_n":1}}',
        b'{"timings":null,"usage":[]}',
        b'{"timings":{"when":"now"}}',
        b'{"usage":{"disk":12}}',
        b'{"usage":{"prompt_tokens":true}}',
        b'{"usage":{prompt_tokens}}',
        b'{"my timings":{"prompt_n":1}}',
    ],
)
def test_what_only_looks_like_figures_is_none(answer: bytes) -> None:
    """Text that quotes a key, and objects that hold no figures, are passed on and not believed."""
    assert pass_through(answer, rewrite=whole_request(COST)) == (answer, None)


@pytest.mark.parametrize(
    "usage",
    [
        {"prompt_tokens": 3, "prompt_tokens_details": None},
        {"prompt_tokens": 3, "prompt_tokens_details": [1]},
        {"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": "many"}},
        {"prompt_tokens": 3, "completion_tokens": None},
    ],
)
def test_odd_figures_count_as_nothing(usage: dict[str, Any]) -> None:
    """A figure that is no number is taken as none, and the answer goes on."""
    answer = orjson.dumps({"usage": usage})
    assert pass_through(answer, rewrite=whole_request(COST))[1] == Figures(0, 3, 0.0, 0, 0.0)


@pytest.mark.parametrize(
    ("answer", "reasoned"),
    [
        (b'{"delta":{"reasoning_content":"hm"}}', True),
        (b'{"delta":{"type":"thinking_delta"}}', True),
        (b'{"content_block":{"type":"thinking"}}', True),
        (b'{"type":"response.reasoning_text.delta","item":{"type":"reasoning_text"}}', True),
        (b'{"delta":{"content":"\\"reasoning_content\\":\\"hm\\""}}', False),
        (b'{"delta":{"reasoning_content":null}}', False),
    ],
)
def test_reasoning_is_noticed(answer: bytes, reasoned: bool) -> None:
    """An answer that reasons apart from its text is known as one."""
    reader = FigureReader()
    reader.feed(answer)
    assert reader.reasoned is reasoned


# --- the whole request's figures


def rewritten(answer: bytes) -> Any:
    return orjson.loads(pass_through(answer, rewrite=whole_request(COST))[0])


def test_timings_are_those_of_both_engines() -> None:
    """Reading took both engines' time and the session's way; what the prefill engine reused is what was cached."""
    answer = rewritten(b'{"timings":' + TIMINGS + b"}")
    timings = answer["timings"]
    assert (timings["cache_n"], timings["prompt_n"]) == (19, 81)
    assert timings["prompt_ms"] == 900.0 + 60.0 + 40.0 + 10.0
    assert timings["prompt_per_token_ms"] == pytest.approx(1010.0 / 81)
    assert timings["prompt_per_second"] == pytest.approx(81 / 1.010)
    assert (timings["predicted_n"], timings["predicted_ms"]) == (7, 350.5)
    assert answer["split"] == {"prefill_ms": 900.0, "save_ms": 60.0, "restore_ms": 40.0, "bytes": 5000}


def test_usage_counts_what_the_prefill_engine_reused() -> None:
    """Cached tokens are those of the whole request; all other counts stay as they were."""
    usage = rewritten(CHAT)["usage"]
    assert usage == {"completion_tokens": 7, "prompt_tokens": 100, "prompt_tokens_details": {"cached_tokens": 19}}


def test_our_own_judgement_sees_the_engines_figures() -> None:
    """The figures that prove a handover are the decode engine's, not the rewritten ones."""
    assert pass_through(CHAT, rewrite=whole_request(COST))[1] == FROM_TIMINGS


@given(
    prompt=st.integers(0, 10_000),
    cached=st.integers(0, 10_000),
    read_before=st.integers(0, 10_000),
)
def test_a_prompt_is_never_more_than_itself(prompt: int, cached: int, read_before: int) -> None:
    """Tokens that both engines read count once: cached and read tokens add up to the prompt, none below zero."""
    cached = min(cached, prompt)
    cost = HandoverFigures(1.0, 1.0, 1.0, 1, read_before, 0)
    body = {
        "timings": {"cache_n": cached, "prompt_n": prompt - cached},
        "usage": {"prompt_tokens": prompt, "prompt_tokens_details": {"cached_tokens": cached}},
    }
    out = orjson.loads(pass_through(orjson.dumps(body), rewrite=whole_request(cost))[0])
    timings, usage = out["timings"], out["usage"]
    assert timings["cache_n"] + timings["prompt_n"] == prompt
    assert 0 <= timings["cache_n"] <= cached
    assert timings["prompt_n"] == min(prompt, read_before + prompt - cached)
    assert usage["prompt_tokens_details"]["cached_tokens"] == timings["cache_n"]


@pytest.mark.parametrize("timings", [{"prompt_n": 0, "cache_n": 0}, {"prompt_n": 0}])
def test_no_figure_is_divided_by_nothing(timings: dict[str, int]) -> None:
    """Figures of zero give figures of zero."""
    cost = HandoverFigures(0.0, 0.0, 0.0, 0, 0, 0)
    out, _ = pass_through(orjson.dumps({"timings": timings}), rewrite=whole_request(cost))
    assert orjson.loads(out)["timings"]["prompt_per_second"] == 0.0


def test_usage_of_responses_counts_what_the_prefill_engine_reused() -> None:
    """Cached input tokens are those of the whole request, and the costs stand beside them."""
    out, figures = pass_through(RESPONSES, rewrite=whole_request(COST))
    last = orjson.loads(out.split(b"data: ")[-1])["response"]
    assert last["usage"]["input_tokens_details"] == {"cached_tokens": 19}
    assert (last["usage"]["input_tokens"], last["split"]["bytes"]) == (100, 5000)
    assert figures == Figures(99, 1, 0.0, 7, 0.0)


def test_usage_of_messages_counts_what_the_prefill_engine_reused() -> None:
    """Uncached input tokens are those that either engine read; the last event's own count stays."""
    out, figures = pass_through(MESSAGES, rewrite=whole_request(COST))
    first, last = (orjson.loads(part.partition(b"\n\n")[0]) for part in out.split(b"data: ")[1:])
    assert first["message"]["usage"] == {"cache_read_input_tokens": 19, "input_tokens": 81, "output_tokens": 0}
    assert first["message"]["split"]["prefill_ms"] == 900.0
    assert last["usage"] == {"output_tokens": 7}
    assert figures == Figures(99, 1, 0.0, 7, 0.0)


def test_progress_goes_on_where_the_prefill_engine_ended() -> None:
    """The decode engine's progress never counts back, and its time is added."""
    out = rewritten(b'{"prompt_progress":{"total":100,"cache":94,"processed":94,"time_ms":3}}')
    assert out == {"prompt_progress": {"total": 100, "cache": 19, "processed": 99, "time_ms": 1003}}


def test_a_calls_arguments_are_no_figures() -> None:
    """In an answer of one piece only its outermost object has figures: a call's arguments may hold any key."""
    inner = b'{"type":"tool_use","input":{"usage":{"cache_read_input_tokens":5,"input_tokens":5},"error":{"a":1}}}'
    usage = b'"usage":{"cache_read_input_tokens":99,"input_tokens":1,"output_tokens":7}'
    reader = FigureReader(whole_request(COST), whole=True)
    pieces = (b'{"content":[' + inner[:30], inner[30:] + b"],", usage + b"}")
    assert [reader.feed(piece) for piece in pieces] == [b"", b"", b""]
    out = reader.close()
    assert inner in out
    assert orjson.loads(out)["usage"] == {"cache_read_input_tokens": 19, "input_tokens": 81, "output_tokens": 7}
    assert (reader.figures(), reader.failed) == (Figures(99, 1, 0.0, 7, 0.0), False)
