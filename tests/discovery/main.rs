//! Workers that come, change and go while the daemon runs, from every source.

mod daemon;
mod requests;
mod sources;
mod stress;
