"""A second renderer of the chat format, written from the rules of docs/chat.md and the golden constants alone."""
import json
import pathlib

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "chat"
CONSTANTS = json.loads((GOLDEN / "constants.json").read_text(encoding="utf-8"))
S = CONSTANTS["strings"]
TOKEN = {t["id"]: t["text"] for t in CONSTANTS["tokens"]}
BOS, EOS, USER, ASSISTANT, OPEN, CLOSE, REMINDER = (TOKEN[i] for i in (0, 1, 128803, 128804, 128821, 128822, 128828))
TASKS = dict(action=128829, query=128830, authority=128831, domain=128832, title=128836, read_url=128845)


def dump(value):
    return json.dumps(value, ensure_ascii=False)


def call_block(calls):
    out = []
    for c in calls:
        lines = []
        for key, value in json.loads(c["function"]["arguments"]).items():
            flag, text = ("true", value) if isinstance(value, str) else ("false", dump(value))
            lines.append(S["parameter_before_name"] + key + S["parameter_before_flag"] + flag + S["parameter_after_flag"]
                         + text + S["parameter_close"])
        out.append(S["invoke_open_before_name"] + c["function"]["name"] + S["invoke_open_after_name"]
                   + S["parameter_joiner"].join(lines) + S["invoke_close"])
    return S["calls_open"] + S["call_joiner"].join(out) + S["calls_close"]


def extras(m):
    s = ""
    if m.get("tools"):
        s += S["tools_block_separator_before"] + S["tools_block_before_schemas"]
        s += S["tools_schema_joiner"].join(dump(t["function"]) for t in m["tools"]) + S["tools_block_after_schemas"]
    if m.get("response_format"):
        s += S["response_format_separator_before"] + S["response_format_before_schema"] + dump(m["response_format"])
    return s


def turns(messages):
    """User turns as lists of (call id or None, text), results in the order of their calls; other messages as they are."""
    out, order = [], {}
    for m in messages:
        if m["role"] not in ("user", "tool"):
            out.append(dict(m))
            continue
        content, call = m["content"], None
        if m["role"] == "tool":
            call = m["tool_call_id"]
            if isinstance(content, list):
                content = "\n\n".join(b["text"] if b["type"] == "text" else f"[Unsupported {b['type']}]" for b in content)
            content = S["tool_result_open"] + content + S["tool_result_close"]
        last = out[-1] if out else None
        if last and last["role"] == "user" and (call is not None or last.get("task") is None):
            last["parts"].append((call, content))
        else:
            out.append({"role": "user", "parts": [(call, content)], "task": m.get("task")})
    for m in out:
        if m["role"] == "assistant" and m.get("tool_calls"):
            order = {c["id"]: i for i, c in enumerate(m["tool_calls"])}
        elif m["role"] == "user" and order:
            slots = [i for i, p in enumerate(m["parts"]) if p[0] is not None]
            for i, p in zip(slots, sorted((m["parts"][i] for i in slots), key=lambda p: order.get(p[0], 0))):
                m["parts"][i] = p
    return out


def last_question(ms):
    return max([i for i, m in enumerate(ms) if m["role"] in ("user", "developer")], default=-1)


def render(messages, tools, o):
    messages = [dict(m) for m in messages]
    if tools:
        if not messages or messages[0]["role"] not in ("system", "developer"):
            messages.insert(0, {"role": "system", "content": ""})
        messages[0]["tools"] = tools
    ms, think = turns(messages), o["thinking_mode"] == "thinking"
    drop = o["drop_thinking"] and not any(m.get("tools") for m in ms)
    if think and drop:
        ms = [m for i, m in enumerate(ms) if m["role"] != "developer" or i >= last_question(ms)]
    last = last_question(ms)
    s = BOS if o["add_default_bos_token"] else ""
    if think and ms:
        profile = CONSTANTS["effort_profiles"][o["effort_profile"]]
        name = profile[o["reasoning_effort"] or ("high" if o["effort_profile"] == "preview" else "low")]
        s += S[name] if name else ""
    for k, m in enumerate(ms):
        role = m["role"]
        if role == "system":
            s += (m["content"] or "") + extras(m)
        elif role == "developer":
            s += USER + m["content"] + extras(m)
        elif role == "user":
            s += USER + S["user_parts_joiner"].join(p[1] for p in m["parts"])
        elif role == "latest_reminder":
            s += REMINDER + m["content"]
        else:
            if think and not (k and ms[k - 1].get("task")) and (not drop or k > last):
                s += (m.get("reasoning_content") or "") + CLOSE
            s += (m["content"] or "") + (call_block(m["tool_calls"]) if m.get("tool_calls") else "")
            s += "" if m.get("wo_eos") else EOS
        if k + 1 == len(ms) or ms[k + 1]["role"] in ("assistant", "latest_reminder"):
            if m.get("task") == "action":
                s += ASSISTANT + (OPEN if think else CLOSE) + TOKEN[TASKS["action"]]
            elif m.get("task"):
                s += TOKEN[TASKS[m["task"]]]
            elif role in ("user", "developer"):
                s += ASSISTANT + (OPEN if think and (not drop or k >= last) else CLOSE)
    return s
