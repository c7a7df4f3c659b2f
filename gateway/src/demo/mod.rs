//! `kvrouted-gateway demo`: simulated engines, a daemon and the gateway from one command, for a first `curl`. The
//! end-to-end tests use the same engines.
//!
//! ```text
//!  curl ─▶ gateway ─▶ face (vLLM's API) ─▶ `kvrouted demo-engine` ── events ─▶ daemon ◀── questions ── gateway
//! ```

mod engine;
mod face;
mod tokenizer;

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};

use tempfile::TempDir;

pub use face::Face;

/// The model of the simulated engines.
pub const MODEL: &str = "demo";

/// Some simulated engines, which end when this value is dropped.
#[derive(Debug)]
pub struct SimulatedEngines {
    /// The engines, in the order of their worker ids.
    pub faces: Vec<Face>,
    kvrouted: PathBuf,
    /// Engines started so far, for the names of their sockets.
    started: usize,
    /// Their sockets. The field comes last, so that the folder outlives the engines.
    folder: TempDir,
}

impl SimulatedEngines {
    /// Starts this many engines of [`MODEL`], each on a free port of the loopback interface.
    ///
    /// # Errors
    /// A folder, a port or a process cannot be had.
    pub async fn start(kvrouted: &Path, count: usize) -> io::Result<Self> {
        let folder = tempfile::Builder::new().prefix("kvrouted-demo-").tempdir()?;
        let mut engines = Self { faces: Vec::with_capacity(count), kvrouted: kvrouted.to_owned(), started: 0, folder };
        for _ in 0..count {
            let face = engines.start_at(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).await?;
            engines.faces.push(face);
        }
        Ok(engines)
    }

    /// Ends an engine and starts another at its address, which publishes elsewhere.
    ///
    /// # Errors
    /// There is no such engine, or as for [`SimulatedEngines::start`].
    pub async fn restart(&mut self, index: usize) -> io::Result<()> {
        let old = self.faces.get(index).ok_or_else(|| io::Error::other("there is no such engine"))?;
        let address = old.address();
        old.stop().await;
        self.faces[index] = self.start_at(address).await?;
        Ok(())
    }

    async fn start_at(&mut self, address: SocketAddr) -> io::Result<Face> {
        self.started += 1;
        let name = format!("engine-{}", self.started);
        Face::start(&self.kvrouted, self.folder.path(), &name, MODEL, address).await
    }

    /// The engines' URLs.
    #[must_use]
    pub fn urls(&self) -> Vec<String> {
        self.faces.iter().map(Face::url).collect()
    }
}
