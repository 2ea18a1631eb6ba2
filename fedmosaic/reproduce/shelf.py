"""All cards, in the order of the papers."""

from __future__ import annotations

from fedmosaic.reproduce import fedrap, fedrecgel, leak, pfedrec, plgc
from fedmosaic.reproduce.card import Card

CARDS: dict[str, Card] = {
    card.name: card for card in (*leak.CARDS, *pfedrec.CARDS, *fedrap.CARDS, *fedrecgel.CARDS, *plgc.CARDS)
}
