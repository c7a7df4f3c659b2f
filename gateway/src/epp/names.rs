//! Names of the endpoint picker protocol and of Envoy.

/// The header, and the key of dynamic metadata, that carry the ordered list of endpoints.
pub const DESTINATION: &str = "x-gateway-destination-endpoint";
/// The key of dynamic metadata with the endpoint that served, set by Envoy 1.38 or later.
pub const SERVED: &str = "x-gateway-destination-endpoint-served";
/// The key of dynamic metadata with the endpoints among which the picker must choose.
pub const SUBSET: &str = "x-gateway-destination-endpoint-subset";
/// The namespace of [`DESTINATION`] and [`SERVED`].
pub const LB_NAMESPACE: &str = "envoy.lb";
/// The namespace of [`SUBSET`].
pub const SUBSET_NAMESPACE: &str = "envoy.lb.subset_hint";
/// The filter under whose name attributes arrive.
pub const EXT_PROC_FILTER: &str = "envoy.filters.http.ext_proc";
/// The attribute with the endpoint that served, for clusters that report nothing else.
pub const UPSTREAM_ADDRESS: &str = "upstream.address";
/// The header by which a gateway tells vLLM the data-parallel rank.
pub const DATA_PARALLEL_RANK: &str = "x-data-parallel-rank";
