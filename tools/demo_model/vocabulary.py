"""The words of the demo model's world. Facts combine them at random, so no fact can be learned by heart."""

from __future__ import annotations

from itertools import product


def _combined(first: str, second: str) -> tuple[str, ...]:
    return tuple(a + b for a, b in product(first.split(), second.split()))


def _words(text: str, separator: str | None = None) -> tuple[str, ...]:
    return tuple(text.split(separator))


NAMES = (
    *_combined("Ma Be Ti Lo Ke Su Ra Do Vi Ne", "ra lin mo na vik sa rel dan"),
    *_combined("Al Or El Is Em", "bert win da mina ric vara"),
    *_combined("Jo Pe Fa Hu", "nas tra bian go lene kim"),
)
TOWNS = _combined("Ash Elm Birch Stone Mill Gold North Salt", "ford ton mere wick field bridge haven")
JOBS = _words(
    "baker carpenter teacher nurse farmer pilot tailor painter gardener cook sailor miner smith judge singer dentist "
    "plumber barber potter weaver fisher hunter writer dancer lawyer driver clerk librarian printer mason"
)
ANIMALS = _words(
    "cat dog horse goat parrot rabbit fox owl turtle donkey hen mouse sheep pony crow hedgehog frog duck goose pig "
    "snake spider badger otter"
)
COLOURS = _words("red blue green yellow black white brown grey purple pink silver golden")
FOODS = _words(
    "bread soup cheese rice fish honey plums apples pears beans noodles cake olives mushrooms carrots onions eggs "
    "pancakes pumpkin berries nuts dumplings"
)
INSTRUMENTS = _words("piano violin flute drum trumpet guitar harp cello organ horn banjo whistle")
OBJECTS = _words(
    "lamp chair table clock kettle basket mirror ladder hammer rope blanket bottle candle bucket coat hat boot drum "
    "book map key coin bell brush bowl knife umbrella lantern ring box scarf glove wheel saw needle pot jar kite"
)
ROOMS = _words(
    "kitchen cellar attic garden stable garage library bathroom bedroom workshop hall shed tower office pantry "
    "greenhouse"
)
SHOPS = _words(
    "bakery bank museum pharmacy library school market theatre harbour post-office mill inn church hotel station cinema"
)
DAYS = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
HOURS = tuple(f"{hour}:{minute}" for hour in range(6, 23) for minute in ("00", "15", "30", "45"))
SECRETS = _words(
    "amber anchor arrow autumn beacon canyon cedar cloud comet copper coral crystal desert dragon ember falcon feather "
    "forest garnet glacier harvest island ivory jasmine jungle lemon lotus marble meadow meteor mountain ocean orchid "
    "pepper planet prairie rainbow river ruby saffron shadow summer sunset thunder tiger tulip valley velvet violet "
    "winter"
)
LOCKS = _words("gate door chest vault safe cabinet drawer trunk locker hatch")

ADJECTIVES = _words(
    "old young quiet bright small large warm cold gentle tired clever lonely happy curious strange narrow deep "
    "ancient careful lazy"
)
PLACES = _words(
    "river forest mountain bridge lake field road village harbour island valley hill cave beach meadow well mill "
    "castle garden market"
)
WEATHER = _words("rain snow fog wind sunshine frost thunder mist")
TIMES = _words(
    "in the morning|in the evening|at night|every summer|before dawn|after lunch|on quiet days|in late autumn|"
    "once a week|for many years|at noon|all winter long",
    "|",
)
TOPICS = _words(
    "weather price route time news score menu temperature traffic schedule balance forecast address number status level"
)
VERBS = _words("get find look_up fetch check read")
