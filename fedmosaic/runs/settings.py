"""Settings of a run: one flat table, refused when unknown, written to a file that reruns it.

`key=value`, options and the file are the same settings; values given on the line win over the file, the file over the
method's defaults.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, field_validator

from fedmosaic.core.errors import SettingsError, UnknownNameError
from fedmosaic.data import sources
from fedmosaic.data.interactions import Interactions
from fedmosaic.data.negatives import Pool
from fedmosaic.data.own_files import PATTERN, matching, reading_of
from fedmosaic.data.split import Split, Straddle, Ties, leave_one_out, ratio_split, time_split
from fedmosaic.evaluation.metrics import METRICS
from fedmosaic.methods import registry
from fedmosaic.methods.base import MethodSettings, renamed, validated
from fedmosaic.training.method import Method

HEADLINE, PAPERS = "full:hr@10", "sampled:hr@10"
# Settings of which some came later than the first records, and some were always said: what a key has where nothing is
# said, so that the keys of runs that are recorded stay what they are.
ALWAYS_SAID = {"user": "user", "item": "item", "header": True, "encoding": "utf-8"}
RECORDS_BEGAN = {"select": PAPERS, "method_settings": {}}  # what a record that says nothing of it was made with
SAID_LATER = ("title", "decimal")
FILE_ENDINGS = (".csv", ".tsv", ".txt", ".dat", ".inter", ".parquet")


OF_FILES = (
    "user", "item", "rating", "time", "title", "separator", "header", "encoding", "decimal", "titles", "min_rating",
    "min_user_rows", "lenient",
)  # fmt: skip


class Settings(BaseModel):
    """Everything that decides a run's numbers, and nothing else."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    method: str
    dataset: str = Field(description="a name of the catalogue, or the path of a file")
    seed: int = Field(default=0, ge=0)
    pool: Pool = Field(default="strict", description="which items may be training negatives")
    # own files: what is not said is recognised (docs/data.md)
    user: str | int | None = Field(default=None, description="column of who: a name, or a number from 1")
    item: str | int | None = Field(default=None, description="column of what")
    rating: str | int | None = Field(default=None, description="column of how much; no: none")
    time: str | int | None = Field(default=None, description="column of when; no: none")
    separator: str | None = Field(default=None, description="between fields: tab, ';', '::' or any text")
    header: bool | None = Field(default=None, description="whether the first row names the columns")
    encoding: str | None = Field(default=None, description="utf-8, latin-1 ...")
    titles: str | None = Field(default=None, description="a file with ids and titles of items, in columns of any name")
    min_rating: float | None = Field(default=None, description="rows with a lower rating are no positives")
    min_user_rows: int = Field(default=1, ge=1, description="users with fewer rows are left out")
    lenient: bool = Field(default=False, description="set up to 5 % of bad rows apart and count them")
    title: str | int | None = Field(default=None, description="column of titles in the data itself")
    decimal: Literal[".", ","] | None = Field(default=None, description="what decimals are written with")
    # the synthetic set
    users: int = Field(default=2000, ge=1)
    items: int = Field(default=1000, ge=4)
    per_user: int = Field(default=20, ge=1)
    # split and evaluation
    split: Literal["leave-one-out", "last-out", "time", "ratio"] = Field(
        default="leave-one-out", description="last-out holds out no validation: the last round is reported"
    )
    ties: Ties = Field(default="hash", description="order of events at the same time; file = as papers")
    straddle: Straddle = Field(
        default=False, description="leave training rows of held-out pairs in (a leak); once: each pair once"
    )
    input: Literal["train", "all-before"] = Field(
        default="train",
        description="history that the test is answered from; all-before: validation items too, never trained on",
    )
    validation_share: float = Field(default=0.1, ge=0, lt=1)
    test_share: float = Field(default=0.1, gt=0, lt=1)
    candidates: int = Field(default=99, ge=1, description="sampled items beside each held-out one")
    candidate_seed: int = Field(default=0, ge=0)
    select: str = Field(
        default="auto",
        description="what chooses the round: sampled or full, metric@k; auto: full:hr@10, but as papers if pool=legacy",
    )
    evaluate_every: int = Field(default=1, ge=1, description="rounds between evaluations on validation")
    patience: int | None = Field(
        default=None, ge=1, description="stop after so many rounds in which validation did not rise"
    )
    method_settings: dict[str, Any] = Field(default_factory=dict)

    @field_validator("select")
    @classmethod
    def _known_selection(cls, value: str) -> str:
        if value == "auto":
            return value
        protocol, _, metric = value.partition(":")
        name, _, cut = metric.partition("@")
        if protocol not in ("sampled", "full") or name not in METRICS or not cut.isdigit() or int(cut) < 1:
            raise ValueError(f"auto, sampled:METRIC@K or full:METRIC@K, with a metric of {', '.join(METRICS)}")
        return value

    @classmethod
    def make(cls, method: str, dataset: str, given: Mapping[str, Any] | None = None) -> Settings:
        """Settings from a flat mapping: each key goes to the run or to the method, whichever knows it.

        >>> Settings.make("ease", "ml-100k", {"pool": "legacy", "lam": "200"}).method_settings
        {'lam': 200.0}
        """
        entry = registry.entry(method)
        clash = [name for name in entry.settings.model_fields if name in cls.model_fields]
        if clash:
            raise SettingsError(
                f"method {method} has a setting {clash[0]!r}, which is a setting of every run; rename it"
            )
        own = {k: v for k, v in (given or {}).items() if k in cls.model_fields and k != "method_settings"}
        rest = dict((given or {}).get("method_settings", {}))
        rest |= {k: v for k, v in (given or {}).items() if k not in cls.model_fields}
        if issubclass(entry.settings, MethodSettings):
            rest = renamed(entry.settings, rest, f"method {method}")
        for key in rest:
            if key not in entry.settings.model_fields:
                known = [*entry.settings.model_fields, *(f for f in cls.model_fields if f != "method_settings")]
                raise UnknownNameError("setting", key, known, f"`fedmosaic describe {method}` explains the method's")
        chosen = validated(entry.settings, rest, f"method {method}")
        # none is every optional setting's default, and TOML cannot say it
        typed = {k: v for k, v in chosen.model_dump().items() if k in rest and v is not None}
        return validated(cls, own | {"method": method, "dataset": dataset, "method_settings": typed}, "the run")

    def build(self) -> Method[Any]:
        """The method these settings describe."""
        method: Method[Any] = registry.entry(self.method).build(self.method_settings)
        return method

    @property
    def is_file(self) -> bool:
        """Whether the data set is a file of one's own, or a pattern of files, and not a name."""
        path = Path(self.dataset)
        known = path.suffix in FILE_ENDINGS or path.name.endswith((".gz", ".zip"))
        return known or path.is_file() or any(sign in self.dataset for sign in PATTERN)

    def resolved(self) -> tuple[Settings, str | None]:
        """The same with what is recognised of a file said, so that reruns do not guess; and that in words."""
        if not self.is_file:
            return self, None
        first = matching(self.dataset)[0]
        if first.suffix == ".parquet":
            return self, None
        said = {name: getattr(self, name) for name in OF_FILES}
        seen, _ = reading_of(first, said)
        places = {c: c if seen.fmt.header else i + 1 for i, c in enumerate(seen.columns)}
        roles = {r: "no" if c is None else places[c] for r, c in seen.roles.items()}
        if self.rating is None and self.min_rating is None:
            del roles["rating"]  # it decides nothing
        format = {k: getattr(seen.fmt, k) for k in ("separator", "header", "encoding", "decimal")}
        return self.model_copy(update={**format, **roles}), seen.words

    def with_ratings(self) -> Settings:
        """The same with the column of ratings, where one is recognised in a file: for looking at, not for training."""
        if not self.is_file or self.rating is not None or matching(self.dataset)[0].suffix == ".parquet":
            return self
        seen, _ = reading_of(matching(self.dataset)[0], {name: getattr(self, name) for name in OF_FILES})
        name = seen.roles["rating"]
        at = None if name is None else seen.columns.index(name) + 1
        return self.model_copy(update={"rating": at})

    def load_data(self, data_dir: str | Path | None = None) -> Interactions:
        """The data set these settings name."""
        if self.is_file:
            return Interactions.from_file(self.dataset, **{name: getattr(self, name) for name in OF_FILES})
        if self.dataset == "synthetic":
            return sources.load("synthetic", users=self.users, items=self.items, per_user=self.per_user)
        return sources.load(self.dataset, data_dir)

    def split_data(self, data: Interactions) -> Split:
        """The split these settings describe."""
        if self.split in ("leave-one-out", "last-out"):
            return leave_one_out(data, ties=self.ties, straddle=self.straddle, validation=self.split == "leave-one-out")
        validation, test = self.validation_share, self.test_share
        if self.split == "time":
            return time_split(data, validation=validation, test=test)
        return ratio_split(data, validation=validation, test=test, ties=self.ties)

    @property
    def selection(self) -> str:
        """What chooses the round: as was said, or else the headline; under the papers' pool, what papers choose by."""
        return (PAPERS if self.pool == "legacy" else HEADLINE) if self.select == "auto" else self.select

    def protocol(self, rule: str, short: int = 0, judged: int | None = None) -> str:
        """One line that belongs beside every number; `rule` is the split's own description.

        `short` users have fewer unseen items than candidates are wanted, so chance is higher for them.
        judged: how many users chose the round, where not all did.
        """
        straddle = ", repeats straddle the split (leak)" if self.straddle else ""
        leak = {"strict": "", "legacy": " (leaks the held-out item)", "isolated": " (peeks)"}[self.pool]
        selection = "last round" if self.split == "last-out" else f"selected on validation {self.selection}"
        selection += f" of {judged:,} users" if judged is not None and self.split != "last-out" else ""
        fed = "" if self.input == "train" else "; input all-before: validation items are fed, not trained on"
        drawn = f"sampled = 1 + {self.candidates}" + (f" (fewer for {short:,} users)" if short else "")
        return f"{rule}{straddle}; pool {self.pool}{leak}; seed {self.seed}; {drawn}; {selection}{fed}"

    def key(self) -> str:
        """Content address: equal settings, given or by default, equal key; a default that changes makes another run.

        What is off (none or false) leaves no trace, so a new setting that is off does not make old runs others.

        >>> Settings.make("fedmf", "ml-100k", {"dim": 32}).key() == Settings.make("fedmf", "ml-100k").key()
        True
        """
        whole = validated(registry.entry(self.method).settings, self.method_settings, f"method {self.method}")
        own = {k: v for k, v in whole.model_dump().items() if v is not None and v is not False}
        run = {k: v for k, v in self.model_dump().items() if v is not None or k not in SAID_LATER}
        if not self.is_file:
            run |= {k: v for k, v in ALWAYS_SAID.items() if run[k] is None}
        text = json.dumps({**run, "method_settings": own}, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:10]

    def recorded(self) -> dict[str, Any]:
        """What a record keeps: all that is not as it was when records began."""
        began = {name: field.default for name, field in type(self).model_fields.items()} | RECORDS_BEGAN
        return {k: v for k, v in self.model_dump().items() if v is not None and v != began[k]}

    def to_toml(self) -> str:
        """The file that reruns this; absent means none."""
        return tomli_w.dumps({k: v for k, v in self.model_dump().items() if v is not None})

    @classmethod
    def from_toml(cls, text: str, source: object = "config") -> Settings:
        """Read `to_toml` back."""
        try:
            values = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise SettingsError(f"{source} is not TOML: {error}") from None
        try:
            method, dataset = values.pop("method"), values.pop("dataset")
        except KeyError as error:
            raise SettingsError(f"{source} does not say {error.args[0]}") from None
        return cls.make(method, dataset, values)


def presets() -> dict[str, str]:
    """The shipped settings files by name: text that begins with the command that found them."""
    files = resources.files("fedmosaic.runs.presets").iterdir()
    return {f.name.removesuffix(".toml"): f.read_text() for f in sorted(files, key=str) if f.name.endswith(".toml")}


def read_config(name: str | Path) -> Settings:
    """Settings of a file, or of a preset by its name."""
    path = Path(name)
    if path.is_file():
        return Settings.from_toml(path.read_text(), path)
    known = presets()
    if str(name) in known:
        return Settings.from_toml(known[str(name)], f"preset {name}")
    raise UnknownNameError("settings file or preset", str(name), known)


def parse_pairs(pairs: Sequence[str]) -> dict[str, Any]:
    """`key=value` words; `none` means absent, whole numbers name columns by place.

    >>> parse_pairs(["pool=legacy", "user=1", "neighbours=none"])
    {'pool': 'legacy', 'user': 1, 'neighbours': None}
    """
    result: dict[str, Any] = {}
    for pair in pairs:
        key, sign, value = pair.partition("=")
        if not sign or not key:
            raise SettingsError(f"expected key=value, got {pair!r}")
        key = key.replace("-", "_")
        if key in result:
            raise SettingsError(f"setting {key!r} is given twice")
        result[key] = None if value.lower() in {"none", "null"} else int(value) if value.isdigit() else value
    return result
