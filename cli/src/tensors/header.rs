//! The header of a safetensors file, in which no name may appear twice: of two tensors of one name,
//! another program may take the other one.

use std::collections::HashSet;
use std::fmt;

use safetensors::tensor::Metadata;
use serde::de::{Deserialize, Deserializer, Error, MapAccess, SeqAccess, Visitor};

/// Reads the JSON of a header. The error quotes no more than a line of it, whose names may have
/// megabytes.
pub(super) fn read(json: &[u8]) -> Result<Metadata, String> {
    let short =
        |error: serde_json::Error| error.to_string().chars().take(MOST_CHARACTERS).collect::<String>();
    serde_json::from_slice::<Unambiguous>(json).map_err(short)?;
    serde_json::from_slice(json).map_err(short)
}

/// Any JSON in which no object has a name twice.
struct Unambiguous;

impl<'de> Deserialize<'de> for Unambiguous {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Anything)
    }
}

struct Anything;

impl<'de> Visitor<'de> for Anything {
    type Value = Unambiguous;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Unambiguous, A::Error> {
        let mut names = HashSet::new();
        while let Some(name) = map.next_key::<String>()? {
            map.next_value::<Unambiguous>()?;
            if let Some(twice) = names.replace(name) {
                let twice: String = twice.chars().take(40).collect();
                return Err(A::Error::custom(format_args!("the name {twice:?} appears twice")));
            }
        }
        Ok(Unambiguous)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Unambiguous, A::Error> {
        while list.next_element::<Unambiguous>()?.is_some() {}
        Ok(Unambiguous)
    }

    fn visit_str<E>(self, _: &str) -> Result<Unambiguous, E> {
        Ok(Unambiguous)
    }

    fn visit_bool<E>(self, _: bool) -> Result<Unambiguous, E> {
        Ok(Unambiguous)
    }

    fn visit_u64<E>(self, _: u64) -> Result<Unambiguous, E> {
        Ok(Unambiguous)
    }

    fn visit_i64<E>(self, _: i64) -> Result<Unambiguous, E> {
        Ok(Unambiguous)
    }

    fn visit_f64<E>(self, _: f64) -> Result<Unambiguous, E> {
        Ok(Unambiguous)
    }

    fn visit_unit<E>(self) -> Result<Unambiguous, E> {
        Ok(Unambiguous)
    }
}

/// Of an error.
const MOST_CHARACTERS: usize = 500;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_appears_twice_is_refused_at_any_depth() {
        let tensor = r#"{"dtype":"F32","shape":[1],"data_offsets":[0,4]}"#;
        let twice = [
            format!(r#"{{"q":{tensor},"q":{tensor}}}"#),
            // The same name in other words.
            format!(r#"{{"q":{tensor},"\u0071":{tensor}}}"#),
            format!(r#"{{"__metadata__":{{"a":"1","a":"2"}},"q":{tensor}}}"#),
            r#"{"q":{"dtype":"F32","shape":[1],"shape":[1],"data_offsets":[0,4]}}"#.to_owned(),
            r#"{"q":{"dtype":"F32","shape":[1],"data_offsets":[0,4],"more":[{"a":null,"a":true}]}}"#
                .to_owned(),
        ];
        for json in twice {
            let error = read(json.as_bytes()).unwrap_err();
            assert!(error.contains("appears twice"), "{json}: {error}");
        }
        let metadata = read(format!(r#"{{"__metadata__":{{"a":"1"}},"q":{tensor}}}"#).as_bytes()).unwrap();
        assert_eq!(metadata.offset_keys(), ["q"]);
    }

    #[test]
    fn an_error_about_a_long_name_is_short() {
        // The longest way to print a character.
        let long = "\u{10ffff}".repeat(1 << 20);
        let twice = format!(r#"{{"{long}":0,"{long}":0}}"#);
        let error = read(twice.as_bytes()).unwrap_err();
        assert!(error.len() < 1000 && error.contains("appears twice"), "{error}");
        let kind = format!(r#"{{"q":{{"dtype":"{long}","shape":[1],"data_offsets":[0,4]}}}}"#);
        let error = read(kind.as_bytes()).unwrap_err();
        assert!(error.len() < 4000, "{error}");
    }
}
