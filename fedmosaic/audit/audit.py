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
from fedmosaic.audit.inference import Finding, Messages, NoiseFound
from fedmosaic.audit.poisoning import Attack, Damage
from fedmosaic.core.errors import SettingsError
from fedmosaic.data.negatives import draw_candidates, training_set
from fedmosaic.data.split import Split
from fedmosaic.engines.federation import Federation
from fedmosaic.methods.closed_form import ClosedForm

ROUNDS = (1, 10, 30)
VICTIMS = 100
ATTACKS: tuple[tuple[Attack, float], ...] = (
    ("none", 0.0), ("boost", 0.01), ("shilling", 0.01), ("sybils", 0.05), ("flip", 0.05), ("huge", 0.0),
)  # fmt: skip
TRAINED = 20  # rounds before lists are looked at


@dataclass(frozen=True)
class Audit:
    """What was found. messages: how their sizes differ. noise: whether it can be taken off, where there is some."""

    prior: Guess
    inference: tuple[Finding, ...]
    poisoning: tuple[Damage, ...]
    messages: tuple[Messages, ...] = ()
    noise: NoiseFound | None = None

    def plain(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "prior": vars(self.prior),
            "inference": [vars(found) for found in self.inference],
            "poisoning": [
                {"attack": d.attack, "share": d.share, "reduction": d.reduction, "er@10": d.er, "hr@10": d.hr}
                for d in self.poisoning
            ],
            "messages": [vars(found) for found in self.messages],
            "noise": None if self.noise is None else vars(self.noise),
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
    if isinstance(method, ClosedForm):  # nothing is chosen by lists that liars have a say in
        method = method.without_validation()
    data = training_set(split, "strict")
    users = inference.victims(data, VICTIMS, seed)
    prior, sizes, noise = inference.prior(data, users), list[Messages](), None
    if isinstance(method, ClosedForm):
        say("single statistics")
        found = inference.of_closed_form(method, data, users, seed)
    elif isinstance(method, Federation) and not method.pooled:
        found, sizes = inference.of_federation(method, data, users, rounds, seed, say)
        noise = inference.noise_of_devices(method.algorithm, data.n_items)
    else:
        raise SettingsError("audit attacks methods whose uploads add up; this one's do not, or it has none")
    candidates, damages = draw_candidates(split), list[Damage]()
    for attack, share in ATTACKS if poison else ():
        for reduction in reductions_of(method):
            say(f"{attack}, {reduction or 'as it is'}")
            damages.append(
                poisoning.damage(
                    method, split, candidates, attack, share, reduction=reduction, rounds=TRAINED, seed=seed
                )
            )
    return Audit(prior, tuple(found), tuple(damages), tuple(sizes), noise)


def reductions_of(method: Federation | ClosedForm) -> tuple[str | None, ...]:
    """The method's own, and bounds beside it where the server sees uploads and does not bound them already."""
    if isinstance(method, ClosedForm):
        seen = not method.secure and not method.bounded
    else:
        spread = any(move.spreads for move in method.algorithm.moves)
        seen = method.team is None and not method.algorithm.server.reduction.each and not spread
    return (None, "bounded") if seen else (None,)
