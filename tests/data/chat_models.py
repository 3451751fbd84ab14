"""Make small tokenizers of chat models, trained on the spot and saved by transformers."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""As in ChatML: nothing says which part is the assistant's."""
MARKED = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}{% else %}"
    "{{ message['content'] + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""The same text, with the assistant's part marked."""
_CALLS = (
    "{% for call in message.tool_calls or [] %}{{ '<call>' + call.function.name + ' ' }}"
    "{{ call.function.arguments | tojson }}{{ '</call>' }}{% endfor %}"
)
_ANSWER = "{{ message.content or '' }}" + _CALLS + "{{ '<|im_end|>' }}"
_TEXT = (
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{{ part.text }}{% endfor %}{% endif %}"
)


def write_tool_template(answer: str, text: str = _TEXT) -> str:
    """Return a template like those of Hermes and Qwen: tools in the system turn, their answers in the user turn."""
    return (
        "{% if tools %}{{ '<|im_start|>system\\n<tools>' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
        "{{ '</tools><|im_end|>\\n' }}{% endif %}"
        "{% for message in messages %}{% if message.role == 'tool' %}"
        "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user\\n' }}{% endif %}"
        "{{ '<result>' + message.content + '</result>' }}"
        "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}{% else %}"
        "{{ '<|im_start|>' + message.role + '\\n' }}{% if message.role == 'assistant' %}"
        + answer
        + "{% else %}"
        + text
        + "{{ '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )


TOOLS = write_tool_template(_ANSWER)
"""Writes tools and calls of them; nothing says which part is the assistant's."""
MARKED_TOOLS = write_tool_template("{% generation %}" + _ANSWER + "{% endgeneration %}")
TEXT_TOOLS = write_tool_template(_ANSWER, "{{ message.content }}")
"""Would write content that is a list as Python shows it."""
FORGETFUL = (
    "{% for message in messages %}{{ message['role'] }}: {% if loop.last or message['role'] != 'assistant' %}"
    "{{ message['content'] }}{% else %}...{% endif %}\\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
"""Shortens earlier answers, as templates of reasoning models do."""
TEXTS = ["What is the capital of France? Paris is.", "Tell me a joke: 日本語 é 🙂", "user assistant system"] * 20


def save_tokenizer(folder: Path, template: str | None = CHATML, **special: str) -> Path:
    """Train a byte-level BPE and save it as transformers does. special: roles such as eos_token."""
    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|im_start|>", "<|im_end|>", "<s>", "</s>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    model.train_from_iterator(TEXTS, trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=model, chat_template=template, **special)
    made.save_pretrained(str(folder))
    return folder
