"""Every kind of bad input is refused with file, line, column and reason; lenient counts what it leaves out."""

from __future__ import annotations

import contextlib
import gzip
import io
import random
import zipfile
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedmosaic.core.errors import DataError, FetchError
from fedmosaic.data.fetch import read_members
from fedmosaic.data.interactions import Interactions
from fedmosaic.data.text import Limits, TextFormat, read_bytes, read_table

HEADER = "user,item,rating,time\n"
GOOD = [f"u{i % 7},i{i},{i % 5},{100 + i}" for i in range(60)]


def write(tmp_path: Path, text: str | bytes, name: str = "shop.csv") -> Path:
    path = tmp_path / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def load(path: Path, **options: Any) -> Interactions:
    return Interactions.from_csv(path, rating="rating", time="time", **options)


@pytest.mark.parametrize(
    ("line", "column", "reason"),
    [
        ("a,b,3", None, "too few fields: 3 where 4"),
        ("a,b,3,4,5", None, "too many fields: 5 where 4"),
        ('a,"b,3,4', None, "a quote is opened and never closed"),
        (",b,3,4", "user", "is blank"),
        ("a,,3,4", "item", "is blank"),
        ("a,b,,4", "rating", "is blank"),
        ("a,b,nan,4", "rating", "is not finite"),
        ("a,b,inf,4", "rating", "is not finite"),
        ("a,b,five,4", "rating", "is not a number: 'five'"),
        ("a,b,3,", "time", "is blank"),
        ("a,b,3,NaN", "time", "is not a time"),
        ("a,b,3,yesterday", "time", "is not a time"),
        ("a,b,3,-5", "time", "is negative"),
        ("a,b,3,99999999999", "time", "lies past the year 2200"),
        ("a,b\x00,3,4", None, "holds a NUL byte"),
    ],
)
def test_bad_rows_name_file_line_column_and_reason(tmp_path: Path, line: str, column: str | None, reason: str) -> None:
    rows = [*GOOD[:9], line, *GOOD[9:]]
    path = write(tmp_path, HEADER + "\n".join(rows) + "\n")
    with pytest.raises(DataError, match=r"shop\.csv") as caught:
        load(path)
    assert caught.value.line == 11
    assert caught.value.column == column
    assert reason in str(caught.value)
    if "quote" in reason:
        return  # an open quote swallows the rest of the file: nothing to be lenient about
    kept = load(path, lenient=True)
    assert len(kept) == 60
    assert sum(kept.left_out.values()) == 1


def test_lenient_fails_above_its_stated_share(tmp_path: Path) -> None:
    rows = [*GOOD, *["a,b,bad,4"] * 10]
    path = write(tmp_path, HEADER + "\n".join(rows))
    with pytest.raises(DataError, match=r"10 of 70 rows are bad, more than 5%"):
        load(path, lenient=True)


@pytest.mark.parametrize("content", ["", "\n\n", HEADER, HEADER + "\n"])
def test_empty_files_are_refused(tmp_path: Path, content: str) -> None:
    with pytest.raises(DataError, match=r"empty|no rows"):
        load(write(tmp_path, content))


def test_missing_file_folder_and_column(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        load(tmp_path / "none.csv")
    (tmp_path / "dir.csv").mkdir()
    with pytest.raises(DataError, match="is a folder"):
        load(tmp_path / "dir.csv")
    with pytest.raises(DataError, match="no column 'customer' for the user; the columns are 'user', 'item'"):
        Interactions.from_csv(write(tmp_path, HEADER + GOOD[0]), user="customer")
    with pytest.raises(DataError, match="header repeats 'user'"):
        Interactions.from_csv(write(tmp_path, "user,user,item\n1,2,3\n"))
    with pytest.raises(DataError, match=r"no separator is recognised"):
        Interactions.from_csv(write(tmp_path, "a", "shop.xyz"))


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("bom", ["", "\ufeff"])
@pytest.mark.parametrize(
    ("separator", "name"), [(",", "a.csv"), ("\t", "a.tsv"), ("::", "a.dat"), (" ", "a.txt"), (";", "b.csv")]
)
def test_declared_formats_give_the_same_data(tmp_path: Path, newline: str, bom: str, separator: str, name: str) -> None:
    text = bom + newline.join([HEADER.strip(), *GOOD]).replace(",", separator) + newline
    expected = load(write(tmp_path, HEADER + "\n".join(GOOD)))
    plain = load(write(tmp_path, text, name), separator=separator)
    packed = load(write(tmp_path, gzip.compress(text.encode()), name + ".gz"), separator=separator)
    assert plain.digest() == packed.digest() == expected.digest()
    bare = text.removeprefix(bom).split(newline, 1)[1]
    numbered = Interactions.from_csv(
        write(tmp_path, bom + bare, name), user=1, item=2, rating=3, time=4, separator=separator, header=False
    )
    assert numbered.digest() == expected.digest()


def test_recbole_header_is_read_by_name(tmp_path: Path) -> None:
    path = write(tmp_path, "user_id:token\titem_id:token\ttimestamp:float\n1\t2\t3\n1\t3\t4.5\n", "x.inter")
    data = Interactions.from_csv(path, user="user_id", item="item_id", time="timestamp")
    assert data.time is not None
    assert (len(data), data.time.tolist()) == (2, [3_000_000, 4_500_000])


def test_wrong_encoding_names_the_byte(tmp_path: Path) -> None:
    path = write(tmp_path, HEADER.encode() + "u1,café,1,2\n".encode("latin-1"))
    with pytest.raises(DataError, match=r"byte 28 \(0xe9\) is not utf-8"):
        load(path, encoding="utf-8")
    with pytest.raises(DataError, match=r"byte 38 \(0xe9\) is not utf-8"):  # part of it is: the rest is damaged
        load(write(tmp_path, HEADER.encode() + "u1,café,1,2\n".encode() + "u1,é,1,2\n".encode("latin-1"), "both.csv"))
    assert load(path).items.ids.to_list() == ["café"]
    assert load(path, encoding="latin-1").items.ids.to_list() == ["café"]
    with pytest.raises(DataError, match="unknown encoding"):
        load(path, encoding="klingon")


def test_ids_are_opaque(tmp_path: Path) -> None:
    rows = ["007,a,1,1", "7,a,1,1", "9007199254740993,a,1,1", "9007199254740992,a,1,1", "-3,a,1,1"]
    assert len(load(write(tmp_path, HEADER + "\n".join(rows))).users) == 5
    big = Interactions.from_frame({"user": [2**53, 2**53 + 1, -4], "item": [1, 1, 1]})
    assert big.users.ids.to_list() == [-4, 2**53, 2**53 + 1]
    unsigned = Interactions.from_frame(
        pl.DataFrame({"user": [2**64 - 1, 1], "item": [1, 1]}, schema_overrides={"user": pl.UInt64})
    )
    assert str(2**64 - 1) in unsigned.users.ids.to_list()
    with pytest.raises(DataError, match="ids must be text or integers, not Float64"):
        Interactions.from_frame({"user": [1.0, 2.0], "item": [1, 2]})
    with pytest.raises(DataError, match="row 2, column 'item': is blank"):
        Interactions.from_frame({"user": [1, 2], "item": ["x", None]})


def test_duplicates_keep_the_latest_and_are_counted(tmp_path: Path) -> None:
    rows = ["u,a,5,3", "u,a,2,9", "u,a,4,9", "u,b,1,1"]
    data = load(write(tmp_path, HEADER + "\n".join(rows)))
    assert (len(data), data.merged, data.describe()["interactions"]) == (2, 2, 4)
    assert data.rating is not None
    assert sorted(data.rating.tolist()) == [1.0, 4.0]


def test_iso_dates_and_numbers_order_alike(tmp_path: Path) -> None:
    text = "user,item,time\na,x,2024-01-02\na,y,2024-01-01T23:59:59\na,z,2024-01-02 00:00:01+00:00\n"
    data = Interactions.from_csv(write(tmp_path, text), time="time")
    assert data.items.take(data.item).to_list() == ["y", "x", "z"]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.lists(st.text(alphabet='ab",\n \r7é', max_size=4), min_size=2, max_size=2), min_size=1, max_size=6))
def test_fast_reader_agrees_with_the_careful_one_or_steps_aside(tmp_path: Path, rows: list[list[str]]) -> None:
    out = io.StringIO()
    out.write("user,item\n")
    for row in rows:
        out.write(",".join('"' + f.replace('"', '""') + '"' if set(f) & set('",\n\r') else f for f in row) + "\n")
    path = write(tmp_path, out.getvalue())
    fmt = TextFormat()

    def read(careful: bool) -> Any:
        try:
            frame = read_table(path, fmt, careful=careful).frame
            return [[v or "" for v in row] for row in frame.rows()]
        except DataError as error:
            return error.reason

    assert read(False) == read(True)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=120))
def test_any_bytes_give_data_or_a_typed_error(tmp_path: Path, noise: bytes) -> None:
    path = write(tmp_path, HEADER.encode() + noise)
    with contextlib.suppress(DataError):
        assert len(load(path)) > 0


def test_shuffled_file_gives_the_same_digest_and_split(tmp_path: Path) -> None:
    from fedmosaic.data.split import leave_one_out

    rows = [f"u{i % 5},i{i % 23},{i % 5},{100 + i // 9}" for i in range(100)]
    first = load(write(tmp_path, HEADER + "\n".join(rows)))
    random.Random(3).shuffle(rows)
    second = load(write(tmp_path, HEADER + "\n".join(rows), "b.csv"))
    assert first.digest() == second.digest()
    assert leave_one_out(first).test.values.tolist() == leave_one_out(second).test.values.tolist()


def test_bombs_and_damaged_archives_are_refused(tmp_path: Path) -> None:
    bomb = write(tmp_path, gzip.compress(b"0" * 3_000_000), "bomb.csv.gz")
    with pytest.raises(DataError, match="refused as a bomb"):
        read_bytes(bomb, Limits(ratio_from=1 << 20))
    with pytest.raises(DataError, match="more than 1,000 bytes"):
        read_bytes(bomb, Limits(bytes=1000))
    whole = gzip.compress(b"user,item\n" * 500)
    with pytest.raises(DataError, match="damaged or cut short"):
        read_bytes(write(tmp_path, whole[:-9], "cut.csv.gz"))
    with pytest.raises(DataError, match="damaged or cut short"):
        read_bytes(write(tmp_path, b"not gzip", "no.csv.gz"))


def archive(name: str, content: bytes = b"x", mode: int = 0) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as z:
        info = zipfile.ZipInfo(name)
        info.external_attr = mode << 16
        info.compress_type = zipfile.ZIP_DEFLATED
        z.writestr(info, content)
    return out.getvalue()


@pytest.mark.parametrize(
    ("name", "mode"),
    [("../up", 0), ("/root", 0), ("a/../../b", 0), ("C:\\x", 0), ("link", 0o120777), ("dev", 0o020666)],
)
def test_archive_members_that_leave_the_folder_are_refused(name: str, mode: int) -> None:
    with pytest.raises(FetchError, match="not a plain file below the archive"):
        read_members(archive(name, mode=mode), {name: "x"}, "z.zip")


def test_archive_bomb_and_missing_member() -> None:
    with pytest.raises(FetchError, match="would unpack to"):
        read_members(archive("big", b"0" * 5_000_000), {"big": "x"}, "z.zip")
    with pytest.raises(FetchError, match="has no member 'other'"):
        read_members(archive("big"), {"other": "x"}, "z.zip")
    assert read_members(archive("a/b", b"hi"), {"a/b": "c"}, "z.zip") == {"c": b"hi"}


def test_tables_of_other_libraries() -> None:
    import pandas as pd
    import pyarrow as pa

    columns = {"who": ["a", "a", "b"], "what": [3, 4, 3]}
    made = [
        Interactions.from_frame(frame, user="who", item="what").digest()
        for frame in (columns, pl.DataFrame(columns), pl.LazyFrame(columns), pd.DataFrame(columns), pa.table(columns))
    ]
    assert len(set(made)) == 1
    with pytest.raises(DataError, match="cannot read a table from int"):
        Interactions.from_frame(3)


def test_parquet(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pl.DataFrame({"u": ["a", "b"], "i": [1, 2]}).write_parquet(path)
    assert len(Interactions.from_parquet(path, user="u", item="i")) == 2
    path.write_bytes(b"PAR1 nonsense")
    with pytest.raises(DataError, match="cannot be read as Parquet"):
        Interactions.from_parquet(path)
    with pytest.raises(DataError, match="no such file"):
        Interactions.from_parquet(tmp_path / "none.parquet")


def test_filters_are_counted(tmp_path: Path) -> None:
    path = write(tmp_path, HEADER + "\n".join(["a,x,5,1", "a,y,1,2", "b,x,5,3"]))
    assert load(path, min_rating=4).left_out == {"rating under 4": 1}
    assert load(path, min_user_rows=2).users.ids.to_list() == ["a"]
    with pytest.raises(DataError, match="no row is left"):
        load(path, min_user_rows=9)
    with pytest.raises(DataError, match="min_rating was given, but no rating column"):
        Interactions.from_csv(path, rating="no", min_rating=3)
