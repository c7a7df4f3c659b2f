//! The members of a JSON object as they stand in its text: keys and values with their places, nothing decoded.

use std::borrow::Cow;
use std::fmt;
use std::ops::Range;

use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;

/// One member. The value is its JSON text.
#[derive(Clone, Debug)]
pub(super) struct Member<'a> {
    /// The key, decoded.
    pub(super) key: Cow<'a, str>,
    /// The value's JSON text, without spaces around it.
    pub(super) value: &'a str,
}

/// The wanted members of an object, in the order of the text.
#[derive(Clone, Debug)]
pub(super) struct Members<'a> {
    text: &'a str,
    list: Vec<Member<'a>>,
}

#[derive(Deserialize)]
#[serde(transparent)]
struct Key<'a>(#[serde(borrow)] Cow<'a, str>);

struct Wanted<'k>(&'k [&'k str]);

impl<'k> Wanted<'k> {
    fn read<'a>(&self, text: &'a str) -> serde_json::Result<Vec<Member<'a>>> {
        let mut from = serde_json::Deserializer::from_str(text);
        let list = from.deserialize_map(Wanted(self.0))?;
        from.end()?;
        Ok(list)
    }
}

impl<'de> Visitor<'de> for Wanted<'_> {
    type Value = Vec<Member<'de>>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut list = Vec::new();
        while let Some(Key(key)) = map.next_key::<Key<'de>>()? {
            let value: &'de RawValue = map.next_value()?;
            if self.0.contains(&&*key) {
                list.push(Member { key, value: value.get() });
            }
        }
        Ok(list)
    }
}

impl<'a> Members<'a> {
    /// Reads those members of the object `text` whose key is in `wanted`.
    pub(super) fn read(text: &'a str, wanted: &[&str]) -> serde_json::Result<Self> {
        Ok(Self { text, list: Wanted(wanted).read(text)? })
    }

    /// The value of `key`. Of several members with one key the last one counts, as for the engines' JSON parsers;
    /// `null` counts as absent.
    pub(super) fn get(&self, key: &str) -> Option<&'a str> {
        self.list.iter().rev().find(|member| member.key == key).map(|member| member.value).filter(|raw| *raw != "null")
    }

    /// Whether any member has this key and a value other than `null`, even if a later one with the key is `null`.
    pub(super) fn has(&self, key: &str) -> bool {
        self.list.iter().any(|member| member.key == key && member.value != "null")
    }

    /// The place of the value of `key` in the text, `null` included.
    pub(super) fn place(&self, key: &str) -> Option<Range<usize>> {
        let member = self.list.iter().rev().find(|member| member.key == key)?;
        Some(self.offset_of(member.value))
    }

    /// The place of the member from its key's opening quote to the value's end. `None` if the member is absent, or if
    /// its key is written with escapes.
    pub(super) fn member_place(&self, key: &str) -> Option<Range<usize>> {
        let member = self.list.iter().rev().find(|member| member.key == key)?;
        let Cow::Borrowed(key) = member.key else { return None };
        Some(self.offset_of(key).start.checked_sub(1)?..self.offset_of(member.value).end)
    }

    fn offset_of(&self, part: &str) -> Range<usize> {
        // Both slices are of one text; the difference of their addresses is the offset.
        let start = part.as_ptr() as usize - self.text.as_ptr() as usize;
        start..start + part.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_have_their_places() {
        let text = r#" {"a": [1, {"b": 2}] , "stream":null, "\u0061b": 3, "a": "x" } "#;
        let members = Members::read(text, &["a", "stream", "ab"]).expect("an object");
        assert_eq!(members.get("a"), Some("\"x\""));
        assert_eq!(members.get("stream"), None);
        assert_eq!(members.get("ab"), Some("3"));
        assert_eq!(&text[members.place("stream").expect("there")], "null");
        assert_eq!(&text[members.member_place("stream").expect("there")], "\"stream\":null");
        assert_eq!(members.member_place("ab"), None);
    }

    #[test]
    fn only_an_object_and_nothing_after_it_is_read() {
        for text in ["", "[]", "1", "{} x", "{\"a\":}", "{\"a\":1,}", "nul"] {
            assert!(Members::read(text, &["a"]).is_err(), "{text}");
        }
    }
}
