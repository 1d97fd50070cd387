"""Sentences full of figures and the words they are read as: the task of the demo model.

"at 14:05, owes $17.20" is read as "at fourteen oh five, owes seventeen dollars and twenty cents".
Sentences are drawn together with their answers, so accuracy needs no reference data. Standard library only.
"""

from __future__ import annotations

import calendar
import random
import zlib
from collections.abc import Iterator

MAX_ITEMS = 8

_ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen"
).split()
_TENS = "_ _ twenty thirty forty fifty sixty seventy eighty ninety".split()
_ORDINALS = (
    "zeroth first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth thirteenth "
    "fourteenth fifteenth sixteenth seventeenth eighteenth nineteenth"
).split()
MONTHS = ("January February March April May June July August September October November December").split()
_CURRENCIES = {"$": ("dollar", "cent"), "€": ("euro", "cent"), "£": ("pound", "penny")}
_PLURALS = {"penny": "pence"}

# The words that introduce an item; they are copied to the answer.
_NUMBER_LEADS = ("invoice", "order", "room", "ticket", "page", "bus", "parcel", "box")
_DATE_LEADS = ("due", "on", "from", "until")
_TIME_LEADS = ("at", "before", "after")
_MONEY_LEADS = ("costs", "pays", "owes", "saves")


def cardinal(n: int) -> str:
    """``4213`` -> "four thousand two hundred thirteen", for 0 <= n < 1,000,000."""
    if not 0 <= n < 1_000_000:
        raise ValueError(f"cardinal() reads 0 to 999,999, not {n}")
    if n < 20:
        return _ONES[n]
    for size, head in ((1000, "thousand"), (100, "hundred")):
        if n >= size:
            rest = f" {cardinal(n % size)}" if n % size else ""
            return f"{cardinal(n // size)} {head}{rest}"
    return _TENS[n // 10] + (f" {_ONES[n % 10]}" if n % 10 else "")


def ordinal(n: int) -> str:
    """``21`` -> "twenty first", for the days of a month."""
    if not 1 <= n <= 31:
        raise ValueError(f"ordinal() reads 1 to 31, not {n}")
    if n < 20:
        return _ORDINALS[n]
    if n % 10:
        return f"{_TENS[n // 10]} {_ORDINALS[n % 10]}"
    return {20: "twentieth", 30: "thirtieth"}[n]


def _two_digits(n: int) -> str:
    """The second half of a year or a time: "hundred", "oh five", "forty two"."""
    if n == 0:
        return "hundred"
    return f"oh {_ONES[n]}" if n < 10 else cardinal(n)


def year_words(year: int) -> str:
    """``1905`` -> "nineteen oh five", ``2005`` -> "two thousand five", ``2021`` -> "twenty twenty one"."""
    if 2000 <= year <= 2009:
        return cardinal(year)
    return f"{cardinal(year // 100)} {_two_digits(year % 100)}"


def date_words(day: int, month: int, year: int) -> str:
    return f"the {ordinal(day)} of {MONTHS[month - 1]} {year_words(year)}"


def time_words(hour: int, minute: int) -> str:
    """24-hour clock: ``09:30`` -> "nine thirty", ``14:00`` -> "fourteen hundred"."""
    return f"{cardinal(hour)} {_two_digits(minute)}"


def _units(n: int, unit: str) -> str:
    return f"{cardinal(n)} {unit if n == 1 else _PLURALS.get(unit, unit + 's')}"


def money_words(symbol: str, whole: int, hundredths: int) -> str:
    """``$17.05`` -> "seventeen dollars and five cents"; nothing is said of zero cents."""
    unit, small = _CURRENCIES[symbol]
    words = _units(whole, unit)
    return f"{words} and {_units(hundredths, small)}" if hundredths else words


def _any_length(rng: random.Random, max_digits: int) -> int:
    """Every number of digits is equally likely, so short and long numbers both occur often."""
    digits = rng.randint(1, max_digits)
    return rng.randrange(10 ** (digits - 1) if digits > 1 else 0, 10**digits)


def _number(rng: random.Random) -> tuple[str, str]:
    lead, n = rng.choice(_NUMBER_LEADS), _any_length(rng, 6)
    return f"{lead} {n}", f"{lead} {cardinal(n)}"


def _date(rng: random.Random) -> tuple[str, str]:
    lead, year, month = rng.choice(_DATE_LEADS), rng.randint(1900, 2099), rng.randint(1, 12)
    day = rng.randint(1, calendar.monthrange(year, month)[1])
    written = f"{year}-{month:02}-{day:02}" if rng.random() < 0.5 else f"{day} {MONTHS[month - 1]} {year}"
    return f"{lead} {written}", f"{lead} {date_words(day, month, year)}"


def _time(rng: random.Random) -> tuple[str, str]:
    lead, hour, minute = rng.choice(_TIME_LEADS), rng.randrange(24), rng.randrange(60)
    minute = 0 if rng.random() < 0.1 else minute
    return f"{lead} {hour:02}:{minute:02}", f"{lead} {time_words(hour, minute)}"


def _money(rng: random.Random) -> tuple[str, str]:
    lead, symbol = rng.choice(_MONEY_LEADS), rng.choice(list(_CURRENCIES))
    whole, hundredths = _any_length(rng, 4), 0 if rng.random() < 0.1 else rng.randrange(100)
    return f"{lead} {symbol}{whole}.{hundredths:02}", f"{lead} {money_words(symbol, whole, hundredths)}"


_ITEMS = (_number, _date, _time, _money)


def draw(rng: random.Random, items: int) -> tuple[str, str]:
    """One sentence of so many items, and the words it is read as."""
    pairs = [rng.choice(_ITEMS)(rng) for _ in range(items)]
    return ", ".join(source for source, _ in pairs), ", ".join(target for _, target in pairs)


def is_held_out(source: str) -> bool:
    """One sentence in eight is for testing: a property of the text, so no training run can have seen it."""
    return zlib.crc32(source.encode()) % 8 == 0


def sentences(seed: int, *, held_out: bool, max_items: int = MAX_ITEMS) -> Iterator[tuple[str, str]]:
    """Endless (source, answer) pairs of 1 to ``max_items`` items."""
    rng = random.Random(seed)
    while True:
        source, target = draw(rng, rng.randint(1, max_items))
        if is_held_out(source) == held_out:
            yield source, target


def vocabulary() -> list[str]:
    """Every symbol of sources and answers: digits, punctuation, words; sorted, so it is stable."""
    words = {*_ONES, *_TENS[2:], *_ORDINALS[1:], *MONTHS, "twentieth", "thirtieth"}
    words |= {*_NUMBER_LEADS, *_DATE_LEADS, *_TIME_LEADS, *_MONEY_LEADS}
    words |= {"thousand", "hundred", "oh", "the", "of", "and"}
    for unit in {unit for pair in _CURRENCIES.values() for unit in pair}:
        words |= {unit, _PLURALS.get(unit, unit + "s")}
    return [*"0123456789", *",:.-", *_CURRENCIES, *sorted(words)]
