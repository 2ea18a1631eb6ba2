"""`fedmosaic audit`: a method on data, attacked by a curious server and by malicious clients.

Everything is measured on the library's own uploads, under the settings that were given; what an attack that failed
leaves open is not proven safe by it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fedmosaic.audit import inference, poisoning
from fedmosaic.audit.attacks import Guess
from fedmosaic.audit.inference import Finding
from fedmosaic.audit.poisoning import Attack, Damage
from fedmosaic.core.errors import SettingsError
from fedmosaic.data.negatives import draw_candidates, training_set
from fedmosaic.data.split import Split
from fedmosaic.engines.federation import Federation
from fedmosaic.engines.secure import SecureTeam
from fedmosaic.methods.closed_form import ClosedForm

ROUNDS = (1, 10, 30)
VICTIMS = 100
ATTACKS: tuple[tuple[Attack, float], ...] = (
    ("none", 0.0), ("boost", 0.01), ("shilling", 0.01), ("flip", 0.05), ("huge", 0.0),
)  # fmt: skip
TRAINED = 20  # rounds before lists are looked at


@dataclass(frozen=True)
class Audit:
    """What was found."""

    prior: Guess
    inference: tuple[Finding, ...]
    poisoning: tuple[Damage, ...]

    def plain(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "prior": vars(self.prior),
            "inference": [vars(found) for found in self.inference],
            "poisoning": [
                {"attack": d.attack, "share": d.share, "bounded": d.bounded, "er@10": d.er, "hr@10": d.hr}
                for d in self.poisoning
            ],
        }


def audited(
    method: Any,
    split: Split,
    *,
    rounds: Sequence[int] = ROUNDS,
    poison: bool = True,
    seed: int = 0,
    say: Callable[[str], None],
) -> Audit:
    """Attack a method. rounds: in which single uploads are looked at. poison: whether clients lie, too."""
    data = training_set(split, "strict")
    users = inference.victims(data, VICTIMS, seed)
    prior = inference.prior(data, users)
    if isinstance(method, ClosedForm):
        say("single statistics")
        return Audit(prior, tuple(inference.of_closed_form(method, data, users, seed)), ())
    if not isinstance(method, Federation) or method.pooled:
        raise SettingsError("audit attacks methods whose uploads add up; this one's do not, or it has none")
    found = inference.of_federation(method, data, users, rounds, seed, say)
    candidates, damages = draw_candidates(split), []
    for attack, share in ATTACKS if poison else ():
        for bounded in (False,) if isinstance(method.team, SecureTeam) else (False, True):  # masks hide what is sent
            say(f"{attack}, {'bounded' if bounded else 'as it is'}")
            damages.append(
                poisoning.damage(method, split, candidates, attack, share, bounded=bounded, rounds=TRAINED, seed=seed)
            )
    return Audit(prior, tuple(found), tuple(damages))
