"""Checks of single values: ids, ratings and times. Written once, over whole columns.

Each check returns the parsed column and, per reason, the mask of the rows that must be refused.
"""

from __future__ import annotations

from datetime import UTC, datetime

import polars as pl

Problems = list[tuple[str, str, pl.Series]]  # (column, reason, mask of bad rows)

_YEAR_2200 = 7_258_118_400  # seconds


def check_ids(column: pl.Series, role: str) -> tuple[pl.Series, Problems]:
    """Ids are opaque: text stays text, integers stay integers, nothing passes through a float."""
    if column.dtype in (pl.Categorical, pl.Enum):
        column = column.cast(pl.String)
    if column.dtype == pl.String:
        return column, [(role, "is blank", column.is_null() | (column == ""))]
    if column.dtype.is_integer():
        # the largest unsigned words do not fit a signed one
        column = column.cast(pl.String if column.dtype == pl.UInt64 else pl.Int64)
        return column, [(role, "is blank", column.is_null())]
    everything = pl.repeat(True, column.len(), eager=True)
    reason = (
        f"ids must be text or integers, not {column.dtype}: cast the column first, so that no id passes through a float"
    )
    return column.cast(pl.String), [(role, reason, everything)]


def check_ratings(column: pl.Series) -> tuple[pl.Series, Problems]:
    """Ratings are finite numbers."""
    blank = _blank(column)
    if not (column.dtype.is_numeric() or column.dtype in (pl.String, pl.Boolean)):
        column = column.cast(pl.String)
    values = column.cast(pl.Float64, strict=False)
    return values, [
        ("rating", "is blank", blank),
        ("rating", "is not a number", values.is_null() & ~blank),
        ("rating", "is not finite", values.is_not_null() & ~values.is_finite().fill_null(True)),
    ]


def check_times(column: pl.Series) -> tuple[pl.Series, Problems]:
    """Times are numbers (not negative) or calendar dates (ISO 8601 when text), not past the year 2200."""
    blank = _blank(column)
    values, malformed = _parse_times(column)
    values = values.set(malformed | blank, 0)
    limit = _YEAR_2200 * _unit(values)
    return values, [
        ("time", "is blank", blank),
        ("time", "is not a time (a finite number, an ISO 8601 date, or 31.12.2026 with dots)", malformed & ~blank),
        ("time", "is negative", (values < 0) & (not column.dtype.is_temporal())),
        ("time", "lies past the year 2200", values > limit),
    ]


def _blank(column: pl.Series) -> pl.Series:
    blank = column.is_null()
    return blank | (column == "").fill_null(False) if column.dtype == pl.String else blank


def _parse_times(column: pl.Series) -> tuple[pl.Series, pl.Series]:
    """Int64 times and the mask of values that are none; of several readings, the one that fails least."""
    if column.dtype.is_temporal():
        micros = column.cast(pl.Datetime("us")).cast(pl.Int64)
        return micros.fill_null(0), micros.is_null()
    if column.dtype.is_integer():
        return column.cast(pl.Int64, strict=False).fill_null(0), column.is_null()
    if column.dtype == pl.String:
        whole = column.cast(pl.Int64, strict=False)
        if whole.null_count() == 0:
            return whole, whole.is_null()
        readings = [whole, _from_float(column.cast(pl.Float64, strict=False)), _from_iso(column)]
        readings += [_from_days(column)] if column.str.contains(r"^\d\d?\.\d\d?\.\d{4}").any() else []
        best = min(readings, key=lambda r: r.null_count())
    else:
        best = _from_float(column.cast(pl.Float64, strict=False))
    return best.fill_null(0), best.is_null()


def _from_float(values: pl.Series) -> pl.Series:
    finite = pl.select(pl.when(values.is_finite() & (values.abs() < 9e18)).then(values)).to_series()
    if (finite.drop_nulls() % 1 == 0).all():
        return finite.cast(pl.Int64)
    return (finite * 1e6).round().cast(pl.Int64, strict=False)


def _from_iso(column: pl.Series) -> pl.Series:
    def micros(text: str | None) -> int | None:
        try:
            moment = datetime.fromisoformat(text or "")
        except ValueError:
            return None
        return round((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1e6)

    return pl.Series([micros(t) for t in column], dtype=pl.Int64)


def _from_days(column: pl.Series) -> pl.Series:
    """Dates with dots begin with the day; those with slashes mean one thing here and another there, and are refused."""
    shapes = ("%d.%m.%Y", "%d.%m.%Y %H:%M", "%d.%m.%Y %H:%M:%S")
    found = [column.str.to_datetime(shape, strict=False, time_unit="us") for shape in shapes]
    return pl.select(pl.coalesce(found)).to_series().cast(pl.Int64)


def _unit(times: pl.Series) -> int:
    """Ticks per second, read off the column's typical size: seconds, milli-, micro- or nanoseconds."""
    middle = times.median()
    typical = float(middle) if isinstance(middle, int | float) else 0.0
    return next((unit for unit, top in ((1, 1e11), (10**3, 1e14), (10**6, 1e17)) if typical < top), 10**9)
