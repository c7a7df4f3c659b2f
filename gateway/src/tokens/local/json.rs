//! JSON as Python reads it: members in their order, and numbers that Python and this program write alike.

use std::cell::Cell;
use std::fmt;
use std::fmt::Write as _;

use minijinja::Value;
use minijinja::value::ValueKind;
use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};

use crate::limits::LOCAL_VALUES_MAX;

/// A value of a request's body.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Json {
    Null,
    Bool(bool),
    Int(i128),
    Float(f64),
    Text(String),
    List(Vec<Self>),
    Map(Vec<(String, Self)>),
}

/// The least and the first too large absolute value of floats that `repr` writes without an exponent. Beyond them, and
/// for integers of more than 64 bits, which arrive as floats, Python's text is another.
const FLOAT_PLAIN: std::ops::Range<f64> = 1e-4..1e16;

impl Json {
    /// A member of an object; `null` counts as absent.
    pub(super) fn get(&self, key: &str) -> Option<&Self> {
        let Self::Map(members) = self else { return None };
        members.iter().find(|(name, value)| name == key && *value != Self::Null).map(|(_, value)| value)
    }

    pub(super) fn text(&self) -> Option<&str> {
        if let Self::Text(text) = self { Some(text) } else { None }
    }

    pub(super) fn list(&self) -> Option<&[Self]> {
        if let Self::List(items) = self { Some(items) } else { None }
    }

    pub(super) fn map(&self) -> Option<&[(String, Self)]> {
        if let Self::Map(members) = self { Some(members) } else { None }
    }

    pub(super) fn bool(&self) -> Option<bool> {
        if let Self::Bool(bool) = self { Some(*bool) } else { None }
    }

    /// The value for a template.
    pub(super) fn value(&self) -> Value {
        match self {
            Self::Null => Value::from(()),
            Self::Bool(bool) => Value::from(*bool),
            Self::Int(int) => match i64::try_from(*int) {
                Ok(small) => Value::from(small),
                Err(_) => Value::from(*int),
            },
            Self::Float(float) => Value::from(*float),
            Self::Text(text) => Value::from(text.as_str()),
            Self::List(items) => Value::from(items.iter().map(Self::value).collect::<Vec<_>>()),
            Self::Map(members) => Value::from_pairs(members.iter().map(|(key, value)| (key.as_str(), value.value()))),
        }
    }
}

/// The values that may still be read of one body: a list of them takes many times its text.
pub(super) struct Values(Cell<usize>);

impl Values {
    pub(super) const fn of_a_body() -> Self {
        Self(Cell::new(LOCAL_VALUES_MAX))
    }

    /// Reads a text of the body.
    ///
    /// # Errors
    /// The text is no JSON, Python writes one of its numbers otherwise, or the body has more values than are read.
    pub(super) fn read(&self, text: &str) -> serde_json::Result<Json> {
        let mut deserializer = serde_json::Deserializer::from_str(text);
        let json = self.deserialize(&mut deserializer)?;
        deserializer.end().map(|()| json)
    }
}

impl<'de> DeserializeSeed<'de> for &Values {
    type Value = Json;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Json, D::Error> {
        let left = self.0.get().checked_sub(1).ok_or_else(|| D::Error::custom("too many values"))?;
        self.0.set(left);
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for &Values {
    type Value = Json;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_unit<E>(self) -> Result<Json, E> {
        Ok(Json::Null)
    }

    fn visit_bool<E>(self, bool: bool) -> Result<Json, E> {
        Ok(Json::Bool(bool))
    }

    fn visit_i64<E>(self, int: i64) -> Result<Json, E> {
        Ok(Json::Int(int.into()))
    }

    fn visit_u64<E>(self, int: u64) -> Result<Json, E> {
        Ok(Json::Int(int.into()))
    }

    fn visit_f64<E: Error>(self, float: f64) -> Result<Json, E> {
        let is_plain = float == 0.0 || FLOAT_PLAIN.contains(&float.abs());
        is_plain.then_some(Json::Float(float)).ok_or_else(|| E::custom("a number that Python writes otherwise"))
    }

    fn visit_str<E>(self, text: &str) -> Result<Json, E> {
        Ok(Json::Text(text.to_owned()))
    }

    fn visit_string<E>(self, text: String) -> Result<Json, E> {
        Ok(Json::Text(text))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Json, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = list.next_element_seed(self)? {
            items.push(item);
        }
        Ok(Json::List(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Json, A::Error> {
        let mut members: Vec<(String, Json)> = Vec::new();
        let mut places = std::collections::HashMap::new();
        while let Some(key) = map.next_key::<String>()? {
            let value = map.next_value_seed(self)?;
            // As in a dict: the last value of a key, at the place of the first one.
            match places.get(&key) {
                Some(at) => members[*at] = (key, value),
                None => {
                    places.insert(key.clone(), members.len());
                    members.push((key, value));
                }
            }
        }
        Ok(Json::Map(members))
    }
}

/// How `json.dumps` lays out its text.
#[derive(Clone, Debug, Default)]
pub(super) struct Layout {
    pub(super) indent: Option<usize>,
    pub(super) ascii: bool,
    pub(super) sort_keys: bool,
    /// Between items, and after a key; `None` = Python's.
    pub(super) separators: Option<(String, String)>,
}

/// `json.dumps` of a template's value. `None` = it is nothing that JSON has.
pub(super) fn dumps(value: &Value, layout: &Layout) -> Option<String> {
    let mut text = String::new();
    write(&mut text, value, layout, 0)?;
    Some(text)
}

/// Deeper values are refused: a template could nest without end.
const DEPTH_MAX: usize = 128;

fn write(text: &mut String, value: &Value, layout: &Layout, depth: usize) -> Option<()> {
    if depth > DEPTH_MAX {
        return None;
    }
    match value.kind() {
        ValueKind::None => text.push_str("null"),
        ValueKind::Bool => text.push_str(if value.is_true() { "true" } else { "false" }),
        // As Python writes numbers of this size, which are the only ones that a body may have.
        ValueKind::Number => write!(text, "{value}").ok()?,
        ValueKind::String => write_string(text, value.as_str()?, layout.ascii),
        ValueKind::Seq | ValueKind::Iterable => {
            let items: Vec<Value> = value.try_iter().ok()?.collect();
            write_all(text, layout, depth, ['[', ']'], items.len(), |text, at| {
                write(text, &items[at], layout, depth + 1)
            })?;
        }
        ValueKind::Map => {
            let mut members = Vec::new();
            for key in value.try_iter().ok()? {
                members.push((key.as_str()?.to_owned(), value.get_item(&key).ok()?));
            }
            if layout.sort_keys {
                members.sort_by(|(a, _), (b, _)| a.cmp(b));
            }
            let colon = layout.separators.as_ref().map_or(": ", |(_, colon)| colon);
            write_all(text, layout, depth, ['{', '}'], members.len(), |text, at| {
                write_string(text, &members[at].0, layout.ascii);
                text.push_str(colon);
                write(text, &members[at].1, layout, depth + 1)
            })?;
        }
        _ => return None,
    }
    Some(())
}

fn write_all(
    text: &mut String,
    layout: &Layout,
    depth: usize,
    [open, close]: [char; 2],
    count: usize,
    mut item: impl FnMut(&mut String, usize) -> Option<()>,
) -> Option<()> {
    text.push(open);
    let line = |text: &mut String, depth: usize| {
        if let Some(indent) = layout.indent {
            text.push('\n');
            text.extend(std::iter::repeat_n(' ', indent * depth));
        }
    };
    let comma = match &layout.separators {
        Some((comma, _)) => comma,
        None if layout.indent.is_some() => ",",
        None => ", ",
    };
    for at in 0..count {
        if at > 0 {
            text.push_str(comma);
        }
        line(text, depth + 1);
        item(text, at)?;
    }
    if count > 0 {
        line(text, depth);
    }
    text.push(close);
    Some(())
}

fn write_string(text: &mut String, string: &str, ascii: bool) {
    text.push('"');
    for char in string.chars() {
        match char {
            '"' => text.push_str("\\\""),
            '\\' => text.push_str("\\\\"),
            '\n' => text.push_str("\\n"),
            '\r' => text.push_str("\\r"),
            '\t' => text.push_str("\\t"),
            '\u{8}' => text.push_str("\\b"),
            '\u{c}' => text.push_str("\\f"),
            control if control < ' ' => push_escape(text, control as u16),
            char if ascii && !char.is_ascii() => {
                for unit in char.encode_utf16(&mut [0; 2]) {
                    push_escape(text, *unit);
                }
            }
            '\u{7f}' if ascii => push_escape(text, 0x7f),
            char => text.push(char),
        }
    }
    text.push('"');
}

fn push_escape(text: &mut String, unit: u16) {
    // Writing to a string cannot fail.
    let _ = write!(text, "\\u{unit:04x}");
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Json {
        Values::of_a_body().read(text).expect("JSON")
    }

    #[test]
    fn members_keep_their_order_and_the_last_of_a_key_counts() {
        let json = read(r#"{"z": 1, "a": [true, null, -2.5], "z": "x"}"#);
        assert_eq!(dumps(&json.value(), &Layout::default()).as_deref(), Some(r#"{"z": "x", "a": [true, null, -2.5]}"#));
        assert_eq!((json.get("z").and_then(Json::text), json.get("b")), (Some("x"), None));
    }

    /// Python 3.11: `json.dumps` of the same value.
    #[test]
    fn the_text_is_pythons() {
        let value = read(r#"{"b": [1, 2.0, {}], "a": "\u00e9\u0001\"<>&'\ud83d\ude42\u007f", "n": []}"#).value();
        let of = |layout: Layout| dumps(&value, &layout).expect("JSON");
        assert_eq!(of(Layout::default()), "{\"b\": [1, 2.0, {}], \"a\": \"é\\u0001\\\"<>&'🙂\u{7f}\", \"n\": []}");
        let ascii = Layout { ascii: true, sort_keys: true, ..Layout::default() };
        let expected = "{\"a\": \"\\u00e9\\u0001\\\"<>&'\\ud83d\\ude42\\u007f\", \"b\": [1, 2.0, {}], \"n\": []}";
        assert_eq!(of(ascii), expected);
        let indented = Layout { indent: Some(2), ..Layout::default() };
        let expected =
            "{\n  \"b\": [\n    1,\n    2.0,\n    {}\n  ],\n  \"a\": \"é\\u0001\\\"<>&'🙂\u{7f}\",\n  \"n\": []\n}";
        assert_eq!(of(indented), expected);
        let tight = Layout { separators: Some((",".into(), ":".into())), ..Layout::default() };
        assert!(of(tight).starts_with("{\"b\":[1,2.0,{}],"));
    }

    #[test]
    fn numbers_that_python_writes_otherwise_are_refused() {
        for text in ["1e16", "1e-5", "123456789012345678901234567890", "[-1e300]"] {
            assert!(Values::of_a_body().read(text).is_err(), "{text}");
        }
        for text in ["0.0", "0.0001", "9999999999999998.0", "18446744073709551615", "-9223372036854775808", "1.5"] {
            assert_eq!(dumps(&read(text).value(), &Layout::default()).as_deref(), Some(text));
        }
        let deep = "[".repeat(200) + &"]".repeat(200);
        assert!(Values::of_a_body().read(&deep).is_err());
    }
}
