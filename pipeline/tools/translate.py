"""MT: translates into one language, English by default; the source language is detected.

Two backends behind one interface: apertium (Debian packages `apertium` and `apertium-eng-spa` or
another pair; offline, one warm process per pair) and a transformers sequence-to-sequence model
(NLLB, M2M100, Marian).
"""

from __future__ import annotations

import atexit
import os
import re
import selectors
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from pipeline.errors import ConfigError
from pipeline.tools.base import STRICT, ToolError, ToolSpec, content_version, one_string
from pipeline.tools.language import detect_language, rank_languages

MODES = Path("/usr/share/apertium/modes")  # where Debian puts the pairs
MAX_CHARACTERS = 2000
NO_APERTIUM = (
    "apertium is not installed; on Debian and Ubuntu: apt-get install apertium apertium-eng-spa; "
    "or give `backend: transformers` and a `model` (the extra `mt` brings only the detection of "
    "the language)"
)

# ISO 639-1 -> 639-3, as in the names of apertium's pairs and (with the script) of NLLB.
ISO3 = {
    **{"af": "afr", "ar": "ara", "bg": "bul", "bn": "ben", "ca": "cat", "cs": "ces", "da": "dan"},
    **{"de": "deu", "el": "ell", "en": "eng", "es": "spa", "et": "est", "eu": "eus", "fa": "pes"},
    **{"fi": "fin", "fr": "fra", "gl": "glg", "he": "heb", "hi": "hin", "hr": "hrv", "hu": "hun"},
    **{"id": "ind", "is": "isl", "it": "ita", "ja": "jpn", "ko": "kor", "lt": "lit", "lv": "lav"},
    **{"mk": "mkd", "nl": "nld", "no": "nob", "pl": "pol", "pt": "por", "ro": "ron", "ru": "rus"},
    **{"sk": "slk", "sl": "slv", "sq": "als", "sr": "srp", "sv": "swe", "sw": "swh", "ta": "tam"},
    **{"te": "tel", "th": "tha", "tr": "tur", "uk": "ukr", "ur": "urd", "vi": "vie", "zh": "zho"},
}


@dataclass(frozen=True)
class MTConfig:
    """`backend: transformers` needs `model` (a folder or hub id). `source` switches detection off.

    Languages are ISO 639-1 codes: en, es, de.
    """

    __pydantic_config__ = STRICT

    name: Literal["MT"] = "MT"
    backend: Literal["apertium", "transformers"] = "apertium"
    target: str = "en"
    source: str | None = None
    model: str | None = None
    device: str = "cpu"
    timeout_s: float = 20.0
    result_limit: int = 400

    def __post_init__(self) -> None:
        for key, code in (("target", self.target), ("source", self.source)):
            if code is not None and code not in ISO3:
                raise ValueError(f"{key}: {code!r} is not one of {', '.join(ISO3)}")
        if (self.backend == "transformers") != (self.model is not None):
            raise ValueError("model: needed by the backend transformers and by no other")


class Translator(Protocol):
    """A backend."""

    identity: str  # part of the tool's version

    def sources(self, target: str) -> set[str] | None:
        """Languages it can translate into `target`; None when it does not know."""
        ...

    def translate(self, text: str, source: str, target: str) -> str:
        """The translation; raises ToolError of kind unsupported, timeout or crash."""
        ...

    def close(self) -> None: ...


class MT:
    """Translates a phrase or a sentence; see `Translator` for the backends."""

    def __init__(self, translator: Translator, config: MTConfig = MTConfig()) -> None:
        self.translator = translator
        self.config = config
        self.spec = mt_spec(config, translator.identity)

    def run(self, arguments: dict[str, Any], document: Mapping[str, Any]) -> str:
        """The translation; raises ToolError (unsupported, too_large, no_result, timeout, crash)."""
        text = " ".join(arguments["text"].split())
        if not text:
            raise ToolError("no_result", "there is nothing to translate")
        if len(text) > MAX_CHARACTERS:
            raise ToolError("too_large", f"the text has over {MAX_CHARACTERS} characters")
        target = self.config.target
        source = self.config.source or self._detect(text)
        if source == target:
            raise ToolError("unsupported", f"{text[:60]!r} is in {target} already")
        return self.translator.translate(text, source, target)

    def close(self) -> None:
        """Stop the backend's processes."""
        self.translator.close()

    def _detect(self, text: str) -> str:
        """A sure answer as it is; a few words are decided among what the backend knows."""
        sure = detect_language(text)
        if sure is not None:
            return sure
        known = self.translator.sources(self.config.target)
        candidates = None if known is None else known | {self.config.target}
        for code in rank_languages(text):
            if candidates is None or code in candidates:
                return code
        raise ToolError("unsupported", f"the language of {text[:60]!r} is not recognised")


def mt_spec(config: MTConfig, identity: str = "") -> ToolSpec:
    """What MT says of itself; `identity` is the backend's."""
    return ToolSpec(
        name="MT",
        version=content_version("1", identity, config.target, config.source),
        description=(
            f"Translates a phrase or a sentence into {config.target} (ISO 639-1); the "
            "language it is in is recognised. Example: la biblioteca gives the library."
        ),
        parameters=one_string("text", "The words to translate, in their own language"),
        result_limit=config.result_limit,
        timeout_s=config.timeout_s,
    )


def build_mt(config: MTConfig) -> MT:
    """The tool of a configuration; raises ConfigError when the backend is not installed."""
    rank_languages("")  # a missing library is said at start, not at the first call
    if config.model is not None:
        return MT(Seq2SeqTranslator(config.model, config.device), config)
    return MT(ApertiumTranslator(timeout_s=config.timeout_s), config)


def apertium_is_there() -> bool:
    """Whether apertium's programs are installed."""
    return shutil.which("apertium-wblank-mode") is not None


class ApertiumTranslator:
    """Apertium with one warm process per pair: about 0.4 s at the first call, then 1 ms."""

    identity = "apertium"

    def __init__(self, timeout_s: float = 20.0) -> None:
        if not apertium_is_there():
            raise ConfigError(f"MT: {NO_APERTIUM}")
        self.timeout_s = timeout_s
        self._pipes: dict[str, _ApertiumPipe] = {}
        self._lock = threading.Lock()

    def sources(self, target: str) -> set[str]:
        """Languages with an installed pair into `target`."""
        names = {path.stem for path in MODES.glob("*.mode")}
        return {code for code in ISO3 if self._pair(code, target) in names}

    def translate(self, text: str, source: str, target: str) -> str:
        """The translation; a process that hangs is killed and a new one started next time."""
        pair = self._pair(source, target)
        if not (MODES / f"{pair}.mode").exists():
            installed = ", ".join(sorted(self.sources(target))) or "none"
            raise ToolError(
                "unsupported",
                f"apertium has no pair {pair} here (from {installed} into {target} there is)",
            )
        with self._lock:
            pipe = self._pipes.get(pair)
            if pipe is None or not pipe.alive:
                pipe = self._pipes[pair] = _ApertiumPipe(pair)
        return pipe.translate(text, self.timeout_s)

    def close(self) -> None:
        """Stop every process."""
        for pipe in self._pipes.values():
            pipe.kill()
        self._pipes.clear()

    @staticmethod
    def _pair(source: str, target: str) -> str:
        return f"{ISO3[source]}-{ISO3[target]}"


class _ApertiumPipe:
    """The programs of one pair, kept open; a NUL byte ends a text and flushes the answer."""

    def __init__(self, pair: str) -> None:
        made = subprocess.run(
            ["apertium-wblank-mode", "-z", str(MODES / f"{pair}.mode")],
            capture_output=True,
            text=True,
            check=True,
        )
        self.process = subprocess.Popen(
            ["bash", "-c", made.stdout, "apertium", "-n", ""],  # -n: no mark on unknown words
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # so that the whole pipeline can be killed
        )
        self._lock = threading.Lock()
        atexit.register(self.kill)

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def translate(self, text: str, timeout_s: float) -> str:
        escaped = re.sub(r"[\\\[\]{}^$/@<>]", lambda found: "\\" + found.group(), text)
        assert self.process.stdin is not None and self.process.stdout is not None
        with self._lock:
            try:
                # The blank `[]` ends the last sentence, as apertium's own text filter does.
                self.process.stdin.write(f"{escaped}[]\n\0".encode())
                self.process.stdin.flush()
                answer = self._read(time.monotonic() + timeout_s)
            except BrokenPipeError:
                self.kill()
                raise ToolError("crash", "apertium ended") from None
        return re.sub(r"\\(.)", r"\1", answer.replace("[]", "")).strip()

    def _read(self, deadline: float) -> str:
        assert self.process.stdout is not None
        answer = b""
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while not answer.endswith(b"\0"):
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    self.kill()
                    raise ToolError("timeout", "apertium did not answer in time")
                read = os.read(self.process.stdout.fileno(), 65_536)
                if not read:
                    self.kill()
                    raise ToolError("crash", "apertium ended")
                answer += read
        return answer[:-1].decode(errors="replace")

    def kill(self) -> None:
        """End the pipeline; harmless when it has ended."""
        atexit.unregister(self.kill)
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    continue  # unsent text of a process that is gone


class Seq2SeqTranslator:
    """A transformers encoder-decoder: NLLB and M2M100 (many pairs) or Marian (one pair)."""

    def __init__(self, model: str, device: str = "cpu", max_new_tokens: int = 256) -> None:
        import torch
        from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

        self.identity = f"transformers {model}"
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.model = AutoModelForSeq2SeqLM.from_pretrained(model).to(device).eval()
        self.max_new_tokens = max_new_tokens
        self._no_grad = torch.inference_mode
        self._lock = threading.Lock()  # a tokenizer's source language is state

    def sources(self, target: str) -> set[str] | None:
        """Languages whose code the tokenizer knows; None for a model of a single pair."""
        known = {code for code in ISO3 if self._code(code) is not None}
        return known - {target} or None

    def translate(self, text: str, source: str, target: str) -> str:
        """The translation by greedy decoding, so that it is the same each time."""
        forced: dict[str, Any] = {}
        with self._lock, self._no_grad():
            if self.sources(target) is not None:
                source_code, target_code = self._code(source), self._code(target)
                if source_code is None or target_code is None:
                    raise ToolError("unsupported", f"the model has no {source} to {target}")
                self.tokenizer.src_lang = source_code
                forced["forced_bos_token_id"] = self.tokenizer.convert_tokens_to_ids(target_code)
            batch = self.tokenizer(text, return_tensors="pt", truncation=True, max_length=512)
            batch.pop("token_type_ids", None)
            ids = self.model.generate(
                **batch.to(self.model.device),
                do_sample=False,
                num_beams=1,
                max_new_tokens=self.max_new_tokens,
                **forced,
            )
        return str(self.tokenizer.decode(ids[0], skip_special_tokens=True)).strip()

    def close(self) -> None:
        """Nothing is held open."""

    def _code(self, language: str) -> str | None:
        """The language's token in the vocabulary: `spa_Latn` (NLLB) or `__es__` (M2M100)."""
        vocabulary = self.tokenizer.get_vocab()
        prefix = f"{ISO3[language]}_"
        nllb = [token for token in self._language_tokens() if token.startswith(prefix)]
        m2m = f"__{language}__"
        return nllb[0] if nllb else m2m if m2m in vocabulary else None

    def _language_tokens(self) -> list[str]:
        pattern = re.compile(r"[a-z]{3}_[A-Z][a-z]{3}")
        return sorted(
            token for token in self.tokenizer.all_special_tokens if pattern.fullmatch(token)
        )
