//! What is written down: rules for the sources, the documents, the schemas, and the lists of names that users rely on.
#![cfg(feature = "daemon")]

mod docs;
mod frozen;
mod frozen_list;
#[path = "../kit/mod.rs"]
mod kit;
mod retired;
mod rules;
mod schemas;
