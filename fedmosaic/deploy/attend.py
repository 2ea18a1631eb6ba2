"""A node of a deployment, a program of one process: it listens on nothing, and runs nothing that the network brings."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

from fedmosaic.core.ending import ending
from fedmosaic.core.files import locked
from fedmosaic.deploy.admission import REQUEST, asked
from fedmosaic.deploy.fleet import Link
from fedmosaic.deploy.flower import AwayError, FleetLine, NotLetInError
from fedmosaic.deploy.keys import CA, NODE_KEY
from fedmosaic.deploy.node import Node

KNOCKS = 5.0  # seconds before a node that was not let in knocks again
LONGEST = 30.0  # seconds at most between two looks for a server that is away
Say = Callable[[str], None]


def attend(place: Path, say: Say = lambda text: None) -> None:
    """Be a node: make keys at the first start, knock until let in, answer tasks until all rounds are over."""
    link, fresh = Link.read(place), not (place / REQUEST).is_file()
    with ending(), locked(place, "node"):
        request = asked(place)
        if fresh:
            say(
                f"keys are made, and stay here; bring {place / REQUEST} to the operator, who lets {request.node} in: "
                "`fedmosaic deploy admit FLEET request.json`"
            )
        node = Node(place, say)
        node.warm_up()  # what is to be compiled is, before others wait for it
        with FleetLine(link.address, place / CA, place / NODE_KEY) as line:
            answer_tasks(node, line, say)
    say("all rounds are over; `fedmosaic recommend --device` answers from here, with no server")


def answer_tasks(node: Node, line: FleetLine, say: Say) -> None:
    """Until the server has said that all rounds are over. Whatever happens to the line, it is tried again."""
    told, pause = "", 0.5
    while not node.ended:
        try:
            line.join()
            if told:
                say("the server lets this node in" if told.startswith("not") else "the server is back")
            told, pause = "", 0.5
            while not node.ended:
                if (found := line.receive()) is not None:
                    with line.alive():
                        answer = node.answer(found[1])
                    line.send(found[0], answer)
        except NotLetInError as error:
            if told != (told := f"not let in: {error}"):
                say(f"{told}; knocking every {KNOCKS:.0f} s")
            time.sleep(KNOCKS)
        except AwayError as error:
            if not told.startswith("away"):
                told = "away"
                say(f"{line.address} does not answer ({error}); trying again")
            time.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, LONGEST)
