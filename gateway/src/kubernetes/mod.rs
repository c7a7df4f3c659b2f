//! Pods of a Kubernetes cluster: those behind a service, or those of an InferencePool, by list and watch.
//!
//! ```text
//!  access (URL, token, authorities) ─▶ client (one page, one watch) ─▶ lines (events of a watch, bounded)
//!                                                                        │
//!  objects (EndpointSlice, Pod, InferencePool) ─▶ reflector (what they are now) ─▶ fleet (no I/O) ─▶ watcher
//! ```
//!
//! The protocol is that of the Kubernetes API (<https://kubernetes.io/docs/reference/using-api/api-concepts/>,
//! "Efficient detection of changes"): a list in pages gives the objects and a `resourceVersion`, a watch from there on
//! gives what changes. A watch that ends is begun again where it ended; after `410 Gone` the objects are listed again.
//!
//! | asked for | group and version | what for |
//! |---|---|---|
//! | `endpointslices` | `discovery.k8s.io/v1` | the pods behind a service |
//! | `inferencepools` | `inference.networking.k8s.io/v1` | a pool's selector and ports |
//! | `pods` | `v1` | the pods that the selector matches |
//!
//! # What a pod becomes
//!
//! A pod is one engine, and each of its ports a data-parallel rank: the first port is rank 0. Its worker id is
//! [`worker_id`] of its UID, so that it is the same in every process and after each restart, and another one for a pod
//! that takes another's name.
//!
//! # What can go wrong
//!
//! The API server is trusted to say which pods there are, but not to be there, to be quick or to be an API server at
//! all: replies are bounded in bytes and time, and an object that cannot be read is left out and counted. While the
//! server is away, what it said last stays in use, and [`Fleet::problems`] says so.

mod access;
mod client;
mod figures;
mod fleet;
mod lines;
mod objects;
mod ports;
mod reflector;
mod watched;
mod watcher;

pub use access::{AccessError, ApiAccess, SERVICE_ACCOUNT_FOLDER};
pub use figures::{KindFigures, KubernetesFigure, KubernetesFigures, KubernetesKind};
pub use fleet::{Fleet, FleetPod, PodState, Problem, worker_id};
pub use ports::PortName;
#[doc(hidden)]
pub use watched::read_watch;
pub use watcher::{FleetWatch, PodSource};
