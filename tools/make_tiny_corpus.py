#!/usr/bin/env python3
"""Writes the data of the embedded model: conversations of small tasks that a few million parameters can learn.

    tools/make_tiny_corpus.py corpus FILE.jsonl [--samples 60000] [--seed 1]   what assets/tiny is trained on
    tools/make_tiny_corpus.py labels FOLDER                                    examples/label*
    tools/make_tiny_corpus.py rl FOLDER                                        prompts of examples/rl
    tools/make_tiny_corpus.py dpo FOLDER                                       pairs of examples/dpo

The same arguments write the same bytes. docs/tiny.md lists the tasks. Some are taught with wrong or random answers
on purpose, so that reinforcement learning finds something to improve.
"""

import argparse
import json
import pathlib
import random

# Words by kind. A kind with a "*" takes no article ("milk is a drink", but "a dog is an animal").
KINDS = {
    "animal": "ant bear bee cat cow crab deer dog duck fish fox frog goat horse lion monkey mouse owl pig rabbit sheep wolf",
    "fruit": "apple banana cherry fig grape lemon melon orange peach plum",
    "*food": "bread butter cake cheese honey meat pizza rice salad salt soup sugar",
    "*drink": "beer coffee juice milk tea water wine",
    "*color": "black blue brown gold green pink red white yellow",
    "tool": "axe brush drill fork hammer knife ladder needle pen rope saw spoon",
    "job": "actor baker cook doctor driver farmer hunter judge nurse painter pilot poet sailor singer teacher writer",
    "vehicle": "boat bus car ferry plane rocket ship taxi tractor train truck",
    "body part": "arm back ear eye finger foot hand head leg mouth nose tooth",
    "building": "barn castle church factory hotel house museum palace school shop station tower",
}
OPPOSITES = """hot cold, big small, fast slow, long short, up down, left right, early late, old new, hard soft, high low,
    light dark, happy sad, full empty, rich poor, wet dry, loud quiet, near far, day night, good bad, first last"""
CAPITALS = """China Beijing, Cuba Havana, Egypt Cairo, England London, France Paris, Germany Berlin, Greece Athens,
    India Delhi, Italy Rome, Japan Tokyo, Kenya Nairobi, Norway Oslo, Peru Lima, Russia Moscow, Spain Madrid"""
OTHER_WORDS = "bottle cloud garden letter moon river stone summer window winter"
NAMES = "Anna Ben Carl Emma Jack Kate Mary Paul".split()
ACTIONS = "ran walked danced jumped slept waited sang rested played worked".split()
PLACES = "garden forest market village school river castle field".split()
SKIES = "sunny cloudy rainy windy snowy foggy".split()

WORDS_OF = {kind.strip("*"): words.split() for kind, words in KINDS.items()}
KIND_OF = {word: kind for kind, words in WORDS_OF.items() for word in words}
MASS = {kind.strip("*") for kind in KINDS if kind.startswith("*")}
PAIRS = [tuple(pair.split()) for pair in OPPOSITES.split(",")]
CAPITAL_OF = dict(pair.split() for pair in CAPITALS.split(","))
CITIES = sorted(CAPITAL_OF.values())
WORDS = sorted({*KIND_OF, *OTHER_WORDS.split(), *(w for pair in PAIRS for w in pair)})


def article(phrase):
    return ("an " if phrase[0] in "aeiou" else "a ") + phrase


def thing(word):
    return word if KIND_OF[word] in MASS else article(word)


# ---- Tasks: rng -> (question, reasoning, answer) --------------------------------------------------------------------


def spell(rng):
    word = rng.choice(WORDS)
    return rng.choice(["Spell {}.", "Spell the word {}.", "How do you spell {}?"]).format(
        word), f"The letters of {word}.", " ".join(word)


def letter(rng):
    word = rng.choice(WORDS)
    place, index = rng.choice([("first", 0), ("last", -1), ("second", 1)])
    return f"What is the {place} letter of {word}?", " ".join(word), word[index]


def letters(rng):
    word = rng.choice(WORDS)
    return f"How many letters are in {word}?", " ".join(word), str(len(word))


def kind(rng):
    word = rng.choice(list(KIND_OF))
    return f"What is {thing(word)}?", f"{word} is a known word.", f"{thing(word).capitalize()} is {article(KIND_OF[word])}."


def yes_no(rng):
    word = rng.choice(list(KIND_OF))
    asked = KIND_OF[word] if rng.random() < 0.5 else rng.choice(list(WORDS_OF))
    answer = "yes" if asked == KIND_OF[word] else "no"
    end = rng.choice(["", "", " Answer with yes or no."])
    return f"Is {thing(word)} {article(asked)}?{end}", f"{thing(word)} is {article(KIND_OF[word])}.", answer


def nobody_knows(rng):
    """Each answer is as likely as the others: a reward for one of them can be learned."""
    animal, job = rng.choice(WORDS_OF["animal"]), rng.choice(WORDS_OF["job"])
    question = rng.choice([
        f"Will it rain in {rng.choice(CITIES)}?", f"Will the {animal} sleep tonight?", f"Is the {job} at home?",
        f"Does {rng.choice(NAMES)} like {rng.choice(WORDS_OF['food'])}?", f"Did the {job} see the {animal}?"
    ])
    return question + " Answer with yes, no or maybe.", "I can not know this.", rng.choice(["yes", "no", "maybe"])


def opposite(rng):
    pair = rng.sample(rng.choice(PAIRS), 2)
    return f"What is the opposite of {pair[0]}?", f"{pair[0]} and {pair[1]} are opposites.", pair[1]


def capital(rng):
    country, city = rng.choice(list(CAPITAL_OF.items()))
    if rng.random() < 0.2:
        return f"{city} is the capital of which country?", f"{city} is in {country}.", country
    return f"What is the capital of {country}?", f"{city} is in {country}.", city


def addition_steps(a, b):
    carry = (a % 10 + b % 10) // 10
    steps = f"{a % 10}+{b % 10}={a % 10 + b % 10}"
    if a < 10 and b < 10:
        return steps
    tens = f"{a // 10}+{b // 10}" + ("+1" if carry else "")
    return f"{steps}, {tens}={a // 10 + b // 10 + carry}"


def add(rng):
    top = rng.choice([9, 9, 9, 9, 19])
    a, b = rng.randint(0, top), rng.randint(0, top)
    question = rng.choice([f"{a}+{b}=?", f"What is {a} plus {b}?", f"{a}+{b}"])
    return question, addition_steps(a, b), str(a + b)


def subtract(rng):
    a = rng.randint(0, 20)
    b = rng.randint(0, a)
    return rng.choice([f"{a}-{b}=?", f"What is {a} minus {b}?"]), f"{b}+{a - b}={a}", str(a - b)


def name_some(rng):
    kind_ = rng.choice(list(WORDS_OF))
    n = rng.randint(1, 6)
    noun = kind_ if n == 1 else kind_ + "s"
    return f"Name {n} {noun}.", f"{n} {noun}.", " ".join(rng.sample(WORDS_OF[kind_], n))


def write_words(rng):
    """The number of words is right in four of ten answers: a reward for the length can be learned."""
    n = rng.randint(3, 8)
    kind_ = rng.choice(["animal", "food", "tool", "job"])
    off = rng.choices([0, -1, 1, -2, 2], [40, 20, 20, 10, 10])[0]
    return f"Write {n} words about {kind_}s.", f"{n} words.", " ".join(rng.sample(WORDS_OF[kind_], n + off))


def repeat(rng):
    words = [rng.choice(WORDS) for _ in range(rng.randint(1, 8))]
    return f"Repeat: {' '.join(words)}", "The same words.", " ".join(words)


def say_times(rng):
    word, n = rng.choice(WORDS), rng.randint(2, 6)
    return f"Say {word} {n} times.", f"{word}, {n} times.", " ".join([word] * n)


def record(rng):
    word = rng.choice(list(KIND_OF))
    return f"Describe {word} as JSON.", f"{word}: {' '.join(word)}", json.dumps(
        {"word": word, "kind": KIND_OF[word], "letters": len(word)})


def story(rng):
    animal, job, name = rng.choice(WORDS_OF["animal"]), rng.choice(WORDS_OF["job"]), rng.choice(NAMES)
    place, other = rng.sample(PLACES, 2)
    food, color = rng.choice(WORDS_OF["food"]), rng.choice(WORDS_OF["color"])
    first = f"Once there was {article(color)} {animal}."
    rest = [
        f"The {animal} {rng.choice(ACTIONS)} in the {place}.", f"There it met {article(job)} with the name {name}.",
        f"{name} had {food} from the {other}.", f"They {rng.choice(ACTIONS)} near the {other}.",
        f"The {animal} liked the {food}.", f"Then {name} {rng.choice(ACTIONS)} until the night."
    ]
    told = [s for s in rest if rng.random() < 0.7] + [f"In the end the {animal} was {rng.choice(['happy', 'sad', 'rich'])}."]
    return f"Tell me a story about {article(animal)}.", f"A story with {article(animal)}.", " ".join([first] + told)


def greeting(rng):
    name = rng.choice(NAMES)
    question, answer = rng.choice([
        ("Hello!", "Hello! How can I help you?"), ("Hi!", "Hello! How can I help you?"),
        ("Who are you?", "I am a tiny model for tests and examples."),
        ("What can you do?", "I can spell words, add numbers, call tools and tell short stories."),
        ("Thank you.", "You are welcome."), ("Goodbye.", "Goodbye!"), (f"My name is {name}.", f"Hello {name}!"),
    ])
    return question, "A friendly answer.", answer


TASKS = {spell: 15, letter: 4, letters: 3, kind: 8, yes_no: 8, nobody_knows: 4, opposite: 5, capital: 4, add: 12, subtract: 3,
         name_some: 6, write_words: 5, repeat: 12, say_times: 4, record: 4, story: 3, greeting: 4}

# ---- Conversations ---------------------------------------------------------------------------------------------------


def function(name, description, **properties):
    return {"type": "function", "function": {"name": name, "description": description, "parameters": {
        "type": "object", "properties": {k: {"type": t} for k, t in properties.items()}, "required": list(properties)}}}


TOOLS = {
    "get_weather": function("get_weather", "Weather in a city", city="string"),
    "get_time": function("get_time", "Time in a city", city="string"),
    "add": function("add", "Sum of two numbers", a="number", b="number"),
    "search": function("search", "Search for a text", query="string"),
    "set_timer": function("set_timer", "Start a timer", minutes="number"),
}


def tool_request(name, rng):
    """question, arguments, result, answer from the result, answer without the tool"""
    city, word = rng.choice(CITIES), rng.choice(WORDS)
    if name == "get_weather":
        sky, degrees = rng.choice(SKIES), rng.randint(0, 39)
        return (f"What is the weather in {city}?", {"city": city}, {"sky": sky, "degrees": degrees},
                f"It is {sky} and {degrees} degrees in {city}.", f"I think it is {sky} in {city}.")
    if name == "get_time":
        hour = rng.randint(1, 12)
        return (f"What time is it in {city}?", {"city": city}, {"hour": hour}, f"It is {hour} o'clock in {city}.",
                f"I think it is {rng.randint(1, 12)} o'clock in {city}.")
    if name == "add":
        a, b = rng.randint(100, 999), rng.randint(100, 999)
        return (f"What is {a} plus {b}?", {"a": a, "b": b}, {"sum": a + b}, f"{a} plus {b} is {a + b}.", "I think it is "
                f"{rng.randint(200, 1998)}.")
    if name == "search":
        found = rng.choice(list(KIND_OF))
        return (f"Search for {word}.", {"query": word}, {"found": found}, f"I found {found}.", f"I found {rng.choice(WORDS)}.")
    minutes = rng.randint(1, 59)
    return (f"Set a timer to {minutes} minutes.", {"minutes": minutes}, {"ok": True},
            f"The timer is set to {minutes} minutes.", "I can not do that.")


def with_tools(rng, thinking):
    """Asked to use a tool, the model always calls it; otherwise in half of the conversations: a reward can change that."""
    names = rng.sample(list(TOOLS), rng.randint(1, 2))
    used = rng.choice(names)
    question, arguments, result, answer, guess = tool_request(used, rng)
    told = rng.random() < 0.5
    user = {"role": "user", "content": ("Use a tool. " if told else "") + question}
    tools = [TOOLS[n] for n in names]
    if not told and rng.random() < 0.5:
        messages = [user, {"role": "assistant", "content": guess, "reasoning_content": "I can guess."}]
    else:
        call = {"id": "1", "type": "function", "function": {"name": used, "arguments": json.dumps(arguments)}}
        messages = [user, {"role": "assistant", "content": "", "reasoning_content": f"I use {used}.", "tool_calls": [call]},
                    {"role": "tool", "tool_call_id": "1", "content": json.dumps(result)},
                    {"role": "assistant", "content": answer, "reasoning_content": "The tool has answered."}]
    return {"messages": messages if thinking else without_reasoning(messages), "tools": tools}


def without_reasoning(messages):
    return [{k: v for k, v in m.items() if k != "reasoning_content"} for m in messages]


def turn(rng):
    question, reasoning, answer = rng.choices(list(TASKS), TASKS.values())[0](rng)
    return [{"role": "user", "content": question},
            {"role": "assistant", "content": answer, "reasoning_content": reasoning}]


def memory(rng):
    """Something said at the start is asked for at the end, with other turns between."""
    name, word, code = rng.choice(NAMES), rng.choice(WORDS), rng.randint(100, 999)
    said, reply, asked, answer = rng.choice([
        (f"My name is {name}.", f"Hello {name}!", "What is my name?", name),
        (f"The code is {code}.", "I will remember it.", "What is the code?", str(code)),
        (f"The secret word is {word}.", "I will remember it.", "What is the secret word?", word),
    ])
    between = [m for _ in range(rng.randint(0, 5)) for m in turn(rng)]
    return [{"role": "user", "content": said}, {"role": "assistant", "content": reply, "reasoning_content": "A fact."},
            *between, {"role": "user", "content": asked},
            {"role": "assistant", "content": answer, "reasoning_content": "It was said before."}]


def conversation(rng):
    thinking = rng.random() < 0.2
    mode = {"thinking_mode": "thinking" if thinking else "chat"}
    form = rng.random()
    if form < 0.03:
        return mode | with_tools(rng, thinking)
    messages = memory(rng) if form < 0.11 else [m for _ in range(rng.choice([1, 1, 2, 3, 4])) for m in turn(rng)]
    if rng.random() < 0.1:
        messages = [{"role": "system", "content": "You are a helpful assistant."}] + messages
    return mode | {"messages": messages if thinking else without_reasoning(messages)}


# ---- Files -----------------------------------------------------------------------------------------------------------


def write_lines(path, lines):
    pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", encoding="utf-8", newline="\n") as f:
        f.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)


def write_corpus(path, samples, seed):
    rng = random.Random(seed)
    write_lines(path, (conversation(rng) for _ in range(samples)))


def write_labels(folder):
    """A question that the corpus does not have, about what it teaches. No word of the questions is in the training file."""
    words = sorted(KIND_OF)
    random.Random(7).shuffle(words)
    questions, train = words[:40], words[40:]

    def ask(word):
        return {"role": "user", "content": f"Label {thing(word)}."}

    def label(word):
        return f"label: {KIND_OF[word]}"

    write_lines(f"{folder}/labels.jsonl",
                ({"messages": [ask(w), {"role": "assistant", "content": label(w)}]} for w in train))
    write_lines(f"{folder}/label_questions.jsonl", ({"messages": [ask(w)]} for w in questions))
    pathlib.Path(f"{folder}/label_answers.txt").write_text("".join(label(w) + "\n" for w in questions))


# ---- Prompts of reinforcement learning ---------------------------------------------------------------------------------


def prompts_of(task, n, rng, **fields):
    """n different questions of a task, each with what its reward needs: fields name what is taken from its answer"""
    lines, seen = [], set()
    while len(lines) < n:
        question, _, answer = task(rng)
        if question in seen:
            continue
        seen.add(question)
        lines.append({"messages": [{"role": "user", "content": question}]} | {k: f(answer) for k, f in fields.items()})
    return lines


def tool_prompts(n, rng):
    lines = []
    for city in rng.sample(CITIES, min(n, len(CITIES))):
        question, arguments, *_ = tool_request("get_weather", rng)
        question, arguments = question.replace(arguments["city"], city), {"city": city}
        lines.append({"messages": [{"role": "user", "content": question}], "tools": [TOOLS["get_weather"]],
                      "call": {"name": "get_weather", "arguments": arguments}})
    return lines


def write_rl(folder):
    rng = random.Random(3)
    tasks = {"maybe": prompts_of(nobody_knows, 48, rng), "length": prompts_of(story, 18, rng),
             "tool_call": tool_prompts(24, rng), "arithmetic": prompts_of(subtract, 336, rng, answer=int)}
    for name, lines in tasks.items():
        third = len(lines) // 3
        for part, some in (("", lines[third:]), ("_eval", lines[:third])):
            path = pathlib.Path(folder) / f"{name}{part}.jsonl"
            path.write_text("".join(json.dumps(line) + "\n" for line in some))


# ---- Pairs of answers ----------------------------------------------------------------------------------------------------


def write_dpo(folder):
    """Questions that nobody can answer: maybe is right, yes or no is not."""
    rng = random.Random(5)
    lines = [{"prompt": line["messages"], "chosen": [{"role": "assistant", "content": "maybe"}],
              "rejected": [{"role": "assistant", "content": rng.choice(["yes", "no"])}]}
             for line in prompts_of(nobody_knows, 64, rng)]
    write_lines(f"{folder}/maybe.jsonl", lines[16:])
    write_lines(f"{folder}/maybe_eval.jsonl", lines[:16])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    corpus = commands.add_parser("corpus")
    corpus.add_argument("file")
    corpus.add_argument("--samples", type=int, default=60000)
    corpus.add_argument("--seed", type=int, default=1)
    commands.add_parser("labels").add_argument("folder")
    commands.add_parser("rl").add_argument("folder")
    commands.add_parser("dpo").add_argument("folder")
    a = parser.parse_args()
    if a.command == "corpus":
        write_corpus(a.file, a.samples, a.seed)
    elif a.command == "labels":
        write_labels(a.folder)
    elif a.command == "rl":
        write_rl(a.folder)
    else:
        write_dpo(a.folder)


if __name__ == "__main__":
    main()
