//! A network namespace with one interface, whose packets this process carries.

use std::fs::File;
use std::net::Ipv4Addr;
use std::os::fd::AsFd;
use std::process::{Command, Stdio};
use std::thread;

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use tun_rs::{DeviceBuilder, Layer, SyncDevice};

use crate::failure::Failure;

/// The bits of the network in an address.
const PREFIX: u8 = 24;
/// The name of the interface.
const INTERFACE: &str = "tun0";

/// A place of the network. It ends with this.
pub(super) struct Namespace {
    name: String,
    address: Ipv4Addr,
}

impl Namespace {
    /// Makes the namespace of a place, and the device that has its packets. Needs root.
    ///
    /// # Errors
    /// This process may not, or `ip` is missing.
    pub(super) fn new(place: u8) -> Result<(Self, SyncDevice), Failure> {
        let name = format!("kvrouted-perf-{}-{place}", std::process::id());
        ip(&["netns", "add", &name])?;
        let namespace = Self { name, address: address(place) };
        let device = namespace.inside(|| {
            let device = DeviceBuilder::new().name(INTERFACE).layer(Layer::L3).build_sync();
            let device = device.map_err(Failure::system("make a TUN interface"))?;
            let with_prefix = format!("{}/{PREFIX}", namespace.address);
            ip(&["address", "add", &with_prefix, "dev", INTERFACE])?;
            ip(&["link", "set", INTERFACE, "up"])?;
            ip(&["link", "set", "lo", "up"])?;
            Ok(device)
        })?;
        Ok((namespace, device))
    }

    /// Its address.
    pub(super) const fn address(&self) -> Ipv4Addr {
        self.address
    }

    /// Does something on a thread within the namespace. Sockets and child processes that it makes stay there.
    ///
    /// # Errors
    /// The namespace is gone, or what is done fails.
    pub(super) fn inside<T: Send>(&self, work: impl FnOnce() -> Result<T, Failure> + Send) -> Result<T, Failure> {
        let done = thread::scope(|threads| threads.spawn(|| self.enter().and_then(|()| work())).join());
        done.map_err(|_| Failure::Contract("a thread of a namespace panicked".to_owned()))?
    }

    /// Puts the calling thread into the namespace for good.
    ///
    /// # Errors
    /// The namespace is gone.
    pub(super) fn enter(&self) -> Result<(), Failure> {
        let path = format!("/run/netns/{}", self.name);
        let link = File::open(&path).map_err(Failure::file(&path))?;
        let entered = move_into_link_name_space(link.as_fd(), Some(LinkNameSpaceType::Network));
        entered.map_err(|error| Failure::system("enter a network namespace")(error.into()))
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        // One that is left behind is seen by `ip netns`, and harms nothing.
        let _ = ip(&["netns", "delete", &self.name]);
    }
}

/// The address of a place.
pub(super) const fn address(place: u8) -> Ipv4Addr {
    Ipv4Addr::new(10, 213, 0, place + 1)
}

/// The place of an address; `None` = none.
pub(super) fn place_of(address: [u8; 4]) -> Option<u8> {
    address.starts_with(&[10, 213, 0]).then(|| address[3].wrapping_sub(1))
}

fn ip(arguments: &[&str]) -> Result<(), Failure> {
    let status = Command::new("ip").args(arguments).stdin(Stdio::null()).status();
    let status = status.map_err(Failure::system("run ip, of Debian's package iproute2"))?;
    match status.success() {
        true => Ok(()),
        false => Err(Failure::Contract(format!("ip {} failed: network namespaces need root", arguments.join(" ")))),
    }
}
