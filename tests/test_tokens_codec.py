"""The encoder: remembered pieces, bytes that a vocabulary lacks, ends of prompts, texts it must not try."""

import dataclasses
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitproxy.tokens import gguf_file
from splitproxy.tokens.codec import Codec, Unencodable
from splitproxy.tokens.patterns import PATTERNS
from splitproxy.tokens.vocabulary import Ends, Vocabulary
from tests.models import tiny_model
from tests.vocabularies import SORTS

MARKS = ("<|im_start|>", "<|im_end|>", "<think>")


@pytest.fixture(scope="module")
def tiny() -> Vocabulary:
    return gguf_file.read(tiny_model("dense"))


def bytes_only(**changes: object) -> Vocabulary:
    words = {bytes([byte]): byte for byte in range(256)}
    return dataclasses.replace(Vocabulary(words, [], {"<|x|>": 300}, PATTERNS["qwen2"], Ends()), **changes)  # type: ignore[arg-type]


pieces = st.one_of(st.sampled_from(MARKS), st.text(max_size=30), st.text(SORTS, max_size=12))


@settings(max_examples=200, deadline=None)
@given(st.lists(pieces, max_size=12), st.lists(st.integers(0, 300), max_size=6), st.integers(0, 4000))
def test_remembered_ids_are_those_of_the_whole(tiny: Vocabulary, parts: list[str], cuts: list[int], room: int) -> None:
    """However a conversation grew, and whatever was forgotten on the way, its ids are those of a fresh encoder."""
    text = "".join(parts)
    codec = Codec(tiny, memory_bytes=room)
    for cut in [*sorted(cuts), len(text)]:
        assert codec.encode(text[:cut]) == Codec(tiny, memory_bytes=0).encode(text[:cut])


def test_a_piece_is_encoded_once(tiny: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next turn of a conversation encodes only what is new."""
    codec = Codec(tiny)
    encoded: list[str] = []
    encode = codec._words.encode

    def noted(text: str) -> Sequence[int]:
        encoded.append(text)
        return encode(text)

    monkeypatch.setattr(codec._words, "encode", noted)
    codec.encode("<|im_start|>one<|im_end|>two")
    codec.encode("<|im_start|>one<|im_end|>two<|im_start|>three<|im_end|>one")
    assert encoded == ["one", "two", "three"]


def test_memory_is_bounded_in_bytes(tiny: Vocabulary) -> None:
    """What is remembered never exceeds the limit; what was used last stays."""
    codec = Codec(tiny, memory_bytes=20_000)
    for number in range(300):
        codec.encode(f"<|im_start|>{'word ' * 20}{number}<|im_end|>")
        assert codec.remembered_bytes <= 20_000
    assert codec.remembered_bytes > 15_000
    codec.encode("x" * 200_000)
    assert codec.remembered_bytes <= 20_000


def test_comparing_leaves_no_trace(tiny: Vocabulary) -> None:
    """Texts of a comparison are not remembered."""
    codec = Codec(tiny)
    codec.encode("some words", remember=False)
    codec.plain("some more")
    assert codec.remembered_bytes == 0


def test_bytes_without_a_token_are_dropped() -> None:
    """An engine leaves out a byte that its vocabulary lacks; so do we."""
    words = {bytes([byte]): byte for byte in range(256) if byte != ord("b")}
    assert Codec(bytes_only(words=words)).encode("abc").to_list() == [97, 99]


@pytest.mark.parametrize(
    ("ends", "ids"), [(Ends(), [97]), (Ends(1, None), [1, 97]), (Ends(1, 2), [1, 97, 2]), (Ends(None, 2), [97, 2])]
)
def test_ends(ends: Ends, ids: list[int]) -> None:
    """A prompt gets the tokens at its ends once more even where its text begins with one, as engines do."""
    assert Codec(bytes_only(ends=ends)).encode("a").to_list() == ids
    again = Codec(bytes_only(ends=ends, special={"<|x|>": 1})).encode("<|x|>a").to_list()
    assert again == [*ids[: ids.index(97)], 1, *ids[ids.index(97) :]]


def test_an_empty_prompt_has_its_ends_alone() -> None:
    """No text, no piece."""
    assert Codec(bytes_only(ends=Ends(1, 2))).encode("").to_list() == [1, 2]


def test_a_run_of_white_space_without_end_is_left_to_the_engine(capfd: pytest.CaptureFixture[str]) -> None:
    """The expression engine fails on a million blanks, and says so on the error output: it is not tried."""
    codec = Codec(bytes_only())
    with pytest.raises(Unencodable):
        codec.encode("a" + " \t" * 300_000)
    assert len(codec.encode(" " * 400_000 + "x")) == 400_001
    assert capfd.readouterr().err == ""


def test_a_failure_of_the_expression_engine_is_an_error_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the Rust side throws is no Exception, and would otherwise end the thread."""

    class PanicException(BaseException):
        pass

    def fail(_text: str) -> list[int]:
        raise PanicException

    codec = Codec(bytes_only())
    monkeypatch.setattr(codec._words._encoding, "encode_ordinary", fail)
    with pytest.raises(Unencodable):
        codec.encode("a")
