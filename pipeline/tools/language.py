"""Which language a text is in, by py3langid (extra `mt`)."""

from __future__ import annotations

from functools import cache
from typing import Any

from pipeline.tools.base import MissingExtra

SURE = 0.8  # probability from which an answer counts, as in the paper's filter


@cache
def _identifier() -> Any:
    try:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier
    except ImportError:
        raise MissingExtra("Language detection", "mt") from None
    return LanguageIdentifier.from_pickled_model(MODEL_FILE, norm_probs=True)


def detect_language(text: str) -> str | None:
    """The ISO 639-1 code of a text's language; None when unsure or when there are no words."""
    if sum(character.isalpha() for character in text) < max(4, len(text) // 3):
        return None
    code, probability = _identifier().classify(text)
    return str(code) if probability >= SURE else None
