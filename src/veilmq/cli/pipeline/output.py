"""What the commands of the pipeline print: short tables for people, or a row a line with every column (`--json`)."""

import sys
from datetime import datetime
from typing import Any, Final

from veilmq.cli.output import in_json, time_text
from veilmq.cli.pipeline.options import Asked

PLACE: Final = ("account", "region")
ROWS_SHOWN: Final = 50


def records(rows: Any) -> list[dict[str, Any]]:
    """A pandas frame's rows; what is missing is None."""
    found = rows.astype(object).to_dict("records")
    return [{name: _plain(value) for name, value in row.items()} for row in found]


def _plain(value: Any) -> Any:
    if isinstance(value, float) and value != value:
        return None
    return value.tolist() if hasattr(value, "tolist") else value


def print_json(value: Any) -> None:
    print(in_json(value, default=_in_words))


def _in_words(value: Any) -> str:
    """For programs; all instants are in UTC, also those that do not say so."""
    if isinstance(value, datetime):
        return f"{value.replace(tzinfo=None).isoformat()}Z"
    return str(value)


def show(asked: Asked, rows: list[dict[str, Any]], columns: tuple[str, ...]) -> None:
    if asked.as_json:
        for row in rows:
            print_json(row)
        return
    if not rows:
        print("the history has nothing about that", file=sys.stderr)
        return
    from veilmq.cli.output import table

    # Queues of one name are told apart where there is more than one account or region.
    places = [name for name in PLACE if len({row.get(name) for row in rows}) > 1]
    kept = [*places, *(name for name in columns if any(row.get(name) is not None for row in rows))]
    cells = [[_cell(name, row.get(name)) for name in kept] for row in rows[:ROWS_SHOWN]]
    table([_head(name) for name in kept], cells)
    if len(rows) > ROWS_SHOWN:
        print(f"... and {len(rows) - ROWS_SHOWN} rows more: --json or --out shows all", file=sys.stderr)


def _head(name: str) -> str:
    return name.removesuffix("_s").removesuffix("_share").replace("_", " ")


def _cell(name: str, value: Any) -> str:
    """For people."""
    if value is None:
        return "-"
    if isinstance(value, list):
        return ", ".join("-" if each is None else str(each) for each in value)
    if name.endswith("_s"):
        return time_text(float(value))
    if name.endswith("_share") or name == "gain":
        return f"{100 * value:.1f} %"
    if isinstance(value, float):
        return f"{value:.0f}" if value >= 1_000 or value == round(value) else f"{value:.3g}"
    return str(value)
