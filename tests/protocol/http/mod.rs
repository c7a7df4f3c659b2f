//! The HTTP port of a daemon that runs: what clients of Dynamo's standalone indexer and selection service ask of it, in
//! their words, and what they get.

mod client;
mod dump;
mod indexer;
mod limits;
mod selection;
mod siege;
mod workers;
