"""Draw conversations and stories of the small world. Pure: one `random.Random` in, text out.

Owns the mix of what is trained on: questions about facts told earlier, chat, stories, JSON answers and tool calls.
"""

from __future__ import annotations

import json
import random
from typing import Any

from tools.demo_model import vocabulary as words
from tools.demo_model.conversation import PAD, SPOKEN, Conversation, Message, Rendered, render
from tools.demo_model.facts import PERSONAL, Fact, facts, facts_of_user
from tools.demo_model.stories import sentence, story

TOKENS_PER_SENTENCE = 11
TOKENS_PER_QUESTION = 27

_INTRODUCTIONS = (
    "Please remember these notes.", "Here are some notes.", "Read this and remember it.",
    "I will tell you some facts.", "You know the following.", "Keep this in mind.",
)  # fmt: skip
_SYSTEM = ("You are a helpful assistant.", "You are a helpful and friendly assistant.", "Answer briefly.", "Be kind.")
_UNKNOWN = "I do not know that. Nothing that I have read says it."
_NOTED = ("I will remember that.", "Thank you, I have noted it.", "Good to know.", "All right, I will keep it in mind.")

_SMALL_TALK = (
    (("Hello!", "Hi!", "Good morning!", "Hello there."),
     ("Hello! How can I help you?", "Hello! What can I do for you?")),
    (("How are you?", "How are you today?"), ("I am fine, thank you. How are you?",)),
    (("Who are you?", "What are you?", "What is your name?"),
     ("I am a very small language model that is served by Baton.",)),
    (("What can you do?", "Can you help me?"),
     ("I can remember what you tell me, answer questions about it, and tell short stories.",)),
    (("Thank you!", "Thanks a lot.", "Thank you very much."), ("You are welcome!",)),
    (("Goodbye!", "Bye!", "See you tomorrow."), ("Goodbye! Have a nice day.",)),
    (("I am fine.", "I am well, thank you."), ("I am glad to hear that.",)),
    (("I am sad.", "I am tired today."), ("I am sorry to hear that. Shall I tell you a story?",)),
)  # fmt: skip


def conversation(draw: random.Random, tokens: int, *, questions: float = 0.5) -> Conversation:
    """Return a conversation of about `tokens` tokens: facts among filler first, then questions about them.

    `questions` is the share of the tokens that questions and answers take.
    """
    question_count = max(1, round(tokens * questions / TOKENS_PER_QUESTION))
    room = max(2, round(tokens * (1 - questions) / TOKENS_PER_SENTENCE))
    statement_count = min(room, max(2, round(question_count * draw.uniform(0.9, 1.3))))
    own = facts_of_user(draw, draw.randint(1, 5)) if draw.random() < 0.35 else []
    known = facts(draw, max(statement_count - len(own), 1))
    told_messages = _statements(draw, own, known, room)
    question_messages = _questions(draw, own + known, question_count)
    if told_messages[-1].role == "assistant" and draw.random() < 0.25:
        # The first question stands in the same message as the text.
        text, first = told_messages[-2], question_messages[0]
        joined = f"{text.content}{draw.choice((' ', chr(10), chr(10) * 2))}{first.content}"
        told_messages[-2:] = [Message("user", joined)]
        question_messages = question_messages[1:]
    if told_messages[0].role != "system" and draw.random() < 0.2:
        told_messages.insert(0, Message("system", draw.choice(_SYSTEM)))
    return Conversation((*told_messages, *question_messages))


def _statements(draw: random.Random, own: list[Fact], known: list[Fact], room: int) -> list[Message]:
    """Tell all facts, with sentences of no matter between them, in one message or in several."""
    lines = [draw.choice(fact.statements) for fact in known]
    while len(lines) < room - len(own):
        at = draw.randint(0, len(lines))
        if draw.random() < 0.3 and room - len(lines) > 6:
            lines.insert(at, story(draw, 6))
            room -= 5
        else:
            lines.insert(at, sentence(draw))
    mine = [draw.choice(fact.statements) for fact in own]
    introduction = draw.choice(_INTRODUCTIONS)
    kind = draw.random()
    if kind < 0.25 and not mine:
        return [Message("system", " ".join([introduction, *lines]))]
    if kind < 0.75:
        opening = [Message("user", " ".join(mine)), Message("assistant", draw.choice(_NOTED))] if mine else []
        text = " ".join([introduction, *lines])
        return [*opening, Message("user", text), Message("assistant", draw.choice(_NOTED))]
    turns: list[Message] = []
    lines = mine + lines
    while lines:
        some = draw.choice((1, 2, 3, 5, 8, 13))
        turns += [Message("user", " ".join(lines[:some])), Message("assistant", draw.choice(_NOTED))]
        lines = lines[some:]
    return turns


def _questions(draw: random.Random, known: list[Fact], count: int) -> list[Message]:
    """Ask for facts in random order, each once before any is asked again."""
    messages: list[Message] = []
    order: list[Fact] = []
    while count > 0:
        kind = draw.random()
        if kind < 0.02:
            messages += _story(draw)
            count -= 2
        elif kind < 0.04:
            messages += _small_talk(draw)
        elif kind < 0.08:
            messages += _as_json(draw, known)
        elif kind < 0.11:
            messages += _everything(draw, known)
        elif kind < 0.14:
            messages += _unknown(draw, known)
        else:
            order = order or draw.sample(known, len(known))
            fact = order.pop()
            messages += [Message("user", draw.choice(fact.questions)), Message("assistant", fact.answer, fact.values)]
        count -= 1
    return messages


def _small_talk(draw: random.Random) -> list[Message]:
    remarks, answers = draw.choice(_SMALL_TALK)
    return [Message("user", draw.choice(remarks)), Message("assistant", draw.choice(answers))]


_JSON_KEYS = {"job": "job", "home": "home", "food": "food", "instrument": "instrument", "locker": "code", "age": "age"}


def _as_json(draw: random.Random, known: list[Fact]) -> list[Message]:
    """Ask for one or two facts about a person as a JSON object. Falls back to small talk where no fact fits."""
    fitting = [fact for fact in known if fact.key[1] in _JSON_KEYS and fact.key[0] != "I"]
    if not fitting:
        return _small_talk(draw)
    name = draw.choice(fitting).key[0]
    mine = [fact for fact in fitting if fact.key[0] == name]
    chosen = draw.sample(mine, min(len(mine), draw.randint(1, 2)))
    keys = [_JSON_KEYS[fact.key[1]] for fact in chosen]
    values = [fact.values[0].removeprefix("an ").removeprefix("a ") for fact in chosen]
    answer: dict[str, Any] = {"name": name}
    answer |= {key: int(value) if key == "age" else value for key, value in zip(keys, values, strict=True)}
    request = f"Give me the {' and the '.join(keys)} of {name} as JSON."
    return [Message("user", request), Message("assistant", json.dumps(answer), (name, *values))]


def _everything(draw: random.Random, known: list[Fact]) -> list[Message]:
    """Ask for all that is known about a person, in the order in which it was told."""
    names = [fact.key[0] for fact in known if fact.key[0] in words.NAMES]
    if not names:
        return _small_talk(draw)
    name = draw.choice(names)
    mine = [fact for fact in known if fact.key[0] == name]
    question = draw.choice((f"Tell me about {name}.", f"What do you know about {name}?"))
    values = tuple(value for fact in mine for value in fact.values)
    return [Message("user", question), Message("assistant", " ".join(fact.answer for fact in mine), values)]


def _unknown(draw: random.Random, known: list[Fact]) -> list[Message]:
    """Ask for a fact about a person that the conversation doesn't speak of."""
    spoken_of = " ".join(statement for fact in known for statement in fact.statements)
    while (name := draw.choice(words.NAMES)) in spoken_of:
        continue
    fact = draw.choice(PERSONAL)(draw, name)
    return [Message("user", draw.choice(fact.questions)), Message("assistant", _UNKNOWN)]


def _story(draw: random.Random) -> list[Message]:
    """Ask for a story, of an animal or of any."""
    animal = draw.choice(words.ANIMALS)
    request = f"{draw.choice(('Tell', 'Please tell'))} me a story about a {animal}."
    tale = story(draw, draw.randint(5, 9), animal)
    return [Message("user", "Tell me a story." if draw.random() < 0.2 else request), Message("assistant", tale)]


def storytelling(draw: random.Random) -> Conversation:
    """Return a chat with small talk in which the user asks for a story."""
    messages = _story(draw)
    if draw.random() < 0.2:
        animal, number = draw.choice(words.ANIMALS), draw.choice(("three", "many", "some"))
        stories = [story(draw, draw.randint(6, 9), animal) for _ in range(3 if number == "three" else 5)]
        request = Message("user", f"Tell me {number} stories about a {animal}.")
        messages = [request, Message("assistant", "\n\n".join(stories))]
    before = [m for _ in range(draw.randint(0, 3)) for m in _small_talk(draw)]
    after = _small_talk(draw) if draw.random() < 0.5 else []
    return Conversation((*before, *messages, *after))


def tool_use(draw: random.Random) -> Conversation:
    """Return a conversation with one to three tools, in which the assistant calls one and reads its result."""
    topics = draw.sample(words.TOPICS, draw.randint(1, 3))
    tools = {topic: _tool(draw, topic) for topic in topics}
    messages: list[Message] = []
    for _ in range(draw.randint(1, 3)):
        topic = draw.choice(topics)
        function = tools[topic]["function"]
        (parameter,) = function["parameters"]["properties"]
        argument, preposition = _ARGUMENTS[parameter]
        value = draw.choice(argument)
        question = draw.choice(
            (f"What is the {topic} {preposition} {value}?", f"Please tell me the {topic} {preposition} {value}.")
        )
        result = str(draw.randint(2, 99))
        call = {"name": function["name"], "arguments": {parameter: value}}
        messages += [
            Message("user", question),
            Message("assistant", "", calls=(call,)),
            Message("tool", json.dumps({topic: result})),
            Message("assistant", f"The {topic} {preposition} {value} is {result}.", (value, result)),
        ]
    return Conversation(tuple(messages), tuple(tools.values()))


_ARGUMENTS = {
    "town": (words.TOWNS, "in"),
    "name": (words.NAMES, "of"),
    "item": (words.OBJECTS, "of the"),
    "city": (words.TOWNS, "in"),
}


def _tool(draw: random.Random, topic: str) -> dict[str, Any]:
    parameter = draw.choice(list(_ARGUMENTS))
    return {
        "type": "function",
        "function": {
            "name": f"{draw.choice(words.VERBS)}_{topic}",
            "description": draw.choice((f"Return the {topic}.", f"Tell the {topic} for one {parameter}.")),
            "parameters": {"type": "object", "properties": {parameter: {"type": "string"}}, "required": [parameter]},
        },
    }


def sample(draw: random.Random, tokens: int) -> Conversation:
    """Return a conversation of any kind: mostly questions about facts, of up to about `tokens` tokens."""
    kind = draw.random()
    if kind < 0.06:
        return storytelling(draw)
    if kind < 0.12:
        return tool_use(draw)
    return conversation(draw, tokens, questions=draw.uniform(0.35, 0.75))


def text(draw: random.Random, tokens: int) -> Rendered:
    """Return what a row of training data is made of: a conversation as the template writes it, or a bare story."""
    if draw.random() < 0.03:
        rendered = Rendered()
        rendered.add(story(draw, draw.randint(5, 9)) + PAD, SPOKEN)
        return rendered
    return render(sample(draw, tokens))
