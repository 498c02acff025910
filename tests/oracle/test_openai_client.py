"""The server as OpenAI's own client sees it: answers, streams, tools, log-probabilities, errors.

The embedded model makes little sense, so what is compared are two ways to the same tokens: streamed and whole, chat and
completion, alone and among others, the server and `plumb score`."""
import asyncio
import json
import os
import subprocess
import time
import urllib.request

import numpy
import openai
import pytest

from plumb_server import ROOT, serve, write_adapter

MODEL = ROOT / "assets/tiny"


def metric(server, name, **labels):
    """The sum over all series of the metric with these labels."""
    with urllib.request.urlopen(server + "/metrics", timeout=30) as reply:
        lines = reply.read().decode().splitlines()
    values = [float(line.rsplit(" ", 1)[1]) for line in lines
              if line.startswith(name + "{") and all(f'{k}="{v}"' in line for k, v in labels.items())]
    assert values, name
    return sum(values)


QUESTION = [{"role": "user", "content": "What is the label of this text: the sky is blue?"}]
TOOLS = [{"type": "function", "function": {"name": "look_up", "description": "d", "parameters": {"type": "object",
          "properties": {"word": {"type": "string"}}}}}]
BRIEF = {"chat_template_kwargs": {"thinking": False}}
IDS = {"return_token_ids": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    adapter = write_adapter(tmp_path_factory.mktemp("adapter") / "poet", seed=1)
    with serve("--max-running", 16, "--adapter", f"poet={adapter}") as address:
        yield address


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server + "/v1", api_key="none", max_retries=0, timeout=60) as c:
        yield c


def chat(client, extra=BRIEF, **fields):
    fields = {"model": "tiny", "messages": QUESTION, "max_tokens": 24, "seed": 3} | fields
    return client.chat.completions.create(extra_body=extra, **fields)


def joined(chunks):
    """-> per choice {content, reasoning, calls, logprobs, ids, finish}, usage"""
    choices, usage = {}, None
    for chunk in chunks:
        usage = chunk.usage or usage
        for c in chunk.choices:
            one = choices.setdefault(c.index, {"content": "", "reasoning": "", "calls": [], "logprobs": [], "ids": [], "finish": None})
            one["content"] += c.delta.content or ""
            one["reasoning"] += getattr(c.delta, "reasoning_content", None) or ""
            for call in c.delta.tool_calls or []:
                if call.index == len(one["calls"]):
                    one["calls"].append([call.function.name, ""])
                one["calls"][call.index][1] += call.function.arguments or ""
            one["logprobs"] += [t.logprob for t in c.logprobs.content] if c.logprobs else []
            one["ids"] += getattr(c, "token_ids", None) or []
            one["finish"] = c.finish_reason or one["finish"]
    return [choices[i] for i in sorted(choices)], usage


def as_joined(choice):
    message = choice.message
    return {"content": message.content or "", "reasoning": getattr(message, "reasoning_content", None) or "",
            "calls": [[c.function.name, c.function.arguments] for c in message.tool_calls or []],
            "logprobs": [t.logprob for t in choice.logprobs.content] if choice.logprobs else [],
            "ids": getattr(choice, "token_ids", None) or [], "finish": choice.finish_reason}


def test_models_are_listed(client):
    assert [m.id for m in client.models.list()] == ["tiny", "poet"]
    assert client.models.retrieve("tiny").object == "model"


@pytest.mark.parametrize("thinking", [True, False])
def test_an_answer_streamed_is_the_answer_whole(client, thinking):
    extra = {"chat_template_kwargs": {"thinking": thinking}} | IDS
    fields = dict(n=3, temperature=0.8, logprobs=True, top_logprobs=2)
    whole = chat(client, extra, **fields)
    assert whole.object == "chat.completion" and whole.model == "tiny"
    assert len({c.message.content for c in whole.choices} | {getattr(c.message, "reasoning_content", "") for c in whole.choices}) > 1
    usage = whole.usage
    assert usage.prompt_tokens == len(whole.prompt_token_ids)
    assert usage.completion_tokens == sum(len(c.token_ids) for c in whole.choices)
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    reasoning = usage.completion_tokens_details.reasoning_tokens
    assert 0 < reasoning <= usage.completion_tokens if thinking else reasoning == 0

    chunks = list(chat(client, extra, stream=True, stream_options={"include_usage": True}, **fields))
    choices, streamed_usage = joined(chunks)
    assert choices == [as_joined(c) for c in whole.choices]
    assert streamed_usage.total_tokens == usage.total_tokens
    assert streamed_usage.completion_tokens_details == usage.completion_tokens_details
    assert chunks[0].prompt_token_ids == whole.prompt_token_ids


def test_a_seed_repeats_and_no_seed_does_not(client):
    first, again, other = chat(client, IDS), chat(client, IDS), chat(client, IDS, seed=4)
    assert first.choices[0].token_ids == again.choices[0].token_ids != other.choices[0].token_ids
    free = {tuple(chat(client, IDS, seed=None, temperature=2).choices[0].token_ids) for _ in range(4)}
    assert len(free) > 1


def test_many_at_once_get_what_each_gets_alone(server, client):
    async def all_at_once():
        async with openai.AsyncOpenAI(base_url=server + "/v1", api_key="none", max_retries=0) as many:
            return await asyncio.gather(*(many.chat.completions.create(
                model="tiny", messages=QUESTION, max_tokens=8 + seed, seed=seed, extra_body=BRIEF | IDS, logprobs=True)
                for seed in range(24)))
    for seed, reply in enumerate(asyncio.run(all_at_once())):
        if seed % 6 == 0:
            alone = chat(client, BRIEF | IDS, max_tokens=8 + seed, seed=seed, logprobs=True)
            assert as_joined(reply.choices[0]) == as_joined(alone.choices[0])


def test_an_adapter_is_chosen_by_name_and_version(client):
    base, poet, pinned = (chat(client, IDS, model=m, temperature=0) for m in ("tiny", "poet", "poet@1"))
    assert poet.choices[0].token_ids == pinned.choices[0].token_ids != base.choices[0].token_ids
    assert set(poet.choices[0].adapter_versions) == {1} and set(base.choices[0].adapter_versions) == {0}
    assert pinned.model == "poet@1"


def test_a_named_tool_is_called(client):
    choice = {"type": "function", "function": {"name": "look_up"}}
    whole = chat(client, tools=TOOLS, tool_choice=choice, max_tokens=12).choices[0]
    assert [c.function.name for c in whole.message.tool_calls] == ["look_up"]
    assert whole.message.tool_calls[0].id.startswith("call_")
    (streamed,), _ = joined(chat(client, tools=TOOLS, tool_choice=choice, max_tokens=12, stream=True))
    assert streamed["calls"] == as_joined(whole)["calls"]


def test_tool_results_are_read(client):
    messages = QUESTION + [
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "look_up", "arguments": '{"word": "sky"}'}}]},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "blue"}]}]
    reply = chat(client, IDS, messages=messages, tools=TOOLS)
    text = client.post("/../detokenize", body={"tokens": reply.prompt_token_ids}, cast_to=object)["prompt"]
    assert "<tool_result>blue</tool_result>" in text and '<｜DSML｜parameter name="word" string="true">sky<' in text


def test_stop_strings_end_an_answer(client):
    free = chat(client, temperature=0, max_tokens=40).choices[0].message.content
    stop = free[len(free) // 2:][:3]
    cut = chat(client, temperature=0, max_tokens=40, stop=["never said", stop]).choices[0]
    assert cut.message.content == free[:free.index(stop)]
    assert cut.finish_reason == "stop" and cut.stop_reason == stop


def test_token_ids_lead_from_chat_to_completion(client):
    reply = chat(client, BRIEF | IDS | {"ignore_eos": True}, temperature=0, logprobs=True)
    same = client.completions.create(model="tiny", prompt=reply.prompt_token_ids, max_tokens=24, temperature=0, logprobs=0,
                                     extra_body=IDS | {"ignore_eos": True})
    assert same.choices[0].token_ids == reply.choices[0].token_ids
    assert same.choices[0].logprobs.token_logprobs == [t.logprob for t in reply.choices[0].logprobs.content]
    assert [t.token for t in reply.choices[0].logprobs.content] == same.choices[0].logprobs.tokens


def score(lines, folder):
    (folder / "in.jsonl").write_text("".join(json.dumps({"tokens": ids}) + "\n" for ids in lines))
    subprocess.run([os.environ["PLUMB"], "score", "--model", MODEL, "--input", folder / "in.jsonl", "--output", folder / "out.jsonl"],
                   check=True, capture_output=True)
    return [fp32(json.loads(line)["logprobs"]) for line in (folder / "out.jsonl").read_text().splitlines()]


def fp32(values):
    """Both sides print fp32 values, but not with the same number of digits."""
    return [float(numpy.float32(x)) for x in values if x is not None]


def test_logprobs_are_those_of_score(client, tmp_path):
    """Equal, not close: of prompts and of answers, in both forms of the API, streamed and whole."""
    prompts = [[0, 3, 300 + i, 541, 569, 700 + i] * (1 + 40 * i) for i in range(3)]
    reply = client.completions.create(model="tiny", prompt=prompts, max_tokens=30, echo=True, logprobs=3, seed=1, n=2,
                                      extra_body=IDS | {"prompt_logprobs": 2})
    lines = [c.prompt_token_ids + c.token_ids for c in reply.choices]
    assert [c.prompt_token_ids for c in reply.choices] == [p for p in prompts for _ in range(2)]
    scored = score(lines, tmp_path)
    for choice, line, expected in zip(reply.choices, lines, scored):
        given = choice.logprobs.token_logprobs
        assert len(given) == len(line) and given[0] is None
        assert given[1:] == fp32(given) == expected
        prompt = choice.prompt_logprobs
        assert prompt[0] is None
        assert [p[str(t)]["logprob"] for p, t in zip(prompt[1:], choice.prompt_token_ids[1:])] == given[1:len(prompt)]

    only = client.completions.create(model="tiny", prompt=prompts[1], max_tokens=0, echo=True, logprobs=0)
    assert only.choices[0].logprobs.token_logprobs == reply.choices[2].logprobs.token_logprobs[:len(prompts[1])]
    assert only.usage.completion_tokens == 0

    answer = chat(client, BRIEF | IDS, logprobs=True)
    tokens = answer.choices[0].token_ids
    assert [t.logprob for t in answer.choices[0].logprobs.content] == score([answer.prompt_token_ids + tokens], tmp_path)[0][-len(tokens):]


def test_completions_stream(client):
    fields = dict(model="tiny", prompt=["The sky", "A dog"], max_tokens=12, seed=2, echo=True, logprobs=1)
    whole = client.completions.create(**fields)
    text, logprobs = {0: "", 1: ""}, {0: [], 1: []}
    for chunk in client.completions.create(stream=True, **fields):
        for c in chunk.choices:
            text[c.index] += c.text
            logprobs[c.index] += c.logprobs.token_logprobs
    assert [text[0], text[1]] == [c.text for c in whole.choices]
    assert whole.choices[0].text.startswith("The sky")
    assert [logprobs[0], logprobs[1]] == [c.logprobs.token_logprobs for c in whole.choices]
    offsets = whole.choices[0].logprobs.text_offset
    assert offsets == sorted(offsets) and offsets[-1] <= len(whole.choices[0].text)


def test_routed_experts_of_each_token(client):
    config = json.loads((MODEL / "config.json").read_text())
    reply = chat(client, BRIEF | IDS | {"return_routed_experts": True}, max_tokens=4)
    choice = reply.choices[0]
    layers, each = config["num_hidden_layers"], config["num_experts_per_tok"]
    assert len(choice.prompt_routed_experts) == len(reply.prompt_token_ids)
    assert len(choice.routed_experts) == len(choice.token_ids)
    for token in choice.prompt_routed_experts + choice.routed_experts[:-1]:
        assert len(token) == layers
        assert all(len(set(e)) == each and all(0 <= x < config["n_routed_experts"] for x in e) for e in token)


def test_a_cancelled_stream_frees_its_pages(server, client):
    with chat(client, BRIEF | {"ignore_eos": True}, stream=True, max_tokens=3000, n=4) as stream:
        chunks = iter(stream)
        while not next(chunks).choices[0].delta.content:
            pass
        assert metric(server, "vllm:num_requests_running") > 0
    deadline = time.monotonic() + 30  # the engine looks for cancelled answers between two steps
    while metric(server, "plumb:cache_pages", state="held") + metric(server, "vllm:num_requests_running") > 0:
        assert time.monotonic() < deadline, "pages are still held"


@pytest.mark.parametrize("fields, kind, field, part", [
    ({"temperature": -1}, openai.BadRequestError, "temperature", "from 0"),
    ({"model": "other"}, openai.NotFoundError, "model", "use one of tiny"),
    ({"max_tokens": 10**6}, openai.BadRequestError, "max_tokens", "at most"),
    ({"messages": []}, openai.BadRequestError, "messages", "at least one"),
    ({"messages": [{"role": "user", "content": "a b " * 2500}]}, openai.BadRequestError, "messages", "4096"),
    ({"messages": [{"role": "bard", "content": "a"}]}, openai.BadRequestError, "messages[0].role", "user"),
    ({"tool_choice": "required"}, openai.BadRequestError, "tool_choice", "tools"),
    ({"n": 1000}, openai.BadRequestError, "n", "1 to"),
    ({"logit_bias": {"99999": 1}}, openai.BadRequestError, "logit_bias.99999", "1279"),
    ({"stream": True, "top_logprobs": 3}, openai.BadRequestError, "top_logprobs", "logprobs"),
])
def test_errors_name_the_field_and_the_fix(client, fields, kind, field, part):
    with pytest.raises(kind) as raised:
        chat(client, **fields)
    assert raised.value.param == field
    assert field in raised.value.message and part in raised.value.message
