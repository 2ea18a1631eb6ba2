"""What is published: a source archive and a wheel, tried in a clean environment from another folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("build", reason="packages are built by `build`")
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return out


def test_what_the_package_says_of_itself() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {line.split("==")[0].lower() for line in lines if "==" in line}
    wanted = [*project["dependencies"], *(one for extra in project["optional-dependencies"].values() for one in extra)]
    names = {one.split(">")[0].split("[")[0].split("<")[0].strip().lower() for one in wanted} - {"fedmosaic"}
    assert names - pinned == set(), "every dependency is pinned in constraints.txt"
    assert (ROOT / "fedmosaic" / "py.typed").is_file()
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"version: {project['version']}" in citation


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_nothing_else(built: Path) -> None:
    (wheel,), (archive,) = built.glob("*.whl"), built.glob("*.tar.gz")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"fedmosaic"}
    for part in ("py.typed", "serving/page.html", "report/page.html", "runs/presets/ease-ml-100k-strict.toml"):
        assert f"fedmosaic/{part}" in names
    with tarfile.open(archive) as packed:
        assert any(name.endswith("/LICENSE") for name in packed.getnames())
    assert wheel.stat().st_size < 2 << 20


@pytest.mark.slow
def test_the_wheel_works_in_a_clean_environment(built: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "env", with_pip=True)
    python, (wheel,) = tmp_path / "env" / "bin" / "python", built.glob("*.whl")
    install = [
        str(python),
        "-m",
        "pip",
        "install",
        "-q",
        "--no-compile",
        "-c",
        str(ROOT / "constraints.txt"),
        str(wheel),
    ]
    here = tmp_path / "elsewhere"
    here.mkdir()
    plain = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"FEDMOSAIC_CACHE": str(tmp_path / "cache")}
    subprocess.run(install, check=True, capture_output=True, timeout=900, cwd=here, env=plain)

    def said(*words: str) -> str:
        command = [str(python.with_name("fedmosaic")), *words]
        done = subprocess.run(command, capture_output=True, text=True, cwd=here, env=plain, timeout=600)
        assert done.returncode == 0, done.stderr
        return done.stdout

    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert said("--version") == f"fedmosaic {version}\n"
    shop = ("synthetic", "users=60", "items=40", "per_user=8")
    found = json.loads(said("run", "mosaic", *shop, "--out", "r", "--json", "-q"))
    assert found["test"]["full"]["hr@10"] > 0
    assert "user 1" in said("recommend", "r", "--user", "1")
    assert "index.html" in said("export", "r", "-o", "bundle")
    extras = subprocess.run(
        [str(python), "-c", "import importlib.util as u; print([m for m in ('torch', 'flwr') if u.find_spec(m)])"],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert extras == "[]\n"
