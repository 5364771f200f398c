"""Facts of the small world: a subject, a relation and a value, each drawn at random, and the sentences that tell them.

Owns what a fact says, how it is asked for and how it is answered. A fact's answer has the value in it word for word.
Statements name the subject before the value: what comes after a token can't change its keys and values.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from tools.demo_model import vocabulary as words


@dataclass(frozen=True)
class Fact:
    """A fact. No two facts of one conversation share a `key`."""

    key: tuple[str, str]
    """Subject and relation."""
    statements: tuple[str, ...]
    questions: tuple[str, ...]
    answer: str
    values: tuple[str, ...]
    """Parts of `answer` that only the statement tells."""


def _article(word: str) -> str:
    return f"an {word}" if word[0] in "aeiou" else f"a {word}"


def _job(draw: random.Random, n: str) -> Fact:
    job = draw.choice(words.JOBS)
    return Fact(
        (n, "job"),
        (f"{n} works as {_article(job)}.", f"{n} is {_article(job)}.", f"The job of {n} is {job}."),
        (f"What is {n}'s job?", f"What does {n} do for a living?", f"What does {n} work as?"),
        f"{n} works as {_article(job)}.",
        (job,),
    )


def _home(draw: random.Random, n: str) -> Fact:
    town = draw.choice(words.TOWNS)
    return Fact(
        (n, "home"),
        (f"{n} lives in {town}.", f"The home of {n} is in {town}.", f"{n} has a house in {town}."),
        (f"Where does {n} live?", f"In which town does {n} live?", f"Where is the home of {n}?"),
        f"{n} lives in {town}.",
        (town,),
    )


def _age(draw: random.Random, n: str) -> Fact:
    age = str(draw.randint(11, 98))
    return Fact(
        (n, "age"),
        (f"{n} is {age} years old.", f"The age of {n} is {age}."),
        (f"How old is {n}?", f"What is the age of {n}?"),
        f"{n} is {age} years old.",
        (age,),
    )


def _pet(draw: random.Random, n: str) -> Fact:
    pet = f"{draw.choice(words.COLOURS)} {draw.choice(words.ANIMALS)}"
    return Fact(
        (n, "pet"),
        (f"{n} has {_article(pet)}.", f"The pet of {n} is {_article(pet)}.", f"{n} keeps {_article(pet)}."),
        (f"Which pet does {n} have?", f"What is the pet of {n}?", f"What animal does {n} keep?"),
        f"{n} has {_article(pet)}.",
        (_article(pet),),
    )


def _food(draw: random.Random, n: str) -> Fact:
    food = draw.choice(words.FOODS)
    return Fact(
        (n, "food"),
        (f"{n} likes {food} best.", f"The favourite food of {n} is {food}.", f"{n} loves to eat {food}."),
        (f"What is {n}'s favourite food?", f"What does {n} like to eat?", f"Which food does {n} like best?"),
        f"{n} likes {food} best.",
        (food,),
    )


def _instrument(draw: random.Random, n: str) -> Fact:
    played = draw.choice(words.INSTRUMENTS)
    return Fact(
        (n, "instrument"),
        (f"{n} plays the {played}.", f"The instrument of {n} is the {played}."),
        (f"Which instrument does {n} play?", f"What does {n} play?"),
        f"{n} plays the {played}.",
        (played,),
    )


def _locker(draw: random.Random, n: str) -> Fact:
    code = "".join(draw.choice("0123456789") for _ in range(4))
    return Fact(
        (n, "locker"),
        (f"The code of {n}'s locker is {code}.", f"{n}'s locker has the code {code}.", f"{n}'s code is {code}."),
        (f"What is the code of {n}'s locker?", f"Which code opens {n}'s locker?", f"What is {n}'s code?"),
        f"The code of {n}'s locker is {code}.",
        (code,),
    )


def _meeting(draw: random.Random, n: str) -> Fact:
    day, other = draw.choice(words.DAYS), draw.choice(words.NAMES)
    return Fact(
        (n, "meeting"),
        (f"{n} meets {other} on {day}.", f"{n} will meet {other} on {day}."),
        (f"When does {n} meet {other}?", f"On which day does {n} meet {other}?"),
        f"{n} meets {other} on {day}.",
        (day,),
    )


def _find(draw: random.Random, n: str) -> Fact:
    thing = f"{draw.choice(words.COLOURS)} {draw.choice(words.OBJECTS)}"
    place = draw.choice(words.PLACES)
    return Fact(
        (n, "found"),
        (f"{n} found {_article(thing)} near the {place}.", f"{n} has found {_article(thing)} near the {place}."),
        (f"What did {n} find?", f"What did {n} find near the {place}?"),
        f"{n} found {_article(thing)}.",
        (_article(thing),),
    )


def _place_of_thing(draw: random.Random) -> Fact:
    thing, room = f"{draw.choice(words.COLOURS)} {draw.choice(words.OBJECTS)}", draw.choice(words.ROOMS)
    return Fact(
        (thing, "place"),
        (f"The {thing} is in the {room}.", f"The {thing} stands in the {room}.", f"The {thing} was put in the {room}."),
        (f"Where is the {thing}?", f"In which room is the {thing}?", f"Where can I find the {thing}?"),
        f"The {thing} is in the {room}.",
        (room,),
    )


def _price(draw: random.Random) -> Fact:
    thing, price = f"{draw.choice(words.COLOURS)} {draw.choice(words.OBJECTS)}", str(draw.randint(2, 99))
    return Fact(
        (thing, "price"),
        (f"The {thing} costs {price} coins.", f"The price of the {thing} is {price} coins."),
        (f"How much does the {thing} cost?", f"What is the price of the {thing}?", f"How much is the {thing}?"),
        f"The {thing} costs {price} coins.",
        (price,),
    )


def _opening(draw: random.Random) -> Fact:
    shop, hour = f"{draw.choice(words.SHOPS)} in {draw.choice(words.TOWNS)}", draw.choice(words.HOURS)
    return Fact(
        (shop, "opening"),
        (f"The {shop} opens at {hour}.", f"The {shop} is open from {hour} on."),
        (f"When does the {shop} open?", f"At what time does the {shop} open?"),
        f"The {shop} opens at {hour}.",
        (hour,),
    )


def _secret(draw: random.Random) -> Fact:
    lock = f"{draw.choice(words.COLOURS)} {draw.choice(words.LOCKS)}"
    secret = f"{draw.choice(words.SECRETS)} {draw.choice(words.SECRETS)}"
    return Fact(
        (lock, "secret"),
        (f"The password of the {lock} is {secret}.", f"The {lock} has the password {secret}."),
        (f"What is the password of the {lock}?", f"Which words open the {lock}?"),
        f"The password of the {lock} is {secret}.",
        (secret,),
    )


PERSONAL: tuple[Callable[[random.Random, str], Fact], ...] = (
    _job, _home, _age, _pet, _food, _instrument, _locker, _meeting, _find,
)  # fmt: skip
OTHER: tuple[Callable[[random.Random], Fact], ...] = (_place_of_thing, _price, _opening, _secret)


def facts(draw: random.Random, count: int) -> list[Fact]:
    """Return `count` facts with keys of their own. A person has one to four of them; a third are about things."""
    drawn: dict[tuple[str, str], Fact] = {}
    names = draw.sample(words.NAMES, max(1, min(len(words.NAMES), count // 3)))
    while len(drawn) < count:
        fact = draw.choice(PERSONAL)(draw, draw.choice(names)) if draw.random() < 0.67 else draw.choice(OTHER)(draw)
        drawn.setdefault(fact.key, fact)
    return draw.sample(list(drawn.values()), count)


def facts_of_user(draw: random.Random, count: int) -> list[Fact]:
    """Return up to five facts that a user tells of itself, in the first person, and answers in the second."""
    name, town, job = draw.choice(words.NAMES), draw.choice(words.TOWNS), _article(draw.choice(words.JOBS))
    food, pet = draw.choice(words.FOODS), _article(f"{draw.choice(words.COLOURS)} {draw.choice(words.ANIMALS)}")
    own = [
        Fact(("I", "name"), (f"My name is {name}.", f"I am {name}."),
             ("What is my name?", "Do you remember my name?"), f"Your name is {name}.", (name,)),
        Fact(("I", "home"), (f"I live in {town}.", f"My home is in {town}."),
             ("Where do I live?", "In which town do I live?"), f"You live in {town}.", (town,)),
        Fact(("I", "job"), (f"I work as {job}.", f"I am {job}."),
             ("What is my job?", "What do I work as?"), f"You work as {job}.", (job,)),
        Fact(("I", "food"), (f"I like {food} best.", f"My favourite food is {food}."),
             ("What is my favourite food?", "Which food do I like best?"), f"You like {food} best.", (food,)),
        Fact(("I", "pet"), (f"I have {pet}.", f"My pet is {pet}."),
             ("Which pet do I have?", "What is my pet?"), f"You have {pet}.", (pet,)),
    ]  # fmt: skip
    return draw.sample(own, min(count, len(own)))
