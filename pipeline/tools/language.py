"""Which language a text is in, by py3langid (extra `mt`)."""

from __future__ import annotations

from functools import cache
from typing import Any

from pipeline.tools.base import MissingExtra

SURE = 0.8  # probability from which an answer counts, as in the paper's filter

# The languages of most written text. Among all 140 of the model, close relatives share the
# probability and few short chunks are sure: of XQuAD's 10-word chunks .83 English, .47 Spanish
# and .95 German ones are named rightly, with these .95, .92 and .98.
LANGUAGES = (
    *("af", "ar", "bg", "bn", "ca", "cs", "da", "de", "el", "en", "es", "et", "fa", "fi", "fr"),
    *("he", "hi", "hr", "hu", "id", "it", "ja", "ko", "lt", "lv", "nl", "no", "pl", "pt", "ro"),
    *("ru", "sk", "sl", "sq", "sr", "sv", "sw", "ta", "te", "th", "tr", "uk", "ur", "vi", "zh"),
)


@cache
def _identifier() -> Any:
    try:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier
    except ImportError:
        raise MissingExtra("Language detection", "mt") from None
    identifier = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
    identifier.set_languages(LANGUAGES)
    return identifier


def detect_language(text: str, sure: float = SURE) -> str | None:
    """The ISO 639-1 code of a text's language; None when unsure or when there are no words."""
    if sum(character.isalpha() for character in text) < max(4, len(text) // 3):
        return None
    code, probability = _identifier().classify(text)
    return str(code) if probability >= sure else None


def rank_languages(text: str) -> list[str]:
    """All languages, the likeliest first, however unsure."""
    return [str(code) for code, _ in _identifier().rank(text)]
