"""Byte-level BPE trained on the model's own sentences, in the files and with the chat template of
Qwen2.5-VL. Host only.

Capital words and numbers are cut into single characters, so that reading is spelling; a capital
that starts a word in small letters stays with it.
"""

import json
import random
from pathlib import Path

import samples
import scenes
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

FILES = ("tokenizer.json", "tokenizer_config.json")
SPECIALS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
PATTERN = r" ?\p{Lu}?\p{Ll}+|\p{L}|\p{N}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s"
VOCAB_SIZE = 1024
TEMPLATE = (
    "{% set image_count = namespace(value=0) %}{% set video_count = namespace(value=0) %}"
    "{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}<|im_start|>system\n"
    "You are a helpful assistant.<|im_end|>\n{% endif %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}<|im_end|>\n{% else %}"
    "{% for content in message['content'] %}"
    "{% if content['type'] == 'image' or 'image' in content or 'image_url' in content %}"
    "{% set image_count.value = image_count.value + 1 %}"
    "{% if add_vision_id %}Picture {{ image_count.value }}: {% endif %}"
    "<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif content['type'] == 'video' or 'video' in content %}"
    "{% set video_count.value = video_count.value + 1 %}"
    "{% if add_vision_id %}Video {{ video_count.value }}: {% endif %}"
    "<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}"
    "<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def sentences(count: int = 6000):
    yield from [
        "system\nYou are a helpful assistant.",
        "user\n",
        "assistant\n",
        "Picture 1: Video 1: ",
    ] * 400
    rng = random.Random("tokenizer")
    for _ in range(count):
        sample = samples.make_sample(rng, scenes.pick_layout(rng, largest=112 * 112))
        for talk in sample.talks:
            for question, answer, _ in talk:
                yield question
                yield answer


def train() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        sentences(),
        trainers.BpeTrainer(
            vocab_size=VOCAB_SIZE - len(SPECIALS),
            min_frequency=2,
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    return tokenizer


def write(folder: Path) -> None:
    """Train and write tokenizer.json and tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    model = json.loads(train().to_str())["model"]
    vocab = model["vocab"]
    first = len(vocab)
    added = [
        {
            "id": first + i,
            "content": s,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for i, s in enumerate(SPECIALS)
    ]
    level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": False,
    }
    dump(
        folder / "tokenizer.json",
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": added,
            "normalizer": {"type": "NFC"},
            "pre_tokenizer": {
                "type": "Sequence",
                "pretokenizers": [
                    {
                        "type": "Split",
                        "pattern": {"Regex": PATTERN},
                        "behavior": "Isolated",
                        "invert": False,
                    },
                    level,
                ],
            },
            "post_processor": level,
            "decoder": level,
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": "",
                "end_of_word_suffix": "",
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": False,
                "vocab": vocab,
                "merges": [m if isinstance(m, str) else " ".join(m) for m in model["merges"]],
            },
        },
        None,
    )
    dump(
        folder / "tokenizer_config.json",
        {
            "add_prefix_space": False,
            "bos_token": None,
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "unk_token": None,
            "errors": "replace",
            "clean_up_tokenization_spaces": False,
            "split_special_tokens": False,
            "model_max_length": 4096,
            "tokenizer_class": "PreTrainedTokenizerFast",
            "additional_special_tokens": list(SPECIALS[1:]),
            "added_tokens_decoder": {
                str(a["id"]): {k: v for k, v in a.items() if k != "id"} for a in added
            },
            "chat_template": TEMPLATE,
        },
    )


def dump(path: Path, value, indent: int | None = 2) -> None:
    path.write_text(json.dumps(value, indent=indent, ensure_ascii=False) + "\n", encoding="utf-8")


def load(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))
