"""The `anthropic` client against POST /v1/messages. What it puts together from a stream must be what the same request gets in one
piece (temperature 0: the same answer each time)."""
import anthropic
import pytest

from plumb_server import serve

ANSWER = "I am a tiny model for tests and examples."
TOOLS = [{"name": "lookup", "description": "Looks a word up",
          "input_schema": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]}}]


@pytest.fixture(scope="module")
def client():
    with serve() as address:
        yield anthropic.Anthropic(base_url=address, api_key="none", max_retries=0, timeout=30, _strict_response_validation=True)


def body(**more):
    """`temperature` travels beside the fields that this client's types still have."""
    extra = {"temperature": 0, **more.pop("extra_body", {})}
    question = [{"role": "user", "content": "Who are you?"}]
    return {"model": "tiny", "max_tokens": 60, "messages": question, "extra_body": extra, **more}


def shape(message):
    """A message without what differs from one request to the next."""
    return [block.model_dump(exclude={"id"}) for block in message.content], message.usage, message.stop_reason, message.stop_sequence


def test_whole_answer(client):
    message = client.messages.create(**body())
    assert [block.text for block in message.content] == [ANSWER]
    assert (message.role, message.model, message.stop_reason) == ("assistant", "tiny", "end_turn")
    counted = client.messages.count_tokens(model="tiny", messages=body()["messages"])
    assert message.usage.input_tokens == counted.input_tokens
    assert message.usage.output_tokens > 1


@pytest.mark.parametrize("more", [
    {}, {"thinking": {"type": "enabled", "budget_tokens": 1024}}, {"system": "Be brief.", "stop_sequences": [" for "]},
    {"tools": TOOLS, "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}])
def test_stream_is_the_whole(client, more):
    whole = client.messages.create(**body(**more))
    with client.messages.stream(**body(**more)) as stream:
        text = "".join(stream.text_stream)
        message = stream.get_final_message()
    assert shape(message) == shape(whole)
    assert text == "".join(block.text for block in whole.content if block.type == "text")
    assert len(whole.content) > 0


def test_raw_events_in_order(client):
    types = [event.type for event in client.messages.create(**body(), stream=True)]
    deltas = types.count("content_block_delta")
    assert deltas > 1
    assert types == ["message_start", "content_block_start", *["content_block_delta"] * deltas, "content_block_stop",
                     "message_delta", "message_stop"]


def test_thinking_comes_first(client):
    message = client.messages.create(**body(thinking={"type": "adaptive"}))
    assert message.content[0].type == "thinking" and message.content[0].signature
    assert message.usage.output_tokens_details.thinking_tokens > 0


def test_stop_reasons(client):
    assert client.messages.create(**body(max_tokens=3)).stop_reason == "max_tokens"
    message = client.messages.create(**body(stop_sequences=[" tests", "never"]))
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", " tests")
    assert message.content[0].text == ANSWER[: ANSWER.index(" tests")]


def test_more_tokens_than_the_context_holds(client):
    assert client.messages.create(**body(max_tokens=100_000)).content[0].text == ANSWER


def test_prefilled_answer(client):
    begun = [*body()["messages"], {"role": "assistant", "content": "I am a tiny"}]
    message = client.messages.create(**body(messages=begun))
    assert "I am a tiny" + message.content[0].text == ANSWER


def test_forced_call_and_its_result(client):
    """The embedded model has never seen a tool: the call is forced, its content is whatever the model writes."""
    message = client.messages.create(**body(tools=TOOLS, tool_choice={"type": "tool", "name": "lookup"}, max_tokens=40))
    call = message.content[0]
    assert (call.type, call.name) == ("tool_use", "lookup")
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "found"}]}
    turns = [*body()["messages"], message.to_param(), result]
    assert client.messages.create(**body(messages=turns, tools=TOOLS)).usage.input_tokens > message.usage.input_tokens


@pytest.mark.parametrize("more, error, kind, field", [
    ({"model": "claude"}, anthropic.NotFoundError, "not_found_error", "model"),
    ({"max_tokens": 0}, anthropic.BadRequestError, "invalid_request_error", "max_tokens"),
    ({"extra_body": {"top_p": 2}}, anthropic.BadRequestError, "invalid_request_error", "top_p"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, anthropic.BadRequestError,
     "invalid_request_error", "messages[0].content[0].type")])
def test_errors_name_the_field(client, more, error, kind, field):
    with pytest.raises(error) as raised:
        client.messages.create(**body(**more))
    assert raised.value.body["error"]["type"] == kind
    assert raised.value.body["error"]["message"].startswith(field)


def test_keys(tmp_path):
    (tmp_path / "keys").write_text("sk-right\n")
    with serve("--api-keys", tmp_path / "keys") as address:
        right, wrong = (anthropic.Anthropic(base_url=address, api_key=key, max_retries=0) for key in ("sk-right", "sk-wrong"))
        assert right.messages.create(**body()).content[0].text == ANSWER
        with pytest.raises(anthropic.AuthenticationError) as raised:
            wrong.messages.create(**body())
        assert raised.value.body["error"]["type"] == "authentication_error"
