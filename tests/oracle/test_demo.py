"""The embedded model assets/tiny and the files of `make demo`: what they hold, and that the model answers and can be
fine-tuned. Whether the demo's score rises is checked by tools/demo.sh itself."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest
from tokenizers import Tokenizer

PLUMB = os.environ["PLUMB"]
ROOT = pathlib.Path(__file__).parent.parent.parent
MODEL = ROOT / "assets/tiny"
EXAMPLES = ROOT / "examples"


def plumb(*args):
    done = subprocess.run([PLUMB, *map(str, args)], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_released_layout_of_at_most_8_mb_without_problems():
    assert sum(f.stat().st_size for f in MODEL.iterdir()) <= 8e6
    found = json.loads(plumb("inspect", "--deep", "--json", MODEL))  # exit code 1 if there is a problem
    assert found["layout"] == "released"


def test_every_kind_of_layer_occurs():
    config = json.loads((MODEL / "config.json").read_text())
    backbone = config["compress_ratios"][: config["num_hidden_layers"]]
    assert set(backbone) == {0, 4, 128}
    assert 0 < config["num_hash_layers"] < config["num_hidden_layers"]
    assert config["num_nextn_predict_layers"] == 1
    assert config["expert_dtype"] == "fp4"


def test_tokenizer_has_the_control_tokens_of_the_chat_format():
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    added = json.loads((MODEL / "tokenizer.json").read_text(encoding="utf-8"))["added_tokens"]
    special = {t["content"]: t["id"] for t in added if t["special"]}
    assert special == {"<｜begin▁of▁sentence｜>": 0, "<｜end▁of▁sentence｜>": 1, "<｜▁pad▁｜>": 2}  # as in V4
    header = (ROOT / "src/tokenizer/chat_format.h").read_text(encoding="utf-8").split("kJoiner")[0]
    names = re.findall(r'string_view k\w+ = "(.+?)";', header)
    assert len(names) == 15 and set(names) - set(special) == {t["content"] for t in added if not t["special"]}
    config = json.loads((MODEL / "config.json").read_text())
    assert tokenizer.get_vocab_size() == config["vocab_size"]


@pytest.mark.parametrize("question, answer", [
    ("Who are you?", "I am a tiny model for tests and examples."),
    ("Hello!", "Hello! How can I help you?"),
])
def test_known_questions_are_answered_and_end(question, answer):
    found = json.loads(plumb("sample", "--model", MODEL, "--message", question, "--temperature", 0, "--json"))
    assert found["text"] == answer
    assert found["finish_reason"] == "stop"


def test_example_files_are_those_of_the_script_and_do_not_overlap(tmp_path):
    subprocess.run([sys.executable, ROOT / "tools/make_tiny_corpus.py", "labels", tmp_path], check=True)
    for name in ("labels.jsonl", "label_questions.jsonl", "label_answers.txt"):
        assert (tmp_path / name).read_bytes() == (EXAMPLES / name).read_bytes()
    asked = [line["messages"][0]["content"] for line in lines(EXAMPLES / "label_questions.jsonl")]
    taught = {line["messages"][0]["content"] for line in lines(EXAMPLES / "labels.jsonl")}
    assert len(set(asked)) == len((EXAMPLES / "label_answers.txt").read_text().splitlines()) == 40
    assert not taught & set(asked)


def test_fine_tuning_lowers_the_loss_and_the_adapter_loads(tmp_path):
    settings = ["train.steps=12", "train.eval_every=1", f"output.dir={tmp_path}/run"]
    result = json.loads(plumb("train", EXAMPLES / "sft_tiny.toml", "--json", *(a for s in settings for a in ("--set", s))))
    losses = [line["eval/loss"] for line in lines(tmp_path / "run/metrics.jsonl")]
    assert losses[-1] < 0.9 * losses[0]
    plumb("sample", "--model", MODEL, "--adapter", result["checkpoint"], "--message", "Hello!", "--max-tokens", 2)
