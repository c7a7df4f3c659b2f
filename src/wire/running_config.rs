//! The configuration that a daemon runs with: the page that tells it, and its codec.

use flatbuffers::{ForwardsUOffset, Vector, WIPOffset};

use super::encode_reply::Builder;
use crate::schema_generated::routing as fb;

/// A field of the configuration and its value.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ConfigField {
    /// The table: `serve`, `space[0]`, `space[0].policy`, `worker[3]`; numbers are from 0.
    pub table: String,
    /// The field's name.
    pub name: String,
    /// Its value: of a field of the page in TOML, of an override as on the command line.
    pub value: String,
    /// Of an override: the variable of the environment, or the option.
    pub source: Option<String>,
}

/// A page of the configuration that a daemon runs with.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RunningConfigPage {
    /// Fields that differ from their defaults; those of one table follow each other.
    pub fields: Vec<ConfigField>,
    /// What environment and options set over the file, in the order in which they win; on the first page.
    pub overrides: Vec<ConfigField>,
    /// The cursor of the next page, never 0; `None` = this is the last.
    pub next_cursor: Option<u32>,
    /// Grows with each change of the configuration.
    pub version: u64,
    /// The file that a reload reads; `None` = the daemon has none.
    pub file: Option<String>,
    /// The daemon's release.
    pub daemon_version: String,
}

pub(super) fn encode(builder: &mut Builder, page: &RunningConfigPage) -> WIPOffset<fb::RunningConfigReply<'static>> {
    let fields = encode_fields(builder, &page.fields);
    let overrides = encode_fields(builder, &page.overrides);
    let args = fb::RunningConfigReplyArgs {
        fields: Some(fields),
        overrides: Some(overrides),
        next_cursor: page.next_cursor.unwrap_or(0),
        version: page.version,
        file: page.file.as_ref().map(|file| builder.create_string(file)),
        daemon_version: Some(builder.create_string(&page.daemon_version)),
    };
    fb::RunningConfigReply::create(builder, &args)
}

type Fields<'b> = Vector<'b, ForwardsUOffset<fb::ConfigField<'b>>>;

fn encode_fields(builder: &mut Builder, fields: &[ConfigField]) -> WIPOffset<Fields<'static>> {
    let encode = |field: &ConfigField| {
        let args = fb::ConfigFieldArgs {
            table: Some(builder.create_shared_string(&field.table)),
            name: Some(builder.create_shared_string(&field.name)),
            value: Some(builder.create_string(&field.value)),
            source: field.source.as_ref().map(|source| builder.create_string(source)),
        };
        fb::ConfigField::create(builder, &args)
    };
    let fields: Vec<_> = fields.iter().map(encode).collect();
    builder.create_vector(&fields)
}

pub(super) fn decode(table: fb::RunningConfigReply<'_>) -> RunningConfigPage {
    RunningConfigPage {
        fields: decode_fields(table.fields()),
        overrides: decode_fields(table.overrides()),
        next_cursor: Some(table.next_cursor()).filter(|cursor| *cursor != 0),
        version: table.version(),
        file: table.file().map(str::to_owned),
        daemon_version: table.daemon_version().unwrap_or_default().to_owned(),
    }
}

fn decode_fields(fields: Option<Fields<'_>>) -> Vec<ConfigField> {
    let decode = |field: fb::ConfigField<'_>| ConfigField {
        table: field.table().to_owned(),
        name: field.name().to_owned(),
        value: field.value().to_owned(),
        source: field.source().map(str::to_owned),
    };
    fields.map(|fields| fields.iter().map(decode).collect()).unwrap_or_default()
}
