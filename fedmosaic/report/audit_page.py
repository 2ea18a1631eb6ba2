"""The audit as one self-contained HTML page: no network, no server, light and dark, on a phone too."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from fedmosaic.audit.audit import VICTIMS, Audit

MARGIN = 0.02  # beyond what popularity guesses


def write_audit_page(title: str, command: str, found: Audit, out: Path) -> Path:
    """Write the page. command: that prints the same."""
    from jinja2 import Environment, StrictUndefined

    told = [
        f"Messages of round {m.round} have one size."
        if m.sizes == 1
        else f"Messages of round {m.round}: {m.sizes} sizes, correlation with lengths of histories {m.correlation:.2f}."
        for m in found.messages
    ]
    if found.noise is not None:
        told.append(f"Noise: {found.noise.recovered} of {found.noise.devices} keys were recovered from one upload.")
    template = (resources.files("fedmosaic.report") / "audit.html").read_text()
    page = Environment(autoescape=True, undefined=StrictUndefined).from_string(template)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(
        page.render(
            title=title, command=command, prior=found.prior, inference=found.inference, told=told, harm=found.poisoning,
            victims=VICTIMS, verdict=verdict(found),
        )
    )  # fmt: skip
    return out


def verdict(found: Audit) -> str:
    """What was found, in two sentences."""
    worst = max(found.inference, key=lambda f: f.f1)
    if worst.f1 > found.prior.f1 + MARGIN:
        read = f"A server that looks reads histories: {worst.attack} in round {worst.round} has F1 {worst.f1:.2f}."
    else:
        read = f"No attack read more of a history than popularity guesses (at best F1 {worst.f1:.2f})."
    shown = [d for d in found.poisoning if d.attack != "none"]
    if not shown:
        return read
    most = max(shown, key=lambda d: d.er)
    if most.er <= 0.05:
        return f"{read} No attack showed the target to more than {most.er:.1%} of the users."
    return f"{read} {most.attack} by {most.share:.1%} of the clients showed the target to {most.er:.0%} of the users."
