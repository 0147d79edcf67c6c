"""The clients that people use: the official SDKs and curl get from the proxy what they get from the engine."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import openai
import pytest
from pydantic import BaseModel

from tests.live_pair import words
from tests.live_served import FLOOR, Served, served

pytestmark = pytest.mark.live

MODEL = "any"
GREEDY: Any = {"temperature": 0}
PARAMETERS = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}
FUNCTION: Any = {"name": "look", "description": "Looks.", "parameters": PARAMETERS}


class Verdict(BaseModel):
    """What the structured answer must be."""

    word: Literal["yes", "no"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    pytest.importorskip("xllamacpp", reason="xllamacpp, the engine of the live tests, is not installed")
    with served(tmp_path_factory.mktemp("served")) as everything:
        yield everything


@pytest.fixture(params=["short", "long"])
def text(request: pytest.FixtureRequest, place: Served) -> str:
    """A prompt that stays, and one that is handed over."""
    place.forget()
    return words(20 if request.param == "short" else FLOOR + 200, request.node.name)


def openais(place: Served) -> tuple[openai.OpenAI, openai.OpenAI]:
    """The proxy's client and the engine's."""
    proxied, direct = (openai.OpenAI(base_url=f"{url}/v1", api_key="k") for url in (place.url, place.alone))
    return proxied, direct


def anthropics(place: Served) -> tuple[anthropic.Anthropic, anthropic.Anthropic]:
    proxied, direct = (anthropic.Anthropic(base_url=url, api_key="k") for url in (place.url, place.alone))
    return proxied, direct


def user(text: str) -> Any:
    return [{"role": "user", "content": text}]


# --- OpenAI


def test_openai_chat(place: Served, text: str) -> None:
    """A chat completion has the engine's text and counts."""
    said = []
    for client in openais(place):
        with client:
            answer = client.chat.completions.create(model=MODEL, messages=user(text), max_tokens=8, **GREEDY)
        assert answer.usage is not None
        said.append((answer.choices[0].message.content, answer.choices[0].finish_reason, answer.usage.total_tokens))
    assert said[0] == said[1]


async def test_openai_chat_stream(place: Served, text: str) -> None:
    """An async stream has the engine's pieces, and its last chunk the counts."""
    said = []
    for url in (place.url, place.alone):
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k") as client:
            stream = await client.chat.completions.create(
                model=MODEL, messages=user(text), max_tokens=8, stream=True, stream_options={"include_usage": True},
                **GREEDY,
            )  # fmt: skip
            chunks = [chunk async for chunk in stream]
        assert chunks[-1].usage is not None
        pieces = [choice.delta.content for chunk in chunks for choice in chunk.choices]
        said.append((pieces, chunks[-1].usage.completion_tokens, chunks[-1].usage.prompt_tokens))
    assert said[0] == said[1]


def test_openai_tools(place: Served, text: str) -> None:
    """With tools the message is the engine's: its text, and its calls where the model makes any."""
    said = []
    for client in openais(place):
        with client:
            answer = client.chat.completions.create(
                model=MODEL, messages=user(text), tools=[{"type": "function", "function": FUNCTION}],
                tool_choice="required", max_tokens=60, **GREEDY,
            )  # fmt: skip
        said.append(answer.choices[0].message)
    assert said[0] == said[1]
    assert said[0].content or said[0].tool_calls


def test_openai_structured_output(place: Served, text: str) -> None:
    """An answer that must have a shape is parsed into it."""
    said = []
    for client in openais(place):
        with client:
            answer = client.chat.completions.parse(
                model=MODEL, messages=user(text), response_format=Verdict, max_tokens=60, **GREEDY
            )
        said.append(answer.choices[0].message.parsed)
    assert said[0] == said[1] is not None


def test_openai_completions(place: Served, text: str) -> None:
    """A text completion, streamed, has the engine's pieces."""
    said = []
    for client in openais(place):
        with client:
            stream = client.completions.create(model=MODEL, prompt=text, max_tokens=8, stream=True, **GREEDY)
            said.append([chunk.choices[0].text for chunk in stream])
    assert said[0] == said[1]


def test_openai_responses(place: Served, text: str) -> None:
    """A response has the engine's text, its counts those of the whole prompt."""
    said = []
    for client in openais(place):
        with client:
            answer = client.responses.create(model=MODEL, input=text, max_output_tokens=8, **GREEDY)
        assert answer.usage is not None
        assert answer.usage.input_tokens_details.cached_tokens < answer.usage.input_tokens
        said.append((answer.output_text, answer.status, answer.usage.total_tokens))
    assert said[0] == said[1]


async def test_openai_responses_stream(place: Served, text: str) -> None:
    """The SDK's own accumulation of a response stream ends in the engine's text."""
    said = []
    for url in (place.url, place.alone):
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k") as client:
            stream = await client.responses.create(
                model=MODEL, input=text, instructions="Be brief.", max_output_tokens=8, stream=True, **GREEDY
            )
            events: list[Any] = [event async for event in stream]
        assert events[-1].type == "response.completed"
        said.append(([event.type for event in events], events[-1].response.output[0].content[0].text))
    assert said[0] == said[1]


def test_openai_errors(place: Served) -> None:
    """The engine's refusal is the SDK's exception for it."""
    for client in openais(place):
        with client, pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model=MODEL, messages=user("x"), extra_body={"grammar": "root ::= ("})
        body: Any = caught.value.body
        assert (caught.value.status_code, body["type"]) == (400, "invalid_request_error")


def test_openai_models(place: Served) -> None:
    """The list of models is the engine's."""
    proxied, direct = openais(place)
    with proxied, direct:
        assert [model.id for model in proxied.models.list()] == [model.id for model in direct.models.list()]


# --- Anthropic


def test_anthropic_messages(place: Served, text: str) -> None:
    """A message has the engine's text; cached and uncached tokens make up the prompt."""
    said = []
    for client in anthropics(place):
        with client:
            answer = client.messages.create(model=MODEL, max_tokens=8, messages=user(text), system="Be brief.")
            count = client.messages.count_tokens(model=MODEL, messages=user(text), system="Be brief.")
        used = answer.usage
        assert used.input_tokens + (used.cache_read_input_tokens or 0) == count.input_tokens
        said.append((answer.stop_reason, used.output_tokens, count.input_tokens))
    assert said[0] == said[1]


async def test_anthropic_stream(place: Served, text: str) -> None:
    """The SDK's stream helper ends in the engine's message, its usage that of the whole request."""
    said = []
    for url in (place.url, place.alone):
        async with (
            anthropic.AsyncAnthropic(base_url=url, api_key="k") as client,
            client.messages.stream(model=MODEL, max_tokens=8, messages=user(text), extra_body=GREEDY) as stream,
        ):
            pieces = [piece async for piece in stream.text_stream]
            final = await stream.get_final_message()
        used = final.usage
        said.append((pieces, final.stop_reason, used.input_tokens + (used.cache_read_input_tokens or 0)))
        assert used.input_tokens > 1
    assert said[0] == said[1]


def test_anthropic_tools(place: Served, text: str) -> None:
    """With tools the message's blocks are the engine's."""
    said = []
    tools: Any = [{"name": "look", "description": "Looks.", "input_schema": PARAMETERS}]
    for client in anthropics(place):
        with client:
            answer = client.messages.create(
                model=MODEL, max_tokens=60, messages=user(text), extra_body=GREEDY, tool_choice={"type": "any"},
                tools=tools,
            )  # fmt: skip
        said.append(answer.content)
    assert said[0] == said[1] != []


def test_anthropic_errors(place: Served) -> None:
    """What the proxy refuses by itself is an error of the API's own kind, with the request's id."""
    with anthropics(place)[0] as client, pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.create(model=MODEL, max_tokens=8, messages=user("x"), extra_body={"kv_transfer_params": {}})
    body: Any = caught.value.body
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert body["request_id"] == caught.value.response.headers["X-Request-Id"]


# --- curl


@pytest.mark.parametrize(
    "arguments",
    [[], ["--http1.0"], ["--compressed"], ["-H", "Transfer-Encoding: chunked"]],
    ids=["plain", "1.0", "compressed", "chunks"],
)
def test_curl(place: Served, text: str, arguments: list[str]) -> None:
    """curl streams an answer to its end, whatever it says about its body and the answer's."""
    body = json.dumps({"prompt": text, "n_predict": 4, "stream": True, **GREEDY})
    last = [json.loads(event.removeprefix("data: ")) for event in curl(place, body, *arguments)][-1]
    assert (last["stop"], last["tokens_predicted"]) == (True, 4)


def test_curl_waits_for_leave_to_send(place: Served) -> None:
    """A body that curl announces with Expect is asked for, and answered."""
    body = json.dumps({"prompt": "x", "n_predict": 2, "stream": True, "pad": "x" * 2_000_000})
    assert json.loads(curl(place, body, "-H", "Expect: 100-continue")[-1].removeprefix("data: "))["stop"]


def curl(place: Served, body: str, *arguments: str) -> list[str]:
    """The events of an answer."""
    program = shutil.which("curl")
    if program is None:
        pytest.skip("curl is not installed")
    command = [
        program,
        "-sSN",
        "--max-time",
        "20",
        "-H",
        "Content-Type: application/json",
        *arguments,
        f"{place.url}/completion",
        "--data-binary",
        "@-",
    ]
    done = subprocess.run(command, input=body.encode(), capture_output=True, check=True)
    return done.stdout.decode().strip().split("\n\n")
