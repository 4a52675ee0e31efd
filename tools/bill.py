"""bill.py FILE VERSION: complete a bill of materials (CycloneDX, JSON) that cyclonedx-py made of a release.

It lacks the release's version, which pyproject.toml has not either, and has what builds a release beside what runs: the
lock is for both. What no dependency leads to from the release itself is taken out.
"""

import json
import sys
from pathlib import Path
from typing import Any


def completed(bill: dict[str, Any], version: str) -> dict[str, Any]:
    """The bill of that version, with what it needs alone."""
    root = bill["metadata"]["component"]
    leads = {each["ref"]: each.get("dependsOn", []) for each in bill["dependencies"]}
    needed: set[str] = set()
    following = [root["bom-ref"]]
    while following:
        ref = following.pop()
        if ref not in needed:
            needed.add(ref)
            following += leads.get(ref, [])
    return bill | {
        "metadata": bill["metadata"] | {"component": root | {"version": version}},
        "components": [each for each in bill["components"] if each["bom-ref"] in needed],
        "dependencies": [each for each in bill["dependencies"] if each["ref"] in needed],
    }


if __name__ == "__main__":
    file = Path(sys.argv[1])
    file.write_text(json.dumps(completed(json.loads(file.read_text()), sys.argv[2]), indent=2) + "\n")
