//! A JSON Schema of the configuration file, for editors: the field table in another notation.

use serde_json::{Map, Value, json};

use super::catalog::{self, FieldInfo, TableInfo, ValueType};
use super::fields;

/// The dialect of the schema. It uses only keywords that older dialects have too, as editors may know no other.
const DIALECT: &str = "https://json-schema.org/draft/2020-12/schema";

/// The schema of the configuration file: types, bounds, choices, defaults and descriptions of all fields. Rules between
/// fields and the syntax within strings are not in it: only `kvrouted config check` applies them.
#[must_use]
pub fn schema() -> Value {
    let tables = catalog::tables().iter().map(|table| (table.name.to_owned(), table_schema(table)));
    json!({
        "$schema": DIALECT,
        "title": "kvrouted",
        "description": "The configuration of the daemon and of relays.",
        "type": "object",
        "properties": tables.collect::<Map<String, Value>>(),
        "additionalProperties": false,
    })
}

fn table_schema(table: &TableInfo) -> Value {
    let mut properties: Map<String, Value> =
        table.fields.iter().map(|field| (field.name.to_owned(), field_schema(table, field))).collect();
    if table.name == fields::SPACE.name
        && let Some(policy) = catalog::table(fields::POLICY.name)
    {
        let own = TableInfo {
            doc: "The policy of this space, where it differs from [policy].",
            fields: policy.fields.iter().filter(|field| field.is_live).cloned().collect(),
            ..policy.clone()
        };
        properties.insert(fields::POLICY.name.to_owned(), object(&own, &own_policy(&own)));
    }
    let one = object(table, &properties);
    if table.is_repeated { json!({ "type": "array", "items": one }) } else { one }
}

/// The fields of a space's own policy. Their defaults are what [policy] says.
fn own_policy(own: &TableInfo) -> Map<String, Value> {
    let schema = |field: &FieldInfo| {
        let mut schema = field_schema(own, &FieldInfo { default: None, ..field.clone() });
        if let Value::Object(schema) = &mut schema {
            schema.remove("examples");
        }
        (field.name.to_owned(), schema)
    };
    own.fields.iter().map(schema).collect()
}

fn object(table: &TableInfo, properties: &Map<String, Value>) -> Value {
    let required: Vec<&str> = table.fields.iter().filter(|field| field.is_required).map(|field| field.name).collect();
    json!({
        "type": "object",
        "description": one_line(table.doc),
        "properties": properties,
        "required": required,
        "additionalProperties": false,
    })
}

fn field_schema(table: &TableInfo, field: &FieldInfo) -> Value {
    let mut schema = type_schema(field.values);
    schema.insert("description".to_owned(), describe(table, field).into());
    match &field.default {
        Some(default) => schema.insert("default".to_owned(), value_of(field.values, default)),
        None => schema.insert("examples".to_owned(), vec![value_of(field.values, &field.example)].into()),
    };
    Value::Object(schema)
}

fn type_schema(values: ValueType) -> Map<String, Value> {
    let schema = match values {
        // TOML's integers end at 2⁶³ - 1. Larger ones are written in quotes.
        ValueType::Integer { min, max } if max > i64::MAX as u64 => json!({
            "anyOf": [
                { "type": "integer", "minimum": min, "maximum": max },
                { "type": "string", "pattern": "^[0-9]{1,20}$" },
            ],
        }),
        ValueType::Integer { min, max } => json!({ "type": "integer", "minimum": min, "maximum": max }),
        ValueType::Number { min, max: Some(max) } => json!({ "type": "number", "minimum": min, "maximum": max }),
        ValueType::Number { min, max: None } => json!({ "type": "number", "minimum": min }),
        ValueType::Flag => json!({ "type": "boolean" }),
        ValueType::Choice(names) => json!({ "type": "string", "enum": names }),
        // A schema counts characters. A string of more characters than bytes are allowed is too long in any case.
        ValueType::Text { bytes_min, bytes_max } => {
            json!({ "type": "string", "minLength": bytes_min, "maxLength": bytes_max })
        }
        ValueType::List { items_max, bytes_max } => json!({
            "type": "array",
            "items": { "type": "string", "minLength": 1, "maxLength": bytes_max },
            "maxItems": items_max,
        }),
        ValueType::Parsed(_) => json!({ "type": "string" }),
    };
    match schema {
        Value::Object(schema) => schema,
        _ => Map::new(),
    }
}

/// A description for the one line or two that editors show.
fn describe(table: &TableInfo, field: &FieldInfo) -> String {
    let unit = if field.unit.is_empty() { String::new() } else { format!(" Unit: {}.", field.unit) };
    let syntax = match field.values {
        ValueType::Parsed(what) => format!(" Values: {what}."),
        _ => String::new(),
    };
    let reload = if field.is_live { "a reload, too" } else { "the next start" };
    let variable = table.variable(field.name);
    format!("{}{unit}{syntax} Takes effect at: {reload}. Variable: {variable}.", one_line(field.doc))
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// A value in TOML as JSON.
fn value_of(values: ValueType, toml: &str) -> Value {
    match values {
        // Of these types, TOML and JSON have one notation.
        ValueType::Integer { .. } | ValueType::Number { .. } | ValueType::Flag => {
            serde_json::from_str(toml).unwrap_or(Value::Null)
        }
        _ => match toml.parse::<toml_edit::Value>() {
            Ok(toml_edit::Value::String(text)) => text.value().as_str().into(),
            Ok(toml_edit::Value::Array(items)) => items.iter().filter_map(toml_edit::Value::as_str).collect(),
            _ => Value::Null,
        },
    }
}
