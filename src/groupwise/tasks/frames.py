"""Frames a source and its target in the tokens that a model's family has for them: begin, what parts the two, end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from groupwise.errors import UserError, reason

LINE = "\n"
SOURCE, TARGET = "<source>", "<target>"
"""Texts that stand in a chat template for those of an example."""
TODAY = "{% macro strftime_now(format) %}26 Jul 2024{% endmacro %}"
"""Before a template: what it takes for today (the day that Llama's own fall back to), so that no run depends on it."""


@dataclass(frozen=True)
class Frame:
    """begin, source, ending, space + target, end.

    Args:
        begin: tokens before the source.
        ending: tokens that tell the model that the target comes now.
        end: the token that ends the target.
        space: of the target's text, between it and the ending.
        delimiter: the end of every source's text, in whose place the ending stands; empty where sources have none.
        turns: source and target are turns of a chat.
    """

    begin: list[int]
    ending: list[int]
    end: int
    space: str
    delimiter: str
    turns: bool = False


def plain_frame(tokenizer: Any, delimiter: str) -> Frame:
    """The frame of a model that continues text.

    * begin: the tokeniser's own first token, where it puts one before every text (Llama, Gemma, OPT; not GPT-2, Qwen).
    * ending: a dialogue's own last line, `delimiter`. For tables, which have none, the token that both begins and ends
      a text, as in prefix tuning (Li & Liang, 2021) and private fine-tuning of GPT-2 (Li et al., 2022): "source
      <|endoftext|> target <|endoftext|>", without the space before each of the two. Where no token is both, a line
      break: in the middle of a sequence a begin or an end alone would be new to the model.
    * end: the tokeniser's end of text.

    Raises:
        UserError: a tokeniser without an end of text.
    """
    end, begin = tokenizer.eos_token_id, tokenizer.bos_token_id
    if end is None:
        raise UserError("The tokeniser has no end-of-text token, which ends each target: choose a causal model's.")
    first = [begin] if begin is not None and tokenizer("a")["input_ids"][:1] == [begin] else []
    if delimiter:
        return Frame(first, _tokens(tokenizer, delimiter), end, " ", delimiter)
    if begin == end:
        return Frame(first, [end], end, " ", "")
    return Frame(first, _tokens(tokenizer, LINE), end, "", "")


def chat_frame(tokenizer: Any, delimiter: str) -> Frame:
    """The frame of a model that answers: the source is a user's turn and the target the answer, by its chat template.

    What the template puts around two texts is found once, by two that stand for them. So whatever it writes before an
    answer (an empty thought, for models that think) is part of every prompt, in training as in generation. The answer
    ends with the token that ends its turn. Sources go without their `delimiter`, whose place the turn takes.

    Raises:
        UserError: no chat template, or one that does not show both texts once, as they are.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise UserError("data.chat=true, but the tokeniser has no chat template: give that of an instructed model.")
    turns = [{"role": "user", "content": SOURCE}, {"role": "assistant", "content": TARGET}]
    try:
        template = TODAY + tokenizer.get_chat_template()
        text = tokenizer.apply_chat_template(turns, chat_template=template, tokenize=False)
    except Exception as error:  # whatever a template raises by itself
        raise UserError(
            f"The tokeniser's chat template takes no question with its answer ({reason(error)}): leave data.chat out."
        ) from error
    before, source, rest = text.partition(SOURCE)
    between, target, after = rest.partition(TARGET)
    if not source or not target or SOURCE in rest or TARGET in after:
        raise UserError("The tokeniser's chat template shows texts otherwise than as they are: leave data.chat out.")
    ending = next(iter(_tokens(tokenizer, after)), None)
    end = ending if ending in tokenizer.added_tokens_decoder else tokenizer.eos_token_id
    if end is None:
        raise UserError("The tokeniser's chat template ends no turn by a token: leave data.chat out.")
    return Frame(_tokens(tokenizer, before), _tokens(tokenizer, between), end, "", delimiter, turns=True)


def _tokens(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
