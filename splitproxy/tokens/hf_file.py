"""The vocabulary of a Hugging Face tokenizer.json, as an engine would read the model that was made from it."""

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson

from splitproxy.tokens.names import special_words
from splitproxy.tokens.patterns import AUTHORS, Pattern
from splitproxy.tokens.vocabulary import (
    BrokenFile,
    Ends,
    UnsupportedVocabulary,
    Vocabulary,
    merge_pair,
    pattern_named,
    word_bytes,
)

_LIMIT_BYTES = 256 * 2**20


def read(path: Path, family: str) -> Vocabulary:
    """The vocabulary of a tokenizer.json. `family` names the pattern; "" finds it by the file's own rules.

    Raises BrokenFile, UnsupportedVocabulary, and OSError.
    """
    if path.stat().st_size > _LIMIT_BYTES:
        raise BrokenFile(f"is larger than {_LIMIT_BYTES // 2**20} MiB, which no tokenizer is")
    try:
        file = orjson.loads(path.read_bytes())
    except orjson.JSONDecodeError as error:
        raise BrokenFile(f"is not valid JSON: {error.msg} (line {error.lineno}, column {error.colno})") from None
    model = _table(_table(file, "the file").get("model"), "model")
    if model.get("type", "BPE") != "BPE":
        raise UnsupportedVocabulary(f"its tokenizer is of the kind {model.get('type')!r}, not byte-level BPE")
    _refuse_rewriting(file.get("normalizer"))
    pattern = pattern_named(family) if family else _pattern(file.get("pre_tokenizer"))
    pattern = dataclasses.replace(pattern, whole_words=model.get("ignore_merges") is True)
    added = file.get("added_tokens") or ()
    special = {str(_entry(token, "content", str)): int(_entry(token, "id", int)) for token in added}
    listed = _table(model.get("vocab"), "model.vocab")
    if not all(type(token) is int and token >= 0 for token in listed.values()):
        raise BrokenFile("holds an id in model.vocab that is no number")
    words = {word: token for text, token in listed.items() if (word := word_bytes(text))}
    ends = _ends(file.get("post_processor"), special)
    special = special_words(words.items()) | special
    return Vocabulary(words, list(_pairs(model.get("merges"))), special, pattern, ends)


def _table(value: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise BrokenFile(f"is no tokenizer.json: {what} is no object")
    return value


def _entry(token: Any, name: str, kind: type) -> Any:
    value = token.get(name) if isinstance(token, dict) else None
    if type(value) is not kind:
        raise BrokenFile(f"holds an added token without a proper {name}")
    return value


def _refuse_rewriting(normalizer: Any) -> None:
    """Engines read text as it is. NFC, which some files ask for, they leave out."""
    if isinstance(normalizer, dict) and normalizer.get("type") != "NFC":
        parts = normalizer.get("normalizers")
        if parts is None or any(not isinstance(part, dict) or part.get("type") != "NFC" for part in parts):
            raise UnsupportedVocabulary(f"it rewrites text first ({normalizer.get('type')})")


def _pattern(rules: Any) -> Pattern:
    """The engine's pattern for a file's own rules of cutting."""
    steps = rules.get("pretokenizers", [rules]) if isinstance(rules, dict) else []
    kinds = [step.get("type") if isinstance(step, dict) else None for step in steps]
    if not kinds or kinds[-1] != "ByteLevel":
        raise UnsupportedVocabulary("it does not merge bytes (there is no ByteLevel step)")
    if kinds == ["ByteLevel"] and steps[0].get("use_regex", True):
        return pattern_named("gpt-2")
    if kinds == ["Digits", "ByteLevel"] and steps[0].get("individual_digits") and steps[1].get("use_regex", True):
        return pattern_named("smollm")
    if kinds == ["Split", "ByteLevel"] and not steps[1].get("use_regex", True):
        expression = (steps[0].get("pattern") or {}).get("Regex")
        if expression in AUTHORS:
            return pattern_named(AUTHORS[expression])
    raise UnsupportedVocabulary("its way of cutting text is not known here; tokenizer.pattern can name it")


def _pairs(merges: Any) -> Iterator[tuple[bytes, bytes]]:
    if not isinstance(merges, list) or not merges:
        raise BrokenFile("holds no list model.merges")
    for line in merges:
        pair = merge_pair(line if isinstance(line, str) else " ".join(line)) if _is_merge(line) else None
        if pair is None:
            raise BrokenFile("holds a merge that is no pair of words")
        yield pair


def _is_merge(line: Any) -> bool:
    return isinstance(line, str) or (isinstance(line, list) and all(isinstance(side, str) for side in line))


def _ends(processor: Any, special: Mapping[str, int]) -> Ends:
    """The tokens around a single text."""
    steps = processor.get("processors", [processor]) if isinstance(processor, dict) else []
    sound = [step for step in steps if isinstance(step, dict)]
    templates = [step.get("single") for step in sound if step.get("type") == "TemplateProcessing"]
    names: list[str | None] = []
    for part in (templates or [None])[0] or ():
        name = (part.get("SpecialToken") or {}).get("id") if isinstance(part, dict) else None
        names.append(name)
    place = names.index(None) if None in names else len(names)
    first, last = names[:place], names[place + 1 :]
    if len(first) > 1 or len(last) > 1 or not all(name in special for name in (*first, *last)):
        raise UnsupportedVocabulary("it puts more around a text than a token at each end")
    return Ends(*(special[str(side[0])] if side else None for side in (first, last)))
