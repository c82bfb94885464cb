"""The condition of ``--where``: SQL that judges one row by its own columns."""

import json
from collections.abc import Iterator
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa

from turbogr.errors import ConfigurationError

# Logs are read in blocks, so that what looks beyond its row would give another answer for every size of block.
_BEYOND_THE_ROW = {"WINDOW": "a window function", "SUBQUERY": "a sub-query", "STAR": "a star: name each column"}


class Condition:
    """A condition in DuckDB's SQL.

    Attributes:
        text: the SQL, as it was given.
        columns: the names in it, in lower case: columns, or parts of one.
    """

    def __init__(self, text: str) -> None:
        """Parse the condition.

        Raises:
            ConfigurationError: it is not one SQL expression, or does not depend on one row alone.
        """
        self.text = text
        try:
            # It must be one expression by itself; inside a statement, `1) LIMIT (5` would be SQL too.
            self._expression = duckdb.SQLExpression(text)
        except duckdb.Error as error:
            raise self._error(f"is not one SQL expression: {_first_line(error)}") from error
        with duckdb.connect() as database:
            tree = database.execute("SELECT json_serialize_sql(?)", [f"SELECT ({self._expression})"]).fetchone()
            nodes = list(_nodes(json.loads(tree[0] if tree else "{}")))
            names = {node["function_name"].lower() for node in nodes if node.get("class") == "FUNCTION"}
            refused = database.execute(
                "SELECT DISTINCT function_name, function_type FROM duckdb_functions() "
                "WHERE function_name IN (SELECT unnest(?::VARCHAR[])) "
                "AND (function_type = 'aggregate' OR stability = 'VOLATILE')",
                [sorted(names)],
            ).fetchall()
        found = [f"{name}(): {'an aggregate' if kind == 'aggregate' else 'not reproducible'}" for name, kind in sorted(refused)]
        found += [_BEYOND_THE_ROW[node["class"]] for node in nodes if node.get("class") in _BEYOND_THE_ROW]
        if found:
            raise self._error(f"must judge each row by its own columns, and holds {found[0]}")
        self.columns = {name.lower() for node in nodes if node.get("class") == "COLUMN_REF" for name in node["column_names"]}

    def dropped(self, table: pa.Table) -> pa.Array:
        """Tell which rows go.

        Args:
            table: rows with the columns that the condition names.

        Returns:
            uint8 [rows]: 1 where the condition is false or NULL.

        Raises:
            ConfigurationError: the condition fails on these rows.
        """
        row = "row"
        while row in (name.lower() for name in table.column_names):
            row = f"_{row}"
        dropped = np.ones(len(table), dtype=np.uint8)
        numbered = table.append_column(row, pa.array(np.arange(len(table))))
        with duckdb.connect() as database:
            try:
                # A filter: DuckDB refuses here whatever would look at other rows or make new ones.
                kept = database.from_arrow(numbered).set_alias("events").filter(self._expression).select(row).to_arrow_table()
            except duckdb.Error as error:
                raise self._error(f"fails: {_first_line(error)} (columns read: {', '.join(table.column_names)})") from error
        dropped[kept[row].to_numpy()] = 0
        return pa.array(dropped)

    def _error(self, what: str) -> ConfigurationError:
        return ConfigurationError(f"--where {self.text!r} {what}")


def _nodes(tree: Any) -> Iterator[dict[str, Any]]:
    if isinstance(tree, dict):
        yield tree
    for part in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ():
        yield from _nodes(part)


def _first_line(error: Exception) -> str:
    """Leave DuckDB's picture of the statement out, which shows more than the condition."""
    return str(error).splitlines()[0]
