"""Do rows fit a Delta table? Their columns, the nulls in them, and what the table requires of a writer.

Strategy: a Delta transaction accepts any files, so the sink checks them before it commits them. Columns and types are
compared before anything is written, and nulls are looked for in each file. A table is refused if it has requirements
that this writer does not meet: for rows (constraints, invariants, values that the writer must generate), for files
(column mapping, other partitions), or by a feature of the protocol that is not known here.

Source: the Delta protocol, "Column Mapping", "CHECK Constraints", "Column Invariants", "Generated Columns", "Identity
Columns", "Table Features".
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any, Final

import pyarrow as pa

from veilmq.pipeline.errors import DeltaRefused

_OF_NULLS: Final = frozenset({"nullable", "containsNull", "valueContainsNull", "metadata"})
_FEATURES: Final = frozenset(
    {
        "appendOnly", "changeDataFeed", "checkConstraints", "columnMapping", "deletionVectors", "generatedColumns",
        "invariants", "timestampNtz", "v2Checkpoint", "variantType", "variantType-preview",
    }
)  # fmt: skip
"""Features that allow appends, or that a table only may use: its properties say whether it does."""
_OF_COLUMNS: Final = {
    "delta.invariants": "an invariant",
    "delta.generationExpression": "an expression that makes its values",
    "delta.identity.": "values that count up",
}
_CONSTRAINTS: Final = "delta.constraints."
_ELEMENT: Final = "element"
_VALUE: Final = "value"
_MEND_COLUMNS: Final = "Change the rows' columns, or write another table."
_MEND: Final = "Write another table, or with foreachBatch and what sees to that."


def check_columns(schema: Any) -> None:
    """Raises DeltaRefused for Arrow columns that no Delta table has: intervals, names that differ only in case."""
    from deltalake import Schema

    try:
        Schema.from_arrow(schema)
    except Exception as error:  # deltalake raises no narrower one
        reason = str(error).partition("\n")[0].rpartition("Schema error: ")[2]
        mend = "Cast, rename or drop the column."
        raise DeltaRefused(f"A Delta table cannot have these columns: {reason}.", mend) from error


def check_fits(table: Any, schema: Any, partitions: Sequence[str] = ()) -> None:
    """Raise DeltaRefused unless files of that Arrow schema may be added to a deltalake table.

    partitions: columns of the schema by which the files are divided.
    """
    from deltalake import Schema

    path = table.table_uri
    _check_wants(table, partitions)
    there = {field.name: field for field in table.schema().fields}
    ours = {field.name: field for field in Schema.from_arrow(schema).fields}
    for name, field in ours.items():
        if name not in there:
            raise DeltaRefused(f"The table {path} has no column {name}: it has {', '.join(there)}.", _MEND_COLUMNS)
        if _kind(field) != _kind(there[name]):
            kinds = f"{_type_text(there[name])}, and that of these rows {_type_text(field)}"
            raise DeltaRefused(f"The column {name} of the table {path} is {kinds}.", _MEND_COLUMNS)
    needed = [name for name, field in there.items() if name not in ours and not field.nullable]
    if needed:
        raise DeltaRefused(f"The table {path} needs a column {needed[0]}.", "")


def check_nulls(table: Any, nulls: frozenset[str]) -> None:
    """`nulls`: see `nulls_of`. Raises DeltaRefused if one of these columns of the table allows no null."""
    for name in sorted(nulls.intersection(_filled(table))):
        mend = "Filter such rows, or give them a value."
        raise DeltaRefused(f"The column {name} of the table {table.table_uri} takes no null, and a row has one.", mend)


def nulls_of(rows: Any) -> Iterator[str]:
    """Columns of an Arrow record batch that contain nulls; nested ones as `a.b`, `a.element`, `a.value`.

    A null whose parent is null does not count.
    """
    for name, column in zip(rows.schema.names, rows.columns, strict=True):
        yield from _nulls(name, column, 0)


def _nulls(name: str, column: Any, above: int) -> Iterator[str]:
    """above: how many of the values are null because their parent is."""
    if column.null_count > above:
        yield name
    if pa.types.is_map(column.type):
        column = column.cast(pa.list_(pa.struct([("key", column.type.key_type), (_VALUE, column.type.item_type)])))
        values = column.flatten()
        yield from _nulls(f"{name}.{_VALUE}", values.field(1), 0)
    elif pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        yield from _nulls(f"{name}.{_ELEMENT}", column.flatten(), 0)
    elif pa.types.is_struct(column.type):
        for number, part in enumerate(column.flatten()):
            yield from _nulls(f"{name}.{column.type.field(number).name}", part, column.null_count)


def _check_wants(table: Any, partitions: Sequence[str]) -> None:
    """Check what the table requires of files and rows beyond their columns. Raises DeltaRefused."""
    path, metadata = table.table_uri, table.metadata()
    if list(metadata.partition_columns) != list(partitions):
        names, ours = (",".join(each) or "nothing" for each in (metadata.partition_columns, partitions))
        mend = f"Give the option partitionBy={names}." if metadata.partition_columns else "Leave partitionBy out."
        raise DeltaRefused(f"The table {path} is partitioned by {names}, and these rows by {ours}.", mend)
    strange = sorted(set(table.protocol().writer_features or ()) - _FEATURES)
    if strange:
        raise DeltaRefused(f"The table {path} has {', '.join(strange)}, which veilmq-delta does not know.", _MEND)
    mapping = metadata.configuration.get("delta.columnMapping.mode", "none")
    if mapping != "none":
        raise DeltaRefused(f"The table {path} maps its columns by {mapping}, and veilmq-delta writes names.", _MEND)
    constraints = [name for name in metadata.configuration if name.startswith(_CONSTRAINTS)]
    if constraints:
        name = constraints[0].removeprefix(_CONSTRAINTS)
        raise DeltaRefused(f"The table {path} has a constraint {name}, and veilmq-delta checks none.", _MEND)
    for name, field in _fields(json.loads(table.schema().to_json())):
        for key, property_ in _OF_COLUMNS.items():
            if any(each.startswith(key) for each in field["metadata"]):
                raise DeltaRefused(f"The column {name} of the table {path} has {property_}.", _MEND)


def _filled(table: Any) -> Iterator[str]:
    """The names, as in `nulls_of`, of the columns and fields that allow no null."""
    for name, field in _fields(json.loads(table.schema().to_json())):
        if not field["nullable"]:
            yield name


def _fields(kind: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """All fields below a type of Delta's JSON, including elements of lists and values of maps."""
    if not isinstance(kind, dict):
        return
    below = f"{name}." if name else ""
    match kind["type"]:
        case "struct":
            found = kind["fields"]
        case "array":
            found = [{"name": _ELEMENT, "type": kind["elementType"], "nullable": kind["containsNull"], "metadata": {}}]
        case "map":
            nullable = kind["valueContainsNull"]
            found = [{"name": _VALUE, "type": kind["valueType"], "nullable": nullable, "metadata": {}}]
        case _:
            return
    for each in found:
        yield f"{below}{each['name']}", each
        yield from _fields(each["type"], f"{below}{each['name']}")


def _type_text(field: Any) -> str:
    return str(field.type.to_json().strip('"'))


def _kind(field: Any) -> Any:
    """The field's type without nullability."""

    def bare(value: Any) -> Any:
        if not isinstance(value, dict):
            return [bare(each) for each in value] if isinstance(value, list) else value
        return {name: bare(each) for name, each in value.items() if name not in _OF_NULLS}

    return bare(json.loads(field.type.to_json()))
