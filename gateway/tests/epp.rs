//! The endpoint picker against a client that plays Envoy: each trap that real Envoys set.

#[path = "epp/bodies.rs"]
mod bodies;
#[path = "epp/connections.rs"]
mod connections;
#[path = "epp/kit.rs"]
mod kit;
#[path = "epp/requests.rs"]
mod requests;
#[path = "epp/responses.rs"]
mod responses;
#[path = "epp/wire.rs"]
mod wire;
