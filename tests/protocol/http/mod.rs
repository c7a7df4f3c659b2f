//! The HTTP port of a running daemon: requests that clients of Dynamo's standalone indexer and selection service send,
//! and the replies.

mod client;
mod dump;
mod indexer;
mod limits;
mod selection;
mod siege;
mod workers;
