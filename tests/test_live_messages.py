"""Requests that cannot be given a slot: they are answered right beside others all the same, and where one slot is
taken, it is known afterwards."""

import json
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.live_pair import words
from tests.live_served import FLOOR, Served, post, served

pytestmark = pytest.mark.live

CHAT, COMPLETIONS, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    pytest.importorskip("xllamacpp", reason="xllamacpp, the engine of the live tests, is not installed")
    flags = ("-np", "3", "--kv-unified", "--cache-ram", "0", "--ctx-checkpoints", "4")
    with served(tmp_path_factory.mktemp("served"), *flags) as everything:
        yield everything


def body(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 12, "temperature": 0, **fields}


def said(path: str, answer: bytes) -> str:
    found = json.loads(answer)
    return str(found["content"][0]["text"] if path == MESSAGES else found["choices"][0]["message"]["content"])


def status(place: Served) -> Any:
    with urllib.request.urlopen(f"{place.url}/splitproxy/status", timeout=5) as answer:  # noqa: S310
        return json.load(answer)


def test_messages_beside_chats(place: Served) -> None:
    """Twelve requests of both APIs at once, long and short, each get the text that the engine alone gives."""
    asked = [(CHAT if n % 2 else MESSAGES, body(words((40, FLOOR + 150)[n % 3 > 0], n))) for n in range(12)]
    expected = []
    for path, request in asked:
        expected.append(said(path, place.own_answer(path, request).body))
    with ThreadPoolExecutor(len(asked)) as pool:
        answers = list(pool.map(lambda one: post(place.url + one[0], one[1]), asked))
    assert {answer.headers["X-Splitproxy-Route"] for answer in answers} == {"local", "handover"}
    assert [said(path, answer.body) for (path, _), answer in zip(asked, answers, strict=True)] == expected
    writer = next(engine for engine in status(place)["engines"] if engine["name"] == "writer")
    assert (writer["slots"]["busy"], status(place)["leases"]) == (0, 0)


def test_several_prompts_in_one_body(place: Served) -> None:
    """More prompts than there are slots, beside other requests: each has its own answer, as far as the engine gives it
    in any company, and all slots come back."""
    texts = [words(40, ("several", n)) for n in range(5)]
    asked = {"prompt": texts, "max_tokens": 12, "temperature": 0}
    single = [{**asked, "prompt": text} for text in texts]
    expected = [json.loads(place.own_answer(COMPLETIONS, one).body)["choices"][0]["text"] for one in single]
    with ThreadPoolExecutor(6) as pool:
        beside = [pool.submit(post, place.url + COMPLETIONS, one) for one in single]
        choices = json.loads(post(place.url + COMPLETIONS, asked).body)["choices"]
        alone = [json.loads(one.result().body)["choices"][0]["text"] for one in beside]
    several = [choice["text"] for choice in sorted(choices, key=lambda choice: choice["index"])]
    for texts in (several, alone):
        assert len(texts) == len(expected)
        assert sum(text == own for text, own in zip(texts, expected, strict=True)) >= len(expected) - 2
        assert not [text for number, text in enumerate(texts) if text in expected[:number] + expected[number + 1 :]]
    assert status(place)["leases"] == 0


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_the_next_turn_is_warm(place: Served, stream: bool) -> None:
    """The slot that the engine chose for a conversation is the one that its next turn is believed to find it in."""
    text = words(FLOOR + 150, ("turns", stream))
    post(place.url + CHAT, body(words(30, "another")))  # so that the slots differ in age
    first = post(place.url + MESSAGES, body(text, stream=stream))
    second = post(place.url + MESSAGES, body(text))
    assert (first.headers["X-Splitproxy-Route"], second.headers["X-Splitproxy-Reason"]) == ("handover", "warm")
    used = json.loads(second.body)["usage"]
    assert used["cache_read_input_tokens"] > FLOOR > used["input_tokens"]
