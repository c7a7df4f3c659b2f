//! Simulated engines that die and come back at the same address.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use kvrouted_gateway::demo::{Face, MODEL};
use tempfile::TempDir;

use crate::callers::Draw;

/// Engines and the folder of their sockets.
pub(crate) struct Fleet {
    faces: Vec<Option<Face>>,
    addresses: Vec<SocketAddr>,
    kvrouted: PathBuf,
    /// How many engines were ever started: each has a socket of its own.
    started: usize,
    folder: TempDir,
}

impl Fleet {
    /// Starts this many engines.
    pub(crate) async fn start(kvrouted: &Path, count: usize) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let mut fleet =
            Self { faces: Vec::new(), addresses: Vec::new(), kvrouted: kvrouted.to_owned(), started: 0, folder };
        for _ in 0..count {
            let face = fleet.engine((Ipv4Addr::LOCALHOST, 0).into()).await.expect("an engine");
            fleet.addresses.push(face.address());
            fleet.faces.push(Some(face));
        }
        fleet
    }

    /// The engines' URLs.
    pub(crate) fn urls(&self) -> Vec<String> {
        self.addresses.iter().map(|address| format!("http://{address}")).collect()
    }

    async fn engine(&mut self, at: SocketAddr) -> std::io::Result<Face> {
        self.started += 1;
        let name = format!("engine-{}", self.started);
        Face::start(&self.kvrouted, self.folder.path(), &name, MODEL, at).await
    }

    /// Kills one engine at a time, never the first, and starts it again some seconds later. The number of deaths.
    pub(crate) async fn kill_now_and_then(&mut self, seed: u64, until: Instant) -> u64 {
        let (mut draw, mut deaths) = (Draw::of(seed, 1000), 0);
        loop {
            let next = Instant::now() + Duration::from_millis(draw.between(4_000, 30_000));
            tokio::time::sleep_until(next.min(until).into()).await;
            if next >= until {
                return deaths;
            }
            let number = draw.between(1, self.faces.len() as u64) as usize;
            // Dropping it is its end: requests under way are cut off.
            self.faces[number] = None;
            deaths += 1;
            tokio::time::sleep(Duration::from_millis(draw.between(200, 5_000))).await;
            self.faces[number] = self.back(self.addresses[number]).await;
        }
    }

    /// Starts an engine at the address of one that died, as soon as the address is free.
    async fn back(&mut self, at: SocketAddr) -> Option<Face> {
        for _ in 0..100 {
            if let Ok(face) = self.engine(at).await {
                return Some(face);
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        panic!("no engine can be started at {at} again");
    }
}
