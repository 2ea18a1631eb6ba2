"""Delimited text in: a fast reader for clean files and a careful one that knows line numbers.

The format is declared or recognised (`recognise`). The fast reader (Polars) either returns every row exactly as
the careful one would, or steps aside; the careful reader walks the lines and names the first bad one, or sets bad
ones apart.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import polars as pl

from fedmosaic.core.errors import DataError

SPELLED = {"tab": "\t", "\\t": "\t", "space": " ", "comma": ",", "semicolon": ";", "bar": "|"}
_UNIT = b"\x1f"  # stands in for separators longer than one byte; a file that holds it goes to the careful reader


@dataclass(frozen=True)
class TextFormat:
    """How a file is written: one separator, with or without header and quoting, one encoding."""

    separator: str = ","
    header: bool = True
    quoted: bool = True
    encoding: str = "utf-8"
    decimal: str = "."

    @classmethod
    def written(cls, separator: str, header: bool = True, encoding: str = "utf-8", decimal: str = ".") -> TextFormat:
        """A format by its separator: those that tables are exported with are quoted, tabs and the like are not."""
        return cls(separator, header, separator in {",", ";"}, encoding, decimal)

    def names(self, first: list[str], source: object) -> list[str]:
        """Names of the columns: the header's, or `column_1`, `column_2`, ..."""
        if not self.header:
            return [f"column_{i + 1}" for i in range(len(first))]
        # RecBole writes the type into the header: user_id:token
        names = [name.split(":")[0] if self.separator == "\t" else name for name in first]
        repeated = sorted({n for n in names if names.count(n) > 1})
        if repeated:
            raise DataError(f"the header repeats {', '.join(map(repr, repeated))}", source=source, line=1)
        return names

    @classmethod
    def of(cls, path: Path, separator: str | None = None, header: bool = True, encoding: str = "utf-8") -> TextFormat:
        """The format declared by the file's ending, unless a separator is given.

        >>> TextFormat.of(Path("shop.tsv.gz")).separator
        '\\t'
        """
        endings = {".tsv": "\t", ".inter": "\t", ".item": "\t", ".csv": ",", ".txt": ",", ".dat": ","}
        if separator is None:
            suffix = Path(path.name.removesuffix(".gz")).suffix
            if suffix not in endings:
                raise DataError(
                    f"the ending {suffix!r} declares no separator; say separator=... "
                    f"(endings known: {', '.join(endings)})",
                    source=path,
                )
            separator = endings[suffix]
        separator = SPELLED.get(separator, separator)
        if not separator:
            raise DataError("the separator is empty", source=path)
        return cls.written(separator, header, encoding)


@dataclass(frozen=True)
class Limits:
    """Caps that stop a decompression bomb early."""

    bytes: int = 8 << 30
    ratio: int = 200
    ratio_from: int = 64 << 20  # small files may compress arbitrarily well


LIMITS = Limits()


@dataclass(frozen=True)
class TextTable:
    """Columns of text, the line each row began on (known only to the careful reader), and rows set apart."""

    frame: pl.DataFrame
    lines: Sequence[int] | None = None
    left_out: dict[str, int] = field(default_factory=dict)


def read_bytes(path: Path, limits: Limits = LIMITS) -> bytes:
    """The content of a plain, gzip or zip file (told by its first bytes), within the limits."""
    try:
        size = path.stat().st_size
        with path.open("rb") as raw:
            begin = raw.read(4)
            raw.seek(0)
            if begin[:2] == b"\x1f\x8b" or path.name.endswith(".gz"):
                with gzip.open(raw) as stream:
                    return _capped(stream, size, path, limits)
            if begin == b"PK\x03\x04":
                return _unzipped(raw, size, path, limits)
            return _capped(raw, size, path, limits)
    except FileNotFoundError:
        raise DataError("no such file", source=path) from None
    except IsADirectoryError:
        raise DataError("is a folder, not a file", source=path) from None
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"the gzip data is damaged or cut short ({error})", source=path) from None
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
        raise DataError(f"the zip data cannot be read ({error})", source=path) from None


def _unzipped(raw: IO[bytes], size: int, path: Path, limits: Limits) -> bytes:
    """The only file of a zip archive; folders and what systems leave beside files are passed over."""
    with zipfile.ZipFile(raw) as archive:
        names = [n for n in archive.namelist() if not n.endswith("/") and not n.startswith("__MACOSX/")]
        if len(names) != 1:
            listed = ", ".join(names[:10]) or "none"
            raise DataError(f"holds {len(names)} files ({listed}); unpack it and name the one to read", source=path)
        with archive.open(names[0]) as stream:
            return _capped(stream, size, path, limits)


def _capped(stream: IO[bytes] | gzip.GzipFile, size: int, source: object, limits: Limits) -> bytes:
    parts: list[bytes] = []
    total = 0
    while part := stream.read(1 << 22):
        total += len(part)
        if total > limits.bytes:
            raise DataError(f"holds more than {limits.bytes:,} bytes; refused", source=source)
        if total > limits.ratio_from and total > limits.ratio * max(size, 1):
            raise DataError(f"unpacks to more than {limits.ratio} times its size; refused as a bomb", source=source)
        parts.append(part)
    return b"".join(parts)


def decode(data: bytes, encoding: str, source: object) -> str:
    """Strict decoding, without byte-order mark and carriage returns at line ends; the error names the byte offset."""
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        raise DataError(
            f"byte {error.start} (0x{data[error.start]:02x}) is not {encoding}; say encoding=..., for example latin-1",
            source=source,
        ) from None
    except LookupError:
        raise DataError(f"unknown encoding {encoding!r}", source=source) from None
    return text.removeprefix("\ufeff").replace("\r\n", "\n")


def decode_any(data: bytes, source: object) -> tuple[str, str]:
    """Text of bytes whose encoding nobody said, and the one that was found: UTF-8 or -16, else Western European.

    >>> decode_any("Léon".encode("latin-1"), "films.csv")
    ('Léon', 'cp1252')
    """
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return decode(data, "utf-16", source), "utf-16"
    with contextlib.suppress(UnicodeDecodeError):
        data.decode("utf-8")
        return decode(data, "utf-8", source), "utf-8"
    if not data.decode("utf-8", errors="ignore").isascii():  # some of it is UTF-8: the rest is damaged
        return decode(data, "utf-8", source), "utf-8"  # which says where
    with contextlib.suppress(UnicodeDecodeError):
        return data.decode("cp1252").replace("\r\n", "\n"), "cp1252"
    return decode(data, "latin-1", source), "latin-1"  # which any bytes are


def read_table(
    path: Path, fmt: TextFormat, *, careful: bool = False, lenient: bool = False, text: str | None = None
) -> TextTable:
    """All columns as text, named by the header or `column_1`, `column_2`, ... text: the content, if it is read."""
    text = decode(read_bytes(path), fmt.encoding, path) if text is None else text
    if not text.strip():
        raise DataError("the file is empty", source=path)
    if not careful:
        table = _fast(text, fmt, path)
        if table is not None:
            return table
    return _careful(text, fmt, path, lenient)


def _first_record(text: str, fmt: TextFormat, source: object) -> list[str]:
    for _, fields in records(text, fmt, source):
        if isinstance(fields, DataError):
            raise fields
        return fields
    raise DataError("the file is empty", source=source)


def _fast(text: str, fmt: TextFormat, source: object) -> TextTable | None:
    names = fmt.names(_first_record(text[: 1 << 20], fmt, source), source)
    data = text.encode()
    if b"\x00" in data or b"\r" in data or _UNIT in data:
        return None
    separator = fmt.separator.encode()
    if len(separator) > 1:
        data, separator = data.replace(separator, _UNIT), _UNIT
    try:
        frame = pl.read_csv(
            io.BytesIO(data),
            separator=separator.decode(),
            has_header=fmt.header,
            quote_char='"' if fmt.quoted else None,
            schema=dict.fromkeys(names, pl.String),
        )
    except pl.exceptions.PolarsError:
        return None
    if frame.height == 0:
        raise DataError("the file has a header and no rows", source=source)
    # A missing last field may be a short row: only the careful reader can tell.
    if frame[names[-1]].null_count() or (frame.width == 1 and not data.strip()):
        return None
    return TextTable(frame)


def records(text: str, fmt: TextFormat, source: object) -> Iterator[tuple[int, list[str] | DataError]]:
    """(line number, fields) of every non-blank record."""
    if not fmt.quoted:
        for number, line in enumerate(io.StringIO(text, newline="\n"), start=1):
            line = line.removesuffix("\n")
            if line:
                yield number, line.split(fmt.separator)
        return
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=fmt.separator, strict=True)
    while True:
        begin = reader.line_num + 1
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            reason = "a quote is opened and never closed" if "end of data" in str(error) else str(error)
            yield begin, DataError(reason, source=source, line=begin)
            continue
        if fields:
            yield begin, fields


def _careful(text: str, fmt: TextFormat, source: object, lenient: bool) -> TextTable:
    names: list[str] = []
    rows: list[list[str]] = []
    lines: list[int] = []
    left_out: dict[str, int] = {}
    for line, fields in records(text, fmt, source):
        if isinstance(fields, list) and not names:
            names = fmt.names(fields, source)
            if fmt.header:
                continue
        problem = _structure_problem(line, fields, names, source)
        if problem is None:
            assert isinstance(fields, list)
            rows.append(fields)
            lines.append(line)
        elif lenient:
            left_out[problem.reason] = left_out.get(problem.reason, 0) + 1
        else:
            raise problem
    if not rows:
        raise DataError("the file has a header and no rows", source=source)
    columns = zip(*rows, strict=True)
    frame = pl.DataFrame(
        {
            name: pl.Series(name, [v or None for v in values], dtype=pl.String)
            for name, values in zip(names, columns, strict=True)
        }
    )
    return TextTable(frame, lines, left_out)


def _structure_problem(line: int, fields: list[str] | DataError, names: list[str], source: object) -> DataError | None:
    if isinstance(fields, DataError):
        return fields
    if len(fields) != len(names):
        kind = "few" if len(fields) < len(names) else "many"
        return DataError(f"too {kind} fields: {len(fields)} where {len(names)} are expected", source=source, line=line)
    if any("\x00" in f for f in fields):
        return DataError("holds a NUL byte", source=source, line=line)
    return None
