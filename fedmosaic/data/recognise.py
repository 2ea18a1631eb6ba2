"""How a text file is written, read off its beginning: separator, header, decimal sign, and what its columns are.

What is said wins over what is recognised, and whatever was recognised is told (`Reading.words`), so that a wrong guess
is seen before it is trained on.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedmosaic.core.errors import DataError
from fedmosaic.data.text import SPELLED, TextFormat, records

SAMPLE = 1 << 18  # characters that are looked at
ROWS = 500
SEPARATORS = ("\t", ";", "::", "|", ",", " ")  # of equals the earlier
WRITTEN = {"\t": "tab", ";": "semicolon", "|": "bar", ",": "comma", " ": "space"}
ROLES = ("user", "item", "rating", "time", "title")
NAMES = {  # how files call what plays a role; letters and digits alone, plural forms too
    "user": "user userid uid u username usr customer customerid cust custid client clientid member memberid visitor "
    "visitorid account accountid buyer buyerid reader readerid reviewer reviewerid person personid kunde kundeid "
    "kundennr kundennummer utilisateur usuario session sessionid",
    "item": "item itemid iid i itemcode movie movieid film filmid product productid prod sku asin article articleid "
    "book bookid isbn song songid track trackid artist artistid business businessid news newsid video videoid game "
    "gameid recipe recipeid parentasin artikel artikelnr artikelnummer produkt produktid produit producto",
    "rating": "rating ratings stars star score vote overall note bewertung sterne reviewrating calificacion",
    "time": "time timestamp ts date datetime day when at unixreviewtime unixtime createdat created eventtime bought "
    "boughtat watched watchedat viewedat clickedat orderdate transactiondt datum zeit zeitpunkt heure fecha",
    "title": "title titles itemtitle movietitle producttitle itemname productname moviename filmtitle booktitle "
    "songname artistname titel titre titulo bezeichnung",
}
_KNOWN = {role: frozenset(words.split()) for role, words in NAMES.items()}
_NUMBER = re.compile(r"[-+]?\d+([.,]\d+)?([eE][-+]?\d+)?")
_DECIMAL_COMMA = re.compile(r"[-+]?\d+(,\d+)?")
_DATE = re.compile(r"\d{4}-\d\d?-\d\d?|\d\d?\.\d\d?\.\d{4}|\d\d?/\d\d?/\d{2,4}")


@dataclass(frozen=True)
class Reading:
    """How a file is read: its format, its columns, and which of them play a role (None: none does)."""

    fmt: TextFormat
    columns: tuple[str, ...]
    roles: Mapping[str, str | None]

    @property
    def words(self) -> str:
        """One line for people.

        >>> recognise("ann\\ttea\\t4\\nbob\\tcup\\t5\\n", "shop.tsv").words
        'read as: tab, no header, columns 1-3; user = column 1, item = column 2, rating = column 3'
        """
        shown = {c: f"column {i + 1}" for i, c in enumerate(self.columns)} if not self.fmt.header else {}
        roles = ", ".join(f"{r} = {shown.get(c, repr(c))}" for r, c in self.roles.items() if c is not None)
        parts = [
            WRITTEN.get(self.fmt.separator, repr(self.fmt.separator)),
            "header" if self.fmt.header else "no header",
            f"columns 1-{len(self.columns)}",
        ]
        parts += [self.fmt.encoding] if self.fmt.encoding != "utf-8" else []
        parts += ["decimal commas"] if self.fmt.decimal == "," else []
        return f"read as: {', '.join(parts)}; {roles}"


def recognise(text: str, source: object, said: Mapping[str, Any] | None = None) -> Reading:
    """Read the format and the roles of columns off the beginning of a file.

    text: its content. source: its name, for errors. said: what is known already, by the names of settings: separator,
    header, encoding, decimal, user, item, rating, time (a name, a number from 1, or `no`: no column plays that role).

    >>> seen = recognise("kunde;sku;stars\\nann;tea;4,5\\nbob;cup;3,0\\n", "shop.csv")
    >>> seen.fmt.separator, seen.fmt.decimal, seen.roles["user"], seen.roles["item"]
    (';', ',', 'kunde', 'sku')
    """
    told = {key: value for key, value in (said or {}).items() if value is not None}
    if not text.strip():
        raise DataError("the file is empty", source=source)
    sample = text[:SAMPLE]
    if len(text) > SAMPLE:  # the last line is cut
        sample = sample[: sample.rfind("\n") + 1] or sample
    separator = told.get("separator")
    separator = SPELLED.get(separator, separator) if separator is not None else _separator(sample, source)
    fmt = TextFormat.written(separator, encoding=told.get("encoding", "utf-8"))
    rows = _rows(sample, fmt, source)
    names = [told[role] for role in ROLES if isinstance(told.get(role), str)]
    header = told["header"] if "header" in told else _has_header(rows, names)
    body = rows[1:] if header else rows
    decimal = told.get("decimal") or _decimal(body, separator)
    fmt = TextFormat.written(separator, header, fmt.encoding, decimal)
    columns = tuple(fmt.names(rows[0], source))
    return Reading(fmt, columns, _roles(columns, body, header, told, source))


def role_of(name: str) -> str | None:
    """What a column called so is for, if its name says it.

    >>> [role_of(name) for name in ("User-ID", "movieId", "Titel", "colour")]
    ['user', 'item', 'title', None]
    """
    plain = re.sub(r"[^a-z0-9]", "", name.split(":")[0].lower())
    return next((role for role, known in _KNOWN.items() if plain in known), None)


def by_name(role: str, columns: Sequence[str]) -> str | None:
    """The column that plays a role by its name: exactly so called, or else the first whose name says so."""
    if role in columns:
        return role
    return next((c for c in columns if role_of(c) == role), None)


def _separator(sample: str, source: object) -> str:
    """The one that cuts (nearly) every line into the same number of fields, the most of them."""
    best: tuple[float, str] | None = None
    for place, separator in enumerate(SEPARATORS):
        widths = [len(f) for f in _rows(sample, TextFormat.written(separator), source, strict=False)]
        if not widths:
            continue
        usual = max(set(widths), key=widths.count)
        if usual < 2 or widths[0] != usual or widths.count(usual) < 0.9 * len(widths):
            continue
        value = usual - place / 100 - (10 if separator == " " else 0)  # texts have spaces in them, too
        best = max(best, (value, separator)) if best is not None else (value, separator)
    if best is None:
        raise DataError(
            "no separator is recognised (tab, semicolon, ::, bar, comma, space); say separator=...", source=source
        )
    return best[1]


def _rows(sample: str, fmt: TextFormat, source: object, strict: bool = True) -> list[list[str]]:
    found: list[list[str]] = []
    for _, fields in records(sample, fmt, source):
        if isinstance(fields, list):
            found.append(fields)
        elif strict and not found:
            raise fields
        if len(found) >= ROWS:
            break
    return found


def _has_header(rows: list[list[str]], names: Sequence[str]) -> bool:
    """Whether the first row names columns: it holds a name that was said or is known, or words over numbers."""
    first, body = rows[0], rows[1:]
    if any(name.split(":")[0] in [f.split(":")[0] for f in first] for name in names):
        return True
    if any(not f.strip() or _valued(f) for f in first):
        return False
    if any(role_of(f) for f in first):
        return True
    return any(body and all(len(r) > at and _valued(r[at]) for r in body) for at in range(len(first)))


def _valued(text: str) -> bool:
    return bool(_NUMBER.fullmatch(text.strip()) or _DATE.match(text.strip()))


def _decimal(body: list[list[str]], separator: str) -> str:
    """A comma, if some column holds numbers and some of them have one."""
    for at in range(max(map(len, body), default=0)) if separator != "," else ():
        column = [r[at].strip() for r in body if len(r) > at and r[at].strip()]
        if column and any("," in v for v in column) and all(_DECIMAL_COMMA.fullmatch(v) for v in column):
            return ","
    return "."


def _roles(
    columns: tuple[str, ...], body: list[list[str]], header: bool, told: Mapping[str, Any], source: object
) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for role in ROLES:
        if role in told:
            found[role] = _said_column(role, told[role], columns, header, source)
    free = [c for c in columns if c not in found.values()]
    for role in ROLES:
        if role not in found and header:
            found[role] = by_name(role, free)
            free = [c for c in free if c != found[role]]
    if not header:
        _by_looks(found, columns, free, body)
    for role in ("user", "item"):
        if found.get(role) is None:
            listed = ", ".join(map(repr, columns)) if header else f"1-{len(columns)}"
            raise DataError(
                f"no column is known to be the {role}; the columns are {listed}. Say {role}=...", source=source
            )
    return {role: found.get(role) for role in ROLES}


def _said_column(role: str, said: Any, columns: tuple[str, ...], header: bool, source: object) -> str | None:
    if said == "no" and role not in ("user", "item") and said not in columns:
        return None
    if isinstance(said, str) and said in columns:
        return said
    if isinstance(said, int):
        if 1 <= said <= len(columns):
            return columns[said - 1]
        raise DataError(f"there is no column {said} for the {role}; the columns are 1-{len(columns)}", source=source)
    if header:
        listed = ", ".join(map(repr, columns))
        raise DataError(f"no column {said!r} for the {role}; the columns are {listed}. Say {role}=...", source=source)
    raise DataError(
        f"no column {said!r} for the {role}: the file is read without a header, so columns have numbers, "
        f"1-{len(columns)}. Say {role}=NUMBER, or header=true",
        source=source,
    )


def _by_looks(found: dict[str, str | None], columns: tuple[str, ...], free: list[str], body: list[list[str]]) -> None:
    """Without names: who comes first, then what, then a small number (a rating) and a large one or a date (a time)."""
    for role in ("user", "item"):
        if role not in found and free:
            found[role] = free.pop(0)
    for column in free:
        at = columns.index(column)
        values = [r[at].strip() for r in body if len(r) > at]
        if "time" not in found and values and all(_looks_like_a_time(v) for v in values):
            found["time"] = column
        elif "rating" not in found and values and all(_NUMBER.fullmatch(v) for v in values):
            few = {float(v.replace(",", ".")) for v in values}
            if max(few) <= 100 and min(few) >= -100:
                found["rating"] = column


def _looks_like_a_time(text: str) -> bool:
    if _DATE.match(text):
        return True
    number = text.split(".")[0]
    return number.isdigit() and 9 <= len(number) <= 19  # seconds since 1973 to nanoseconds
