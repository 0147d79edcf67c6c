"""How each family of models cuts text into words before it merges bytes, by llama.cpp's names of the families.

Engines differ from the models' authors in details (marks, digits, the case of letters): these are the engines' rules,
written for tiktoken. The engines cut some texts in several passes; here one expression does it, which says with
look-aheads where an earlier pass would have ended a piece. A family that is missing here is left to the engine.
"""

from dataclasses import dataclass

# Letters and numbers as the engines' tables know them. Later Unicode versions, which the expression engine may follow
# first, added letters that are unassigned code points for an engine.
_KNOWN = r"\p{Age:15.1}"


def _known(category: str) -> str:
    return rf"[\p{{{category}}}&&{_KNOWN}]"


L, N, M, P, S = (_known(name) for name in "LNMPS")

# Not (?i:...): case folding would let the long s through.
_CONTRACTION = r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]"
_LOWER_CONTRACTION = r"'s|'t|'re|'ve|'m|'ll|'d"
# All of a run of white space but the last one before a word.
_BLANKS = r"\s+(?!\S)|\s+"


def _words(
    numbers: str, *, contraction: str = _CONTRACTION, marks: str = "", line_ends: bool = True, blanks: str = _BLANKS
) -> str:
    """The llama-3 way: a word takes one sign in front of it; with `line_ends`, signs take those behind them."""
    letters = f"[{L}{marks}]" if marks else L
    signs = rf"[^\s{L}{marks}{N}]+[\r\n]*" if line_ends else rf"[^\s{L}{marks}{N}\r\n]+"
    alternatives = (contraction, rf"[^\r\n{L}{N}]?{letters}+", numbers, rf" ?{signs}", r"\s*[\r\n]+", blanks)
    return "|".join(part for part in alternatives if part)


def _gpt2(*, digits_apart: bool) -> str:
    """The GPT-2 way: a word takes one blank in front of it. With `digits_apart` each digit was cut out before."""
    numbers = N if digits_apart else rf" ?{N}+"
    # Before a digit that was cut out, a run of white space is a piece of its own.
    blanks = rf"\s+(?={N})|{_BLANKS}" if digits_apart else _BLANKS
    return rf"{_LOWER_CONTRACTION}| ?{L}+|{numbers}| ?[^\s{L}{N}]+|{blanks}"


def _cased(numbers: str, *, contraction: bool) -> str:
    """The o200k way, as engines do it: letters outside ASCII count as capital and small at once; marks are signs."""
    upper, lower = rf"[{L}&&[^a-z]]", rf"[{L}&&[^A-Z]]"
    after = rf"(?:{_CONTRACTION})?" if contraction else ""
    return "|".join((
        rf"[^\r\n{L}{N}]?{upper}*{lower}+{after}",
        rf"[^\r\n{L}{N}]?{upper}+{lower}*{after}",
        numbers,
        rf" ?[^\s{L}{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        _BLANKS,
    ))  # fmt: skip


def _eastern(numbers: str, *, line_ends: bool) -> str:
    """The DeepSeek way: numbers, then runs of Chinese and Japanese, then the rest; each pass bounds the next."""
    east = r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]"
    signs = rf"[{P}{S}]"
    other = rf"[^\s{L}{M}{N}{P}{S}]"  # what no alternative takes: it joins the word after it, or stays alone
    before = rf"[^\r\n{L}{P}{S}{N}]"
    return "|".join((
        numbers,
        rf"[{before}&&{east}]?[[{L}{M}]&&{east}]+",
        rf"[{signs}&&{east}]+",
        rf"[{other}&&{east}]+(?=[{other}&&{east}][[{L}{M}]&&{east}])|[{other}&&{east}]+",
        r"[!-/:-@\[-`{-~][A-Za-z]+",
        rf"[{before}--{east}]?[[{L}{M}]--{east}]+",
        rf" ?[{signs}--{east}]+" + (r"[\r\n]*" if line_ends else ""),
        r"\s*[\r\n]+" if line_ends else r"[\r\n]",
        rf"\s+(?=[{N}{east}])",
        _BLANKS,
        rf"[{other}--{east}]+(?=[{other}--{east}][[{L}{M}]--{east}])|[{other}--{east}]+",
    ))  # fmt: skip


def _code() -> str:
    """The way of DeepSeek Coder: words and signs take a blank in front of them; eastern runs are cut out of them."""
    east = r"[[\u0800-\u9fa5\uac00-\ud7ff]--\s]"
    blank, rest = r"[\s--[\r\n]]", rf"[^{L}{P}{N}\r\n]"
    parts = [r"[\r\n]", N]
    for kind in (L, P):
        parts += [rf"{blank}?[{kind}--{east}]+", rf"[{kind}&&{east}]+", rf"{blank}(?=[{kind}&&{east}])"]
    run = rf"[{rest}--{east}]+"
    return "|".join((*parts, rf"[{rest}&&{east}]+", rf"{run}(?={blank}[{L}{P}])", run))


def _signs_first(signs: str, *, blank_before_digits: bool) -> str:
    """The Falcon way: runs of signs, then words as GPT-2 has them, then ASCII digits by three."""
    rest = "(?:(?![0-9]{3})" + N + ")+"
    numbers = rf"[0-9]{{3}}|[ ](?=[0-9]{{3}})| ?{rest}" if blank_before_digits else rf"[0-9]{{3}}|{rest}|[ ](?={N})"
    return rf"{signs}+| ?{L}+|{numbers}| ?[[^\s{L}{N}]--{signs}]+|\s+(?={signs})|{_BLANKS}"


def _by_line() -> str:
    """Qwen2's way, each line by itself."""
    blank = r"[\s--\n]"
    head = rf"{_CONTRACTION}|[^\r\n{L}{N}]?{L}+|{N}| ?[^\s{L}{N}]+\r*"
    return rf"{head}|\n+|{blank}*\r+|{blank}+(?!\S)|{blank}+"


def _between_stops(*, digits_apart: bool) -> str:
    """The Bloom way: a word is whatever stands between blanks and stops; it takes one blank in front of it."""
    stops = r"[(\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]"
    word = rf"[^{stops}]"
    gap = rf"{stops}+(?=[ ]{word})|{stops}+"
    if digits_apart:
        return rf"{N}| ?[{word}--{N}]+|[ ](?={N})|{gap}"
    return rf" ?{word}+|{gap}"


_JAIS2_BLANKS = "|".join(rf"\s{{{n}}}(?!\S)" for n in (512, 256, 128, 64, 32, 16, 8, 4)) + r"|\s{1,2}(?!\S)|\s"
_EXAONE_MOE = (
    rf"{_CONTRACTION}|[^\r\n{L}{N}]?(?:{L}{M}*(?:[ ]{L}{M}*)*)+|{N}| ?[^\s{L}{N}]+[\r\n/]?|\s*[\r\n]|{_BLANKS}"
)


@dataclass(frozen=True, slots=True)
class Pattern:
    """How a family cuts text, and two habits of it."""

    expression: str
    whole_words: bool = False  # a piece that is a token as it stands is taken before any merge
    begins: bool = False  # prompts get the first token in front unless the file says otherwise


_LLAMA3 = _words(rf"{N}{{1,3}}")
_QWEN2 = _words(N)
_GPT2 = _gpt2(digits_apart=False)
_SMOLLM = _gpt2(digits_apart=True)
_GPT4O = _cased(rf"{N}{{1,3}}", contraction=True)

_FAMILIES: tuple[tuple[Pattern, str], ...] = (
    (
        Pattern(_LLAMA3, whole_words=True, begins=True),
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
    ),
    (Pattern(_LLAMA3), "dbrx smaug-bpe chatglm-bpe"),
    (Pattern(_LLAMA3, whole_words=True), "glm4 glm5"),
    (
        Pattern(_QWEN2),
        "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2 "
        "bailingmoe bailingmoe2 llada-moe",
    ),
    (Pattern(_words(N, marks=M)), "qwen35"),
    (Pattern(_words(N, contraction="")), "ufakzeka"),
    (Pattern(_words(N, line_ends=False)), "seed-coder"),
    (
        Pattern(_GPT2),
        "gpt-2 phi-2 gigachat a.x-4.0 mellum mpt olmo jais trillion granite-docling exaone4",
    ),
    (Pattern(_SMOLLM), "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2"),
    (Pattern(_GPT4O), "gpt-4o llama4 kanana2 talkie minimax-m2"),
    (Pattern(_cased(N, contraction=False), whole_words=True, begins=True), "tekken"),
    (Pattern(_eastern(rf"{N}{{1,3}}", line_ends=True)), "deepseek-v3 hunyuan-dense joyai-llm hy_v4"),
    (Pattern(_eastern(N, line_ends=False)), "spark2_5"),
    (Pattern(_code()), "deepseek-coder"),
    (Pattern(_words(rf"{N}{{1,3}}", blanks=rf"\s+(?={N})|{_BLANKS}"), whole_words=True), "minicpm5"),
    (Pattern(_words(rf"{N}{{1,3}}", blanks=_JAIS2_BLANKS)), "jais-2"),
    (Pattern(_EXAONE_MOE), "exaone-moe"),
    (Pattern(_by_line()), "laguna"),
    (Pattern(_signs_first(rf"[{P}$+<=>\^~|`]", blank_before_digits=True)), "falcon"),
    (Pattern(_signs_first(rf"[{P}$+<=>\^~|]", blank_before_digits=False)), "default"),
    (Pattern(_between_stops(digits_apart=False)), "bloom poro-chat gpt3-finnish"),
    (Pattern(_between_stops(digits_apart=True)), "viking"),
)  # fmt: skip

PATTERNS = {name: pattern for pattern, names in _FAMILIES for name in names.split()}
"""By `tokenizer.ggml.pre`."""


def _as_authors(expression: str) -> str:
    """An expression as the models' authors write it in a tokenizer.json."""
    for name in "LNMPS":
        expression = expression.replace(_known(name), rf"\p{{{name}}}")
    return expression.replace(_CONTRACTION, "(?i:'s|'t|'re|'ve|'m|'ll|'d)")


def _cased_by_authors(numbers: str, *, contraction: bool) -> str:
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    after = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?" if contraction else ""
    head = rf"[^\r\n\p{{L}}\p{{N}}]?{upper}*{lower}+{after}|[^\r\n\p{{L}}\p{{N}}]?{upper}+{lower}*{after}"
    return rf"{head}|{numbers}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|{_BLANKS}"


AUTHORS = {
    _as_authors(_LLAMA3): "llama-bpe",
    _as_authors(_QWEN2): "qwen2",
    _as_authors(_words(N, marks=M)): "qwen35",
    _cased_by_authors(r"\p{N}{1,3}", contraction=True): "gpt-4o",
    _cased_by_authors(r"\p{N}", contraction=False): "tekken",
}
"""By the expression in a model's tokenizer.json: the family that engines take it for."""
