#!/usr/bin/env python3
"""Trains the tokenizer of the embedded model: byte-level BPE over a corpus of tools/make_tiny_corpus.py.

    .venv/bin/python tools/make_tiny_tokenizer.py CORPUS.jsonl tokenizer.json [--vocabulary 1280]

It differs from DeepSeek-V4's only in size and in that every digit is a token of its own, so that a small model can add.
"""

import argparse
import json
import pathlib

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

# Begin and end of sentence and padding have the ids that they have in V4, and as there only they are `special`: a
# decoder that skips special tokens must not lose a think tag.
SPECIAL = ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"]
CONTROL = [
    "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", "｜DSML｜", "<｜latest_reminder｜>", "<｜action｜>", "<｜query｜>",
    "<｜authority｜>", "<｜domain｜>", "<｜title｜>", "<｜read_url｜>", "<｜extracted_url｜>"
]
# V4's patterns: digits (there up to three), Chinese and Japanese, words with what stands before them and the rest.
SPLITS = [
    r"\p{N}", "[一-龥\u3040-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
    r" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
]
CHAT_FORMAT = pathlib.Path(__file__).parent.parent / "tests/golden/chat/constants.json"


def texts(corpus):
    """What the chat encoder will give to the tokenizer, piece by piece."""
    strings = json.loads(CHAT_FORMAT.read_text(encoding="utf-8"))["strings"]
    tools_block = strings["tools_block_before_schemas"] + strings["tools_block_after_schemas"]
    for token in CONTROL:  # these are tokens before any merge
        tools_block = tools_block.replace(token, "\n")
    for line in open(corpus, encoding="utf-8"):
        sample = json.loads(line)
        if "tools" in sample:
            yield tools_block
            yield "\n".join(json.dumps(tool["function"]) for tool in sample["tools"])
        for message in sample["messages"]:
            yield message["content"]
            yield message.get("reasoning_content", "")
            for call in message.get("tool_calls", []):
                yield from (str(value) for value in json.loads(call["function"]["arguments"]).values())


def train(corpus, vocabulary):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in SPLITS] +
        [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokens = [AddedToken(t, normalized=False, special=True) for t in SPECIAL + CONTROL]
    tokenizer.train_from_iterator(texts(corpus), trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=tokens, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False))
    return json.loads(tokenizer.to_str())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus")
    parser.add_argument("output")
    parser.add_argument("--vocabulary", type=int, default=1280)
    a = parser.parse_args()
    result = train(a.corpus, a.vocabulary)
    for token in result["added_tokens"]:  # the trainer calls all of them special
        token["special"] = token["content"] in SPECIAL
        token["normalized"] = token["content"] in CONTROL
    pathlib.Path(a.output).write_text(json.dumps(result, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
