//! Connections from other hosts: `kvrouted connect` and the daemon's remote port as processes, and peers that attack the
//! port.

mod callers;
mod cost;
mod hostile;
