//! `kvrouted reset`: makes a running daemon forget its workers' blocks.

use std::io::Write as _;
use std::path::PathBuf;

use super::admin;
use super::exit::{Exit, Failure};
use crate::config::socket_default;
use crate::error::counted;
use crate::ids::Worker;
use crate::wire::ResetOrder;

/// Drops the daemon's view of workers' blocks and deletes their snapshots. The engines keep their caches; the daemon
/// learns what they store from now on.
#[derive(Debug, clap::Args)]
pub struct ResetArgs {
    /// The daemon's Unix socket
    #[arg(long, value_name = "PATH", default_value_os_t = socket_default())]
    pub socket: PathBuf,
    /// The daemon's admin socket [default: as the daemon says on its socket]
    #[arg(long, value_name = "PATH")]
    pub admin_socket: Option<PathBuf>,
    /// Only this worker, rank 0 unless given [default: every worker]
    #[arg(long, value_name = "ID/RANK", value_parser = worker)]
    pub worker: Option<Worker>,
    /// Only blocks in device memory, after the engine's own cache was cleared (vLLM: /reset_prefix_cache, /pause,
    /// /sleep; SGLang: /flush_cache). The engine publishes the clear with its next step; until then the worker is
    /// `unproven`
    #[arg(long)]
    pub engine_cleared: bool,
}

impl ResetArgs {
    /// Sends the request and prints the result.
    ///
    /// # Errors
    /// A daemon that does not answer, an unknown worker, a closed standard output.
    pub fn run(&self) -> Result<Exit, Failure> {
        let order = ResetOrder { worker: self.worker, engine_cleared: self.engine_cleared };
        let done = admin::connect(self.admin_socket.as_ref().unwrap_or(&self.socket))?.reset(order)?;
        let (workers, snapshots) =
            (counted(done.workers as usize, "worker"), counted(done.snapshots as usize, "snapshot"));
        let mut stdout = std::io::stdout().lock();
        writeln!(stdout, "{workers} emptied, {snapshots} removed")?;
        stdout.flush()?;
        Ok(Exit::Done)
    }
}

fn worker(text: &str) -> Result<Worker, String> {
    let (id, rank) = text.split_once('/').unwrap_or((text, "0"));
    match (id.parse(), rank.parse()) {
        (Ok(id), Ok(rank)) => Ok(Worker::new(id, rank)),
        _ => Err("expected ID or ID/RANK, two numbers".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_is_an_id_with_an_optional_rank() {
        assert_eq!((worker("7"), worker("7/3")), (Ok(Worker::new(7, 0)), Ok(Worker::new(7, 3))));
        assert!(["", "/", "7/", "/3", "7/3/1", "-1", "w7"].iter().all(|text| worker(text).is_err()));
    }
}
