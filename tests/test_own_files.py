"""Strangers' files: what is recognised, what is told, what is refused, and titles from wherever they are."""

from __future__ import annotations

import gzip
import io
import zipfile
from pathlib import Path

import pytest
from commands import run_command

from fedmosaic.core.errors import DataError
from fedmosaic.data.interactions import Interactions
from fedmosaic.runs.settings import Settings

ROWS = [(f"u{u}", f"i{(u * 7 + n) % 20}", 1 + n % 5, 1_600_000_000 + 1000 * n) for u in range(12) for n in range(6)]
FILMS = {f"i{n}": f'Film {n}; "the return", part {n}' for n in range(20)}


def quoted(text: str) -> str:
    return '"' + text.replace('"', '""') + '"'


def comma() -> str:
    lines = ["customer,sku,stars,bought,title", *(f"{u},{i},{r},{t},{quoted(FILMS[i])}" for u, i, r, t in ROWS)]
    return "\n".join(lines) + "\n"


def tab() -> str:
    return "".join(f"{u}\t{i}\t{t}\n" for u, i, _, t in ROWS)


def semicolon() -> str:
    return "\n".join(["Kunde;Artikel;Bewertung", *(f"{u};{i};{r},5" for u, i, r, _ in ROWS)]) + "\n"


def test_three_shapes_are_read_and_told(tmp_path: Path) -> None:
    said = {}
    for name, text in (("a.csv", comma()), ("b.log", tab()), ("c.txt", semicolon())):
        (tmp_path / name).write_text(text)
        said[name] = data = Interactions.from_file(tmp_path / name)
        assert (len(data), len(data.users), len(data.items)) == (72, 12, 20)
    assert said["a.csv"].read_as == (
        "read as: comma, header, columns 1-5; user = 'customer', item = 'sku', rating = 'stars', time = 'bought', "
        "title = 'title'"
    )
    assert said["b.log"].read_as == (
        "read as: tab, no header, columns 1-3; user = column 1, item = column 2, time = column 3"
    )
    assert "semicolon, header, columns 1-3, decimal commas" in str(said["c.txt"].read_as)
    assert said["a.csv"].titles(said["a.csv"].item[:1]) == [FILMS[said["a.csv"].items.take(said["a.csv"].item[:1])[0]]]
    assert said["c.txt"].time is None


def test_decimal_commas_decide_what_is_a_positive(tmp_path: Path) -> None:
    (tmp_path / "c.txt").write_text(semicolon())
    kept = Interactions.from_file(tmp_path / "c.txt", min_rating=4.5)
    assert kept.rating is not None
    assert kept.rating.min() == 4.5
    assert sum(kept.left_out.values()) + len(kept) == 72


@pytest.mark.parametrize("packed", ["gz", "zip"])
def test_packed_files_are_known_by_their_first_bytes(tmp_path: Path, packed: str) -> None:
    (tmp_path / "a.csv").write_text(comma())
    path = tmp_path / "packed"
    if packed == "gz":
        path.write_bytes(gzip.compress(comma().encode()))
    else:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("folder/a.csv", comma())
    assert Interactions.from_csv(path).digest() == Interactions.from_csv(tmp_path / "a.csv").digest()


def test_a_zip_of_several_files_is_refused_by_their_names(tmp_path: Path) -> None:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("ratings.csv", comma())
        archive.writestr("films.csv", "a,b\n")
    (tmp_path / "shop.zip").write_bytes(content.getvalue())
    with pytest.raises(DataError, match=r"holds 2 files \(ratings.csv, films.csv\)"):
        Interactions.from_csv(tmp_path / "shop.zip")


def test_several_files_are_one_data_set(tmp_path: Path) -> None:
    lines = tab().splitlines(keepends=True)
    (tmp_path / "1.tsv").write_text("".join(lines[:30]))
    (tmp_path / "2.tsv").write_text("".join(lines[30:]))
    (tmp_path / "whole.txt").write_text(tab())
    whole = Interactions.from_file(tmp_path / "whole.txt")
    assert Interactions.from_file(tmp_path / "*.tsv").digest() == whole.digest()
    assert Settings.make("popularity", str(tmp_path / "*.tsv")).load_data().digest() == whole.digest()
    (tmp_path / "3.tsv").write_text("u1\ti1\nu2\ti2\n")
    with pytest.raises(DataError, match=r"3.tsv: has user, item, where .*1.tsv has user, item, time"):
        Interactions.from_file(tmp_path / "*.tsv")
    with pytest.raises(DataError, match="no file matches"):
        Interactions.from_file(tmp_path / "*.parquet")
    (tmp_path / "2.tsv").write_text("u1\ti1\t100\nu2\t\t100\n")
    with pytest.raises(DataError, match=r"2.tsv, line 2, column 'column_2': is blank"):
        Interactions.from_file(tmp_path / "[12].tsv")


@pytest.mark.parametrize("head", ["item,title", "movieId,name,year", "Nr;Bezeichnung;Preis", ""])
def test_titles_of_any_columns(tmp_path: Path, head: str) -> None:
    (tmp_path / "b.log").write_text(tab())
    cut = ";" if ";" in head else ","
    lines = [head] * bool(head) + [
        cut.join([i, quoted(t), "1999"][: 2 + (head != "item,title")]) for i, t in FILMS.items()
    ]
    (tmp_path / "films.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    data = Interactions.from_file(tmp_path / "b.log", titles=tmp_path / "films.csv")
    assert data.info is not None
    assert data.info["title"].to_list() == [FILMS[i] for i in data.items.ids]


def test_titles_of_other_items_are_refused(tmp_path: Path) -> None:
    (tmp_path / "b.log").write_text(tab())
    (tmp_path / "films.csv").write_text("id,name\n901,Solaris\n902,Stalker\n")
    with pytest.raises(DataError, match="no column holds the ids of the items; the columns are 'id', 'name'"):
        Interactions.from_file(tmp_path / "b.log", titles=tmp_path / "films.csv")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (
            {"user": "who"},
            "no column 'who' for the user: the file is read without a header, so columns have numbers, 1-3",
        ),
        ({"item": 7}, "there is no column 7 for the item; the columns are 1-3"),
        ({"header": True}, "no column is known to be the user; the columns are 'u0', 'i0', '1600000000'"),
    ],
)
def test_wrong_words_about_a_file_say_what_there_is(tmp_path: Path, options: dict[str, object], reason: str) -> None:
    (tmp_path / "b.log").write_text(tab())
    with pytest.raises(DataError) as caught:
        Interactions.from_file(tmp_path / "b.log", **options)
    assert reason in str(caught.value)


def test_dates_with_dots_begin_with_the_day(tmp_path: Path) -> None:
    (tmp_path / "d.csv").write_text("user;item;Datum\na;x;02.01.2020\na;y;01.02.2020 10:30\n")
    data = Interactions.from_file(tmp_path / "d.csv")
    assert data.items.take(data.item).to_list() == ["x", "y"]
    (tmp_path / "e.csv").write_text("user;item;Datum\na;x;02/01/2020\na;y;01/02/2020\n")
    with pytest.raises(DataError, match="line 2, column 'Datum': is not a time"):
        Interactions.from_file(tmp_path / "e.csv")


def test_a_run_says_how_it_read_and_its_settings_do_not_guess(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("b.log").write_text(tab())
    Path("films.csv").write_text("nr,name\n" + "\n".join(f"{i},{quoted(t)}" for i, t in FILMS.items()))
    done = run_command("run", "popularity", "b.log", "titles=films.csv", "--out", "shop", "-q")
    assert done.code == 0, done.err
    assert "b.log read as: tab, no header, columns 1-3" in done.err
    config = Path("shop/config.toml").read_text()
    assert "header = false" in config
    assert "user = 1" in config
    assert "rating" not in config
    asked = run_command("recommend", "shop")
    assert asked.code == 2
    assert "for example one of u0, u1, u10" in asked.err
    listed = run_command("recommend", "shop", "--user", "u3", "-k", "2")
    assert "the return" in listed.out
    told = run_command("data", "describe", "b.log")
    assert "tab, no header, columns 1-3" in told.out
    again = run_command("run", "--config", "shop/config.toml", "--out", "shop2", "-q")
    assert again.code == 0, again.err
    assert Path("shop2/config.toml").read_text() == config
