//! A daemon in its place. It is killed and started again, in the same folder.

use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::time::Duration;

use kvrouted::client::{Client, ClientOptions};
use kvrouted::wire::StatusPage;
use rustix::process::{Pid, Signal, kill_process};

use super::broker::NATS_PORT;
use super::engine::{EVENTS_PORT, REPLAY_PORT};
use super::namespace::{Namespace, address};
use super::plan::Places;
use crate::failure::Failure;
use crate::ingest::{BLOCK_SIZE, clock_ns};
use crate::memory::rss_bytes_of;
use crate::socket::daemon_command;

/// Where routers hear each other.
const ROUTERS_PORT: u16 = 5571;
/// The secret of all routers.
const SECRET: &str = "a secret of thirty-two bytes or more, for this run";
/// How often a router writes its bookings down.
const BOOKINGS_IMAGE_MS: u64 = 200;
/// How long status may take.
const REPLY_MAX: Duration = Duration::from_secs(10);

/// A daemon. It ends with this.
pub(super) struct Router {
    name: String,
    place: Arc<Namespace>,
    folder: PathBuf,
    child: Option<Child>,
}

impl Router {
    /// Starts the router of a place.
    ///
    /// # Errors
    /// Its folder cannot be written, or no process started.
    pub(super) fn start(router: u8, place: &Arc<Namespace>, places: Places) -> Result<Self, Failure> {
        let folder = std::env::temp_dir().join(format!("perf-faults-{}-{router}-{:x}", std::process::id(), clock_ns()));
        std::fs::create_dir_all(&folder).map_err(Failure::file(&folder))?;
        let name = format!("router-{router}");
        let mut router = Self { name, place: Arc::clone(place), folder, child: None };
        router.write("secret", SECRET)?;
        let config = router.config(places);
        router.write("kvrouted.toml", &config)?;
        router.start_again()?;
        Ok(router)
    }

    fn write(&self, name: &str, text: &str) -> Result<(), Failure> {
        let file = self.folder.join(name);
        std::fs::write(&file, text).map_err(Failure::file(&file))
    }

    fn config(&self, places: Places) -> String {
        let at = |name: &str| self.folder.join(name).display().to_string();
        let hears = match places.broker() {
            Some(broker) => format!("nats = [\"nats://{}:{NATS_PORT}\"]", address(broker)),
            None => {
                let at = |router| format!("tcp://{}:{ROUTERS_PORT}", address(router));
                let peers: Vec<_> = (0..places.routers).map(at).collect();
                format!("listen = \"tcp://{}:{ROUTERS_PORT}\"\npeers = {peers:?}", self.place.address())
            }
        };
        let mut config = format!(
            "[serve]\nsocket = {:?}\n[snapshot]\ndir = {:?}\nevery_s = 2\nbookings_image_ms = {BOOKINGS_IMAGE_MS}\n\
             [routers]\nname = {:?}\n{hears}\nsecret_file = {:?}\n\
             [[space]]\nmodel = \"m\"\nblock_size = {BLOCK_SIZE}\nsalts = \"none\"\nfull_reports = \"none\"\n",
            at("s"),
            at("snapshots"),
            self.name,
            at("secret"),
        );
        for engine in 0..places.engines {
            let host = address(places.engine(engine));
            config.push_str(&format!(
                "[[worker]]\nid = {engine}\nendpoint = \"tcp://{host}:{EVENTS_PORT}\"\nreplay = \"tcp://{host}:{REPLAY_PORT}\"\n"
            ));
        }
        config
    }

    /// Starts it again.
    ///
    /// # Errors
    /// No process started.
    pub(super) fn start_again(&mut self) -> Result<(), Failure> {
        let mut command = daemon_command(&self.folder.join("kvrouted.toml"), &[])?;
        let place = Arc::clone(&self.place);
        let spawn = || command.stdin(Stdio::null()).spawn().map_err(Failure::system("start a child process"));
        self.child = Some(place.inside(spawn)?);
        Ok(())
    }

    /// Kills it.
    pub(super) fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            // That it is gone already is seen by `is_running`.
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// Tells it to end, and waits until it has.
    ///
    /// # Errors
    /// It ended with an error.
    pub(super) fn stop(&mut self) -> Result<(), Failure> {
        let Some(mut child) = self.child.take() else { return Ok(()) };
        if let Some(process) = Pid::from_raw(child.id() as i32) {
            kill_process(process, Signal::TERM)
                .map_err(|error| Failure::system("tell a daemon to end")(error.into()))?;
        }
        let status = child.wait().map_err(Failure::system("wait for a daemon"))?;
        match status.success() {
            true => Ok(()),
            false => Err(Failure::Contract(format!("{} ended with {status}", self.name))),
        }
    }

    /// Fails if the daemon has ended although the run has not ended it.
    ///
    /// # Errors
    /// It ended by itself.
    pub(super) fn check(&mut self) -> Result<(), Failure> {
        let Some(child) = &mut self.child else { return Ok(()) };
        match child.try_wait().map_err(Failure::system("look at a daemon"))? {
            None => Ok(()),
            Some(status) => Err(Failure::Contract(format!("{} ended by itself: {status}", self.name))),
        }
    }

    /// Its socket.
    pub(super) fn socket(&self) -> PathBuf {
        self.folder.join("s")
    }

    /// Its status.
    ///
    /// # Errors
    /// It does not answer.
    pub(super) fn status(&self) -> Result<StatusPage, Failure> {
        let options = ClientOptions { timeout: Some(REPLY_MAX), ..ClientOptions::default() };
        Ok(Client::connect_admin(&self.socket(), &options)?.status_all()?)
    }

    /// Its open files and its resident memory, bytes.
    ///
    /// # Errors
    /// It does not run.
    pub(super) fn resources(&self) -> Result<(usize, u64), Failure> {
        let process = self.child.as_ref().map(Child::id);
        let process = process.ok_or_else(|| Failure::Contract(format!("{} does not run", self.name)))?;
        let files = PathBuf::from(format!("/proc/{process}/fd"));
        Ok((std::fs::read_dir(&files).map_err(Failure::file(&files))?.count(), rss_bytes_of(process)?))
    }
}

impl Drop for Router {
    fn drop(&mut self) {
        self.kill();
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}
