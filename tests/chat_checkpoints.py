"""Tokenizer directories in the files that a published checkpoint has, small enough for tests."""

import json
from pathlib import Path

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from tokenizers.decoders import ByteLevel

SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>",
    "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
ADDED = ("<tool_call>", "</tool_call>", "<think>", "</think>")
"""Tokens of their own that text may spell: the published files do not call them special."""

QWEN2_VL = """\
{%- for m in messages -%}
{%- if loop.first and m.role != 'system' -%}
{{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif -%}
{{ '<|im_start|>' + m.role + '\\n' }}
{%- if m.content is string -%}
{{ m.content }}
{%- else -%}
{%- for part in m.content -%}
{%- if part.type == 'image' -%}
{{ '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- elif 'text' in part -%}
{{ part.text }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' }}
{%- endif -%}
"""
"""What the templates of Qwen2-VL and Qwen2.5-VL render, default system turn included."""

NO_DEFAULT_SYSTEM = QWEN2_VL.replace("loop.first and m.role != 'system'", "false")
"""What Qwen3-VL's renders."""

TRIMMING = NO_DEFAULT_SYSTEM.replace("{{ m.content }}", "{{ m.content | trim }}").replace(
    "{{ part.text }}", "{{ part.text | trim }}"
)
STRINGS_ALONE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
    "{% endfor %}{{ '<|im_start|>assistant\\n' }}"
)
PARTS_ALONE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for part in m.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% else %}<|image_pad|>{% endif %}{% endfor %}"
    "<|im_end|>{% endfor %}"
)
WITH_TOOLS = """\
{%- if tools -%}
{{ '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' -%}{{ messages[0].content + '\\n\\n' }}{%- endif -%}
{{ 'Tools:' }}
{%- for tool in tools -%}{{ '\\n' + (tool | tojson) }}{%- endfor -%}
{{ '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' -%}
{{ '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif -%}
{%- for m in messages if m.role != 'system' -%}
{{ '<|im_start|>' + m.role + '\\n' }}
{%- if m.content is string -%}{{ m.content }}{%- else -%}
{%- for part in m.content -%}
{%- if part.type == 'image' -%}
{{ '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- else -%}{{ part.text }}{%- endif -%}
{%- endfor -%}{%- endif -%}
{%- for call in m.tool_calls or [] -%}
{{ '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""
"""One that lists tools and writes calls, as Qwen3-VL's does."""

NO_IMAGES = QWEN2_VL.replace("<|vision_start|><|image_pad|><|vision_end|>", "")

_WORDS = (
    "what is in the picture describe it briefly you are a helpful assistant system user question "
    "Größe été 図は何ですか a red square on blue ground"
)


def write_checkpoint(directory: Path, template: str | None = QWEN2_VL) -> Path:
    """Write tokenizer.json, tokenizer_config.json, config.json and generation_config.json."""
    backend = _train()
    ids = {token: backend.token_to_id(token) for token in SPECIAL}
    directory.mkdir(parents=True, exist_ok=True)
    backend.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "Qwen2Tokenizer",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "bos_token": None,
        "errors": "replace",
        "clean_up_tokenization_spaces": False,
    }
    if template is not None:
        settings["chat_template"] = template
    _dump(directory / "tokenizer_config.json", settings)
    _dump(
        directory / "config.json",
        {"model_type": "qwen2_vl", "image_token_id": ids["<|image_pad|>"]},
    )
    _dump(
        directory / "generation_config.json",
        {"eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]]},
    )
    return directory


def _train() -> Tokenizer:
    """A byte-level BPE with merges, split as the Qwen tokenizers split."""
    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    words = Regex(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(words, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        [_WORDS] * 8,
        trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False),
    )
    backend.add_special_tokens(list(SPECIAL))
    backend.add_tokens(list(ADDED))
    return backend


def _dump(path: Path, value: object) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def eos_ids(token_bytes):
    """Ids that end an answer, as the checkpoint's generation_config.json lists them."""
    return tuple(token_bytes.index(token) for token in (b"<|im_end|>", b"<|endoftext|>"))
