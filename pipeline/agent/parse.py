"""How a turn is read, for people and tests: `callsieve agent parse --protocol react < TURN`."""

from __future__ import annotations

from typing import Any

from pipeline.agent import chat, direct, inline, plain, react
from pipeline.agent.turns import ProtocolModule
from pipeline.errors import ConfigError

PROTOCOLS: dict[str, ProtocolModule] = {
    "react": react,
    "chat": chat,
    "inline": inline,
    "plain": plain,
    "direct": direct,
}


def parse_turn(protocol: str, text: str) -> dict[str, Any]:
    """Read one turn: `{"actions": [[name, arguments]], "answer", "flags", "errors"}`.

    Raises ConfigError for a protocol that does not exist.
    """
    turn = protocol_named(protocol).parse(text)
    return {
        "actions": [[call.name, call.arguments] for call in turn.actions],
        "answer": turn.answer,
        "flags": list(turn.flags),
        "errors": list(turn.errors),
    }


def protocol_named(name: str) -> ProtocolModule:
    """Return the module of a protocol; raises ConfigError naming the ones there are."""
    if name not in PROTOCOLS:
        raise ConfigError(f"protocol {name!r} is not one of: {', '.join(PROTOCOLS)}")
    return PROTOCOLS[name]
