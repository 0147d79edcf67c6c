"""Tokenizer files: what each kind says, and what a broken one ends in: one sentence."""

import base64
import json
import resource
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiktoken

from splitproxy.errors import ConfigError
from splitproxy.tokens import files
from splitproxy.tokens.codec import Codec
from splitproxy.tokens.patterns import PATTERNS
from splitproxy.tokens.vocabulary import Ends, UnsupportedVocabulary, Vocabulary
from tests.models import tiny_model
from tests.vocabularies import CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED, Words, model_of, spelled, symbols

Edit = Callable[[bytes], bytes]


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def gguf_file(*values: bytes, version: int = 3, count: int | None = None) -> bytes:
    """A file's head from its values."""
    return b"GGUF" + struct.pack("<IQQ", version, 0, len(values) if count is None else count) + b"".join(values)


def value(key: str, kind: int, content: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + content


def entry(key: str, content: str) -> bytes:
    return value("tokenizer.ggml." + key, 8, text(content))


def strings(key: str, entries: list[str], claimed: int | None = None) -> bytes:
    head = struct.pack("<IQ", 8, len(entries) if claimed is None else claimed)
    return value("tokenizer.ggml." + key, 9, head + b"".join(map(text, entries)))


def types(numbers: list[int]) -> bytes:
    content = struct.pack(f"<IQ{len(numbers)}i", 5, len(numbers), *numbers)
    return value("tokenizer.ggml.token_type", 9, content)


MODEL = [entry("model", "gpt2"), entry("pre", "qwen2")]
LISTS = [strings("tokens", ["a", "b", "ab"]), strings("merges", ["a b"])]

BROKEN: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is no GGUF file"),
    "other magic": (b"GGML" + b"\0" * 40, "is no GGUF file"),
    "magic alone": (b"GGUF", "cut off"),
    "version 1": (gguf_file(version=1), "version 1"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "little-endian"),
    "a 5 GB string": (gguf_file(value("general.name", 8, struct.pack("<Q", 5 * 2**30) + b"x" * 64)), "cut off"),
    "a 5 GB key": (gguf_file(struct.pack("<Q", 5 * 2**30) + b"x" * 64), "cut off"),
    "a length beyond 64 bits of file": (gguf_file(struct.pack("<Q", 2**64 - 1) + b"x" * 64), "cut off"),
    "a 5 GB list": (gguf_file(*MODEL, strings("tokens", ["a"], 5 * 2**30)), "list of 5368709120 entries"),
    "a 5 GB list of numbers": (
        gguf_file(value("tokenizer.ggml.token_type", 9, struct.pack("<IQ", 5, 5 * 2**30) + b"\0" * 64)),
        "list of 5368709120 entries",
    ),
    "a 5 GB list that does not matter": (
        gguf_file(value("other", 9, struct.pack("<IQ", 0, 5 * 2**30) + b"\0" * 64)),
        "list of 5368709120 entries",
    ),
    "more values than bytes": (gguf_file(*MODEL, count=2**40), "list of 1099511627776 entries"),
    "unknown kind of value": (gguf_file(value("x", 77, b"\0" * 8)), "unknown kind 77"),
    "list of lists": (gguf_file(value("x", 9, struct.pack("<IQ", 9, 1) + b"\0" * 16)), "list of the unknown kind 9"),
    "no tokenizer": (gguf_file(value("general.name", 8, text("x"))), "holds no tokenizer"),
    "no tokens": (gguf_file(*MODEL, LISTS[1]), "no list tokenizer.ggml.tokens"),
    "no merges": (gguf_file(*MODEL, LISTS[0]), "no list tokenizer.ggml.merges"),
    "merges that are none": (gguf_file(*MODEL, LISTS[0], strings("merges", ["ab"])), "no pair of words"),
    "merges of no bytes": (gguf_file(*MODEL, LISTS[0], strings("merges", ["a \u4f60"])), "no pair of words"),
    "tokens of another kind": (gguf_file(*MODEL, entry("tokens", "a"), LISTS[1]), "no list tokenizer.ggml.tokens"),
    "too few types": (gguf_file(*MODEL, *LISTS, types([1])), "3 tokens, but 1 token types"),
    "a name that is a number": (
        gguf_file(value("tokenizer.ggml.model", 4, struct.pack("<I", 1))),
        "as something else than str",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_model_file_ends_in_one_sentence(name: str, tmp_path: Path) -> None:
    """Whatever a file claims, reading it ends quickly, without memory gone, and says which file and what is wrong."""
    content, sentence = BROKEN[name]
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ConfigError) as caught:
        files.read(str(path), "", {})
    (fault,) = caught.value.faults
    assert fault.startswith(f"tokenizer: {path}: ")
    assert sentence in fault
    assert "\n" not in fault
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 100 * 1024


def test_a_model_file_may_be_cut_anywhere(tmp_path: Path) -> None:
    """A download that broke off is a fault of the configuration, wherever it broke off."""
    whole = gguf_file(*MODEL, *LISTS, types([1, 1, 1]))
    path = tmp_path / "model.gguf"
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(ConfigError):
            files.read(str(path), "", {})
    path.write_bytes(whole)
    assert files.read(str(path), "", {}).words == {b"a": 0, b"b": 1, b"ab": 2}


@pytest.mark.parametrize(
    ("head", "reason"),
    [
        ([entry("model", "llama")], "'llama'"),
        ([entry("model", "gpt2"), entry("pre", "made-up"), *LISTS], "'made-up'"),
        ([*MODEL, value("general.name", 8, text("Phi-3 mini")), *LISTS], "white space"),
        ([entry("model", "gpt2"), entry("pre", "llama-bpe"), *LISTS], "does not say which"),
    ],
)
def test_what_cannot_be_done_here_is_no_fault(head: list[bytes], reason: str, tmp_path: Path) -> None:
    """Sentence-piece models, unknown families and files that leave something open: the engine is asked instead."""
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_file(*head))
    with pytest.raises(UnsupportedVocabulary, match=reason):
        files.read(str(path), "", {})


def test_a_model_file_without_a_family_is_of_the_default_one(tmp_path: Path) -> None:
    """Files from before families had names are cut as engines cut them."""
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_file(entry("model", "gpt2"), *LISTS))
    assert files.read(str(path), "", {}).pattern == PATTERNS["default"]


def test_a_model_file_is_read_as_the_engines_read_it(tmp_path: Path) -> None:
    """Types make tokens special, and so do some names, unless the file gives the purpose to another token."""
    names = ["<a>", "<b>", "<c>", "<unused>", "<|im_end|>", "<fim_prefix>", "<|fim_middle|>"]
    kinds = [CONTROL, USER_DEFINED, UNKNOWN, UNUSED, NORMAL, NORMAL, NORMAL]
    words = Words(
        [*symbols(), "Ġa", *names], [NORMAL] * 257 + kinds, ["Ġ a"],
        keys=(("fim_mid_token_id", 0), ("bos_token_id", 257), ("add_bos_token", True), ("eos_token_id", 258)),
    )  # fmt: skip
    read = files.read(str(model_of(words, tmp_path)), "", {})
    assert read.special == {"<a>": 257, "<b>": 258, "<c>": 259, "<|im_end|>": 261, "<fim_prefix>": 262}
    assert read.merges == [(b" ", b"a")]
    assert read.words[b" a"] == 256
    assert read.ends == Ends(257, None)


def test_words_with_names_that_engines_know_are_special(tmp_path: Path) -> None:
    """In files that know no types, too, a word like </s> is found before a text is cut."""
    path = tmp_path / "x.tiktoken"
    path.write_bytes(RANKS + base64.b64encode(b"</s>") + b" 257\n")
    assert files.read(str(path), "qwen2", {"<|x|>": 258}).special == {"</s>": 257, "<|x|>": 258}


# -- tokenizer.json ----------------------------------------------------------------------------------------------------


def tokenizer_json(**changes: Any) -> dict[str, Any]:
    """The tiny model's vocabulary as Hugging Face would keep it."""
    read = files.read(str(tiny_model("dense")), "", {})
    special = [{"id": token, "content": name, "special": True} for name, token in read.special.items()]
    assert read.merges
    model = {
        "type": "BPE",
        "vocab": {spelled(word): token for word, token in read.words.items()},
        "merges": [[spelled(left), spelled(right)] for left, right in read.merges],
    }
    head = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    author = head + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    split = {"type": "Split", "pattern": {"Regex": author}, "behavior": "Isolated"}
    cut = {"type": "Sequence", "pretokenizers": [split, {"type": "ByteLevel", "use_regex": False}]}
    whole = {"normalizer": {"type": "NFC"}, "pre_tokenizer": cut, "added_tokens": special, "model": model}
    return whole | changes


def read_json(folder: Path, content: Any, family: str = "") -> Vocabulary:
    path = folder / "tokenizer.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return files.read(str(path), family, {})


def test_a_tokenizer_json_gives_the_ids_of_the_model_file(tmp_path: Path) -> None:
    """Both files of one model, one encoder."""
    sample = "<|im_start|>user\nThe garden's 123 letters\n\n  wait<|im_end|>"
    ours = Codec(read_json(tmp_path, tokenizer_json())).encode(sample)
    assert ours == Codec(files.read(str(tiny_model("dense")), "", {})).encode(sample)


DIGITS = {"type": "Digits", "individual_digits": True}


@pytest.mark.parametrize(
    ("rules", "family"),
    [
        ({"type": "ByteLevel", "add_prefix_space": False}, "gpt-2"),
        (
            {
                "type": "Sequence",
                "pretokenizers": [{"type": "Digits", "individual_digits": True}, {"type": "ByteLevel"}],
            },
            "smollm",
        ),
    ],
)
def test_a_tokenizer_json_tells_its_family(rules: dict[str, Any], family: str, tmp_path: Path) -> None:
    """The rules of cutting stand for the family that engines take the model for."""
    assert read_json(tmp_path, tokenizer_json(pre_tokenizer=rules)).pattern == PATTERNS[family]


def test_a_family_can_be_named(tmp_path: Path) -> None:
    """tokenizer.pattern wins over rules that are not known; whole words are as the file says."""
    unknown = tokenizer_json(pre_tokenizer={"type": "ByteLevel", "use_regex": False})
    with pytest.raises(UnsupportedVocabulary, match=r"tokenizer\.pattern"):
        read_json(tmp_path, unknown)
    assert read_json(tmp_path, unknown, "llama-bpe").pattern.expression == PATTERNS["llama-bpe"].expression
    with pytest.raises(ConfigError, match=r"must be one of .*qwen2"):
        read_json(tmp_path, unknown, "qwen-2")


def test_a_tokenizer_json_tells_the_ends(tmp_path: Path) -> None:
    """What the template puts around a single text."""
    single = [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    steps = {
        "type": "Sequence",
        "processors": [{"type": "ByteLevel"}, {"type": "TemplateProcessing", "single": single}],
    }
    read = read_json(tmp_path, tokenizer_json(post_processor=steps))
    assert read.ends == Ends(read.special["<|im_start|>"], None)
    assert read_json(tmp_path, tokenizer_json()).ends == Ends()


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("{", "not valid JSON"),
        ({}, "model is no object"),
        ({"model": []}, "model is no object"),
        ({"model": {"type": "BPE"}, "pre_tokenizer": {"type": "ByteLevel"}}, "model.vocab is no object"),
        (lambda: tokenizer_json(model=tokenizer_json()["model"] | {"merges": None}), "no list model.merges"),
        (lambda: tokenizer_json(model=tokenizer_json()["model"] | {"merges": ["ab"]}), "no pair of words"),
        (lambda: tokenizer_json(model=tokenizer_json()["model"] | {"merges": [5]}), "no pair of words"),
        (lambda: tokenizer_json(model=tokenizer_json()["model"] | {"vocab": {"a": -1}}), "no number"),
        (lambda: tokenizer_json(added_tokens=[{"id": "1", "content": "x"}]), "without a proper id"),
    ],
)
def test_a_broken_tokenizer_json_ends_in_one_sentence(content: Any, sentence: str, tmp_path: Path) -> None:
    """It names the file and what is missing."""
    with pytest.raises(ConfigError, match=sentence) as caught:
        read_json(tmp_path, content() if callable(content) else content)
    assert "tokenizer.json: " in caught.value.faults[0]


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"type": "Unigram", "vocab": []}},
        {"normalizer": {"type": "Lowercase"}},
        {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Prepend"}]}},
        {"pre_tokenizer": {"type": "Metaspace"}},
        {"pre_tokenizer": None},
    ],
)
def test_a_tokenizer_json_of_another_kind_is_no_fault(changes: dict[str, Any], tmp_path: Path) -> None:
    """Unigram models, rewriting of text and cutting at blanks are the engine's."""
    with pytest.raises(UnsupportedVocabulary):
        read_json(tmp_path, tokenizer_json(**changes))


# -- ranks -------------------------------------------------------------------------------------------------------------

RANKS = b"".join(b"%s %d\n" % (base64.b64encode(bytes([byte])), byte) for byte in range(256)) + b"YWI= 256\n"


def test_a_file_of_ranks_is_read(tmp_path: Path) -> None:
    """Its words are ranks and ids; pattern and special tokens come from the configuration, the ends from nowhere."""
    path = tmp_path / "x.tiktoken"
    path.write_bytes(RANKS)
    read = files.read(str(path), "qwen2", {"<|x|>": 257})
    assert read.ends is None
    assert Codec(read).encode("ab<|x|>b").to_list() == [256, 257, 98]


@pytest.mark.parametrize(
    ("content", "family", "special", "sentence"),
    [
        (RANKS, "", {}, "tokenizer.pattern must name it"),
        (RANKS, "nothing", {}, "must be one of"),
        (b"", "qwen2", {}, "holds no ranks"),
        (b"YWI= 256 7\n", "qwen2", {}, "line 1 is not"),
        (RANKS + b"!!!! 257\n", "qwen2", {}, "line 258 is not"),
        (b"YWI= x\n", "qwen2", {}, "line 1 is not"),
        (b"\xff\xfe\0\0" * 9, "qwen2", {}, "line 1 is not"),
        (RANKS + b"YWJj 256\n", "qwen2", {}, "an id twice"),
        (RANKS, "qwen2", {"<|x|>": 5}, "an id twice"),
        (RANKS + b"YWJj 99999999999\n", "qwen2", {}, "no id"),
    ],
)
def test_a_broken_file_of_ranks_ends_in_one_sentence(
    content: bytes, family: str, special: dict[str, int], sentence: str, tmp_path: Path
) -> None:
    """It names the file, and the line where there is one."""
    path = tmp_path / "x.tiktoken"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=sentence):
        files.read(str(path), family, special)


def test_a_broken_source_ends_the_start(tmp_path: Path) -> None:
    """The command exits with 2 and one sentence, before any engine is needed; no traceback, no log."""
    path = tmp_path / "model.gguf"
    path.write_bytes(BROKEN["a 5 GB list"][0])
    config = tmp_path / "c.toml"
    engines = '[[engines]]\nrole = "decode"\nurl = "http://127.0.0.1:9"\n'
    config.write_text(f'tokenizer.source = "{path}"\nsplit.dir = "{tmp_path}/s"\nlisten = "127.0.0.1:0"\n{engines}')
    command = [sys.executable, "-m", "splitproxy", "serve", "-c", str(config)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert line.startswith(f"tokenizer: {path}: claims to hold a list of 5368709120 entries")


def test_a_source_that_is_not_there_ends_in_one_sentence(tmp_path: Path) -> None:
    """A path that leads nowhere, or to a folder."""
    for path in (tmp_path / "nothing.gguf", tmp_path):
        with pytest.raises(ConfigError, match="cannot be read: "):
            files.read(str(path), "qwen2", {})


def test_an_encoding_of_tiktoken_is_never_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not in tiktoken's cache is a fault of the configuration; nothing is downloaded at the start."""
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})
    fetch = tiktoken.load.read_file
    with pytest.raises(ConfigError, match="tiktoken:o200k_base: is not in tiktoken's cache"):
        files.read("tiktoken:o200k_base", "", {})
    assert tiktoken.load.read_file is fetch
    with pytest.raises(ConfigError, match=r"no encoding of tiktoken; it has .*cl100k_base"):
        files.read("tiktoken:made-up", "", {})


def test_an_encoding_of_tiktoken_is_read_from_its_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its words and special tokens, cut as engines cut text for such models."""
    ranks = {bytes([byte]): byte for byte in range(256)} | {b"ab": 256}
    cached = tiktoken.Encoding("o200k_base", pat_str=".", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 999})
    monkeypatch.setitem(tiktoken.registry.ENCODINGS, "o200k_base", cached)
    read = files.read("tiktoken:o200k_base", "", {})
    assert read.pattern == PATTERNS["gpt-4o"]
    assert Codec(read).encode("ab<|endoftext|>").to_list() == [256, 999]
