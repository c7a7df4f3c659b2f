//! What is written down: rules for the sources, the documents, the schemas, the threat model, and the lists of names
//! that users rely on.
#![cfg(feature = "daemon")]

mod docs;
mod frozen;
mod frozen_list;
#[path = "../kit/mod.rs"]
mod kit;
mod ops;
mod promql;
mod retired;
mod rules;
mod schemas;
mod threat_model;

/// The folder of the project.
pub(crate) fn root() -> &'static std::path::Path {
    std::path::Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Fails with the list, unless it is empty.
pub(crate) fn report(problems: &[String]) {
    assert!(problems.is_empty(), "{} problems:\n{}", problems.len(), problems.join("\n"));
}
