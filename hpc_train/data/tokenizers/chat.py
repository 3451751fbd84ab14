"""Render conversations with a tokenizer's chat template, and mark the tokens of the assistant's turns.

Templates run in the sandbox of transformers (jinja2.sandbox). A template that marks the assistant's part itself, with
`{% generation %}`, decides what counts; for any other, a turn is what the template adds to the text of the turns before
it and the prompt for an answer. A conversation may have tools (functions that the assistant may call), which the
template writes too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hpc_train.data.readers.records import first_line
from hpc_train.data.token_store import Tokens, choose_token_dtype
from hpc_train.data.tokenizers.tokenizer_folder import FolderTokenizer
from hpc_train.errors import UserError
from hpc_train.terminal import one_line

ROLES = ("system", "developer", "user", "assistant", "tool")
ASSISTANT = "assistant"
_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
Where = Callable[[], str]
Message = dict[str, Any]
Tools = list[dict[str, Any]] | None


class EncodedChat(NamedTuple):
    """A conversation as tokens."""

    tokens: Tokens
    counts: npt.NDArray[np.bool_]
    """(tokens,): whether the token is the assistant's, and so a target that counts."""


@dataclass(frozen=True)
class ChatEncoder:
    """Renders and tokenizes conversations."""

    renderer: Any
    """transformers.PreTrainedTokenizerFast"""
    template: str
    tool_template: str
    """The template of conversations that have tools; most tokenizers have one template for both."""
    vocab_size: int

    def encode(self, value: Any, where: Where, tools: Any = None) -> EncodedChat:
        """Encode one conversation, a list of messages. where: says which one it is. Raises UserError, one line.

        tools: JSON schemas of functions, as a list or as JSON text of one; None or empty: none.
        """
        messages, tools = check_messages(value, where), check_tools(tools, where)
        template = self.tool_template if tools else self.template
        _check_template(template, messages, tools, where)
        if not self.takes_parts:
            messages = [_join_text_parts(message) for message in messages]
        encode = self._encode_marked if has_marks(template) else self._encode_by_prefixes
        ids, counts = encode(messages, where, tools)
        return EncodedChat(np.array(ids, choose_token_dtype(self.vocab_size)), np.array(counts, np.bool_))

    @cached_property
    def takes_parts(self) -> bool:
        """Whether the template writes the texts of content that is a list of parts; most expect text alone."""
        probe = [{"role": "user", "content": [{"type": "text", "text": "0f9a"}, {"type": "text", "text": "77c3"}]}]
        try:
            text = self.renderer.apply_chat_template(probe, tokenize=False)
        except Exception:  # a template that adds a list to a text, or refuses it
            return False
        return "0f9a" in text and "77c3" in text and "'type'" not in text and '"type"' not in text

    def _encode_marked(self, messages: list[Message], where: Where, tools: Tools) -> tuple[list[int], list[bool]]:
        options = {"return_dict": True, "return_assistant_tokens_mask": True}
        encoded = self._apply(messages, where, tools, tokenize=True, **options)
        return list(encoded["input_ids"]), [bool(value) for value in encoded["assistant_masks"]]

    def _encode_by_prefixes(self, messages: list[Message], where: Where, tools: Tools) -> tuple[list[int], list[bool]]:
        text = self._apply(messages, where, tools, tokenize=False)
        spans = [
            self._find_turn(messages, index, text, where, tools)
            for index, message in enumerate(messages)
            if message["role"] == ASSISTANT
        ]
        encoded = self.renderer(text, add_special_tokens=False, return_offsets_mapping=True)
        counts = [
            begin < end and any(first <= begin < last for first, last in spans)
            for begin, end in encoded["offset_mapping"]
        ]
        return list(encoded["input_ids"]), counts

    def _find_turn(self, messages: list[Message], index: int, text: str, where: Where, tools: Tools) -> tuple[int, int]:
        """Return the characters of `text` that are the answer `index`."""
        through = self._apply(messages[: index + 1], where, tools, tokenize=False)
        if index:
            before = self._apply(messages[:index], where, tools, tokenize=False, add_generation_prompt=True)
        else:
            before = self._find_opening(messages[0], through, where, tools)
        if not (text.startswith(through) and through.startswith(before)):
            raise UserError(
                f"{where()}: the chat template writes message {index + 1} differently once others follow, so that the "
                "assistant's part cannot be found: put {% generation %} and {% endgeneration %} around it there"
            )
        return len(before), len(through)

    def _find_opening(self, answer: Message, through: str, where: Where, tools: Tools) -> str:
        """Return what the template writes before the first message, an answer: what another answer has in common."""
        given = str(answer.get("content") or "").lstrip()
        other = {"role": ASSISTANT, "content": "b" if given.startswith("a") else "a"}
        pairs = zip(through, self._apply([other], where, tools, tokenize=False), strict=False)
        return through[: next((place for place, (one, two) in enumerate(pairs) if one != two), 0)]

    def _apply(self, messages: list[Message], where: Where, tools: Tools, **options: Any) -> Any:
        try:
            return self.renderer.apply_chat_template(messages, tools, **options)
        except Exception as error:  # a template may fail in any way, and says so itself with raise_exception
            raise UserError(one_line(f"{where()}: the chat template refuses it ({first_line(error)})")) from error


def make_chat_encoder(tokenizer: FolderTokenizer) -> ChatEncoder:
    """Make the encoder of a tokenizer's chat template. Raises UserError if it has none, or transformers is missing."""
    template, tool_template = tokenizer.settings.chat_template, tokenizer.settings.tool_template
    if template is None:
        raise UserError(
            "this tokenizer has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json): "
            "take the tokenizer of a chat model, or write one"
        )
    try:
        from transformers import PreTrainedTokenizerFast
    except ImportError as error:
        raise UserError("chats need the package transformers: pip install 'hpc_train[hf]'") from error
    from hpc_train.data.tokenizers.tokenizer import import_tokenizers

    # A model of its own: transformers changes how it treats special tokens, which in a template are meant.
    model = import_tokenizers().Tokenizer.from_str(tokenizer.source)
    model.no_truncation()
    model.no_padding()
    renderer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=model,
        chat_template={"default": template, "tool_use": tool_template or template},
        clean_up_tokenization_spaces=False,
        **tokenizer.settings.special,
    )
    return ChatEncoder(renderer, template, tool_template or template, tokenizer.vocab_size)


def has_marks(template: str) -> bool:
    """Return whether a chat template marks the assistant's part itself."""
    return _MARK.search(template) is not None


def check_messages(value: Any, where: Where) -> list[Message]:
    """Return the messages of a conversation. Raises UserError for what is none, without or with unknown roles.

    Keys without a value are left out: tables have each key in each message, and templates ask whether one is there.
    """
    if not isinstance(value, list) or not value or not all(isinstance(entry, dict) for entry in value):
        raise UserError(
            f'{where()}: not a conversation; expected a list such as [{{"role": "user", "content": "..."}}]'
        )
    roles = ", ".join(ROLES)
    for index, message in enumerate(value, 1):
        role, content = message.get("role"), message.get("content")
        if "role" not in message:
            keys = ", ".join(map(str, message)) or "none"
            raise UserError(one_line(f"{where()}: message {index} has no role (its keys: {keys}); one of {roles}"))
        if role not in ROLES:
            raise UserError(one_line(f"{where()}: message {index} has the role {role!r}; known are {roles}"))
        _check_calls(message, index, where)
        if not _is_text(content) and not (content is None and message.get("tool_calls")):
            raise UserError(one_line(f"{where()}: message {index} ({role}) has {_describe_content(content)}"))
    return [{key: item for key, item in entry.items() if item is not None or key == "content"} for entry in value]


def check_tools(value: Any, where: Where) -> Tools:
    """Return a conversation's tools; None if it has none. Tables often have them as JSON text. Raises UserError."""
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise UserError(one_line(f"{where()}: tools is text that is not JSON ({first_line(error)})")) from error
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) and tool for tool in value):
        raise UserError(
            f"{where()}: tools is not a list of functions; "
            'expected [{"type": "function", "function": {"name": ...}}]'
        )
    return value


def _check_template(template: str, messages: list[Message], tools: Tools, where: Where) -> None:
    """Raise UserError if a template would silently leave out tools or calls of them."""
    calls = next((index for index, message in enumerate(messages, 1) if message.get("tool_calls")), None)
    lost = "its tools" if tools and "tools" not in template else None
    lost = f"the tool_calls of message {calls}" if calls and "tool_calls" not in template else lost
    if lost:
        raise UserError(
            f"{where()}: the chat template does not write {lost}: take the tokenizer of a model that calls functions, "
            "or leave them out of the records"
        )


def _check_calls(message: Message, index: int, where: Where) -> None:
    calls = message.get("tool_calls")
    if calls is not None and not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
        raise UserError(f"{where()}: message {index}: tool_calls is not a list of objects")


def _is_text(content: Any) -> bool:
    """Return whether content is text, or a list of parts that are."""
    if isinstance(content, list):
        return bool(content) and all(_is_text_part(part) for part in content)
    return isinstance(content, str)


def _is_text_part(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type", "text") == "text" and isinstance(part.get("text"), str)


def _describe_content(content: Any) -> str:
    other = [part for part in content if not _is_text_part(part)] if isinstance(content, list) else []
    kind = other[0].get("type") if other and isinstance(other[0], dict) else None
    return f"a part of type {kind!r} in its content; only text can be read" if kind else "no text as its content"


def _join_text_parts(message: Message) -> Message:
    content = message.get("content")
    return {**message, "content": "".join(part["text"] for part in content)} if isinstance(content, list) else message
