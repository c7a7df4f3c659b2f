//! The configuration that the daemon runs with: fields of its start, and those that reloads and orders have changed since.
//! Used by the control thread alone.

use std::cell::{Cell, Ref, RefCell};

use crate::config::{Config, Difference, Override, WrittenTable};
use crate::error::{Error, Kind, Result};
use crate::limits::CONFIG_PAGE_BYTES_MAX;
use crate::wire::{ConfigField, RunningConfigPage};

/// What of the start and of later changes is in force.
pub(super) struct RunningConfig {
    now: RefCell<Config>,
    /// Counts changes, from 1.
    version: Cell<u64>,
}

impl RunningConfig {
    pub(super) fn new(config: &Config) -> Self {
        Self { now: RefCell::new(config.clone()), version: Cell::new(1) }
    }

    /// The configuration in force. Do not hold it across an await.
    pub(super) fn now(&self) -> Ref<'_, Config> {
        self.now.borrow()
    }

    /// The file that a reload reads, in words.
    pub(super) fn source(&self) -> String {
        self.now()
            .sandbox
            .file
            .as_ref()
            .map_or_else(|| "the command line".to_owned(), |file| file.display().to_string())
    }

    /// Notes a reload that took over what it may of `next`. Returns what differs in what it took over.
    pub(super) fn reloaded(&self, next: &Config) -> Difference {
        let is = self.now().reloaded(next);
        let difference = self.now().difference(&is);
        self.set(is);
        difference
    }

    /// Notes an order that set fields of every policy.
    pub(super) fn ordered(&self, settings: &[String]) {
        let is = self.now().clone().with_policy_settings(settings);
        self.set(is);
    }

    fn set(&self, config: Config) {
        self.version.set(self.version.get() + 1);
        *self.now.borrow_mut() = config;
    }

    /// The page with the tables from number `cursor` on, of at most [`CONFIG_PAGE_BYTES_MAX`] or one table.
    ///
    /// # Errors
    /// [`Kind::InvalidArgument`] if there is no such table.
    pub(super) fn page(&self, cursor: u32) -> Result<RunningConfigPage> {
        let config = self.now();
        let tables = config.written.get(cursor as usize..).ok_or_else(|| {
            let what = format!("the configuration has no page from table {cursor} on");
            Error::new(Kind::InvalidArgument, what, "begin with cursor 0")
        })?;
        let mut left = CONFIG_PAGE_BYTES_MAX;
        let fits = |table: &&WrittenTable| {
            let fits = left > 0;
            left = left
                .saturating_sub(table.path.len() + table.fields.iter().map(|(n, v)| n.len() + v.len()).sum::<usize>());
            fits
        };
        let count = tables.iter().take_while(fits).count();
        let fields = tables[..count].iter().flat_map(|table| table.fields.iter().map(|field| told(table, field)));
        let next = cursor as usize + count;
        Ok(RunningConfigPage {
            fields: fields.collect(),
            overrides: if cursor == 0 { config.overrides.iter().map(overridden).collect() } else { Vec::new() },
            next_cursor: (next < config.written.len()).then_some(next as u32),
            version: self.version.get(),
            file: config.sandbox.file.as_ref().map(|file| file.display().to_string()),
            daemon_version: env!("CARGO_PKG_VERSION").to_owned(),
        })
    }
}

fn told(table: &WrittenTable, (name, value): &(String, String)) -> ConfigField {
    ConfigField { table: table.path.clone(), name: name.clone(), value: value.clone(), source: None }
}

fn overridden(set: &Override) -> ConfigField {
    let Override { source, table, field, text } = set.clone();
    ConfigField { table, name: field, value: text, source: Some(source) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_follow_each_other_and_are_the_whole_configuration() {
        let field = |name: &str, value: String| (name.to_owned(), value);
        let table = |id: usize| WrittenTable {
            path: format!("worker[{id}]"),
            fields: vec![field("id", id.to_string()), field("name", format!("\"{id:0200}\""))],
        };
        let config = Config { written: (0..4000).map(table).collect(), ..Config::default() };
        let running = RunningConfig::new(&config);
        let (mut fields, mut cursor, mut pages) = (Vec::new(), Some(0), 0);
        while let Some(at) = cursor {
            let page = running.page(at).expect("a page");
            assert!(page.fields.iter().map(|field| field.value.len()).sum::<usize>() < 2 * CONFIG_PAGE_BYTES_MAX);
            fields.extend(page.fields);
            (cursor, pages) = (page.next_cursor, pages + 1);
        }
        assert!(pages > 1);
        assert_eq!(fields.len(), 2 * 4000);
        assert_eq!(running.page(1 << 30).expect_err("no such page").kind(), Kind::InvalidArgument);
    }
}
