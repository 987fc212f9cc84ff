"""The desks of the reference cases: library, paper archive, stock, and one function to call."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TypeVar

from pipeline.agent.environments.functions import FunctionTool
from pipeline.tools.base import Tool, ToolError
from pipeline.tools.calculator import Calculator

Value = TypeVar("Value")
_calculator = Calculator()

OWNED = {"Il Gattopardo": 5, "Se questo e' un uomo": 2}
LENT = {"Il Gattopardo": 3, "Se questo e' un uomo": 2}
PAPERS = {"attention is all you need": 2017, "gpt-3": 2020, "react": 2022}
STOCK = {"SKU-11": {"stock": 4, "threshold": 10, "incoming": 20}}


def library_tools(owned: Mapping[str, int] = OWNED, lent: Mapping[str, int] = LENT) -> list[Tool]:
    """Tools of the library desk: catalogo, prestiti, calc."""

    def catalogo(titolo: str) -> str:
        """Says how many copies of a title the library owns.

        Args:
            titolo: The exact title.
        """
        return str(_look_up(owned, titolo, "title"))

    def prestiti(titolo: str) -> str:
        """Says how many copies of a title are lent out.

        Args:
            titolo: The exact title.
        """
        return str(_look_up(lent, titolo, "title"))

    return [FunctionTool(catalogo), FunctionTool(prestiti), calc_tool()]


def paper_tools() -> list[Tool]:
    """Tools of the paper archive: search, calc."""

    def search(title: str) -> str:
        """Says in which year a paper appeared.

        Args:
            title: The title of the paper.
        """
        return str(_look_up(PAPERS, title.lower(), "paper"))

    return [FunctionTool(search), calc_tool()]


def stock_tools(rows: Mapping[str, Mapping[str, int]] = STOCK) -> list[Tool]:
    """Tools of the stock desk: stock, incoming."""

    def stock(sku: str) -> str:
        """Gives the stock of an article and the threshold under which it is ordered.

        Args:
            sku: The article, for example SKU-11.
        """
        row = _look_up(rows, sku, "article")
        return json.dumps({"stock": row["stock"], "threshold": row["threshold"]})

    def incoming(sku: str) -> str:
        """Gives how many pieces of an article are on their way.

        Args:
            sku: The article, for example SKU-11.
        """
        return json.dumps({"incoming": _look_up(rows, sku, "article")["incoming"]})

    return [FunctionTool(stock), FunctionTool(incoming)]


def calcola_tools() -> list[Tool]:
    """The one function of the function-calling case."""

    def calcola(espressione: str) -> str:
        """Calcola un'espressione aritmetica.

        Args:
            espressione: L'espressione, per esempio 4831 * 7092.
        """
        return _calculator.run({"expression": espressione}, {})

    return [FunctionTool(calcola)]


def calc_tool() -> Tool:
    """The Calculator under the short name `calc`."""

    def calc(expression: str) -> str:
        """Works out an arithmetic expression.

        Args:
            expression: The sum, for example 5 - 3.
        """
        return _calculator.run({"expression": expression}, {})

    return FunctionTool(calc)


def _look_up(table: Mapping[str, Value], key: str, what: str) -> Value:
    if key.strip() not in table:
        known = "; ".join(table)
        raise ToolError("no_result", f"no {what} {key[:80]!r}. Known: {known}")
    return table[key.strip()]
