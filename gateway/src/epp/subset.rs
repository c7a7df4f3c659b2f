//! The endpoints among which a gateway lets the picker choose.

use std::net::{IpAddr, SocketAddr};

use super::messages::{ProcessingRequest, Value};
use super::names;

/// A set of endpoints. Empty = the gateway allows nobody, which is not the same as no subset.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Subset {
    addresses: Vec<SocketAddr>,
    /// Hosts of which every port is allowed.
    hosts: Vec<IpAddr>,
    /// Entries that are neither.
    unreadable: usize,
}

impl Subset {
    /// The subset of a message; `None` = the gateway set none.
    ///
    /// The value is a list of texts or one text; each text may hold several entries between commas. A value of another
    /// kind allows nobody, because a picker must not leave a subset that it cannot read.
    #[must_use]
    pub fn of(message: &ProcessingRequest) -> Option<Self> {
        let namespaces = &message.metadata_context.as_ref()?.filter_metadata;
        let value = namespaces.get(names::SUBSET_NAMESPACE)?.fields.get(names::SUBSET)?;
        let mut subset = Self::default();
        subset.read(value);
        if let Some(list) = &value.list_value {
            list.values.iter().for_each(|value| subset.read(value));
        }
        Some(subset)
    }

    fn read(&mut self, value: &Value) {
        for entry in value.string_value.iter().flat_map(|text| text.split(',')).map(str::trim) {
            if let Ok(address) = entry.parse() {
                self.addresses.push(address);
            } else if let Ok(host) = entry.trim_start_matches('[').trim_end_matches(']').parse() {
                self.hosts.push(host);
            } else if !entry.is_empty() {
                self.unreadable += 1;
            }
        }
    }

    /// The memory that it takes, in bytes.
    pub(super) const fn bytes(&self) -> usize {
        self.addresses.len() * size_of::<SocketAddr>() + self.hosts.len() * size_of::<IpAddr>()
    }

    /// How many entries are neither an address nor a host.
    #[must_use]
    pub const fn unreadable(&self) -> usize {
        self.unreadable
    }

    /// Whether an endpoint is allowed.
    #[must_use]
    pub fn allows(&self, address: &SocketAddr) -> bool {
        self.addresses.contains(address) || self.hosts.contains(&address.ip())
    }
}

#[cfg(test)]
mod tests {
    use super::super::messages::{Metadata, Struct};
    use super::*;

    fn subset(value: Option<Value>) -> Option<Subset> {
        let fields = value.into_iter().map(|value| (names::SUBSET.to_owned(), value)).collect();
        let filter_metadata = [(names::SUBSET_NAMESPACE.to_owned(), Struct { fields })].into();
        Subset::of(&ProcessingRequest {
            metadata_context: Some(Metadata { filter_metadata }),
            ..ProcessingRequest::default()
        })
    }

    fn allowed(subset: &Subset) -> Vec<&'static str> {
        let all = ["10.0.0.8:8000", "10.0.0.8:8001", "10.0.0.9:8000", "[fd00::1]:8000"];
        all.into_iter().filter(|text| subset.allows(&text.parse().expect("an address"))).collect()
    }

    #[test]
    fn a_list_a_text_and_a_mixture_mean_the_same() {
        let texts = Value::texts(&["10.0.0.8:8000", " 10.0.0.9:8000 "]);
        let joined = Value::text("10.0.0.8:8000, 10.0.0.9:8000");
        let mixed = Value::texts(&["10.0.0.8:8000,10.0.0.9:8000", ""]);
        for value in [texts, joined, mixed] {
            let subset = subset(Some(value)).expect("a subset");
            assert_eq!(allowed(&subset), ["10.0.0.8:8000", "10.0.0.9:8000"]);
            assert_eq!(subset.unreadable, 0);
        }
    }

    #[test]
    fn a_host_alone_means_all_its_ports() {
        let subset = subset(Some(Value::texts(&["10.0.0.8", "[fd00::1]"]))).expect("a subset");
        assert_eq!(allowed(&subset), ["10.0.0.8:8000", "10.0.0.8:8001", "[fd00::1]:8000"]);
    }

    #[test]
    fn no_key_is_no_subset_but_an_empty_or_unreadable_one_allows_nobody() {
        assert_eq!(subset(None), None);
        assert_eq!(Subset::of(&ProcessingRequest::default()), None);
        for value in [Value::default(), Value::text(""), Value::texts(&[]), Value::text("engine-1:8000")] {
            let subset = subset(Some(value.clone())).expect("a subset");
            assert_eq!(allowed(&subset), [""; 0], "{value:?}");
        }
        assert_eq!(subset(Some(Value::text("engine-1:8000"))).expect("a subset").unreadable, 1);
    }
}
