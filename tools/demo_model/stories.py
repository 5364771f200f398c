"""Sentences and stories that tell no fact anyone asks for: what lies between a fact and its question."""

from __future__ import annotations

import random

from tools.demo_model import vocabulary as words


def sentence(draw: random.Random) -> str:
    """Return a sentence about the world at large, without a name or a number in it."""
    one, two = draw.choice(words.ADJECTIVES), draw.choice(words.ADJECTIVES)
    place, other, animal = draw.choice(words.PLACES), draw.choice(words.PLACES), draw.choice(words.ANIMALS)
    weather, time, job = draw.choice(words.WEATHER), draw.choice(words.TIMES), draw.choice(words.JOBS)
    return draw.choice(
        (
            f"The {one} {animal} sleeps near the {place} {time}.",
            f"People walk along the {place} {time}.",
            f"There is a path from the {place} to the {other}.",
            f"The {weather} comes over the {place} {time}.",
            f"Every {job} knows the {one} {place}.",
            f"The {place} is {one} and {two}.",
            f"A {one} road leads past the {place}.",
            f"Children tell stories about the {one} {animal}.",
            f"Nothing is as {one} as the {place} {time}.",
            f"The {weather} makes the {animal} {one}.",
        )
    )


def story(draw: random.Random, sentences: int, animal: str = "") -> str:
    """Return a story of about `sentences` sentences with one hero, a friend and a happy end."""
    hero, friend = draw.sample(words.NAMES, 2)
    kind = animal or draw.choice(words.ANIMALS)
    one, two = draw.sample(words.ADJECTIVES, 2)
    place, goal = draw.sample(words.PLACES, 2)
    thing = f"{draw.choice(words.COLOURS)} {draw.choice(words.OBJECTS)}"
    weather, food = draw.choice(words.WEATHER), draw.choice(words.FOODS)
    first = f"Once upon a time there was a {one} {kind} called {hero}."
    middle = [
        f"{hero} lived near the {place} and loved {food}.",
        f"One day {hero} wanted to see the {goal}.",
        f"On the way {hero} met a {two} {draw.choice(words.ANIMALS)} called {friend}.",
        f"{friend} was looking for a {thing}.",
        f"{hero} and {friend} walked to the {goal} together.",
        f"Then the {weather} came, and they were cold.",
        f"Behind the {goal} they found the {thing}.",
        f"{friend} was very happy and gave {hero} some {food}.",
    ]
    others = [i for i in range(len(middle)) if i not in (2, 3)]  # 2 and 3 bring in what the rest speaks of
    indexes = sorted([2, 3, *draw.sample(others, min(max(sentences - 4, 1), len(others)))])
    return " ".join([first, *(middle[i] for i in indexes), f"In the evening {hero} went home and slept well."])
