"""Units (pint) and Python (Monty): results, limits, hostile input."""

import os
import random
import time

import pytest

from pipeline.tools.base import ToolError
from pipeline.tools.executor import Executor


def outcome(run, text: str) -> str:
    try:
        return run(text)
    except ToolError as error:
        return error.kind


class TestUnits:
    @pytest.fixture(scope="class")
    def convert(self):
        pytest.importorskip("pint")
        from pipeline.tools.units import convert

        return lambda text: outcome(convert, text)

    @pytest.mark.parametrize(
        ("text", "result"),
        [
            ("5 miles to km", "8.05 km"),
            ("5 ft 3 in to cm", "160.02 cm"),
            ("6 feet and 2 inches to cm", "187.96 cm"),
            ("5 ft, 3 in in m", "1.6 m"),
            ("100 °F to °C", "37.78 °C"),
            ("72 degrees Fahrenheit to celsius", "22.22 celsius"),
            ("-40 degC to degF", "-40 degF"),
            ("60 mph in km/h", "96.56 km/h"),
            ("100 km / h to miles per hour", "62.14 miles per hour"),
            ("1,250 kg to tonnes", "1.25 tonnes"),
            ("3 square feet to m^2", "0.28 m^2"),
            ("1 m3 to litres", "1000 litres"),
            ("9.81 m/s² to ft/s**2", "32.19 ft/s**2"),
            ("5 KM to Miles", "3.11 Miles"),
            ("0.0004 km to miles", "0.0002485 miles"),
            ("3 light years to km", "28382191417742.4 km"),
            ("2 nautical miles to m", "3704 m"),
            ("90 minutes to hours?", "1.5 hours"),
            ("1e3 g to kg", "1 kg"),
            ("3 kg to m", "unsupported"),
            ("3 quux to m", "unsupported"),
            ("20 degC 5 degC to degF", "unsupported"),  # degrees are not added up
            ("to", "syntax"),
            ("5 to km", "syntax"),
            ("km to m", "syntax"),
            ("5 m**999999 to m", "syntax"),
            ("5 __import__ to m", "unsupported"),
            ("5 km to m; 3", "syntax"),
            ("5 " + "m " * 100 + "to m", "too_large"),
        ],
    )
    def test_conversions(self, convert, text, result):
        assert convert(text) == result

    def test_hostile_input_is_an_error_kind(self, convert):
        rng = random.Random(0)
        units = [
            "km",
            "miles",
            "m/s",
            "degF",
            "kg",
            "s",
            "pi",
            "dB",
            "nan",
            "µm",
            "hours",
            "e",
            "B",
        ]
        pieces = [*units, "5", "3.2", "9e99", "^", "**", "*", "/", "(", ")", "'", "[", "²", "_"]
        pieces += [" ", " and ", ",", "-", "%", "__class__", "9", ".", "lambda", "\\", "per", "Ω"]
        kinds: dict[str, int] = {}
        start = time.process_time()
        for _ in range(2_000):
            middle = "".join(rng.choice(pieces) for _ in range(rng.randrange(5)))
            got = convert(f"{rng.randrange(99)} {rng.choice(units)}{middle} to {rng.choice(units)}")
            kind = got if got in {"syntax", "unsupported", "too_large"} else "result"
            kinds[kind] = kinds.get(kind, 0) + 1
        assert min(kinds["syntax"], kinds["unsupported"], kinds["result"]) > 20
        assert time.process_time() - start < 20


class TestPython:
    @pytest.fixture(scope="class")
    def tool(self):
        pytest.importorskip("pydantic_monty")
        from pipeline.tools.python import Python, PythonConfig

        tool = Python(PythonConfig(timeout_s=0.5))
        yield tool
        tool.close()

    @pytest.mark.parametrize(
        ("code", "result"),
        [
            ("sum(n * n for n in range(10))", "285"),
            ("print('hi'); 3", "hi 3"),
            ("x = 2\nfor i in range(3):\n    x *= 2\nx", "16"),
            ("'text'", "text"),
            ("[1, 2]", "[1, 2]"),
            ("import datetime; str(datetime.date.today())", "2023-01-30"),
            ("(", "syntax"),
            ("1 / 0", "exception"),
            ("while True: pass", "timeout"),
            ("'a' * 10**9", "too_large"),
            ("10 ** 10 ** 8", "too_large"),
            ("[0] * 10**10", "too_large"),
            ("def f(): return f()\nf()", "too_large"),
            ("print('x' * 10**8)", "too_large"),
            ("open('/etc/passwd').read()", "not_allowed"),
            ("import socket", "not_allowed"),
            ("import subprocess", "not_allowed"),
            ("__import__('os').system('true')", "exception"),
        ],
    )
    def test_programs_and_limits(self, tool, code, result):
        document = {"date": "2023-01-30"}
        assert outcome(lambda text: tool.run({"code": text}, document), code) == result

    def test_calls_share_nothing_and_repeat(self, tool):
        assert outcome(lambda text: tool.run({"code": text}, {}), "x = 1; x") == "1"
        assert outcome(lambda text: tool.run({"code": text}, {}), "x") == "exception"
        draws = {tool.run({"code": "import random; random.random()"}, {}) for _ in range(3)}
        assert len(draws) == 1

    def test_nothing_outside_is_seen_or_touched(self, tool, tmp_path):
        target = tmp_path / "x"
        code = f"open({str(target)!r}, 'w').write('x')"
        assert outcome(lambda text: tool.run({"code": text}, {}), code) == "not_allowed"
        assert not target.exists()
        os.environ["CALLSIEVE_TEST_SECRET"] = "hush"
        try:
            seen = outcome(
                lambda text: tool.run({"code": text}, {}), "import os; str(dict(os.environ))"
            )
        finally:
            del os.environ["CALLSIEVE_TEST_SECRET"]
        assert "hush" not in seen

    def test_nothing_printed_is_no_result(self, tool):
        with Executor([tool]) as executor:
            assert executor.execute("Python", "x = 3").error_kind == "no_result"
            assert executor.execute("Python", "print(1); print(2)").result == "1 2"
            assert executor.execute("Python", "6 * 7").result == "42"  # opens again after close


def test_missing_library_names_the_extra(monkeypatch):
    import sys

    import pipeline.tools.units as units

    units._registry.cache_clear()
    monkeypatch.setitem(sys.modules, "pint", None)
    with pytest.raises(ValueError, match=r"\.\[units\]"):
        units.Units()
    units._registry.cache_clear()
