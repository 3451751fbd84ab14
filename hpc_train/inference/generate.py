"""Generate text with a loaded model, using `generate` of transformers and its key-value cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from hpc_train.data.readers.records import first_line
from hpc_train.data.tokenizers.tokenizer import Tokenizer
from hpc_train.data.tokenizers.tokenizer_folder import FolderTokenizer
from hpc_train.errors import UserError
from hpc_train.inference.load_model import LoadedModel
from hpc_train.terminal import one_line

Show = Callable[[str], object]
"""Takes each new piece of text."""


@dataclass(frozen=True)
class GenerateOptions:
    """How the next token is chosen, and when to stop."""

    tokens: int = 128
    """Tokens to generate, at most; the end of a document or of a turn stops earlier."""
    temperature: float = 0.0
    """Divides the logits; 0: always the likeliest token (greedy)."""
    top_k: int = 0
    """Number of most likely tokens to choose among; 0: all."""
    top_p: float = 1.0
    """Choose among the likeliest tokens that together have this probability."""
    seed: int = 0
    chat: bool = False
    """The prompt is the user's turn of a conversation, rendered by the tokenizer's chat template."""
    batch: int = 8
    """Prompts that are generated together."""


def generate_texts(
    loaded: LoadedModel, prompts: Sequence[str], options: GenerateOptions, show: Show | None = None
) -> Iterator[str]:
    """Iterate over what follows each prompt, in order. show: of a single prompt, gets the text piece by piece.

    Raises UserError at once for an empty prompt, and one that is too long for the model.
    """
    encoded = [encode_prompt(loaded.tokenizer, prompt, options.chat) for prompt in prompts]
    if loaded.has_encoder and loaded.ends_prompts:
        encoded = [[*prompt, *loaded.tokenizer.end] for prompt in encoded]
    _check_lengths(loaded, encoded, options)
    return _generate_batches(loaded, encoded, options, show)


def _generate_batches(
    loaded: LoadedModel, encoded: Sequence[Sequence[int]], options: GenerateOptions, show: Show | None
) -> Iterator[str]:
    devices = [loaded.model.device] if loaded.model.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(options.seed)
        for first in range(0, len(encoded), options.batch):
            yield from _generate_batch(loaded, encoded[first : first + options.batch], options, show)


def encode_prompt(tokenizer: Tokenizer, prompt: str, chat: bool) -> list[int]:
    """Return the tokens of a prompt, with those that begin a document."""
    if chat:
        return _render_chat(tokenizer, prompt)
    (tokens,) = tokenizer.encode([prompt.encode()])
    every = [*tokenizer.begin, *map(int, tokens)]
    if not every:
        raise UserError("the prompt is empty, and this tokenizer begins a document with no token; give some text")
    return every


def _render_chat(tokenizer: Tokenizer, prompt: str) -> list[int]:
    from hpc_train.data.tokenizers.chat import make_chat_encoder

    if not isinstance(tokenizer, FolderTokenizer):
        raise UserError(f"--chat: the tokenizer {tokenizer.name} has no chat template; leave it out")
    renderer = make_chat_encoder(tokenizer).renderer
    messages = [{"role": "user", "content": prompt}]
    try:
        text = renderer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    except Exception as error:  # a template may fail in any way, and says so itself with raise_exception
        raise UserError(one_line(f"--chat: the chat template refuses the prompt ({first_line(error)})")) from error
    return [int(token) for token in renderer(text, add_special_tokens=False)["input_ids"]]


def _check_lengths(loaded: LoadedModel, encoded: Sequence[Sequence[int]], options: GenerateOptions) -> None:
    model, longest = loaded.model, max(map(len, encoded), default=0)
    most = getattr(model.config, "max_position_embeddings", None)
    needed = max(longest, options.tokens) if loaded.has_encoder else longest + options.tokens
    if most is not None and needed > most:
        raise UserError(
            f"a prompt of {longest} tokens and {options.tokens} new ones are more than the {most} positions of the "
            "model; shorten it, or give fewer --tokens"
        )
    vocabulary = model.get_input_embeddings().num_embeddings
    if (largest := max((max(prompt) for prompt in encoded), default=0)) >= vocabulary:
        raise UserError(
            f"the tokenizer has a token {largest}, and the model only {vocabulary}; give the model's own tokenizer"
        )


@torch.no_grad()
def _generate_batch(
    loaded: LoadedModel, encoded: Sequence[Sequence[int]], options: GenerateOptions, show: Show | None
) -> Iterator[str]:
    """Generate after prompts of different lengths, padded on the left; those for an encoder, on the right."""
    width, ends = max(map(len, encoded)), loaded.end_tokens
    inputs = torch.zeros(len(encoded), width, dtype=torch.int64)
    mask = torch.zeros_like(inputs)
    for row, tokens in enumerate(encoded):
        first = 0 if loaded.has_encoder else width - len(tokens)
        inputs[row, first : first + len(tokens)] = torch.tensor(tokens)
        mask[row, first : first + len(tokens)] = 1
    # None replaces the settings of the folder's generation_config, which transformers warns about in greedy decoding.
    sampling: dict[str, Any] = {"do_sample": False, "temperature": None, "top_k": None, "top_p": None}
    if options.temperature > 0:
        sampling = {
            "do_sample": True,
            "temperature": options.temperature,
            "top_k": options.top_k,
            "top_p": options.top_p,
        }
    streamer = None if show is None or len(encoded) > 1 else TextStreamer(loaded.tokenizer, show, set(ends))
    out = loaded.model.generate(
        inputs.to(loaded.model.device),
        attention_mask=mask.to(loaded.model.device),
        max_new_tokens=options.tokens,
        eos_token_id=ends or None,
        pad_token_id=ends[0] if ends else 0,
        streamer=streamer,
        **sampling,
    )
    for row in out[:, 1 if loaded.has_encoder else width :].tolist():  # a decoder begins with one token of its own
        yield loaded.tokenizer.decode(np.array(_cut_end(row, set(ends)), dtype=np.int64))


def _cut_end(tokens: list[int], ends: set[int]) -> list[int]:
    """Return the tokens before the end of the document."""
    return tokens[: next((index for index, token in enumerate(tokens) if token in ends), len(tokens))]


@dataclass
class TextStreamer:
    """Shows text as tokens come: what generate of transformers calls a streamer."""

    tokenizer: Tokenizer
    show: Show
    ends: set[int]
    _tokens: list[int] = field(default_factory=list)
    _shown: int = 0
    _prompt_seen: bool = False

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt at the first call, then each new token."""
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        self._tokens += _cut_end(value.flatten().tolist(), self.ends)
        text = self.tokenizer.decode(np.array(self._tokens, dtype=np.int64))
        if not text.endswith("\ufffd"):  # the first bytes of a character, or damage that `end` shows
            self._show_from(text)

    def end(self) -> None:
        """Show what is left."""
        self._show_from(self.tokenizer.decode(np.array(self._tokens, dtype=np.int64)))

    def _show_from(self, text: str) -> None:
        if len(text) > self._shown:
            self.show(text[self._shown :])
            self._shown = len(text)
