"""The `openai` client against POST /v1/responses. The client checks each event against its types; what it puts together from a
stream must be what the same request gets in one piece (temperature 0: the same answer each time)."""
import openai
import pydantic
import pytest

from plumb_server import serve

ANSWER = "I am a tiny model for tests and examples."
TOOLS = [{"type": "function", "name": "lookup", "description": "Looks a word up", "strict": True,
          "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"],
                         "additionalProperties": False}}]


@pytest.fixture(scope="module")
def client():
    with serve() as address:
        yield openai.OpenAI(base_url=address + "/v1", api_key="none", max_retries=0, timeout=30, _strict_response_validation=True)


def ask(client, **more):
    return client.responses.create(**{"model": "tiny", "input": "Who are you?", "temperature": 0, **more})


def shape(response):
    """A response without what differs from one request to the next."""
    return [item.model_dump(exclude={"id", "call_id"}) for item in response.output], response.usage, response.status


def test_whole_answer(client):
    response = ask(client)
    assert response.output_text == ANSWER and response.status == "completed"
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    assert response.model == "tiny"


@pytest.mark.parametrize("more", [{}, {"reasoning": {"effort": "high"}, "max_output_tokens": 60},
                                  {"tools": TOOLS, "tool_choice": "required", "max_output_tokens": 60},
                                  {"include": ["message.output_text.logprobs"], "top_logprobs": 2}])
def test_stream_is_the_whole(client, more):
    whole = ask(client, **more)
    events = list(ask(client, stream=True, **more))
    assert [e.sequence_number for e in events] == list(range(len(events)))
    assert [e.type for e in events[:2]] == ["response.created", "response.in_progress"]
    assert shape(events[-1].response) == shape(whole)
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert text == whole.output_text
    done = [e.item for e in events if e.type == "response.output_item.done"]
    assert done == events[-1].response.output and len(done) > 0


def test_the_clients_own_accumulation(client):
    with client.responses.stream(model="tiny", input="Who are you?", temperature=0) as stream:
        snapshots = [event.snapshot for event in stream if event.type == "response.output_text.delta"]
        assert stream.get_final_response().output_text == snapshots[-1] == ANSWER


def test_logprobs(client):
    content = ask(client, include=["message.output_text.logprobs"], top_logprobs=2).output[0].content[0]
    assert "".join(t.token for t in content.logprobs) == ANSWER
    assert all(t.logprob <= 0 and t.top_logprobs[0].logprob == t.logprob for t in content.logprobs)  # greedy


def test_forced_call_and_its_result(client):
    """The embedded model has never seen a tool: the call is forced, its content is whatever the model writes."""
    response = ask(client, tools=TOOLS, tool_choice={"type": "function", "name": "lookup"}, max_output_tokens=40)
    call = response.output[0]
    assert (call.type, call.name) == ("function_call", "lookup")
    items = [{"role": "user", "content": "Who are you?"}, *[item.model_dump(exclude_none=True) for item in response.output],
             {"type": "function_call_output", "call_id": call.call_id, "output": "found"}]
    assert ask(client, input=items, tools=TOOLS, max_output_tokens=20).usage.input_tokens > response.usage.input_tokens


def test_length_makes_it_incomplete(client):
    events = list(ask(client, stream=True, max_output_tokens=3))
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.incomplete_details.reason == "max_output_tokens"
    assert events[-1].response.usage.output_tokens == 3


def test_structured_output_is_told_to_the_model(client):
    class Label(pydantic.BaseModel):
        name: str

    with pytest.raises(pydantic.ValidationError):  # the embedded model knows no JSON: the client gets its text and tries
        client.responses.parse(model="tiny", input="Who are you?", temperature=0, text_format=Label, max_output_tokens=20)


@pytest.mark.parametrize("more, error, param", [
    ({"model": "other"}, openai.NotFoundError, "model"),
    ({"temperature": -1}, openai.BadRequestError, "temperature"),
    ({"previous_response_id": "resp_1"}, openai.BadRequestError, "previous_response_id"),
    ({"tools": [{"type": "web_search"}]}, openai.BadRequestError, "tools[0].type")])
def test_errors_name_the_field(client, more, error, param):
    with pytest.raises(error) as raised:
        ask(client, **more)
    assert raised.value.param == param and param in raised.value.message


def test_stop_in_mid_stream(client):
    with ask(client, stream=True, input="Write on.", max_output_tokens=2000, extra_body={"ignore_eos": True}) as stream:
        for event in stream:
            if event.type == "response.output_text.delta":
                break
    assert ask(client).output_text == ANSWER  # the server goes on
