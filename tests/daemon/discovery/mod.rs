//! Workers that are added, changed and removed while the daemon runs, by every source.

mod daemon;
mod hostile;
mod requests;
mod sources;
mod stress;
