"""What the client was generated from and what it calls things, against schemas/."""

import dataclasses
import hashlib
import re
import unittest

from kvrouted import RouteRequest, errors, frames, messages
from kvrouted.schema_generated import routing_generated as fb

from .daemon import ROOT

GENERATED = ROOT / "clients/python/kvrouted/schema_generated"


def table(heading: str) -> dict[int, str]:
    """Number and name of each row of a table of schemas/README.md."""
    text = (ROOT / "schemas/README.md").read_text()
    section = text.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    return {int(number): name for number, name in re.findall(r"^\| (\d+) \| `(\w+)` \|", section, re.MULTILINE)}


class Schema(unittest.TestCase):
    def test_the_generated_tables_are_those_of_the_schema(self):
        for line in (GENERATED / "STAMP").read_text().splitlines():
            digest, name = line.split("  ")
            path = ROOT / name if name.endswith(".fbs") else GENERATED / name
            found = hashlib.sha256(path.read_bytes()).hexdigest()
            self.assertEqual(found, digest, f"{name}: run scripts/gen-schemas")

    def test_bits_and_codes_have_the_documented_names(self):
        named = {
            "Trust reasons": messages.TRUST_REASONS,
            "Feature bits": messages.FEATURES,
            "Reply notes": messages.REPLY_NOTES,
        }
        for heading, names in named.items():
            # Newer bits go by their number until they are named here.
            self.assertLessEqual(dict(enumerate(names)).items(), table(heading).items(), heading)
        self.assertLessEqual(errors.ERROR_NAMES.items(), table("Error codes").items())
        levels = {int(level): level.name.lower() for level in messages.TrustLevel}
        self.assertEqual(levels, table("Trust levels"))

    def test_values_of_a_newer_daemon_are_read_as_the_most_cautious(self):
        self.assertIs(messages.TrustLevel(99), messages.TrustLevel.NONE)
        self.assertIs(messages.WorkerState(99), messages.WorkerState.DOWN)
        self.assertIs(messages.MatchStatus(99), messages.MatchStatus.UNMATCHABLE)
        self.assertIs(messages.BookingOutcome(99), messages.BookingOutcome.UNKNOWN)
        self.assertEqual(messages.named_bits(1 << 60 | 1, messages.REPLY_NOTES), {"scheme_unknown", "bit_60"})

    def test_every_number_of_a_route_has_a_field_and_is_sent(self):
        schema = (ROOT / "schemas/routing.fbs").read_text()
        table = re.search(r"^table Route \{(.*?)^\}", schema, re.MULTILINE | re.DOTALL).group(1)
        plain = re.findall(r"^  (\w+): (?:bool|int|uint|ulong|double)\b", table, re.MULTILINE)
        # The client takes the space from the model, and books if it has a name for the booking.
        elsewhere = {"space_id", "book", "token_count"}
        fields = {field.name: field.type for field in dataclasses.fields(RouteRequest)}
        self.assertEqual(set(plain) - elsewhere, set(frames._ROUTE_NUMBERS))
        examples = {"bool": True, "int": 7, "float": 1.5}
        values = {name: examples[fields[name]] for name in frames._ROUTE_NUMBERS}
        frame = frames.encode_route(1, 0, RouteRequest(model="m", tokens=[1], **values))
        route = fb.Route.GetRootAs(frame[16:])
        for name, value in values.items():
            self.assertEqual(getattr(route, frames._wire_name(name))(), value, name)
