"""Named loads are the same each time, and no text is sent twice."""

import pytest

from splitproxy.measure.mixes import MIXES, plan


@pytest.mark.parametrize("mix", MIXES)
def test_a_plan_is_the_same_each_time(mix: str) -> None:
    """The same seed makes the same arrivals, lengths and words; another seed makes others."""
    assert plan(mix, 30, 2.0, 7) == plan(mix, 30, 2.0, 7)
    assert [prompt.at_s for prompt in plan(mix, 30, 2.0, 7)] != [prompt.at_s for prompt in plan(mix, 30, 2.0, 8)]


@pytest.mark.parametrize("mix", MIXES)
def test_another_run_has_other_words(mix: str) -> None:
    """Runs that are compared arrive alike and are equally long, and share no beginning that an engine could hold."""
    one, other = plan(mix, 30, 2.0, 7, run=1), plan(mix, 30, 2.0, 7, run=2)
    shape = [(prompt.at_s, prompt.tokens, prompt.answer_tokens, prompt.shared_tokens) for prompt in one]
    assert shape == [(prompt.at_s, prompt.tokens, prompt.answer_tokens, prompt.shared_tokens) for prompt in other]
    for a, b in zip(one, other, strict=True):
        assert a.text(1.0).split()[:40] != b.text(1.0).split()[:40]


def test_arrivals_keep_their_rate() -> None:
    """On average as many come as were asked for, one after the other, from the beginning on."""
    times = [prompt.at_s for prompt in plan("chat", 400, 5.0, 1)]
    assert times == sorted(times)
    assert times[0] == 0
    assert times[-1] == pytest.approx(80, rel=0.25)


def test_an_agent_goes_on_from_its_last_turn() -> None:
    """Turns of one agent share their beginnings, which grow; other agents share none of it."""
    prompts = plan("agent", 6, 1.0, 1)
    first, other, second = (prompts[number].text(1.0).split() for number in (0, 1, 3))
    shared = prompts[0].shared_tokens
    assert first[:shared] == second[:shared]
    assert first[:40] != other[:40]
    assert prompts[3].shared_tokens > shared


def test_documents_come_between_chats() -> None:
    """A minority of long prompts is what the mix is about; scale makes all of them shorter or longer."""
    prompts = plan("documents", 200, 1.0, 1)
    long = [prompt for prompt in prompts if prompt.kind == "document"]
    assert 0.15 < len(long) / len(prompts) < 0.35
    assert min(prompt.tokens for prompt in long) > max(p.tokens for p in prompts if p.kind == "chat")
    halved = plan("documents", 200, 1.0, 1, scale=0.5)
    assert all(abs(2 * half.tokens - whole.tokens) <= 2 or half.tokens == 8
               for half, whole in zip(halved, prompts, strict=True))  # fmt: skip
    assert len(prompts[0].text(0.5).split()) == pytest.approx(prompts[0].tokens / 2, abs=2)
