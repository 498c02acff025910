#!/usr/bin/env python3
"""An environment of several turns: the model finds a number with a tool (docs/rewards.md).

The dataset's lines have a key "secret". Each call guess(number) is answered with "higher", "lower" or "right"; a right guess
ends the conversation with a reward of 1 / guesses. A conversation that ends before has the reward 0.
"""
import json
import sys

TOOL = {
    "type": "function",
    "function": {
        "name": "guess",
        "description": "Say a number. The answer is higher, lower or right.",
        "parameters": {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]},
    },
}
sessions = {}  # many conversations may be open at once


def turn(session, answer):
    if not answer["tool_calls"]:
        return {"messages": [{"role": "user", "content": "Use the tool guess."}]}
    messages = []
    for call in answer["tool_calls"]:
        session["guesses"] += 1
        try:
            number = int(json.loads(call["arguments"])["number"])
        except (ValueError, TypeError, KeyError):
            said = "guess needs a whole number"
        else:
            said = "right" if number == session["secret"] else "higher" if number < session["secret"] else "lower"
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": said})
        if said == "right":
            metrics = {"guesses": session["guesses"]}
            return {"messages": messages, "done": True, "reward": 1 / session["guesses"], "metrics": metrics}
    return {"messages": messages}


def reply(request):
    name = request["session"]
    if request["type"] == "open":
        sessions[name] = {"secret": request["line"]["secret"], "guesses": 0}
        return {"tools": [TOOL]}
    if request["type"] == "turn":
        answer = turn(sessions[name], request["answer"])
        if answer.get("done"):
            del sessions[name]
        return answer
    del sessions[name]  # close: too long, too many turns, or nobody wants it any more
    return {"reward": 0}


for text in sys.stdin:
    request = json.loads(text)
    print(json.dumps({"id": request["id"], **reply(request)}), flush=True)
