"""Tokens that engines know by name."""

from collections.abc import Collection, Iterable

# Engines take tokens with these names for special ones even where the file calls them ordinary words ...
_ENDINGS = (
    "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <|endoftext|> </s> <|eom_id|> "
    "<EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|> <|tool_response> [e~[ <|channel|> "
    "<|message|> <|start|> <|constrain|> <\uff5cend\u2581of\u2581sentence\uff5c>"
)
# ... and these, unless the file gives another token for the purpose.
PURPOSES = {
    "fim_pre": "<|fim_prefix|> <fim-prefix> <fim_prefix> <\uff5cfim\u2581begin\uff5c> <PRE> \u2581<PRE> "
    "<|code_prefix|> <|prefix|>",
    "fim_suf": "<|fim_suffix|> <fim-suffix> <fim_suffix> <\uff5cfim\u2581hole\uff5c> <SUF> \u2581<SUF> "
    "<|code_suffix|> <|suffix|>",
    "fim_mid": "<|fim_middle|> <fim-middle> <fim_middle> <\uff5cfim\u2581end\uff5c> <MID> \u2581<MID> "
    "<|code_middle|> <|middle|>",
    "fim_pad": "<|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD]",
    "fim_rep": "<|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame>",
    "fim_sep": "<|file_sep|>",
}


def special_names(given: Collection[str] = ()) -> set[str]:
    """The names of tokens that engines find before a text is cut. `given` are purposes that the file fills itself."""
    names = set(_ENDINGS.split())
    for purpose, candidates in PURPOSES.items():
        if purpose not in given:
            names.update(candidates.split())
    return names


def special_words(words: Iterable[tuple[bytes, int]]) -> dict[str, int]:
    """The ordinary words of a vocabulary that engines take for special tokens because of their names."""
    names = {name.encode(): name for name in special_names()}
    return {names[word]: token for word, token in words if word in names}
